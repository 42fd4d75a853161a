"""What is planned: model, GPUs, parallelism, batch and switches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import InvalidArgument

if TYPE_CHECKING:
    from common.vlm.shape import ModelShape

_MIB = 2**20

GPU_BYTES: dict[str, int] = {
    "a100-80": 81920 * _MIB,
    "h100": 81559 * _MIB,
    "h800": 81559 * _MIB,
    "h200": 143771 * _MIB,
}
"""Memory by name of the GPU, as the driver reports it."""

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float32": 4}

MOST_GROUPS = 1 << 20
"""Of one step."""

FUSED_DTYPES = frozenset({"bfloat16"})
"""Dtypes for which the fused kernels run on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step.

    Attributes:
        prompts: N: groups of the whole step.
        samples: G: responses of a group.
        prompt_tokens: of every group, vision tokens and last token included.
        vision_tokens: of every group.
        response_tokens: of every response: all are taken to be as long as the longest.
        group_tokens: of all responses of the group that has most; None: as many as all have if
            each is as long as the longest.
    """

    prompts: int
    samples: int
    prompt_tokens: int
    vision_tokens: int
    response_tokens: int
    group_tokens: int | None = None

    @property
    def prefix_tokens(self) -> int:
        """P: a prompt without its last token."""
        return self.prompt_tokens - 1

    @property
    def row_tokens(self) -> int:
        """T: tokens of all responses of one group, which training packs in one row."""
        return self.lane_tokens if self.group_tokens is None else self.group_tokens

    @property
    def lane_tokens(self) -> int:
        """What the rollout has room for: the longest response for each of a group."""
        return self.samples * self.response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything that decides the bytes.

    Attributes:
        train_tp: GPUs over which training, prefixes and reference split the model.
        rollout_tp: GPUs over which the rollout splits it.
        groups_in_flight: groups that one rollout replica decodes at a time; None: all it has.
        prefix_graphs: most groups whose prefix keeps its graph; None: as many as fit.
        checkpointing: keep layer inputs only, and run layers again in the backward.
        whole_graphs: never do so, even where not one whole graph fits.
        sequence_parallel: whether what has the model's width is split over the ranks too.
        shard_optimizer: whether masters and moments are split over the data-parallel replicas.
        spill_optimizer: whether masters and moments are on the host while they are not needed.
        spill_reference: whether reference weights are on the host while nothing reads them.
        ahead: whether reference prefixes of the next step are made in the window.
        headroom_bytes: of each GPU, to be left free.
    """

    shape: ModelShape
    gpu: str
    gpus: int
    train_tp: int
    rollout_tp: int
    batch: Batch
    groups_in_flight: int | None = None
    prefix_graphs: int | None = None
    dtype: str = "bfloat16"
    optimizer_dtype: str = "float32"
    train_vision: bool = False
    checkpointing: bool = False
    whole_graphs: bool = False
    sequence_parallel: bool = True
    shard_optimizer: bool = True
    spill_optimizer: bool = True
    spill_reference: bool = False
    ahead: bool = True
    headroom_bytes: int = 0

    @property
    def budget_bytes(self) -> int:
        """Memory of one GPU, without the headroom."""
        return GPU_BYTES[self.gpu] - self.headroom_bytes

    @property
    def replicas(self) -> int:
        """Data-parallel replicas in training."""
        return self.gpus // self.train_tp

    @property
    def rollout_replicas(self) -> int:
        """Engines."""
        return self.gpus // self.rollout_tp

    @property
    def groups(self) -> int:
        """Groups of one training replica, the busiest one's."""
        return -(-self.batch.prompts // self.replicas)

    @property
    def decoding_groups(self) -> int:
        """Groups that one rollout replica decodes at a time."""
        most = -(-self.batch.prompts // self.rollout_replicas)
        return min(most, self.groups_in_flight or most)

    @property
    def layouts_nest(self) -> bool:
        """Whether the shards of one layout contain those of the other, so that they alias."""
        small, large = sorted((self.train_tp, self.rollout_tp))
        return large % small == 0

    @property
    def fused(self) -> bool:
        """Whether the split pass runs on fused kernels."""
        return self.dtype in FUSED_DTYPES

    def check(self) -> None:
        """Refuse what cannot be.

        Raises: InvalidArgument naming the key, its value and what is legal.
        """
        self._check_choices()
        batch = self.batch
        for name, number in (
            ("gpus", self.gpus),
            ("prompts", batch.prompts),
            ("samples", batch.samples),
            ("response_tokens", batch.response_tokens),
            ("groups_in_flight", self.groups_in_flight),
            ("prefix_graphs", self.prefix_graphs),
        ):
            if number is not None and number < 1:
                raise InvalidArgument(f"{name} = {number}: must be at least 1")
        if not 0 <= self.headroom_bytes < GPU_BYTES[self.gpu]:
            raise InvalidArgument(
                f"headroom = {self.headroom_bytes} bytes: must be from 0 to less than the "
                f"{GPU_BYTES[self.gpu]} bytes of the {self.gpu}"
            )
        if batch.prompts > MOST_GROUPS:
            raise InvalidArgument(f"prompts = {batch.prompts}: must be at most {MOST_GROUPS}")
        if batch.prompt_tokens < 2:
            raise InvalidArgument(f"prompt_tokens = {batch.prompt_tokens}: must be at least 2")
        if not 0 <= batch.vision_tokens <= batch.prefix_tokens:
            raise InvalidArgument(
                f"vision_tokens = {batch.vision_tokens}: must be from 0 to prompt_tokens - 1 = "
                f"{batch.prefix_tokens}"
            )
        legal = legal_degrees(self.shape, self.gpus)
        for name, ranks in (("train_tp", self.train_tp), ("rollout_tp", self.rollout_tp)):
            if ranks not in legal:
                raise InvalidArgument(
                    f"{name} = {ranks}: {self.shape.name} has {self.shape.heads} heads, "
                    f"{self.shape.kv_heads} key/value heads, an MLP of {self.shape.inner} and "
                    f"{self.shape.vocabulary} tokens; on {self.gpus} GPUs legal are "
                    f"{', '.join(map(str, legal))}"
                )

    def _check_choices(self) -> None:
        choices = (
            ("gpu", self.gpu, GPU_BYTES),
            ("dtype", self.dtype, DTYPE_BYTES),
            ("optimizer_dtype", self.optimizer_dtype, DTYPE_BYTES),
        )
        for name, value, legal in choices:
            if value not in legal:
                raise InvalidArgument(f"{name} = {value!r}: legal are {', '.join(legal)}")


def default_degree(shape: ModelShape, gpus: int, *, most: int) -> int:
    """The largest legal tensor-parallel degree up to `most`; 1 where there is none."""
    return max((ranks for ranks in legal_degrees(shape, gpus) if ranks <= most), default=1)


def legal_degrees(shape: ModelShape, gpus: int) -> list[int]:
    """Tensor-parallel degrees that divide the GPUs and every split width of the text model."""
    return [
        ranks
        for ranks in range(1, min(gpus, shape.heads) + 1)
        if gpus % ranks == 0
        and all(width % ranks == 0 for width in (shape.heads, shape.inner, shape.vocabulary))
        and (shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0)
    ]
