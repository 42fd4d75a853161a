"""The prefix backward: its job on a model of one weight, and its epoch on a real broker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from common.events import bodies
from common.ids import GroupId, Participant, Service
from common.step.tasks import Task
from common.step.view import StepView
from common.tensors.spec import DType, Placement, TensorSpec
from common.tensors.storage import StorageSpec
from common.tensors.views import tensor_view
from common.vlm.prefix import PrefixKV
from common.worker.scope import StepScope
from common.worker.weights import KV, POLICY_GRADIENTS
from services.prefix_encoder import backward
from services.prefix_encoder.backward import BackwardJob, NoMemoryForPrefix, PrefixBackward
from services.prefix_encoder.graphs import PrefixGraphs
from services.prefix_encoder.step import GroupWork
from tests.unit.step.test_schedule import event, plan
from tests.unit.worker.conftest import CPU, ENCODER, RUN, broker, mortal_broker, started

__all__ = ["broker", "mortal_broker", "started"]

L, K, P, D = 2, 1, 3, 4


class Model:
    """One weight; every forward is one multiplication a layer."""

    def __init__(self, refusals: int = 0) -> None:
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, D, dtype=torch.float64))
        self.forwards = 0
        self.refusals = refusals

    def forward(self) -> PrefixKV:
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("no room for 3 bytes")
        self.forwards += 1
        states = torch.arange(P * D, dtype=torch.float64).view(K, P, D)
        return PrefixKV(
            keys=[states * self.weight * (layer + 1) for layer in range(L)],
            values=[states * self.weight.square() for _ in range(L)],
        )


def gradient() -> torch.Tensor:
    return torch.linspace(-1, 1, L * 2 * K * P * D, dtype=torch.float64).view(L, 2, K, P, D)


def job(model: Model, kept: PrefixKV | None = None, passes: int = 1) -> BackwardJob:
    return BackwardJob(kept, gradient(), passes=passes, forward=model.forward, switch_streams=False)


def with_graph_kept() -> torch.Tensor:
    model = Model()
    done = job(model, model.forward())
    assert done.run()
    assert done.recompute_s() == 0.0
    assert model.forwards == 1
    return model.weight.grad


def test_a_prefix_that_runs_again_gives_the_same_bits():
    model = Model()
    done = job(model)
    assert done.run()
    assert done.recompute_s() > 0
    assert torch.equal(model.weight.grad, with_graph_kept())


def test_a_refused_forward_adds_nothing_and_the_job_goes_on_from_there():
    model = Model(refusals=1)
    done = job(model)
    assert not done.run()
    assert done.cause == "no room for 3 bytes"
    assert model.weight.grad is None
    assert done.run()
    assert torch.equal(model.weight.grad, with_graph_kept())


@pytest.mark.parametrize("refusals", [0, 1])
def test_every_pass_is_added_once(refusals):
    model = Model()
    kept = model.forward()
    model.refusals = refusals
    done = job(model, kept, passes=3)
    assert done.run() is (refusals == 0)
    assert done.run()
    assert model.forwards == 3
    assert torch.allclose(model.weight.grad, 3 * with_graph_kept())


LEARNER = Participant(service=Service.LEARNER)


class Epoch:
    """Group 0 is trained, and its prefix has no graph; group 1 has kept its own."""

    def __init__(self, scope, model, gradients, published) -> None:
        self.scope = scope
        self.model = model
        self.published = published
        prompt = SimpleNamespace(prefix_tokens=P)
        self.works = {
            GroupId(group): GroupWork(prompt, vision=torch.zeros(0)) for group in range(2)
        }
        self.works[GroupId(1)].policy = Model().forward()
        run = SimpleNamespace(
            context=SimpleNamespace(
                recipe=SimpleNamespace(prefix_passes=1),
                governed=False,
                device=CPU.torch,
                degree=1,
            ),
            gradients=gradients,
            graphs=PrefixGraphs(
                "all", reserve_bytes=0, memory=lambda: None, give_back=lambda: None
            ),
        )
        forwards = SimpleNamespace(policy_prefix=lambda *_, **__: model.forward())
        self._backward = PrefixBackward(run, scope, forwards, self.works)

    async def run(self) -> None:
        await self._backward.run(GroupId(0), "cause")

    @property
    def bodies(self) -> list[bodies.Body]:
        return [told.body for told in self.published]


@pytest.fixture
async def epoch(broker, monkeypatch):
    monkeypatch.setattr(backward, "GIVEN_BACK_WITHIN_S", 0.0)
    learner, encoder = await broker.join(LEARNER), await broker.join(ENCODER)
    await broker.begin(1)
    flat = TensorSpec(name="flat", dtype=DType.FLOAT64, shape=(D,))
    spec = StorageSpec(tensors=(flat,), readers=(), writers=(LEARNER, ENCODER))
    created = await learner.open_storage(RUN, POLICY_GRADIENTS, create=spec)
    gradients = await encoder.open_storage(RUN, POLICY_GRADIENTS)
    lease = await learner.allocate(
        run_id=RUN,
        epoch=1,
        group=GroupId(0),
        name="policy.prefix_kv_gradients",
        tensors=[TensorSpec(name=KV, dtype=DType.FLOAT64, shape=(L, 2, K, P, D))],
        consumers=[ENCODER],
        next_use=Task.PREFIX_BACKWARD,
        placement=Placement.DEVICE,
    )
    tensor_view(lease, KV).copy_(gradient())
    lease.seal()
    view = StepView(plan(groups=2), needs_reference=False)
    assert view.apply(event(bodies.ResponsesTrained(lease=lease.id), 0))
    published = []

    async def publish(told) -> None:
        published.append(told)

    with ThreadPoolExecutor(1) as compute:
        scope = StepScope(
            view,
            participant=ENCODER,
            broker=encoder,
            compute=compute,
            device=CPU,
            publish=publish,
            spawn=lambda *_: None,
        )
        yield Epoch(scope, Model(), gradients, published)
        scope.close()
    for storage in (gradients, created):
        storage.close()


async def test_a_prefix_without_its_graph_runs_again_and_says_so(epoch):
    await epoch.run()
    (done,) = epoch.bodies
    assert done.recomputed
    assert done.recompute_s > 0
    assert torch.equal(epoch.model.weight.grad, with_graph_kept())
    assert epoch.works[GroupId(1)].policy is not None


async def test_where_there_is_no_memory_others_are_asked_for_some(epoch):
    epoch.model.refusals = 1
    await epoch.run()
    wanted, done = epoch.bodies
    assert wanted == bodies.MemoryWanted(device="cpu", size_bytes=0)
    assert done.recomputed
    assert torch.equal(epoch.model.weight.grad, with_graph_kept())
    assert epoch.works[GroupId(1)].policy is None


async def test_two_refusals_are_an_error_that_says_what_helps(epoch):
    epoch.model.refusals = 2
    with pytest.raises(NoMemoryForPrefix, match="no room for 3 bytes; lower"):
        await epoch.run()
    assert epoch.model.weight.grad is None
