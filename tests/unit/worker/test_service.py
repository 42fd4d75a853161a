"""A worker's process."""

from __future__ import annotations

import asyncio
import threading

from common.config.deployment import Deployment
from common.ids import Participant, Service
from common.service.context import ServiceContext
from common.worker.device import WorkerDevice
from common.worker.service import WorkerService


async def test_every_thread_that_jobs_run_in_has_entered_the_device(tmp_path, monkeypatch):
    entered = []
    monkeypatch.setattr(WorkerDevice, "enter", lambda _: entered.append(threading.get_ident()))
    deployment = Deployment(state_dir=tmp_path)
    context = ServiceContext(Participant(service=Service.LEARNER), deployment)
    service = WorkerService(context, None)
    try:
        assert entered == [threading.get_ident()]
        assert await asyncio.to_thread(threading.get_ident) in entered[1:]
    finally:
        await service.close()
        await context.registry.close()
