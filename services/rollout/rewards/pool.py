"""Reward functions in spawned worker processes, with a time limit for every response.

A function that overruns is ended with its process, which a fresh one replaces; the workers end
with this process, however it ends.

A call of a worker costs far more than a quick function, so one call takes all responses of a
group for one function. Where that does not do, the responses get a call each: those that the
worker did not begin because the others took long, all of them if the call overran or its process
ended, so that only the culprit fails, and from the outset where the function was slow before.

Shapes: G responses of a group, F reward functions.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import time
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Self

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from services.rollout.rewards import worker
from services.rollout.rewards.errors import RewardFunctionInvalid
from services.rollout.rewards.metrics import REWARD_FAILURES, REWARD_SECONDS
from services.rollout.rewards.outcome import Pair, RewardOutcome, reward_outcome, timing
from services.rollout.rewards.worker import Evaluation, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from common.ids import GroupId
    from common.rl.reward_config import RewardConfig

Call = tuple[str, tuple[int, ...]]
"""A function's name and the responses, by index, that one call of a worker is for."""
Results = dict[Pair, Evaluation]

_LOADING_LIMIT_S = 120.0
"""Longest import of all reward functions in one worker."""
_QUEUED_PER_WORKER = 4
"""Calls given to the pool for each worker; enough to keep it busy, the rest wait here."""
_SHARED_CALL_S = 0.1
"""Longest time for which one call goes on to further responses. A function that needs more for a
group is slow: a call of a worker costs little beside it, and all workers should share the group."""
_POOL_CHECK_S = 0.5
"""How often a waiting call looks whether its pool still works."""
_ATTEMPTS = 2
"""Tries of a call whose worker pool broke down under it."""


class RewardPool:
    """The worker processes of one run, as an asynchronous context manager."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._functions = tuple(function.function for function in config.functions)
        self._pool: ProcessPool | None = None
        self._slots = asyncio.Semaphore(_QUEUED_PER_WORKER * config.workers)
        self._slow: set[str] = set()
        """Functions whose last group took too long for a shared call."""

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
        self,
        group: GroupId,
        completions: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        *,
        evaluation: bool,
    ) -> RewardOutcome:
        """Evaluate the functions of a step on all responses of a group.

        Cancelling it ends the running evaluations with their workers.

        Args:
            completions: G texts.
            rows: G rows of the data set, as a rule one row G times.
            evaluation: the step evaluates held-out responses, which have weights of their own.
        Raises: RewardFailed if a function failed and the recipe says that the run stops.
        """
        weights = self._config.weights(evaluation=evaluation)
        samples = tuple(range(len(completions)))
        call = functools.partial(self._call, completions=completions, rows=rows)
        results: Results = {}
        if samples:
            shared = [(name, samples) for name in weights if name not in self._slow]
            single = [(name, (i,)) for name in weights if name in self._slow for i in samples]
            decided = await self._gather([call(each) for each in (*shared, *single)], results)
            left = [(name, (i,)) for name in weights for i in samples if (name, i) not in results]
            if left and not decided:
                await self._gather([call(each) for each in left], results)
        self._note(weights, results)
        return reward_outcome(self._config, group, len(completions), weights, results)

    async def _gather(self, calls: Iterable[Coroutine[Any, Any, Results]], into: Results) -> bool:
        """Run calls at the same time. Returns whether a failure made the others needless."""
        tasks = [asyncio.create_task(call) for call in calls]
        try:
            for finished in asyncio.as_completed(tasks):
                results = await finished
                into.update(results)
                failed = any(result.failure is not None for result in results.values())
                if failed and self._config.on_error != "default":
                    return True
        finally:
            await _cancel(tasks)
        return False

    async def _call(
        self, call: Call, *, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> Results:
        """The evaluations that one call of a worker gave; none for several responses if it failed.

        A failure of a call with one response is that response's.
        """
        name, samples = call
        limit_s = self._config.time_limit_s
        task = functools.partial(
            worker.evaluate,
            time_limit_s=limit_s,
            budget_s=min(_SHARED_CALL_S, limit_s / 2),
        )
        async with self._slots:
            start_s = time.monotonic()
            try:
                evaluations: list[Evaluation] = await self._run(
                    limit_s,
                    task,
                    name,
                    [completions[i] for i in samples],
                    [rows[i] for i in samples],
                )
            except TimeoutError:
                evaluations = [_failed(FailureKind.TIMED_OUT, worker.overrun(limit_s), limit_s)]
            except (ProcessExpired, BrokenProcessPool) as error:
                elapsed_s = time.monotonic() - start_s
                evaluations = [_failed(FailureKind.DIED, f"its process ended: {error}", elapsed_s)]
            else:
                return {(name, i): each for i, each in zip(samples, evaluations, strict=False)}
        return {(name, samples[0]): evaluations[0]} if len(samples) == 1 else {}

    def _note(self, names: Iterable[str], results: Results) -> None:
        """Remember which functions are slow, and count."""
        for name in names:
            slow = timing(name, results).total_s > _SHARED_CALL_S
            (self._slow.add if slow else self._slow.discard)(name)
        for (name, _), evaluation in results.items():
            REWARD_SECONDS.labels(name).observe(evaluation.elapsed_s)
            if evaluation.failure is not None:
                REWARD_FAILURES.labels(name, evaluation.failure.value).inc()

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


def _failed(kind: FailureKind, cause: str, elapsed_s: float) -> Evaluation:
    return Evaluation(value=0.0, elapsed_s=elapsed_s, failure=kind, cause=cause)


async def _cancel(tasks: Sequence[asyncio.Task[Results]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
