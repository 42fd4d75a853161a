"""TRL's `GRPOTrainer` on a workload's prompts, with the times of its phases.

Needs TRL, which is no dependency of this project; `bench.trl_step` checks that before the import.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoProcessor,
    GenerationConfig,
    PrinterCallback,
    Qwen2_5_VLForConditionalGeneration,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from bench.step_inputs import KL_COEFFICIENT, SEED
from common.rl.config import AlgorithmConfig
from common.vlm.loading import load_config, suppressed_token_ids, weight_layout
from common.vlm.random_weights import fill_random
from common.weights.binding import views
from rollplex.verify.task import checksum_reward

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from bench.step_workloads import Workload

GENERATION = "generation"
"""The engine's forwards: prefill and decode of all responses."""
REFERENCE = "reference"
"""Log-probabilities under the reference."""
ROLLOUT = "rollout"
"""All that comes before the first backward, the two above included."""


class StepClock(TrainerCallback):
    """Wall time of every step and of what runs inside it, work on the device included.

    Attributes:
        step_s: seconds of the steps so far, from `on_step_begin` to `on_step_end`.
        phases: likewise, seconds by phase.
    """

    def __init__(self, device: torch.device, *, warm_up: int) -> None:
        """Args: warm_up: steps whose peak of memory does not count."""
        self.step_s: list[float] = []
        self.phases: list[Mapping[str, float]] = []
        self._device = device
        self._warm_up = warm_up
        self._began = 0.0
        self._running: defaultdict[str, float] = defaultdict(float)

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Called by the trainer before a step's first micro-batch."""
        if len(self.step_s) == self._warm_up and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._running = defaultdict(float)
        self._began = self._now()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Called by the trainer after the update."""
        self.step_s.append(self._now() - self._began)
        self.phases.append(dict(self._running))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that this is open to the current step's."""
        began = self._now()
        yield
        self._running[name] += self._now() - began

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class RandomCheckpoint:
    """Answers `from_pretrained` of a folder without weights: the ones that a run would begin with.

    TRL loads policy and reference through `architecture` of `model_init_kwargs`; each gets a
    configuration object of its own, because the trainer writes `use_cache` into the policy's.
    """

    def __init__(self, device: torch.device, *, train_vision: bool) -> None:
        """Args: train_vision: whether the tower takes part in the training."""
        self._device = device
        self._train_vision = train_vision

    def from_pretrained(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, **_ignored: Any
    ) -> Qwen2_5_VLForConditionalGeneration:
        """A model of that folder's shape on the device."""
        with torch.device(self._device):
            model = Qwen2_5_VLForConditionalGeneration._from_config(
                load_config(path), dtype=dtype, attn_implementation=attn_implementation
            )
        layout = weight_layout(model, train_vision=self._train_vision, dtype=dtype)
        flat = torch.empty(layout.total_elements, dtype=dtype, device=self._device)
        tensors = views(flat, layout)
        fill_random(tensors, seed=SEED)
        with torch.no_grad():
            for name, values in tensors.items():
                model.get_parameter(name).copy_(values)
        model.model.visual.requires_grad_(self._train_vision)
        model.generation_config = GenerationConfig.from_pretrained(path)
        # TRL loads the reference from where the policy says that it came from.
        model.config.name_or_path = path
        return model


class TimedTrainer(GRPOTrainer):
    """Measures its phases, and refuses to go on with work other than the workload's."""

    def __init__(self, work: Workload, clock: StepClock, **kwargs: Any) -> None:
        """Args: kwargs: of `GRPOTrainer`."""
        super().__init__(callbacks=[clock], **kwargs)
        self.remove_callback(PrinterCallback)
        self._work = work
        self._clock = clock

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._clock.phase(ROLLOUT):
            return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: Any) -> Any:
        prompt_ids, images, fields = super()._tokenize_prompts(prompts)
        _require_lengths("prompts", prompt_ids, self._work.prompt_tokens)
        return prompt_ids, images, fields

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        forwards: list[int] = []
        decoder = self.accelerator.unwrap_model(self.model).model.language_model

        def record(_module: Any, _args: Any, given: dict[str, Any]) -> None:
            forwards.append(given["inputs_embeds"].shape[1])

        hook = decoder.register_forward_pre_hook(record, with_kwargs=True)
        try:
            with self._clock.phase(GENERATION):
                completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        finally:
            hook.remove()
        _require_lengths("responses", completion_ids, self._work.lengths.max_tokens)
        if forwards != [self._work.prompt_tokens] + [1] * (self._work.lengths.max_tokens - 1):
            raise RuntimeError(f"generation made no use of its K/V cache: forwards of {forwards}")
        return completion_ids, logprobs

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is not self.ref_model:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with self._clock.phase(REFERENCE):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


