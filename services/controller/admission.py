"""CreateRun: everything that is checked before a run joins the queue."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import InvalidArgument, RollplexError
from common.ids import Participant, RunId, Service
from protos.rollplex.v1 import broker_pb2
from services.controller.files import check_run_dir, prepare_run_dir
from services.controller.preflight import check_recipe
from services.controller.ranks import check_ranks
from services.controller.record import RunRecord
from services.controller.room import check_room
from services.controller.settings import read_recipe
from services.controller.work import now_unix_ms

if TYPE_CHECKING:
    from common.config.deployment import Deployment
    from common.config.recipe import Recipe
    from services.controller.broker import BrokerPort
    from services.controller.config import ControllerConfig

log = logging.getLogger(__name__)


class Admission:
    """Turns a request into the record of a run that can start."""

    def __init__(
        self, deployment: Deployment, config: ControllerConfig, broker: BrokerPort
    ) -> None:
        self._deployment = deployment
        self._config = config
        self._broker = broker

    async def admit(
        self,
        recipe_json: str,
        *,
        run_dir: str | None,
        resume_from: str | None,
        request_id: str | None,
    ) -> RunRecord:
        """Check a recipe in full and prepare the run's folder.

        Args:
            recipe_json: a resolved recipe.
            run_dir: unset: a folder of its own under the deployment's `state_dir`.
            resume_from: checkpoint folder to continue from.

        Raises:
            InvalidArgument: something in the request is wrong; names key, value and what is legal.
            ResourceExhausted: the arena cannot hold the run.
        """
        recipe = read_recipe(recipe_json)
        _check_resume_from(resume_from)
        run_id = _new_run_id(recipe)
        run_folder = self._run_dir(run_id, run_dir)
        check_run_dir(run_folder)
        check_ranks(recipe, self._deployment)
        deployment = self._deployment
        check_room(
            recipe,
            await self._ledger(),
            device=deployment.device,
            place=deployment.place(Participant(service=Service.LEARNER)),
            partners=deployment.partners,
        )
        resolved = recipe.resolved_json()
        with tempfile.TemporaryDirectory(prefix="rollplex-preflight-") as folder:
            file = Path(folder) / "recipe.json"
            file.write_text(resolved, encoding="utf-8")
            facts = await check_recipe(recipe, file, deadline_s=self._config.preflight_deadline_s)
        for warning in facts.warnings:
            log.warning("a row will be dropped", extra={"cause": warning})
        prepare_run_dir(run_folder, resolved)
        return RunRecord(
            run_id=run_id,
            recipe_json=resolved,
            run_dir=str(run_folder),
            resume_from=resume_from,
            steps_total=recipe.training.steps,
            created_unix_ms=now_unix_ms(),
            train_rows=facts.train_rows,
            eval_rows=facts.eval_rows,
            request_id=request_id or "",
        )

    def _run_dir(self, run_id: RunId, wanted: str | None) -> Path:
        return Path(wanted or self._deployment.state_dir / "runs" / run_id).absolute()

    async def _ledger(self) -> broker_pb2.Ledger:
        try:
            return await self._broker.ledger()
        except RollplexError as error:
            # Not up yet; the deployment says how large its arena will be.
            log.info("no ledger from the broker", extra={"cause": str(error)})
            return broker_pb2.Ledger(capacity_bytes=self._deployment.arena_bytes)


def _new_run_id(recipe: Recipe) -> RunId:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return RunId(f"{recipe.name}-{stamp}-{secrets.token_hex(2)}")


def _check_resume_from(folder: str | None) -> None:
    if folder is not None and not Path(folder).is_dir():
        raise InvalidArgument(f"resume_from = {folder!r} is not a checkpoint folder")
