"""Prometheus metrics of the reward functions: which one is slow, which one fails."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

REWARD_SECONDS = Histogram(
    "rollplex_reward_seconds",
    "Run time of a reward function on one response",
    ["function"],
    buckets=(0.0001, 0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
)
REWARD_FAILURES = Counter(
    "rollplex_reward_failures",
    "Responses on which a reward function gave no usable value",
    ["function", "kind"],
)
