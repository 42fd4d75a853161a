"""The learner's part in a run: training state, durable copies, checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import NotFound
from common.events.bodies import ModelRole
from common.ids import Epoch, Service, WeightsVersion
from common.registry.runs import DurableRecord
from common.step.machine import Lane
from common.step.tasks import Task
from common.vlm.checkpoint import load_checkpoint
from common.vlm.files import check_model_files
from common.worker.device import wait_for
from common.worker.threads import in_thread
from common.worker.weights import (
    POLICY_GRADIENTS,
    POLICY_OPTIMIZER,
    POLICY_WEIGHTS,
    ModelShape,
    first_weights,
    flat_spec,
    optimizer_spec,
    policy_shape,
    shared_model,
)
from common.worker.work import Prepared, ReadWeights
from services.learner.checkpoints import CheckpointInvalid, CheckpointStore, version_of
from services.learner.shadow import HostShadow
from services.learner.step import LearnerStep
from services.learner.training_state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.tensors.storage import Hold, Storage, StorageSpec
    from common.worker.context import RunContext
    from common.worker.scope import StepScope

log = logging.getLogger(__name__)

_RESTORE_TIMEOUT_S = 120.0
"""Longest wait for readers of an older version to let go, or for spilled state to come back."""


class LearnerRun:
    """One run in this process."""

    keeps_cache = False
    trouble = ""
    lanes = (Lane(name="compute", tasks=(Task.UPDATE, Task.RESPONSE_TRAIN)),)

    def __init__(
        self,
        context: RunContext,
        shape: ModelShape,
        specs: dict[str, StorageSpec],
        storages: dict[str, Storage],
    ) -> None:
        self.context = context
        self.shape = shape
        self._specs = specs
        self.weights = storages[POLICY_WEIGHTS]
        self.optimizer = storages[POLICY_OPTIMIZER]
        self.gradients = storages[POLICY_GRADIENTS]
        self.state = TrainingState.of(
            shape.layout,
            weights=self.weights,
            optimizer=self.optimizer,
            gradients=self.gradients,
        )
        self.model = shared_model(context, shape, self.weights, self.gradients)
        self.shadow = HostShadow(
            context.run_dir / "shadow", self.state, rank=context.participant.rank
        )
        self.checkpoints = CheckpointStore(
            context.run_dir / "checkpoints",
            self.state,
            shape.config,
            model_path=context.recipe.model.path,
        )
        self.nonfinite_in_a_row = 0
        self._version: WeightsVersion | None = None

    @classmethod
    async def create(cls, context: RunContext) -> LearnerRun:
        """Open the policy's storages."""
        model = context.recipe.model
        check_model_files(model.path, weights=model.weights == "files")
        shape = policy_shape(context)
        me, encoder = context.participant, context.peer(Service.PREFIX_ENCODER)
        layout = shape.layout
        specs = {
            POLICY_WEIGHTS: flat_spec(
                layout.total_elements,
                context.dtype,
                readers=(me, encoder, context.peer(Service.ROLLOUT)),
                writers=(me,),
            ),
            POLICY_OPTIMIZER: optimizer_spec(context, layout, me),
            POLICY_GRADIENTS: flat_spec(
                layout.trainable_elements,
                context.accumulator_dtype,
                readers=(),
                writers=(me, encoder),
            ),
        }
        storages = {
            name: await context.broker.open_storage(context.run_id, name, create=spec)
            for name, spec in specs.items()
        }
        return cls(context, shape, specs, storages)

    async def prepare(self) -> Prepared:
        """Hold a whole version: the one in the storages, or else the newest durable one."""
        version = await self._whole_version()
        if version is None:
            version = await self._restore()
        self._version = version
        if self.context.spills_optimizer:
            await in_thread(self.optimizer.park)
        layout = self.shape.layout
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
        return (ReadWeights(role=ModelRole.POLICY, storage=self.weights, model=self.model),)

    async def save_checkpoint(self, epoch: Epoch) -> tuple[Path, WeightsVersion]:
        """Write the version held as a checkpoint and make it a durable copy.

        Spilled optimizer state comes back for it, until the next step begins.
        """
        version = self._version
        assert version is not None, "prepare comes before save_checkpoint"
        recipe = self.context.recipe
        with await self.optimizer.hold_read(version, timeout_s=_RESTORE_TIMEOUT_S):
            path = await in_thread(
                lambda: self.checkpoints.save(
                    version,
                    recipe_json=recipe.model_dump_json(),
                    keep=recipe.training.keep_checkpoints,
                )
            )
        record = DurableRecord(kind="checkpoint", version=version, location=str(path), epoch=epoch)
        await self.context.ledger.commit_durable(self.context.run_id, record)
        return path, version

    def published(self, version: WeightsVersion) -> None:
        """An update has made this version readable, and durable where the recipe wants that."""
        self._version = version

    async def close(self) -> None:
        """Drop the mappings."""
        for storage in (self.weights, self.optimizer, self.gradients):
            storage.close()

    # ---------------------------------------------------------------- restoring

    async def _whole_version(self) -> WeightsVersion | None:
        """The version in the storages, if both hold the same one and neither is torn."""
        found: set[WeightsVersion | None] = set()
        for name in (POLICY_OPTIMIZER, POLICY_WEIGHTS):
            probe = await self.context.broker.open_storage(
                self.context.run_id, name, create=self._specs[name]
            )
            found.add(None if probe.torn else probe.version)
            probe.close()
        return found.pop() if len(found) == 1 else None

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

        def load() -> None:
            self._load_model()
            self.state.masters_from_weights()

        await self._rewritten(start, load)
        return start

    async def _restored(self, record: DurableRecord) -> WeightsVersion:
        if record.kind == "checkpoint":
            return await self._resumed(Path(record.location))

        def restore() -> None:
            self._load_model()
            self.shadow.restore(record.location)

        await self._rewritten(record.version, restore)
        log.info("restored", extra={"version": record.version, "copy": record.location})
        return record.version

    async def _resumed(self, folder: Path) -> WeightsVersion:
        version = version_of(folder)
        await self._rewritten(version, lambda: self.checkpoints.load(folder))
        log.info("restored", extra={"version": version, "copy": str(folder)})
        return version

    async def _rewritten(self, version: WeightsVersion, fill: Callable[[], None]) -> None:
        """Fill optimizer state and weights anew and publish them; torn if that fails."""
        holds: list[Hold] = []
        try:
            for storage in (self.optimizer, self.weights):
                holds.append(  # noqa: PERF401 - each waits
                    await storage.hold_write(version, timeout_s=_RESTORE_TIMEOUT_S)
                )

            def filled() -> None:
                fill()
                wait_for(self.context.device)

            await in_thread(filled)
            for hold in holds:
                await hold.publish()
        finally:
            for hold in holds:
                hold.release()

    def _load_model(self) -> None:
        context, state = self.context, self.state
        if context.resume_from is not None:
            load_checkpoint(context.resume_from, state.layout, state.weights)
        else:
            first_weights(context, context.recipe.model.path, state.layout, state.weights)
