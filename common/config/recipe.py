"""The recipe of a training run: what to train, on what, how, and under which schedule."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.config.base import FrozenConfig
from common.config.sglang import SglangConfig
from common.rl.config import AlgorithmConfig
from common.rl.lengths import LengthsConfig
from common.rl.reward_config import RewardConfig
from common.step.schedule import Schedule


class ModelConfig(FrozenConfig):
    """The checkpoint that policy and reference start from."""

    path: Path
    """Folder in Hugging Face format: config, tokenizer, image processor, safetensors."""
    reference_path: Path | None = None
    """Folder of the reference model; unset: the same as `path`."""
    weights: Literal["files", "random"] = "files"
    """Where the first weights come from: `files` of the folder, or `random` values that follow from
    the configuration and the run's seed, for measurements: the folder needs no safetensors then,
    and policy and reference begin equal."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Dtype of the compute weights. Masters, moments and gradients are float32, or float64 with
    float64 weights."""
    train_vision: bool = False
    """Whether the vision tower and its merger are trained."""
    kernels: Literal["auto", "plain"] = "auto"
    """`auto`: fused kernels for bfloat16 on a GPU, the library's modules elsewhere; `plain`: the
    library's modules everywhere."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.weights == "random" and self.reference_path is not None:
            raise ValueError(
                f'reference_path = {str(self.reference_path)!r} with weights = "random": the '
                "reference has the policy's random weights; leave reference_path unset"
            )
        return self


class DataConfig(FrozenConfig):
    """Where the prompts come from."""

    train: str
    """`module:function` or `file.py:function` that returns a sequence of rows, or a JSONL file."""
    eval: str | None = None
    """Held-out rows, in the same form; unset: no evaluation."""
    max_prompt_tokens: int = Field(default=8192, ge=1)
    """Longest prompt, vision tokens included; a longer sample is dropped and counted."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Smallest image area in pixels; unset: the processor's own."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Largest image area in pixels; unset: the processor's own."""
    workers: int = Field(default=1, ge=1)
    """Processes that read, tokenize and process pixels."""
    cache_mib: int = Field(default=256, ge=0)
    """Memory for prepared samples that may be used again, in MiB; 0: none are kept."""
    ahead_mib: int = Field(default=1024, ge=0)
    """Device memory for prompts and vision embeddings of the next step, in MiB: a video of 24,320
    patches needs 55 of them in bfloat16. What does not fit is prepared when its step has begun."""
    max_drop_fraction: float = Field(default=0.1, ge=0, le=1)
    """The run stops when more than this share of its samples had to be dropped."""


class EngineName(StrEnum):
    """Rollout engines."""

    NATIVE = "native"
    """This project's own."""
    SGLANG = "sglang"
    """SGLang, in processes of its own; see `docs/sglang.md`."""


