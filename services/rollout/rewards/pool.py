"""Reward functions in spawned worker processes, with a time limit for every response.

A function that overruns is ended with its process, which a fresh one replaces; the workers end
with this process, however it ends.

Shapes: G responses of a group, F reward functions.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from services.rollout.rewards import worker
from services.rollout.rewards.errors import RewardFailed, RewardFunctionInvalid
from services.rollout.rewards.metrics import REWARD_FAILURES, REWARD_SECONDS
from services.rollout.rewards.worker import Evaluation, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from common.ids import GroupId
    from common.rl.reward_config import RewardConfig

_LOADING_LIMIT_S = 120.0
"""Longest import of all reward functions in one worker."""
_QUEUED_PER_WORKER = 4
"""Evaluations given to the pool for each worker; enough to keep it busy, the rest wait here."""
_POOL_CHECK_S = 0.5
"""How often a waiting evaluation looks whether its pool still works."""
_ATTEMPTS = 2
"""Tries of an evaluation whose worker pool broke down under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """One function that gave no usable value for one response."""

    function: str
    sample: int
    """Index of the response in its group."""
    kind: FailureKind
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTiming:
    """How long one function took on the responses of a group."""

    evaluations: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    longest_sample: int = -1
    """Index of the response that took longest; -1: none was evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """The rewards of one group."""

    group: GroupId
    dropped: bool
    """The group takes no further part in the step; the failures say why."""
    rewards: tuple[float, ...]
    """G weighted sums; empty if dropped."""
    values: Mapping[str, tuple[float, ...]]
    """G values of each function before its weight; empty if dropped."""
    failures: tuple[RewardFailure, ...]
    timings: Mapping[str, FunctionTiming]


class RewardPool:
    """The worker processes of one run, as an asynchronous context manager."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._functions = tuple(function.function for function in config.functions)
        self._pool: ProcessPool | None = None
        self._slots = asyncio.Semaphore(_QUEUED_PER_WORKER * config.workers)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers and wait until one has loaded all functions.

        Raises: RewardFunctionInvalid if a function cannot be loaded.
        """
        try:
            # The pool's own limit begins only when a worker has loaded the functions.
            async with asyncio.timeout(_LOADING_LIMIT_S):
                errors = await self._run(_LOADING_LIMIT_S, worker.loading_errors)
        except (TimeoutError, ProcessExpired, BrokenProcessPool) as error:
            await self.close()
            raise RewardFunctionInvalid(
                f"reward functions {list(self._functions)}: their worker ended while it loaded "
                f"them ({type(error).__name__}: {error})"
            ) from error
        if errors:
            await self.close()
            raise RewardFunctionInvalid("; ".join(errors.values()), functions=list(errors))

    async def close(self) -> None:
        """End the workers; running evaluations are given up. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(_end, pool)

    async def score(
        self, group: GroupId, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> RewardOutcome:
        """Evaluate all functions on all responses of a group.

        Cancelling it ends the running evaluations with their workers.

        Args:
            completions: G texts.
            rows: G rows of the data set, as a rule one row G times.
        Raises: RewardFailed if a function failed and the recipe says that the run stops.
        """
        pairs = [(name, sample) for name in self._functions for sample in range(len(completions))]
        tasks = [
            asyncio.create_task(self._evaluate(name, completions[sample], rows[sample]))
            for name, sample in pairs
        ]
        try:
            for finished in asyncio.as_completed(tasks):
                failed = (await finished).failure is not None
                if failed and self._config.on_error != "default":
                    break
        finally:
            await _cancel(tasks)
        evaluations = {
            pair: task.result()
            for pair, task in zip(pairs, tasks, strict=True)
            if not task.cancelled()
        }
        return self._outcome(group, len(completions), evaluations)

    async def _evaluate(self, name: str, completion: str, row: Mapping[str, Any]) -> Evaluation:
        async with self._slots:
            evaluation = await self._attempt(name, completion, row)
        REWARD_SECONDS.labels(name).observe(evaluation.elapsed_s)
        if evaluation.failure is not None:
            REWARD_FAILURES.labels(name, evaluation.failure.value).inc()
        return evaluation

    async def _attempt(self, name: str, completion: str, row: Mapping[str, Any]) -> Evaluation:
        limit_s = self._config.time_limit_s
        start_s = time.monotonic()
        try:
            evaluation: Evaluation = await self._run(
                limit_s, worker.evaluate, name, completion, row
            )
        except TimeoutError:
            evaluation = Evaluation(
                value=0.0,
                elapsed_s=limit_s,
                failure=FailureKind.TIMED_OUT,
                cause=f"ran longer than time_limit_s = {limit_s}",
            )
        except (ProcessExpired, BrokenProcessPool) as error:
            evaluation = Evaluation(
                value=0.0,
                elapsed_s=time.monotonic() - start_s,
                failure=FailureKind.DIED,
                cause=f"its process ended: {error}",
            )
        return evaluation

    async def _run(self, limit_s: float, function: Callable[..., Any], *args: object) -> Any:
        """Run one task in a worker, in a new pool if the present one has broken down.

        A pool breaks down as a whole when an idle worker is killed, with tasks that were never
        begun; so those are tried again.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            pool = self._pool or self._open()
            try:
                return await _result(pool, pool.schedule(function, args=args, timeout=limit_s))
            except (BrokenProcessPool, RuntimeError):
                # Several tasks learn of the breakdown; the first one opens the new pool.
                if self._pool is pool:
                    self._pool = None
                    await asyncio.to_thread(_end, pool)
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _open(self) -> ProcessPool:
        self._pool = ProcessPool(
            max_workers=self._config.workers,
            initializer=worker.initialise,
            initargs=(self._functions,),
            context=multiprocessing.get_context("spawn"),
        )
        return self._pool

    def _outcome(
        self, group: GroupId, responses: int, evaluations: Mapping[tuple[str, int], Evaluation]
    ) -> RewardOutcome:
        failures = tuple(
            RewardFailure(function=name, sample=sample, kind=result.failure, cause=result.cause)
            for (name, sample), result in evaluations.items()
            if result.failure is not None
        )
        if failures and self._config.on_error == "stop":
            first = failures[0]
            raise RewardFailed(
                f"reward function {first.function!r} on response {first.sample} of group {group}: "
                f"{first.kind.value}: {first.cause}",
                function=first.function,
                group=int(group),
                sample=first.sample,
                kind=first.kind.value,
                cause=first.cause,
            )
        dropped = bool(failures) and self._config.on_error == "drop_group"
        values: dict[str, tuple[float, ...]] = {}
        if not dropped:
            values = {
                name: tuple(self._value(evaluations[name, i]) for i in range(responses))
                for name in self._functions
            }
        return RewardOutcome(
            group=group,
            dropped=dropped,
            rewards=() if dropped else self._weighted(values, responses),
            values=values,
            failures=failures,
            timings={name: _timing(name, evaluations) for name in self._functions},
        )

    def _value(self, evaluation: Evaluation) -> float:
        return self._config.default_value if evaluation.failure else evaluation.value

    def _weighted(
        self, values: Mapping[str, tuple[float, ...]], responses: int
    ) -> tuple[float, ...]:
        return tuple(
            sum(term.weight * values[term.function][i] for term in self._config.functions)
            for i in range(responses)
        )


def _timing(name: str, evaluations: Mapping[tuple[str, int], Evaluation]) -> FunctionTiming:
    elapsed = {
        sample: result.elapsed_s
        for (function, sample), result in evaluations.items()
        if function == name
    }
    if not elapsed:
        return FunctionTiming()
    slowest = max(elapsed, key=lambda sample: elapsed[sample])
    return FunctionTiming(
        evaluations=len(elapsed),
        total_s=sum(elapsed.values()),
        longest_s=elapsed[slowest],
        longest_sample=slowest,
    )


async def _result(pool: ProcessPool, scheduled: ProcessFuture[Any]) -> Any:
    """Wait for a scheduled task; cancelling ends it.

    Raises: BrokenProcessPool also for a task that a pool took while it broke down, and forgot.
    """
    future = asyncio.wrap_future(scheduled)
    try:
        while True:
            await asyncio.wait({future}, timeout=_POOL_CHECK_S)
            if future.done():
                return future.result()
            if not pool.active:
                raise BrokenProcessPool("the worker pool broke down")
    finally:
        future.cancel()


async def _cancel(tasks: Sequence[asyncio.Task[Evaluation]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
