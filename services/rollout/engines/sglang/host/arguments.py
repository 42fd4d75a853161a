"""From the project's settings to SGLang's: arguments of its engine and its environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from services.rollout.engines.sglang.host.weights import ADDRESS, REFRESH_LOADER

if TYPE_CHECKING:
    from services.rollout.engines.sglang.messages import EngineSettings

_PACKAGE = "services.rollout.engines.sglang"

_ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    # a scheduler without requests would have a core to itself
    "sleep_on_idle": True,
}
"""SGLang does not support CPUs like this; it is for tests and rehearsals."""


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Keywords of `sglang.srt.entrypoints.engine.Engine`."""
    return {
        "model_path": settings.model_path,
        "dtype": settings.dtype,
        "random_seed": settings.seed % 2**31,
        "max_running_requests": settings.max_requests,
        "context_length": settings.context_tokens,
        "max_total_tokens": settings.kv_tokens,
        "mem_fraction_static": settings.memory_fraction,
        "enable_memory_saver": _saves_memory(settings),
        "enable_deterministic_inference": settings.deterministic,
        # tokens are drawn by `host.sampler`
        "sampling_backend": "pytorch",
        "enable_custom_logit_processor": True,
        "custom_weight_loader": [REFRESH_LOADER],
        "base_gpu_id": settings.gpu,
        "tp_size": settings.ranks,
        # token ids in, token ids out, one report a decode step
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        # of the tower, which nobody runs: no kernels are looked for
        "mm_attention_backend": "sdpa",
        "log_level": "warning",
        **(_ON_CPU if settings.device == "cpu" else {}),
        **settings.arguments,
    }


def unset_variables(settings: EngineSettings) -> tuple[str, ...]:
    """Variables that the host's children must not inherit.

    Segments that grow are mapped past the memory saver, which would then release nothing.
    """
    return ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if _saves_memory(settings) else ()


def engine_environment(settings: EngineSettings, weights_address: str) -> dict[str, str]:
    """Variables for the host and its children, to be set before SGLang is imported."""
    return {
        ADDRESS: weights_address,
        # A prompt may be longer than what the configuration was trained with, as in training.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Embeddings of pictures are not kept: they would be those of older weights.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": f"{_PACKAGE}.models",
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": f"{_PACKAGE}.processors",
        # The logarithm of what is sampled from: over the temperature, without suppressed tokens.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **(_cpu_environment(settings.ranks) if settings.device == "cpu" else {}),
    }


def _cpu_environment(ranks: int) -> dict[str, str]:
    """SGLang asks for the cores of each rank where there are more ranks than NUMA nodes.

    Nothing is compiled: a process that is killed over it leaves a torn library for all that follow.
    """
    cores = sorted(os.sched_getaffinity(0))
    bound = (str(cores[rank % len(cores)]) for rank in range(ranks))
    several = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(bound)} if ranks > 1 else {}
    return {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", **several}


def _saves_memory(settings: EngineSettings) -> bool:
    """Whether memory can be released; on a CPU the calls are there, and do nothing."""
    return settings.release_memory and settings.device != "cpu"
