"""Where every parameter of a model lies in one flat buffer. Needs no torch.

A layout orders its entries as

    [trainable with weight decay | trainable without | frozen]

so that the optimizer, gradient clipping and reductions over ranks work on contiguous slices. The
weights, the gradient accumulator, the masters and the moments of one model all use the same element
offsets, each in its own dtype; buffers of trainable state end at `trainable_elements`. Every entry
starts at a multiple of `ALIGNMENT_ELEMENTS`; the elements between entries are padding, which
stays zero. Where the rollout gathers between the weights, they alone lie otherwise, in the same
order (`common.weights.places`).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from common.weights.errors import LayoutInvalid, MissingWeight, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ALIGNMENT_ELEMENTS = 16
"""Entries start at multiples of this many elements (64 bytes of float32)."""

_FORMAT = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A parameter before it has a place.

    Attributes:
        name: in-memory name, as in ``model.named_parameters()``.
        shape: of this rank's part of the parameter.
        trainable: whether the optimizer updates it.
        decay: whether weight decay applies; only with `trainable`.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    decay: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A parameter and its place.

    Attributes:
        name: in-memory name.
        shape: of this rank's part of the parameter.
        trainable: whether the optimizer updates it.
        decay: whether weight decay applies.
        offset_elements: first element in the flat buffer.
        numel: number of elements, padding not counted.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    decay: bool
    offset_elements: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """The places of all parameters of one model on one rank.

    Attributes:
        entries: in order of offset.
        dtype: torch's name of the compute weights' dtype, such as ``bfloat16``.
        aliases: further names of parameters that share an entry, to the entry's name.
        rank: whose part of each tensor this is.
        world: number of parts; 1 means that every entry is the whole tensor.
        decay_elements: ``flat[:decay_elements]`` has weight decay.
        trainable_elements: ``flat[:trainable_elements]`` is updated.
        total_elements: length of a buffer of all weights.
    """

    entries: tuple[TensorEntry, ...]
    dtype: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    world: int = 1
    decay_elements: int
    trainable_elements: int
    total_elements: int

    @classmethod
    def build(
        cls,
        specs: Iterable[TensorSpec],
        *,
        dtype: str,
        aliases: Mapping[str, str] | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> WeightLayout:
        """Give every parameter its place.

        Inside a region matrices come before vectors, and the order is that of `specs` otherwise:
        so what an engine joins, such as gate and up, lies together whether it is trained or not.

        Raises: LayoutInvalid for a name given twice, a frozen parameter with decay, an alias of
            something unknown, or a rank outside the world.
        """
        ordered = sorted(
            specs, key=lambda spec: (not spec.trainable, not spec.decay, len(spec.shape) < 2)
        )
        entries: list[TensorEntry] = []
        offset = decay_elements = trainable_elements = 0
        for spec in ordered:
            if spec.decay and not spec.trainable:
                raise LayoutInvalid(f"{spec.name}: decay on a frozen parameter", name=spec.name)
            numel = math.prod(spec.shape)
            entries.append(
                TensorEntry(
                    name=spec.name,
                    shape=tuple(spec.shape),
                    trainable=spec.trainable,
                    decay=spec.decay,
                    offset_elements=offset,
                    numel=numel,
                )
            )
            offset += padded(numel)
            if spec.decay:
                decay_elements = offset
            if spec.trainable:
                trainable_elements = offset
        layout = cls(
            entries=tuple(entries),
            dtype=dtype,
            aliases=dict(aliases or {}),
            rank=rank,
            world=world,
            decay_elements=decay_elements,
            trainable_elements=max(trainable_elements, decay_elements),
            total_elements=offset,
        )
        layout._check()
        return layout

    @property
    def names(self) -> tuple[str, ...]:
        """The entries' names, in order of offset."""
        return tuple(entry.name for entry in self.entries)

    @property
    def trainable_entries(self) -> tuple[TensorEntry, ...]:
        """The entries that the optimizer updates."""
        return tuple(entry for entry in self.entries if entry.trainable)

    def select(self, names: Iterable[str]) -> dict[str, TensorEntry]:
        """The entries of these parameters; an alias stands for the entry that it shares.

        Raises: MissingWeight naming all that the layout does not have.
        """
        by_name = {entry.name: entry for entry in self.entries}
        chosen = {name: by_name.get(self.aliases.get(name, name)) for name in names}
        if missing := [name for name, entry in chosen.items() if entry is None]:
            raise missing_error(missing, "the layout")
        return {name: entry for name, entry in chosen.items() if entry is not None}

    def to_json(self) -> str:
        """This layout as one JSON object, stable for equal layouts."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> WeightLayout:
        """The layout that `to_json` wrote.

        Raises: LayoutInvalid if the text is no such object or breaks a rule of layouts.
        """
        try:
            raw: dict[str, Any] = json.loads(text)
            version = raw.pop("format")
            entries = tuple(
                TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
                for entry in raw.pop("entries")
            )
            layout = cls(entries=entries, **raw)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LayoutInvalid(f"not a weight layout: {error}") from error
        if version != _FORMAT:
            raise LayoutInvalid(f"layout format is {version}; this version reads {_FORMAT}")
        layout._check()
        return layout

    def _check(self) -> None:
        """Hold every rule that the module's docstring states.

        Raises: LayoutInvalid naming the entry.
        """
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise LayoutInvalid(f"rank {self.rank} is not in a world of {self.world}")
        seen: set[str] = set()
        offset = 0
        for entry in self.entries:
            name = entry.name
            if name in seen:
                raise LayoutInvalid(f"{name} has two entries", name=name)
            seen.add(name)
            if entry.offset_elements != offset or entry.numel != math.prod(entry.shape):
                raise LayoutInvalid(
                    f"{name} lies at {entry.offset_elements} with {entry.numel} elements; "
                    f"expected {offset} and {math.prod(entry.shape)}",
                    name=name,
                )
            if entry.decay != (offset < self.decay_elements) or entry.trainable != (
                offset < self.trainable_elements
            ):
                raise LayoutInvalid(f"{name} lies in the wrong region", name=name)
            offset += padded(entry.numel)
        if offset != self.total_elements:
            raise LayoutInvalid(f"entries take {offset} elements, not {self.total_elements}")
        for alias, target in self.aliases.items():
            if target not in seen or alias in seen:
                raise LayoutInvalid(f"{alias} cannot be an alias of {target}", name=alias)


def missing_error(names: list[str], where: str) -> MissingWeight:
    """The error for parameters that `where` does not cover."""
    return MissingWeight(f"{where} has no weight for: {shown(names)}", names=names)


def padded(numel: int) -> int:
    """So many elements and those up to the next place where an entry may start."""
    return -(-numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
