"""What training and rollout can share of a few tensors on one GPU. Needs no torch.

Several buffers are tried; in each of them every training tensor has to be a view. The one that
takes the least memory beyond the training shard is chosen, the same on all replicas of a training
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from common.layouts.box import Box, minus_all
from common.layouts.storage import Storage
from common.layouts.tensors import Part, RankTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.layouts.storage import View

    Tensors = tuple[RankTensor, ...]


class Kind(StrEnum):
    """How a rollout rank comes by a tensor."""

    ALIAS = "alias"
    """It is a view of the training shard on the same GPU: nothing to do after an update."""
    GATHER = "gather"
    """It is a view of a buffer that has the training shard in it: the rest is collected there."""
    REBUILD = "rebuild"
    """It is a buffer of its own, refreshed whole after every update."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box to be copied after an update.

    Attributes:
        source: training rank that holds it; None: that of this GPU, from another place.
        part: of the rollout's tensor.
        box: logical indices.
    """

    source: int | None
    part: int
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSharing:
    """One tensor of the rollout on one GPU; elements are those of one layer.

    Attributes:
        view: in the buffer shared with training; None for one of its own.
        alias_elements: at the very place where training writes them.
        moves: disjoint boxes; with what aliases they are all of the tensor but its padding.
        scratch_elements: held during the collection, because its destination has gaps.
    """

    tensor: RankTensor
    kind: Kind
    view: View | None
    alias_elements: int
    moves: tuple[Move, ...]
    scratch_elements: int

    @property
    def moved_elements(self) -> int:
        """Elements that are copied after every update."""
        return sum(move.box.numel for move in self.moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSharing:
    """Tensors of one GPU that have a logical tensor in common, directly or through others.

    Attributes:
        storage_elements: of the shared buffer.
        train: training's tensors.
        train_views: where they lie in it.
        rollout: the rollout's tensors; none on a GPU without a rank of it.
    """

    storage_elements: int
    train: Tensors
    train_views: tuple[View, ...]
    rollout: tuple[TensorSharing, ...]

    @property
    def gap_elements(self) -> int:
        """Elements of the shared buffer beyond training's tensors."""
        return self.storage_elements - sum(one.numel for one in self.train)

    @property
    def extra_elements(self) -> int:
        """All memory beyond the training shard, buffers for rebuilding included."""
        return self.gap_elements + self.rebuilt_elements

    @property
    def rebuilt_elements(self) -> int:
        """Elements in buffers of the rollout's own."""
        return sum(one.tensor.numel for one in self.rollout if one.kind is Kind.REBUILD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Tensors of all ranks that have logical tensors in common.

    Attributes:
        train: by rank of training.
        rollout: by rank of the rollout.
        train_in_blocks: `Layout.in_blocks` of training.
        rollout_in_blocks: the same of the rollout.
    """

    train: tuple[Tensors, ...]
    rollout: tuple[Tensors, ...]
    train_in_blocks: bool
    rollout_in_blocks: bool

    def overlaps(self, train_rank: int, rollout_rank: int) -> bool:
        """Whether the two ranks have any element in common."""
        return any(
            part.box.intersect(held) is not None
            for one in self.rollout[rollout_rank]
            for part in one.parts
            for held in _boxes(self.train[train_rank], part.tensor.name)
        )

    def best(self, train_rank: int, rollout_rank: int) -> ClusterSharing:
        """The best sharing on a GPU that has these two ranks, regarded by itself."""
        made: list[ClusterSharing] = []
        for one in self._candidates(train_rank, rollout_rank):
            if one.extra_elements == 0:
                return one
            made.append(one)
        return min(made, key=lambda one: (one.extra_elements, one.rebuilt_elements))

    def together(
        self, train_rank: int, rollout_ranks: Sequence[int], *, packed: bool = False
    ) -> dict[int, ClusterSharing]:
        """The best sharing on GPUs that have the same training rank beside these rollout ranks.

        All of them have the same buffer, so that one offset holds on all replicas of training.

        Args: packed: training's tensors follow each other without a gap.
        """
        made = [
            {
                (one.storage_elements, one.train_views): one
                for one in self._candidates(train_rank, rollout_rank, packed=packed)
            }
            for rollout_rank in rollout_ranks
        ]
        buffers = [key for key in made[0] if all(key in one for one in made)]
        chosen = min(buffers, key=lambda key: _cost([one[key] for one in made]))
        return {rank: one[chosen] for rank, one in zip(rollout_ranks, made, strict=True)}

    def apart(self, train_rank: int, rollout_rank: int) -> ClusterSharing:
        """No sharing: training's tensors one after the other, buffers of the rollout's own."""
        storage, views = self._dense(train_rank)
        return self._in_storage(storage, views, train_rank, rollout_rank, apart=True)

    def alone(self, train_rank: int) -> ClusterSharing:
        """A GPU with no rank of the rollout: training's tensors one after the other."""
        storage, views = self._dense(train_rank)
        return ClusterSharing(
            storage_elements=storage.elements,
            train=self.train[train_rank],
            train_views=views,
            rollout=(),
        )

    def _dense(self, train_rank: int) -> tuple[Storage, tuple[View, ...]]:
        storage = Storage.of(self.train[train_rank])
        views = self._train_views(storage, self.train[train_rank])
        assert views is not None, "each of them was put there"
        return storage, views

    def _candidates(
        self, train_rank: int, rollout_rank: int, *, packed: bool = False
    ) -> Iterator[ClusterSharing]:
        for storage in self._storages(train_rank, rollout_rank, packed=packed):
            if (views := self._train_views(storage, self.train[train_rank])) is not None:
                yield self._in_storage(storage, views, train_rank, rollout_rank)

    def _storages(self, train_rank: int, rollout_rank: int, *, packed: bool) -> Iterator[Storage]:
        own, wanted = self.train[train_rank], self.rollout[rollout_rank]
        yield Storage.of(own)
        if packed:
            return
        yield Storage.of(wanted)
        # every rollout shard that lies in this training shard, each one as its engine wants it: so
        # the buffer is the same on all replicas of this training rank
        yield Storage.of(one for rank in self.rollout if _holds(own, rank) for one in rank)
        yield Storage.of(
            (one for rank in self.train if _holds(wanted, rank) for one in rank), first=own
        )
        if (hull := _hull(own, wanted)) is not None:
            yield Storage.of([hull])

    def _train_views(self, storage: Storage, own: Tensors) -> tuple[View, ...] | None:
        views = [storage.view(one, in_blocks=self.train_in_blocks) for one in own]
        found = tuple(view for view in views if view is not None)
        return found if len(found) == len(own) else None

    def _in_storage(
        self,
        storage: Storage,
        views: tuple[View, ...],
        train_rank: int,
        rollout_rank: int,
        *,
        apart: bool = False,
    ) -> ClusterSharing:
        own = self.train[train_rank]
        placed = list(zip(own, views, strict=True))
        rollout = tuple(
            self._tensor(
                one,
                None if apart else storage.view(one, in_blocks=self.rollout_in_blocks),
                placed,
                train_rank,
            )
            for one in self.rollout[rollout_rank]
        )
        return ClusterSharing(
            storage_elements=storage.elements,
            train=own,
            train_views=views,
            rollout=rollout,
        )

    def _tensor(
        self,
        tensor: RankTensor,
        view: View | None,
        own: list[tuple[RankTensor, View]],
        train_rank: int,
    ) -> TensorSharing:
        alias_elements = 0
        moves: list[Move] = []
        for number, (row, part) in enumerate(tensor.placed_parts()):
            if (real := part.real) is None:
                continue
            there = [] if view is None else list(_in_place(row, part, view, own))
            alias_elements += sum(box.numel for box in there)
            moves += self._moves(number, part, minus_all([real], there), train_rank)
        in_place = Kind.GATHER if moves else Kind.ALIAS
        gaps = any(
            move.source is not None and move.box.shape[1:] != tensor.parts[move.part].box.shape[1:]
            for move in moves
        )
        return TensorSharing(
            tensor=tensor,
            kind=Kind.REBUILD if view is None else in_place,
            view=view,
            alias_elements=alias_elements,
            moves=tuple(moves),
            scratch_elements=tensor.numel if gaps else 0,
        )

    def _moves(self, number: int, part: Part, wanted: list[Box], train_rank: int) -> Iterator[Move]:
        """Where the missing boxes of a part come from: this rank, else the next that has them."""
        ranks = len(self.train)
        for source in ((train_rank + step) % ranks for step in range(ranks)):
            for held in _boxes(self.train[source], part.tensor.name):
                for box in wanted:
                    if (piece := box.intersect(held)) is not None:
                        yield Move(None if source == train_rank else source, number, piece)
                wanted = minus_all(wanted, [held])
        assert not wanted, f"no training rank has {part.tensor.name} {wanted}"


def _cost(made: Sequence[ClusterSharing]) -> tuple[int, int, int]:
    """Most extra memory of a GPU, then that of all, then what is rebuilt."""
    extra = [one.extra_elements for one in made]
    return max(extra), sum(extra), sum(one.rebuilt_elements for one in made)


def _boxes(tensors: Sequence[RankTensor], name: str) -> list[Box]:
    """What the tensors hold of a logical one."""
    return [
        real
        for one in tensors
        for part in one.parts
        if part.tensor.name == name and (real := part.real) is not None
    ]


def _holds(outer: Sequence[RankTensor], inner: Sequence[RankTensor]) -> bool:
    """Whether all that `inner` has, padding aside, is in `outer` too."""
    return all(
        (real := part.real) is None or not minus_all([real], _boxes(outer, part.tensor.name))
        for one in inner
        for part in one.parts
    )


def _hull(own: Sequence[RankTensor], wanted: Sequence[RankTensor]) -> RankTensor | None:
    """The smallest tensor with both of two boxes that overlap; None for anything else."""
    if len(own) != 1 or len(wanted) != 1 or len(own[0].parts) != 1 or len(wanted[0].parts) != 1:
        return None
    one, other = own[0].parts[0], wanted[0].parts[0]
    if one.tensor != other.tensor or one.box.intersect(other.box) is None:
        return None
    return RankTensor(own[0].names, (Part(one.tensor, one.box.hull(other.box)),))


def _in_place(
    row: int, part: Part, view: View, own: Sequence[tuple[RankTensor, View]]
) -> Iterator[Box]:
    """Boxes of a part that lie where a training tensor has them.

    Args:
        row: of the rollout's tensor, where the part starts.
        view: of the rollout's tensor.
        own: training tensors and their views of the same buffer.
    """
    for tensor, train_view in own:
        if train_view.strides[train_view.blocks :] != view.strides[view.blocks :]:
            continue
        for train_row, train_part in tensor.placed_parts():
            if part.tensor.name != train_part.tensor.name or (real := part.real) is None:
                continue
            if (both := real.intersect(train_part.box)) is not None:
                yield from _equal_rows(
                    both,
                    (view, row - part.box.ranges[0][0], part.box),
                    (train_view, train_row - train_part.box.ranges[0][0], train_part.box),
                )


def _equal_rows(
    both: Box, one: tuple[View, int, Box], other: tuple[View, int, Box]
) -> Iterator[Box]:
    """Runs of rows of a box that have the same address in two views.

    Args:
        both: logical indices that both views have.
        one: a view, what a logical row adds to be a row of its tensor, and the box of the part.
        other: the same of the other.
    """
    row, stop = both.ranges[0]
    columns = [start for start, _ in both.ranges[1:]]
    while row < stop:
        addresses, spans = [], [stop - row]
        for view, shift, box in (one, other):
            at = row + shift
            steps = view.strides[view.blocks + 1 :]
            inside = sum(
                (start - first) * step
                for start, (first, _), step in zip(columns, box.ranges[1:], steps, strict=True)
            )
            addresses.append(view.row_offset(at) + inside)
            spans.append(view.block_rows - at % view.block_rows)
        if addresses[0] == addresses[1]:
            yield Box(((row, row + min(spans)), *both.ranges[1:]))
        row += min(spans)
