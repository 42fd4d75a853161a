"""A process with two busy reward workers, to be killed by a test."""

from __future__ import annotations

import asyncio
import sys

from common.rl.reward_config import RewardConfig
from services.rollout.rewards.pool import RewardPool

FUNCTION = "tests.integration.rewards.functions_for_tests:spins_and_says_who"


async def main(pid_file):
    config = RewardConfig(functions=[{"function": FUNCTION}], time_limit_s=600, workers=2)
    row = {"pid_file": pid_file}
    async with RewardPool(config) as pool:
        scorings = [pool.score(group, ["a"], [row], evaluation=False) for group in range(2)]
        await asyncio.gather(*scorings)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