def make_trainer(
    work: Workload,
    clock: StepClock,
    *,
    model: Path,
    rows: Path,
    device: str,
    steps: int,
    micro_batch: int,
    output: Path,
) -> TimedTrainer:
    """A trainer that makes `steps` updates, each from all of the workload's responses.

    Args:
        model: folder of `bench.step_inputs.make_model`.
        rows: file of `bench.step_inputs.write_rows`; pictures only.
        device: `cpu` or `cuda`.
        micro_batch: responses of one scoring or training pass; divides the step's responses.
        output: folder that TRL asks for.
    """
    algorithm = AlgorithmConfig(kl_coefficient=KL_COEFFICIENT)
    checkpoint = RandomCheckpoint(torch.device(device), train_vision=work.train_vision)
    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        # Also the passes of one generation: all responses are generated at once, on policy.
        gradient_accumulation_steps=work.prompts * work.samples // micro_batch,
        num_generations=work.samples,
        max_completion_length=work.lengths.max_tokens,
        generation_kwargs={
            "min_new_tokens": work.lengths.max_tokens,
            "suppress_tokens": list(suppressed_token_ids(load_config(model))),
        },
        beta=algorithm.kl_coefficient,
        epsilon=algorithm.clip_low,
        learning_rate=algorithm.learning_rate,
        weight_decay=algorithm.weight_decay,
        max_grad_norm=algorithm.max_grad_norm,
        lr_scheduler_type=algorithm.lr_schedule,
        gradient_checkpointing=True,
        bf16=work.dtype == "bfloat16",
        model_init_kwargs={
            "architecture": checkpoint,
            "dtype": work.dtype,
            "attn_implementation": "sdpa",
        },
        use_cpu=device == "cpu",
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
    )
    return TimedTrainer(
        work,
        clock,
        model=str(model),
        reward_funcs=_reward,
        args=config,
        train_dataset=_dataset(rows),
        processing_class=AutoProcessor.from_pretrained(model, padding_side="left"),
    )


def _dataset(rows: Path) -> Dataset:
    """The rows with decoded pictures: TRL asks for each as often as a step has responses and
    passes, and decoding is no part of what is measured."""
    samples = [_sample(json.loads(line), rows.parent) for line in rows.read_text().splitlines()]

    def lookup(batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        chosen = [samples[number] for number in batch["number"]]
        return {name: [sample[name] for sample in chosen] for name in samples[0]}

    return Dataset.from_dict({"number": list(range(len(samples)))}).with_transform(lookup)


def _sample(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    picture, text = row["messages"][0]["content"]
    with Image.open(folder / picture["image"]) as opened:
        image = opened.convert("RGB")
    prompt = [{"role": "user", "content": text["text"]}]
    return {"prompt": prompt, "image": image, "index": row["index"]}


def _reward(
    completions: Sequence[Sequence[Mapping[str, str]]], index: Sequence[int], **_ignored: Any
) -> list[float]:
    return [
        checksum_reward(turns[0]["content"], {"index": number})
        for turns, number in zip(completions, index, strict=True)
    ]


def _require_lengths(what: str, token_ids: Sequence[Sequence[int]], wanted: int) -> None:
    found = {len(ids) for ids in token_ids}
    if found != {wanted}:
        raise RuntimeError(f"{what} have {sorted(found)} tokens; the workload has {wanted}")
