"""What one rank of a process group does after an update, as regions of its buffers. Needs no torch.

Every rank derives the same rounds from the plan, so all of them call the same collectives in the
same order. In one round a rank takes part in

- whole gathers: every rank has one of equal runs of rows, in the order of the ranks, and every rank
  wants all of them: they go straight to their places;
- one exchange: everything else that crosses ranks, packed by destination;
- copies inside the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from common.errors import InvalidArgument
from common.layouts.box import Box
from common.weights.resharding.regions import (
    Buffer,
    Region,
    copies,
    source_regions,
    target_regions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from common.layouts.plan import GpuSharing
    from common.layouts.sharing import Move
    from common.layouts.tensors import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGather:
    """Equal runs of rows of all ranks, one after the other.

    Attributes:
        target: where all of them go; contiguous.
        source: this rank's; contiguous.
        in_place: whether it lies in the target already.
    """

    target: Region
    source: Region
    in_place: bool


@dataclass(slots=True, kw_only=True)
class Round:
    """One rank's part in a round; sends and receives are by rank, each in the same order there.

    Attributes:
        copies: target and source.
        exchanges: whether any rank sends anything.
    """

    gathers: list[WholeGather] = field(default_factory=list)
    copies: list[tuple[Region, Region]] = field(default_factory=list)
    sends: list[list[Region]]
    receives: list[list[Region]]
    exchanges: bool = False


@dataclass(frozen=True)
class Schedule:
    """The rounds of one rank.

    Attributes:
        gpus: of the plan, one a rank, in the order of the ranks.
        rank: whose rounds.
        train_degree: ranks of a replica of training.
        round_elements: most that a rank sends or receives in a round, unless one tensor is larger.
    Raises: InvalidArgument if `gpus` has a part of a replica of training only.
    """

    gpus: tuple[GpuSharing, ...]
    rank: int
    train_degree: int
    round_elements: int

    def __post_init__(self) -> None:
        needed = {
            first + rank
            for first in (one.gpu - one.train_rank for one in self.gpus)
            for rank in range(self.train_degree)
        }
        if missing := sorted(needed - self._rank_of.keys()):
            raise InvalidArgument(
                f"the group has no rank for GPUs {missing}, which hold parts of the same training "
                f"replicas of degree {self.train_degree}"
            )

    @cached_property
    def _rank_of(self) -> dict[int, int]:
        return {one.gpu: rank for rank, one in enumerate(self.gpus)}

    def rounds(self) -> Iterator[Round]:
        """All rounds, whose number and sizes are the same on every rank."""
        current, load = self._empty(), [0] * len(self.gpus)
        for cluster in range(len(self.gpus[self.rank].clusters)):
            gathered = set(self._gathered(cluster))
            moves = [
                one for one in self._moves(cluster) if (one.tensor, one.move.part) not in gathered
            ]
            added = self._load(cluster, gathered, moves)
            for layer in range(self.gpus[self.rank].clusters[cluster].train[0].count):
                together = [a + b for a, b in zip(load, added, strict=True)]
                if max(load) and max(together) > self.round_elements:
                    yield current
                    current, together = self._empty(), added
                load = together
                for tensor, part in sorted(gathered):
                    current.gathers.append(self._gather(cluster, layer, tensor, part))
                for one in moves:
                    self._add(current, one, cluster, layer)
        yield current

    def _empty(self) -> Round:
        return Round(sends=[[] for _ in self.gpus], receives=[[] for _ in self.gpus])

    def _moves(self, cluster: int) -> Iterator[_RankMove]:
        for target, gpu in enumerate(self.gpus):
            for tensor, one in enumerate(gpu.clusters[cluster].rollout):
                for move in one.moves:
                    source = target
                    if move.source is not None:
                        source = self._rank_of[gpu.gpu - gpu.train_rank + move.source]
                    yield _RankMove(target, source, tensor, move)

    def _load(
        self, cluster: int, gathered: set[tuple[int, int]], moves: Sequence[_RankMove]
    ) -> list[int]:
        """Elements of one layer that each rank sends or receives, whichever are more."""
        rollout = self.gpus[self.rank].clusters[cluster].rollout
        everywhere = sum(
            rollout[tensor].tensor.parts[number].box.numel for tensor, number in gathered
        )
        sent, received = [everywhere] * len(self.gpus), [everywhere] * len(self.gpus)
        for one in moves:
            if one.source != one.target:
                sent[one.source] += one.move.box.numel
                received[one.target] += one.move.box.numel
        return [max(pair) for pair in zip(sent, received, strict=True)]

    def _add(self, current: Round, one: _RankMove, cluster: int, layer: int) -> None:
        current.exchanges |= one.source != one.target
        if self.rank not in (one.source, one.target):
            return
        shared = self.gpus[one.target].clusters[cluster].rollout[one.tensor]
        part, box = shared.tensor.parts[one.move.part], one.move.box
        holder = self.gpus[one.source].clusters[cluster]
        place = Buffer(cluster, layer)
        if one.source == one.target:
            current.copies += copies(shared, one.tensor, one.move, holder, place)
        elif self.rank == one.target:
            current.receives[one.source] += target_regions(
                shared, one.move.part, box, place, one.tensor
            )
        else:
            current.sends[one.target] += source_regions(holder, part, box, place)

    # ---------------------------------------------------------------- whole gathers

    def _gathered(self, cluster: int) -> Iterator[tuple[int, int]]:
        """Tensor and part of everything that is gathered whole."""
        first = self.gpus[0]
        plain = [first.gpu - first.train_rank + rank for rank in range(self.train_degree)]
        if len(self.gpus) == 1 or [one.gpu for one in self.gpus] != plain:
            return
        for tensor, shared in enumerate(first.clusters[cluster].rollout):
            for number in range(len(shared.tensor.parts)):
                if all(
                    self._is_gathered(rank, cluster, tensor, number)
                    for rank in range(len(self.gpus))
                ):
                    yield tensor, number

    def _is_gathered(self, rank: int, cluster: int, tensor: int, number: int) -> bool:
        held = self.gpus[rank].clusters[cluster]
        shared = held.rollout[tensor]
        part, ranks = shared.tensor.parts[number], len(self.gpus)
        same = self.gpus[0].clusters[cluster].rollout[tensor].tensor.parts[number]
        if part != same or part.real != part.box or part.rows % ranks:
            return False
        runs = [_run(part, one, ranks) for one in range(ranks)]
        wanted = {(one.source, one.box) for one in shared.moves if one.part == number}
        others = {(one, run) for one, run in enumerate(runs) if one != rank}
        if wanted not in (others, others | {(None, runs[rank])}):
            return False
        targets = list(target_regions(shared, number, part.box, Buffer(cluster, 0), tensor))
        sources = list(source_regions(held, part, runs[rank], Buffer(cluster, 0)))
        return len(targets) == len(sources) == 1 and all(
            one.view.contiguous for one in (*targets, *sources)
        )

    def _gather(self, cluster: int, layer: int, tensor: int, number: int) -> WholeGather:
        held = self.gpus[self.rank].clusters[cluster]
        shared = held.rollout[tensor]
        part = shared.tensor.parts[number]
        own = _run(part, self.rank, len(self.gpus))
        buffer = Buffer(cluster, layer)
        (target,) = target_regions(shared, number, part.box, buffer, tensor)
        (source,) = source_regions(held, part, own, buffer)
        in_place = all(one.source is not None for one in shared.moves if one.part == number)
        return WholeGather(target=target, source=source, in_place=in_place)


class _RankMove(NamedTuple):
    """A move between two ranks, or inside one.

    Attributes:
        tensor: index among the rollout's of the cluster.
    """

    target: int
    source: int
    tensor: int
    move: Move


def _run(part: Part, number: int, runs: int) -> Box:
    (start, stop), *rest = part.box.ranges
    rows = (stop - start) // runs
    return Box(((start + number * rows, start + (number + 1) * rows), *rest))
