"""The peers of a controller, played by the test over real sockets."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from dataclasses import dataclass, field

from common.errors import NotFound, Stale
from common.events import Event, WorkSpan, bodies, event_to_proto
from common.ids import (
    WORKERS,
    Epoch,
    Incarnation,
    LeaseId,
    Participant,
    RunId,
    Service,
    StepIndex,
    WeightsVersion,
)
from common.registry.client import Registry, ServiceEntry
from common.step.plan import StepMode, StepPlan
from common.step.tasks import Task
from common.transport import BoundServicer, GrpcServer, serve
from protos.rollplex.v1 import broker_pb2, broker_pb2_grpc, worker_pb2, worker_pb2_grpc

BROKER = Participant(service=Service.BROKER)


class ScriptedBroker(broker_pb2_grpc.BrokerServicer):
    """Keeps one order of events and hands it to whoever watches."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.hub = uuid.uuid4().hex
        self.open: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.aborts: list[tuple[int, str]] = []
        self.closed: list[str] = []
        self.order: list[Event] = []
        self._more = asyncio.Event()

    def publish(self, event: Event) -> None:
        self.order.append(event)
        self._more.set()
        self._more = asyncio.Event()

    async def OpenRun(self, request, context):
        self.open[request.run_id] = request.epoch
        return broker_pb2.OpenRunReply(hub_incarnation=self.hub, head_seq=len(self.order))

    async def BeginStep(self, request, context):
        plan = StepPlan.from_proto(request.plan)
        if plan.epoch <= self.open[plan.run_id]:
            raise Stale(f"epoch {plan.epoch} is over")
        self.open[plan.run_id] = plan.epoch
        self.plans.append(plan)
        self.publish(self.node.event(bodies.StepBegan(plan=plan), plan))
        self.node.tasks.append(asyncio.create_task(self.node.play(plan)))
        return broker_pb2.BeginStepReply(seq=len(self.order), hub_incarnation=self.hub)

    async def AbortStep(self, request, context):
        if request.run_id not in self.open:
            raise NotFound(f"run {request.run_id} is not open")
        self.aborts.append((request.epoch, request.reason))
        return broker_pb2.AbortStepReply()

    async def CloseRun(self, request, context):
        self.closed.append(request.run_id)
        return broker_pb2.CloseRunReply()

    async def GetLedger(self, request, context):
        return broker_pb2.Ledger(capacity_bytes=self.node.arena_bytes)

    async def WatchEvents(self, request, context):
        if request.hub_incarnation != self.hub:
            raise Stale("another hub")
        at = request.after_seq
        while True:
            while at < len(self.order):
                event = event_to_proto(self.order[at])
                at += 1
                event.seq = at
                yield broker_pb2.WatchedEvent(hub_incarnation=self.hub, event=event)
            await self._more.wait()


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Answers; the learner says which version the node holds."""

    def __init__(self, node: Node, participant: Participant) -> None:
        self.node = node
        self.participant = participant
        self.incarnation = Incarnation(uuid.uuid4().hex)
        self.configured: list[int] = []
        self.released: list[str] = []
        self.refuse = ""
        self.save = None
        """Awaited by SaveCheckpoint."""

    async def Configure(self, request, context):
        if self.refuse:
            raise RuntimeError(self.refuse)
        self.configured.append(request.epoch)
        is_learner = self.participant.service is Service.LEARNER
        return worker_pb2.ConfigureReply(
            incarnation=self.incarnation,
            weights_version=self.node.versions[request.run_id] if is_learner else None,
        )

    async def GetStatus(self, request, context):
        return worker_pb2.WorkerStatus(participant=str(self.participant), phase="decode", group=1)

    async def Release(self, request, context):
        self.released.append(request.run_id)
        return worker_pb2.ReleaseReply()

    async def SaveCheckpoint(self, request, context):
        if self.save is not None:
            await self.save()
        version = self.node.versions[request.run_id]
        return worker_pb2.SaveCheckpointReply(path=f"/ckpt/{version}", weights_version=version)


@dataclass
class Node:
    """All peers of one node. `versions` is the learner's durable state: it outlives everything."""

    url: str
    deployment: str
    versions: Counter[str] = field(default_factory=Counter)
    arena_bytes: int = 2**40
    hold: set[int] = field(default_factory=set)
    """Steps whose update does not come, until `release_step`."""
    drop_groups: set[int] = field(default_factory=set)
    fail_task: bodies.TaskFailed | None = None
    ranks: int = 1
    tasks: list[asyncio.Task] = field(default_factory=list)
    servers: dict[Participant, GrpcServer] = field(default_factory=dict)
    entries: dict[Participant, ServiceEntry] = field(default_factory=dict)
    workers: dict[Participant, ScriptedWorker] = field(default_factory=dict)

    async def start(self) -> None:
        self.registry = Registry(self.url, self.deployment, ttl_s=2.0)
        self.broker = ScriptedBroker(self)
        await self._serve(BROKER, self.broker, broker_pb2, broker_pb2_grpc, "Broker")
        for participant in self.participants:
            self.workers[participant] = ScriptedWorker(self, participant)
            await self._serve(
                participant, self.workers[participant], worker_pb2, worker_pb2_grpc, "Worker"
            )
        self.tasks.append(asyncio.create_task(self._heartbeats()))

    @property
    def participants(self) -> list[Participant]:
        return [Participant(service=s, rank=r) for s in WORKERS for r in range(self.ranks)]

    async def _serve(self, participant, servicer, module, grpc_module, name) -> None:
        bound = BoundServicer(
            name=module.DESCRIPTOR.services_by_name[name].full_name,
            servicer=servicer,
            add=getattr(grpc_module, f"add_{name}Servicer_to_server"),
        )
        server = await serve([bound], "127.0.0.1:0", participant)
        await server.health.set_serving(True)
        self.servers[participant] = server
        self.entries[participant] = await self.registry.register(
            ServiceEntry(
                participant=participant,
                node="here",
                pid=1,
                grpc_address=server.address,
                http_address="",
                incarnation=getattr(servicer, "incarnation", Incarnation("broker")),
                serving=True,
            )
        )

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for entry in list(self.entries.values()):
                await self.registry.heartbeat(entry)

    async def restart_broker(self) -> None:
        """Another incarnation at another address: the event stream breaks."""
        await self.servers[BROKER].stop(0)
        self.broker = ScriptedBroker(self)
        await self._serve(BROKER, self.broker, broker_pb2, broker_pb2_grpc, "Broker")

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for server in self.servers.values():
            await server.stop(0)
        # gRPC's own sockets live as long as any of its objects.
        self.servers.clear()
        await self.registry.close()

    def event(self, body, plan: StepPlan | None, *, sender=BROKER, group=None, work=None) -> Event:
        return Event(
            sender=sender,
            run_id=plan.run_id if plan else RunId(""),
            step=plan.step if plan else StepIndex(0),
            epoch=plan.epoch if plan else Epoch(0),
            body=body,
            group=group,
            work=work,
        )

    async def play(self, plan: StepPlan) -> None:
        """Everything that the workers would say in this step."""
        publish = self.broker.publish
        rollout = Participant(service=Service.ROLLOUT)
        for planned in plan.groups:
            group = planned.group
            if group in self.drop_groups and plan.mode is StepMode.TRAIN:
                dropped = bodies.GroupDropped(code="bad", reason="no", sample=planned.sample)
                publish(self.event(dropped, plan, group=group))
                continue
            generated = bodies.GroupGenerated(
                lease=LeaseId(1),
                response_tokens=8,
                decode_iteration=1,
                weights_version=plan.weights_version,
            )
            publish(self.event(generated, plan, sender=rollout, group=group))
            rewards = (1.0,) * plan.samples_per_group
            rewarded = bodies.GroupRewarded(rewards=rewards, failures=0)
            publish(self.event(rewarded, plan, sender=rollout, group=group))
        if self.fail_task is not None:
            publish(self.event(self.fail_task, plan, sender=rollout))
            return
        if plan.mode is StepMode.TRAIN and plan.step not in self.hold:
            self.update(plan)

    def update(self, plan: StepPlan) -> None:
        learner = Participant(service=Service.LEARNER)
        self.versions[plan.run_id] = plan.step + 1
        published = bodies.WeightsPublished(
            weights_version=WeightsVersion(plan.step + 1), metrics={"loss": 0.5}
        )
        work = WorkSpan(task=Task.UPDATE, start_ns=plan.step * 10, end_ns=plan.step * 10 + 5)
        self.broker.publish(self.event(published, plan, sender=learner, work=work))

    def release_step(self) -> None:
        """Let the held step's update happen."""
        plan = self.broker.plans[-1]
        self.hold.discard(plan.step)
        self.update(plan)

    def kill(self, service: Service) -> None:
        """What the broker would say of a death."""
        worker = self.workers[Participant(service=service)]
        died = bodies.ParticipantDied(
            participant=worker.participant,
            pid=1,
            incarnation=worker.incarnation,
            reason="connection closed",
        )
        worker.incarnation = Incarnation(uuid.uuid4().hex)
        self.broker.publish(self.event(died, self.broker.plans[-1]))