class RolloutConfig(FrozenConfig):
    """How responses are sampled."""

    engine: EngineName = EngineName.NATIVE
    """Which engine decodes."""
    sglang: SglangConfig | None = None
    """Settings of `engine = "sglang"`, and only legal there; unset: its defaults."""
    samples_per_group: int = Field(default=8, ge=1)
    """G: responses to one prompt."""
    max_new_tokens: int = Field(ge=1)
    """Longest response, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer's log-probabilities use the same one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1: off."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k most likely tokens; 0: off."""
    stop: tuple[str, ...] = ()
    """Tokens, by their text, that end a response beside the model's end-of-sequence token."""
    max_slots: int = Field(default=256, ge=1)
    """Sequences that decode at the same time."""
    lengths: LengthsConfig | None = None
    """Responses of set lengths in training steps, for measurements: each has exactly so many
    tokens, whatever they are. Unset: responses end where the model ends them."""

    @property
    def logprob_bound(self) -> float | None:
        """How far the engine's log-probabilities may be from the trainer's; None: they are its."""
        if self.engine is not EngineName.SGLANG:
            return None
        return (self.sglang or SglangConfig()).logprob_bound

    @model_validator(mode="after")
    def _engine_has_its_table(self) -> Self:
        if self.sglang is not None and self.engine is not EngineName.SGLANG:
            raise ValueError(
                f'a table sglang with engine = {self.engine.value!r}: set engine = "sglang", or '
                "leave the table out"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.lengths is not None and self.lengths.max_tokens > self.max_new_tokens:
            raise ValueError(
                f"lengths.max_tokens = {self.lengths.max_tokens} is over max_new_tokens = "
                f"{self.max_new_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _slots_hold_a_group(self) -> Self:
        if self.max_slots < self.samples_per_group:
            raise ValueError(
                f"max_slots = {self.max_slots} cannot hold one group; legal is "
                f"samples_per_group = {self.samples_per_group} or more"
            )
        return self


class TrainingConfig(FrozenConfig):
    """How long and in what order the run trains."""

    schedule: Schedule = Schedule.ROLLPLEX
    """When which task may start; every schedule makes the same update."""
    steps: int = Field(ge=1)
    """Number of updates."""
    prompts_per_step: int = Field(ge=1)
    """N: groups of one step."""
    activation_checkpointing: bool = False
    """Keep only layer inputs of the prefix forward and recompute in its backward; those of a vision
    tower that trains too."""
    vision_checkpointing: bool | Literal["auto"] = "auto"
    """The same for such a tower alone, whose activations of one large picture take tens of GiB.
    auto: on a GPU."""
    push_bucket_mib: float = Field(default=256.0, gt=0)
    """With `disaggregated`: size of the pieces, in MiB, in which weights go to the rollout. One
    goes while later parts of the weights are updated."""
    share_prefix: bool = True
    """Whether training and scoring run a group's prefix once. off, for comparisons: once for each
    response, as where responses are scored alone; the update is the same. With `serial` only."""
    ahead: bool = True
    """Whether prompts of the next step are worked on in this one: prepared by idle data workers,
    and, while sequences decode, run through a frozen vision tower and the reference. With `serial`
    they are prepared only. The update is the same; off, for comparisons."""
    ahead_reference_groups: int | None = Field(default=None, ge=0)
    """Most groups of the next step whose reference prefix K/V are kept on the device meanwhile.
    Unset: all of them."""
    prefix_graphs: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = "auto"
    """Most groups whose policy prefix keeps its graph at a time; those of the others run forward
    again in their backward. auto: on a GPU as many as there is memory for, which is measured, and
    always one; elsewhere all. all: those of a whole step. The update is the same."""
    graph_reserve_gib: float = Field(default=16.0, ge=0)
    """Of a GPU's memory, what `prefix_graphs = "auto"` leaves for what the step still needs: the
    learner's response pass, the rollout's K/V, workspaces. In GiB."""
    spill_optimizer: bool | Literal["auto"] = "auto"
    """Whether the optimizer's state lies in the host's memory while no update needs it, so that its
    device memory serves the rest of the step. auto: on a GPU; the update is the same."""
    optimizer_part_mib: float = Field(default=3072.0, gt=0)
    """Size of the parts in which the optimizer's state is kept, saved and updated, in MiB. Where it
    is spilled, three of them are on the device at a time in an update: one leaves, one is updated,
    one comes. The update is the same whatever their size."""
    spill_reference: bool | Literal["auto"] = "auto"
    """Whether the reference's weights lie in the host's memory while nothing reads them: from the
    last score to the next step's first reference prefix. auto: on a GPU whose budget has no room
    for the run's weights, gradients and optimizer state, or three parts of it if it is spilled,
    with `graph_reserve_gib` beside them, if the host has room for the copies. The update is the
    same."""
    restore_ahead_groups: int = Field(default=3, ge=0)
    """How many groups are still to be trained when the spilled optimizer's state begins to come
    back, where the device has room for all of it and `graph_reserve_gib` beside it. 0, and
    elsewhere: its parts come back in the update, a few at a time. Where prefixes keep their graphs,
    more groups mean less memory for those."""
    checkpoint_every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only on demand and, with `final_checkpoint`, at the end."""
    final_checkpoint: bool = True
    """Write a checkpoint after the last step whatever else is set; off for measurements."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    host_shadow: bool = True
    """Keep masters and moments outside the broker too, so that a death costs no finished step."""
    eval_every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: before the first step and after the last."""
    eval_prompts: int = Field(default=0, ge=0)
    """Rows of the held-out set that an evaluation uses; 0: all."""
    record_responses: bool = False
    """Keep each step's responses in the run's folder, to replay them under another schedule."""
    replay_from: Path | None = None
    """Run folder whose recorded responses are fed instead of sampling."""
    step_deadline_s: float = Field(default=600.0, gt=0)
    """A step that takes longer is ended and begun again."""

    @model_validator(mode="after")
    def _unshared_is_serial(self) -> Self:
        if not self.share_prefix and self.schedule is not Schedule.SERIAL:
            raise ValueError(
                f"share_prefix = false with schedule = {self.schedule.value!r}: it is a baseline "
                'of schedule = "serial" only'
            )
        return self


def spills(wanted: bool | Literal["auto"], device: str) -> bool:
    """What `spill_optimizer` comes to. Args: device: `cpu` or `cuda`."""
    return device == "cuda" if wanted == "auto" else wanted


class Recipe(FrozenConfig):
    """Everything that defines a run; with the code's version, it defines the result."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Short name, part of the run's id."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the data order and of sampling."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    algorithm: AlgorithmConfig
    training: TrainingConfig

    @property
    def prefix_passes(self) -> int:
        """How often training and scoring run the prefix of one group."""
        return 1 if self.training.share_prefix else self.rollout.samples_per_group

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm reads the reference's log-probabilities."""
        return self.algorithm.needs_reference

    @model_validator(mode="after")
    def _unshared_tower_is_frozen(self) -> Self:
        if self.model.train_vision and not self.training.share_prefix:
            raise ValueError(
                "training.share_prefix = false with model.train_vision = true: the tower has one "
                "backward a group; leave one of them at its default"
            )
        return self

    @model_validator(mode="after")
    def _sglang_can_do_it(self) -> Self:
        if self.rollout.engine is not EngineName.SGLANG:
            return self
        refused = {
            "training.schedule": (self.training.schedule is Schedule.FUSED, "fused"),
            "training.replay_from": (
                self.training.replay_from is not None,
                str(self.training.replay_from),
            ),
            "model.dtype": (self.model.dtype == "float64", "float64"),
        }
        for key, (is_set, value) in refused.items():
            if is_set:
                raise ValueError(
                    f'{key} = {value!r} with rollout.engine = "sglang": SGLang runs its own '
                    "prefill and samples its own tokens, in float32 or bfloat16; use "
                    'rollout.engine = "native" for it'
                )
        return self

    @model_validator(mode="after")
    def _evaluation_has_data(self) -> Self:
        wants = self.training.eval_every_steps or self.training.eval_prompts
        if wants and self.data.eval is None:
            raise ValueError(
                "training.eval_every_steps or training.eval_prompts is set, but data.eval is not; "
                "name a held-out set in data.eval or set both to 0"
            )
        return self
