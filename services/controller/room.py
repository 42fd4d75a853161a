"""Whether the arena can hold a run: sizes from safetensors headers, without loading a tensor."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.config.recipe import spills
from common.errors import InvalidArgument, ResourceExhausted
from common.ids import Service
from common.layouts.node import node_plan, rollout_sharing
from common.step.schedule import OWN_WEIGHTS
from common.tensors.parts import in_flight_bytes
from common.vlm.shape import read_shape
from common.weights.cuts import cuts

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.recipe import Recipe
    from common.step.partners import Partners
    from common.step.place import Place
    from protos.rollplex.v1.broker_pb2 import Ledger

_COMPUTE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
_HEADER_LIMIT_BYTES = 100 * 2**20
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Number of parameters of a checkpoint."""

    language: int
    vision: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.language + self.vision


def count_elements(model_path: Path, *, key: str) -> Elements:
    """Read the headers of a checkpoint's safetensors files.

    Raises:
        InvalidArgument: there are none, or one cannot be read.
    """
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise InvalidArgument(
            f"{key} = {str(model_path)!r} holds no *.safetensors file; `rollplex init-model` makes "
            "a small model to begin with"
        )
    language = vision = 0
    for file in files:
        for name, tensor in _header(file, key).items():
            if name == "__metadata__":
                continue
            numel = math.prod(tensor["shape"])
            if "visual" in name.split("."):
                vision += numel
            else:
                language += numel
    return Elements(language=language, vision=vision)


def needed_bytes(
    recipe: Recipe, *, device: str, place: Place, partners: Partners | None = None
) -> dict[str, int]:
    """Bytes of the run-scoped storages that a recipe needs at a time, by storage.

    Of several ranks they are those of all, on GPUs of one, but for what each has of tensors that
    are not split.
    Each replica has weights and gradients of its own, and a share of the optimizer's state.

    Args:
        device: of the deployment, which the recipe may leave to decide what is spilled.
        place: of any rank of training on the node, whose ranks share its arena on a CPU.
        partners: the ranks of all services; None: as many as `place` says.
    Raises:
        InvalidArgument: a model folder cannot be read.
    """
    policy = count_elements(recipe.model.path, key="model.path")
    reference_path = recipe.model.reference_path
    reference = (
        policy
        if reference_path is None
        else count_elements(reference_path, key="model.reference_path")
    )
    compute = _COMPUTE_BYTES[recipe.model.dtype]
    master = 8 if recipe.model.dtype == "float64" else 4
    trainable = policy.total if recipe.model.train_vision else policy.language
    # A master copy apart from the weights is needed only where the dtypes differ.
    state = master * (2 if compute == master else 3)
    needed = {
        "policy.weights": place.replicas * policy.total * compute,
        "policy.optimizer": _optimizer_bytes(
            recipe, trainable, state, device=device, ranks=place.world
        ),
        "policy.gradients": place.replicas * trainable * master,
    }
    if recipe.training.schedule in OWN_WEIGHTS and device == "cpu":
        needed["rollout.weights"] = place.replicas * policy.total * compute
    if recipe.needs_reference:
        needed["reference.weights"] = place.replicas * reference.total * compute
    if partners is not None and partners.count(Service.ROLLOUT) != place.degree:
        needed["rollout.weights"] = _rebuilt_bytes(recipe, partners, element_bytes=compute)
    if device == "cuda":
        # A GPU is the arena of one rank.
        return {name: size // place.world for name, size in needed.items()}
    return needed


def _rebuilt_bytes(recipe: Recipe, partners: Partners, *, element_bytes: int) -> int:
    """What ranks of the rollout, all of them, have of their own at another degree."""
    ranks = partners.count(Service.ROLLOUT)
    plan = node_plan(
        read_shape(str(recipe.model.path)),
        train_tp=partners.count(Service.LEARNER),
        rollout_tp=ranks,
        element_bytes=element_bytes,
    )
    return sum(
        rollout_sharing(plan, rank, replica=replica).rebuild_bytes
        for replica in range(partners.replica_count(Service.ROLLOUT))
        for rank in range(ranks)
    )


def _optimizer_bytes(
    recipe: Recipe, trainable: int, element_bytes: int, *, device: str, ranks: int
) -> int:
    """All of the optimizer's state, or, where it is spilled, the parts in flight of every rank."""
    training = recipe.training
    if not spills(training.spill_optimizer, device):
        return element_bytes * trainable
    of_rank = trainable // ranks
    ranges = cuts(of_rank, element_bytes=element_bytes, part_mib=training.optimizer_part_mib)
    return ranks * in_flight_bytes([element_bytes * (part.stop - part.start) for part in ranges])


def check_room(
    recipe: Recipe, ledger: Ledger, *, device: str, place: Place, partners: Partners | None = None
) -> None:
    """Refuse a run whose run-scoped storages alone are larger than the arena.

    Args: device, place, partners: as for `needed_bytes`.

    With random weights there are no headers to read; the broker itself refuses storages that do
    not fit.

    Raises:
        InvalidArgument: a model folder cannot be read.
        ResourceExhausted: with what is needed and who holds what now.
    """
    if recipe.model.weights == "random":
        return
    needed = needed_bytes(recipe, device=device, place=place, partners=partners)
    total = sum(needed.values())
    if total <= ledger.capacity_bytes:
        return
    parts = ", ".join(f"{name} {size / _MIB:.0f} MiB" for name, size in needed.items())
    raise ResourceExhausted(
        f"model.path = {str(recipe.model.path)!r} needs {total / _MIB:.0f} MiB of arena for the "
        f"whole run ({parts}), but arena_gib of the deployment gives "
        f"{ledger.capacity_bytes / _MIB:.0f} MiB. Raise arena_gib, or choose a smaller model.\n"
        f"{ledger_table(ledger)}"
    )


def ledger_table(ledger: Ledger) -> str:
    """The ledger for a person, largest first."""
    lines = [f"arena now: {ledger.used_bytes / _MIB:.1f} of {ledger.capacity_bytes / _MIB:.1f} MiB"]
    for entry in sorted(ledger.entries, key=lambda e: -e.bytes):
        holders = ", ".join(entry.holders) or "nobody"
        run = f"of run {entry.run_id}, " if entry.run_id else ""
        lines.append(
            f"  {entry.bytes / _MIB:9.1f} MiB  {entry.name}  {run}held by {holders}, "
            f"until {entry.until}"
        )
    return "\n".join(lines)


def _header(file: Path, key: str) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            # A file of another kind may claim any length; a cut-off header does not parse.
            header = json.loads(stream.read(min(length, _HEADER_LIMIT_BYTES)))
    except (OSError, ValueError, struct.error) as error:
        raise InvalidArgument(f"{key}: {file} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise InvalidArgument(f"{key}: {file} is not a safetensors file: its header is no table")
    return header
