"""What a measured run is asked for: its schedule, and the engine that samples its responses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.step_inputs import BASELINES
from common.errors import InvalidArgument
from common.step.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NATIVE = "native"
_WEIGHTS = {"sglang": "alias", "sglang-copy": "copy"}
"""By engine: how SGLang has the policy's weights."""
ENGINES = (NATIVE, *_WEIGHTS)
_ON_GPU = {
    "attention_backend": "triton",
    "cuda_graph_bs_decode": [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64],
    "disable_prefill_cuda_graph": True,
    "log_level": "info",
}
"""Arguments of SGLang that need no kernel packages beside its own; its decode graphs hold the 64
sequences of a workload."""
_BOUND = 0.5
"""Of log-probabilities, between SGLang and the trainer: what was seen is a figure of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One run of a measurement.

    Attributes:
        schedule: of `common.step.schedule`, or one of `BASELINES` of `bench.step_inputs`.
        engine: of `ENGINES`.
    """

    schedule: str
    engine: str = NATIVE

    @property
    def sglang(self) -> bool:
        """Whether the node has to have an interpreter with SGLang."""
        return self.engine in _WEIGHTS

    def rollout(self, *, device: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """Of the recipe's `[rollout]`: which engine, and how.

        Args: table: keys of `[rollout.sglang]`, in place of those that are set here.
        """
        if not self.sglang:
            return {}
        ours = {"logprob_bound": _BOUND, "arguments": _ON_GPU if device == "cuda" else {}}
        weights = {"weights": _WEIGHTS[self.engine]}
        return {"engine": "sglang", "sglang": {**ours, **table, **weights}}


def asked(texts: Sequence[str]) -> Mapping[str, Asked]:
    """Runs by label: `schedule` or `schedule@engine`, numbered from the second time on.

    Raises: InvalidArgument for a schedule or an engine that there is not.
    """
    seen: Counter[str] = Counter()
    found: dict[str, Asked] = {}
    for text in texts:
        schedule, _, engine = text.partition("@")
        one = Asked(schedule=schedule, engine=engine or NATIVE)
        for value, legal in ((schedule, [*Schedule, *BASELINES]), (one.engine, ENGINES)):
            if value not in legal:
                raise InvalidArgument(f"--schedules: {value!r}; legal are {', '.join(legal)}")
        label = schedule if one.engine == NATIVE else f"{schedule}@{one.engine}"
        seen[label] += 1
        found[label if seen[label] == 1 else f"{label}-{seen[label]}"] = one
    return found
