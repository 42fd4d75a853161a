"""The moments of a run at which the tests kill, each with how it is held and what it is."""

from __future__ import annotations

import asyncio
import contextlib
import re
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import Unavailable
from common.events import bodies
from common.ids import RunId
from common.registry.connection import open_redis, retry_redis
from common.tensors.parts import whole_of
from common.worker.optimizer_parts import POLICY_OPTIMIZER
from rollplex.models import RunState
from tests.integration.runs.lab import reach
from tests.integration.runs.sightings import Sightings
from tests.integration.runs.strikes import SETTLE_S, Landed, kill, still, stopped, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from rollplex.client import Client
    from rollplex.models import Run
    from tests.integration.runs.node import Node

ROLLOUT, ENCODER, REFERENCE, LEARNER = "rollout/0", "prefix-encoder/0", "reference/0", "learner/0"
BROKER, CONTROLLER, REDIS = "broker/0", "controller/0", "redis"
WORKERS = (ROLLOUT, ENCODER, REFERENCE, LEARNER)
VICTIMS = (*WORKERS, BROKER, CONTROLLER, REDIS)

ATTEMPTS = 5
ASKED_S = 1.0
"""The learner has asked for a publication after this, once its commit is done."""
_READABLE = re.compile(r"readable\(v(\d+)\)")
PAUSE_MS = 4000
"""Longer than any moment that is made by it, shorter than a registration's life."""


