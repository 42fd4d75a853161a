"""The learner's part in a run: training state, durable copies, checkpoints."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import NotFound
from common.events.bodies import ModelRole
from common.ids import Epoch, WeightsVersion
from common.registry.runs import DurableRecord
from common.step.machine import Lane
from common.step.tasks import Task
from common.vlm.checkpoint import load_checkpoint
from common.vlm.files import check_model_files
from common.worker.threads import in_thread
from common.worker.weights import ModelShape, first_weights, policy_shape, shared_model
from common.worker.work import Prepared, ReadWeights
from services.learner.checkpoints import CheckpointStore, version_of
from services.learner.nonfinite import recorded_nonfinite
from services.learner.optimizer_file import CheckpointInvalid
from services.learner.push import push_whole
from services.learner.shadow import HostShadow
from services.learner.sharding import Sharding
from services.learner.step import LearnerStep
from services.learner.storages import HOLD_TIMEOUT_S, LearnerStorages
from services.learner.training_state import StatePart

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.worker.context import RunContext
    from common.worker.scope import StepScope
    from services.learner.replicas import Replicas

log = logging.getLogger(__name__)


class LearnerRun:
    """One run in this process."""

    keeps_cache = False
    trouble = ""
    lanes = (Lane(name="compute", tasks=(Task.UPDATE, Task.RESPONSE_TRAIN), collective=True),)

    def __init__(self, context: RunContext, shape: ModelShape, storages: LearnerStorages) -> None:
        self.context = context
        self.shape = shape
        self.storages = storages
        self.model = shared_model(context, shape, storages.weights, storages.gradients)
        self.shadow = HostShadow(
            context.run_dir / "shadow",
            storages.state,
            place=context.place,
        )
        self.sharding = Sharding.of(context, shape)
        self.checkpoints = CheckpointStore(
            context.run_dir / "checkpoints",
            storages.state,
            shape.config,
            model_path=context.recipe.model.path,
            sharding=self.sharding,
        )
        self.nonfinite = 0
        """Steps in a row, before the version held, whose gradient was NaN or infinite."""
        self._version: WeightsVersion | None = None

    @property
    def replicas(self) -> Replicas | None:
        """That the trainable state is shared among; None: there is one."""
        return None if self.sharding is None else self.sharding.replicas

    @classmethod
    async def create(cls, context: RunContext) -> LearnerRun:
        """Open the policy's storages."""
        model = context.recipe.model
        check_model_files(model.path, weights=model.weights == "files")
        shape = policy_shape(context)
        return cls(context, shape, await LearnerStorages.open(context, shape.layout))

    async def prepare(self) -> Prepared:
        """Hold a whole version: the one in the storages, or else the newest durable one."""
        await in_thread(self.storages.park)
        version = await self._whole_version()
        if version is None:
            version = await self._restore()
        if version != self._version:
            records = await self.context.ledger.durable(self.context.run_id)
            self.nonfinite = recorded_nonfinite(records, version)
        self._version = version
        await self._push(version)
        layout = self.shape.whole
        return Prepared(
            weights_version=version,
            facts={
                "parameters": str(layout.total_elements),
                "trainable_parameters": str(layout.trainable_elements),
            },
        )

    def begin(self, scope: StepScope) -> LearnerStep:
        """Start an epoch."""
        return LearnerStep(self, scope)

    def read_weights(self) -> tuple[ReadWeights, ...]:
        """The policy's."""
        return (
            ReadWeights(
                role=ModelRole.POLICY,
                storage=self.storages.weights,
                model=self.model,
                pieces=self.shape.pieces,
            ),
        )

    async def save_checkpoint(self, epoch: Epoch) -> tuple[Path, WeightsVersion]:
        """Write the version held as a checkpoint and make it a durable copy.

        Spilled optimizer state comes back for it, part by part. Of several ranks, none is done
        before all are.
        """
        version = self._version
        assert version is not None, "prepare comes before save_checkpoint"
        recipe, storages = self.context.recipe, self.storages
        with await storages.weights.hold_read(version, timeout_s=HOLD_TIMEOUT_S):
            begin = partial(self.checkpoints.begin, version, recipe_json=recipe.model_dump_json())
            draft = await in_thread(begin)
            if draft is not None:
                await storages.read_parts(version, draft.write)
        keep = recipe.training.keep_checkpoints
        path = await in_thread(partial(self.checkpoints.commit, version, draft, keep=keep))
        if self.context.speaks_for_all:
            record = DurableRecord(
                kind="checkpoint", version=version, location=str(path), epoch=epoch
            )
            await self.context.ledger.commit_durable(self.context.run_id, record)
        if self.context.joined is not None:
            await in_thread(self.context.joined.meet)
        return path, version

    def published(self, version: WeightsVersion, *, nonfinite: int) -> None:
        """An update has made this version readable, and durable where the recipe wants that.

        Args: nonfinite: the number that belongs to it.
        """
        self._version, self.nonfinite = version, nonfinite

    async def close(self) -> None:
        """Drop the mappings."""
        self.storages.close()

    async def _push(self, version: WeightsVersion) -> None:
        """See that a rollout with weights of its own has the version."""
        if self.context.push is None:
            return
        with await self.storages.weights.hold_read(version, timeout_s=HOLD_TIMEOUT_S):
            await push_whole(self.context.push, version, self.storages.state.weights)

    # ---------------------------------------------------------------- restoring

    async def _whole_version(self) -> WeightsVersion | None:
        """The version that the storages of all ranks hold; None: they differ, or one is torn."""
        version, joined = await self.storages.whole_version(), self.context.joined
        if joined is None:
            return version
        number = -1 if version is None else version
        return version if await in_thread(lambda: joined.all_equal(number)) else None

    async def _restore(self) -> WeightsVersion:
        records = await self.context.ledger.durable(self.context.run_id)
        for record in records:
            try:
                return await self._restored(record)
            except (NotFound, CheckpointInvalid) as error:
                log.warning("durable copy is unusable", extra={"error": str(error)})
        if self.context.resume_from is not None:
            return await self._resumed(self.context.resume_from)
        start = WeightsVersion(0)
        await self._rewritten(start, self._load_model, StatePart.begin_from_weights)
        return start

    async def _restored(self, record: DurableRecord) -> WeightsVersion:
        if record.kind == "checkpoint":
            return await self._resumed(Path(record.location))

        slot = self.shadow.slot_name(record.version)

        def load() -> None:
            self.shadow.check(slot)
            self._load_model()

        await self._rewritten(record.version, load, partial(self.shadow.restore, slot))
        log.info("restored", extra={"version": record.version, "copy": record.location})
        return record.version

    async def _resumed(self, folder: Path) -> WeightsVersion:
        version = version_of(folder)
        await self._rewritten(
            version,
            partial(self.checkpoints.load_weights, folder),
            partial(self.checkpoints.load_part, folder),
        )
        log.info("restored", extra={"version": version, "copy": str(folder)})
        return version

    async def _rewritten(
        self,
        version: WeightsVersion,
        fill_weights: Callable[[], None],
        fill_part: Callable[[StatePart], None],
    ) -> None:
        """Write the storages of all ranks anew.

        Raises: NotFound or CheckpointInvalid of this rank; NotFound where it is another one's.
        """
        joined, agreed = self.context.joined, False

        def complete() -> None:
            """Go on if all ranks have come so far, and have what other replicas have filled."""
            nonlocal agreed
            agreed = True
            if joined is not None and not joined.all_true(True):
                raise NotFound("another rank of the learner has no such copy")
            if self.replicas is not None:
                self.replicas.gather(self.storages.state.trainable_weights)

        try:
            await self.storages.rewrite(version, fill_weights, fill_part, complete)
        except (NotFound, CheckpointInvalid):
            if joined is not None and not agreed:
                await in_thread(partial(joined.all_true, False))
            raise

    def _load_model(self) -> None:
        context, state = self.context, self.storages.state
        if context.resume_from is not None:
            load_checkpoint(
                context.resume_from, state.layout, state.weights, shards=self.shape.parts
            )
        else:
            first_weights(context, context.recipe.model.path, self.shape, state.weights)
