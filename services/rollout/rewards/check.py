"""Check a recipe's reward functions before its run starts, in a process of its own.

    python -m services.rollout.rewards.check --recipe recipe.json

prints `{"ok": bool, "errors": [{"key", "value", "message"}]}`; the exit status is 0 if all is well.
Importing a user's module may do anything, so this never happens in a service.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.rl.reward_config import RewardConfig
from services.rollout.rewards.errors import RewardFunctionInvalid
from services.rollout.rewards.functions import load_function

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_rewards(config: RewardConfig) -> list[dict[str, Any]]:
    """Load every function here, and describe those that cannot be loaded by key and value."""
    errors = []
    for index, function in enumerate(config.functions):
        try:
            with contextlib.redirect_stdout(sys.stderr):
                load_function(function.function)
        except RewardFunctionInvalid as error:
            key = f"reward.functions[{index}].function"
            errors.append({"key": key, "value": function.function, "message": str(error)})
    return errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the `reward` table of a resolved recipe. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.rewards.check")
    parser.add_argument("--recipe", type=Path, required=True, help="resolved recipe, as JSON")
    recipe = json.loads(parser.parse_args(arguments).recipe.read_text())
    errors = check_rewards(RewardConfig.model_validate(recipe["reward"]))
    sys.stdout.write(json.dumps({"ok": not errors, "errors": errors}) + "\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