class Striker:
    """Kills in one run on one node, each time in another step; an async context manager."""

    def __init__(self, node: Node, client: Client, run: Run) -> None:
        self._node = node
        self._client = client
        self._run_id = run.run_id
        self._checkpoints = Path(run.run_dir) / "checkpoints"
        self._open = AsyncExitStack()
        self._last_step = -1
        self.seen = Sightings(node)

    async def __aenter__(self) -> Striker:
        self._broker = await self._open.enter_async_context(self._node.broker())
        self._ledger = await self._open.enter_async_context(self._node.ledger())
        self._redis = open_redis(self._node.deployment.redis_url)
        self._open.push_async_callback(self._redis.aclose)
        following = asyncio.create_task(self.seen.follow())
        self._open.push_async_callback(asyncio.gather, following, return_exceptions=True)
        self._open.callback(following.cancel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    # ---------------------------------------------------------------- between steps

    async def configuring(self, victim: str) -> Landed:
        """A worker that was killed before is loading its part of the run again."""
        loads = victim if victim in WORKERS else REFERENCE
        await until(self._is_fresh)
        self._last_step = self.seen.step
        for _ in range(ATTEMPTS):
            joined = self.seen.joined(loads)
            old = await kill(self._node, loads)

            async def is_back(old: int = old) -> bool:
                return self._node.pid(loads) not in (0, old)

            async def has_joined(joined: int = joined) -> bool:
                return self.seen.joined(loads) > joined

            await until(is_back)
            pid = self._node.pid(loads)
            await until(has_joined)
            # It has opened its link, which is the first thing of a configuration.
            with stopped(pid):
                await asyncio.sleep(SETTLE_S)
                run = await self._asked(self._client.get_run)
                if run.state is RunState.CONFIGURING:
                    return await self._kill(victim, "configuring")
        raise AssertionError(f"{loads} was never caught while it was configuring")

    async def paused(self, victim: str) -> Landed:
        """The run waits between two steps, until a client has it go on."""
        await until(self._is_fresh)
        await self._pause()
        struck = await self._kill(victim, "paused")
        await self._asked(self._client.resume)
        return struck

    async def planned(self, victim: str) -> Landed:
        """The journal says that the step was begun; the broker has not been told."""
        await until(self._is_fresh)
        await self._pause()
        epoch = (await self._asked(self._client.get_run)).epoch
        with stopped(self._node.pid(BROKER)):
            await self._asked(self._client.resume)

            async def written() -> bool:
                entries = await self._ledger.read_journal(RunId(self._run_id))
                return any(e.kind == "begun" and e.epoch > epoch for e in entries)

            await until(written)
            return await self._kill(victim, "begun in the journal only")

    async def saving(self, victim: str) -> Landed:
        """A checkpoint is being written."""

        async def holds() -> bool:
            return self._is_newer and any(self._checkpoints.glob(".step-*"))

        async with still(self._node, LEARNER, holds):
            return await self._kill(victim, "checkpoint being written")

    # ---------------------------------------------------------------- in a step

    async def begun(self, victim: str) -> Landed:
        """The step has begun and nothing of it is done.

        Its prompts may be ready before it begins: who would say so is held still until then.
        """
        await until(self._is_fresh)
        await self._pause()
        with stopped(self._node.pid(ENCODER)):
            before = self.seen.began
            await self._asked(self._client.resume)

            async def holds() -> bool:
                return self.seen.began is not before and self._fresh

            await until(holds)
            assert not self.seen.of_epoch(bodies.GroupPrepared)
            return await self._kill(victim, "step begun")

    async def window(self, victim: str) -> Landed:
        """Sequences decode."""
        async with self.window_held():
            return await self._kill(victim, "window open")

    @asynccontextmanager
    async def window_held(self, *, hinted: bool = False) -> AsyncIterator[None]:
        """The rollout is held still while sequences decode.

        Args: hinted: in a step that knows the next one's prompts, which the last one does not.
        """

        async def holds() -> bool:
            if not (self._fresh and self.seen.window_is_open):
                return False
            return not hinted or self.seen.hinted

        async with still(self._node, ROLLOUT, holds):
            self._last_step = self.seen.step
            yield

    async def spilled(self, victim: str, storage: str = "policy.optimizer.0") -> Landed:
        """The contents of a storage are in the broker's own memory only."""

        async def holds() -> bool:
            if not (self._fresh and self.seen.window_is_open):
                return False
            return await self._has_state(storage, "spilled")

        async with still(self._node, ROLLOUT, holds):
            return await self._kill(victim, f"{storage} spilled")

    async def aborted(self) -> None:
        """Wait until the epoch was ended without an update."""

        async def holds() -> bool:
            return bool(self.seen.of_epoch(bodies.StepAborted))

        await until(holds)

    async def scoring(self, victim: str) -> Landed:
        """The reference holds a group's prefix and responses."""

        async def holds() -> bool:
            return self._fresh and REFERENCE in await self._holders("reference.prefix_kv")

        async with still(self._node, REFERENCE, holds):
            return await self._kill(victim, "reference scores")

    async def learner_accumulates(self, victim: str) -> Landed:
        """The learner adds a group's response part to the gradients."""
        return await self._accumulating(victim, LEARNER)

    async def encoder_accumulates(self, victim: str) -> Landed:
        """The prefix-encoder adds a group's prefix part to the gradients."""
        return await self._accumulating(victim, ENCODER)

    async def updating(self, victim: str) -> Landed:
        """The weights are being written, and the new version is not durable."""
        async with self._update_held() as version:
            struck = await self._kill(victim, "update, not durable")
        assert struck.step == version
        return struck

    async def between_parts(self, victim: str) -> Landed:
        """Some parts of the optimizer's state have the new version, some the old one."""

        async def holds() -> bool:
            step = self.seen.step
            return self._fresh and {step, step + 1} <= await self._part_versions()

        async with still(self._node, LEARNER, holds):
            return await self._kill(victim, "update, between two parts")

    async def pushing(self, victim: str) -> Landed:
        """Weights are on their way to a rollout that has its own."""

        async def holds() -> bool:
            return self._fresh and self.seen.push_is_open

        async with still(self._node, ROLLOUT, holds):
            return await self._kill(victim, "push under way")

    async def pushed(self, victim: str) -> Landed:
        """The rollout has the new version, which is not durable."""
        async with self._update_held() as version:
            await until(self._push_over)
            struck = await self._kill(victim, "pushed, not durable")
        assert struck.step == version
        return struck

    async def durable(self, victim: str) -> Landed:
        """The new version is durable; the broker has not been told to publish it."""
        async with self._update_held() as version:
            if self.seen.push_is_open:
                await until(self._push_over)
                await asyncio.sleep(ASKED_S)
            # It has asked Redis for the commit, which goes on without it.
            await asyncio.sleep(SETTLE_S)
            held = LEARNER if victim == LEARNER else BROKER
            with stopped(self._node.pid(held)):
                # The broker, held still, answers no publish; the learner asks for none.
                await self._let_writes_go_on()
                await until(lambda: self._is_durable(version + 1))
                if held == BROKER:
                    await asyncio.sleep(ASKED_S)
                struck = await self._kill(victim, "update, durable, not published")
            if victim == LEARNER:
                await until(lambda: self._has_state("policy.weights", f"torn(v{version})"))
                assert await self._part_versions() == {version + 1}
        return struck

    async def published(self, victim: str) -> Landed:
        """The step is done; the controller has not written that down."""
        await self._step_begun()
        with stopped(self._node.pid(CONTROLLER)):

            async def holds() -> bool:
                return self.seen.published

            await until(holds)
            return await self._kill(victim, "published, not in the journal")

    # ---------------------------------------------------------------- how they are held

    @property
    def _is_newer(self) -> bool:
        began = self.seen.began
        ours = began is not None and began.run_id == self._run_id
        return ours and self.seen.step > self._last_step

    @property
    def _fresh(self) -> bool:
        """Whether a step runs in which nothing was killed yet."""
        return self.seen.running and self._is_newer

    async def _is_fresh(self) -> bool:
        return self._fresh

    async def _step_begun(self) -> None:
        """Wait for the beginning of a step; what the controller writes for it is written then."""
        before = self.seen.began

        async def holds() -> bool:
            return self.seen.began is not before and self._fresh

        await until(holds)

    async def _pause(self) -> None:
        await self._asked(self._client.pause)
        await reach(self._client, self._run_id, RunState.PAUSED)

    async def _asked(self, call: Callable[[str], Awaitable[Run]]) -> Run:
        """Call the controller, which may be the one that was killed."""
        answers: list[Run] = []

        async def answered() -> bool:
            with contextlib.suppress(Unavailable):
                answers.append(await call(self._run_id))
            return bool(answers)

        await until(answered)
        return answers[0]

    async def _accumulating(self, victim: str, who: str) -> Landed:
        async def holds() -> bool:
            groups = len(self.seen.of_epoch(bodies.GroupPrepared))
            accumulates = await self._holders("policy.gradients") == {who}
            return self._fresh and accumulates and self.seen.groups_done < groups

        async with still(self._node, who, holds):
            return await self._kill(victim, f"{who} accumulates")

    @asynccontextmanager
    async def _update_held(self) -> AsyncIterator[int]:
        """Hold an update before its commit, by having Redis wait. Yields: the version before it."""
        await self._step_begun()
        await self._redis.execute_command("CLIENT", "PAUSE", PAUSE_MS, "WRITE")
        try:
            version = self.seen.step

            async def written() -> bool:
                """All parts are: what is left is the commit."""
                writing = await self._has_state("policy.weights", "writing")
                return writing and await self._part_versions() == {version + 1}

            await until(written, within_s=PAUSE_MS / 1000)
            assert await self._is_durable(version)
            yield version
        finally:
            await self._let_writes_go_on()

    async def _let_writes_go_on(self) -> None:
        # A server that was killed meanwhile comes back without the pause.
        await retry_redis(
            lambda: self._redis.execute_command("CLIENT", "UNPAUSE"),
            what="letting writes go on",
            url=self._node.deployment.redis_url,
            deadline_s=30.0,
        )

    async def _push_over(self) -> bool:
        return self.seen.push_is_over

    async def _is_durable(self, version: int) -> bool:
        records = await self._ledger.durable(RunId(self._run_id))
        return max((record.version for record in records), default=0) == version

    async def _has_state(self, storage: str, begins: str) -> bool:
        entries = await self._node.entries(self._broker, self._run_id)
        return any(e.name == storage and e.state.startswith(begins) for e in entries)

    async def _part_versions(self) -> set[int]:
        """The versions of the optimizer state's parts; none of one that is torn or written."""
        entries = await self._node.entries(self._broker, self._run_id)
        states = [e.state for e in entries if whole_of(e.name) == POLICY_OPTIMIZER]
        return {int(found[1]) for found in map(_READABLE.search, states) if found}

    async def _holders(self, name: str) -> set[str]:
        entries = await self._node.entries(self._broker, self._run_id)
        return {holder for entry in entries if entry.name == name for holder in entry.holders}

    async def _kill(self, victim: str, moment: str) -> Landed:
        began = self.seen.began
        assert began is not None
        self._last_step = began.step
        await kill(self._node, victim)
        return Landed(victim=victim, moment=moment, step=began.step, epoch=began.epoch)


MOMENTS = (
    Striker.configuring,
    Striker.paused,
    Striker.planned,
    Striker.begun,
    Striker.window,
    Striker.scoring,
    Striker.learner_accumulates,
    Striker.encoder_accumulates,
    Striker.updating,
    Striker.durable,
    Striker.published,
    Striker.saving,
)
