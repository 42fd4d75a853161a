"""Hold the split pass against the library on a tiny model, and print the differences as JSON.

`python -m common.vlm.verify_split [--device cpu]`
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

import torch

from common.vlm.bound import bound_model
from common.vlm.tiny import tiny_config
from common.vlm.verification import decode_vs_monolithic, split_vs_monolithic
from common.vlm.verification_cases import all_cases

if TYPE_CHECKING:
    from collections.abc import Sequence


def measure(device: str) -> dict[str, float]:
    """Largest differences over all cases, tower trained and frozen, checkpointing on and off."""
    config = tiny_config()
    cases = [case.to(device) for case in all_cases(config)]
    gradients, logprobs, decode = 0.0, 0.0, 0.0
    for train_vision in (True, False):
        for checkpointing in (True, False):
            exact = bound_model(
                config, dtype=torch.float64, train_vision=train_vision, device=device
            )
            report = split_vs_monolithic(exact, cases, checkpointing=checkpointing)
            gradients = max(gradients, report.max_rel_grad_diff)
            single = bound_model(
                config, dtype=torch.float32, train_vision=train_vision, device=device
            )
            report = split_vs_monolithic(single, cases, checkpointing=checkpointing)
            logprobs = max(logprobs, report.max_logprob_diff)
            decode = max(decode, decode_vs_monolithic(single, cases))
    return {
        "split_vs_monolithic_rel_grad_diff_f64": gradients,
        "logprob_diff_f32": logprobs,
        "decode_logit_diff_f32": decode,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON object; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    arguments = parser.parse_args(argv)
    sys.stdout.write(json.dumps(measure(arguments.device)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
