"""Which prefix may run now, so that K/V never fill the room that the step needs to end.

Some room, the reserve, is kept for what the step cannot go on without: K and V of the policy for
one group, or for as many as decode from them at a time, of the reference and gradients for one
group, and everything small. Where groups train only when all are scored, the reference's and the
gradients are not there at the same time; then, reference weights that are spilled are away, and
their room counts for the gradients. A prefix that runs ahead is admitted while it leaves the
reserve free. One that is due is admitted in any case: it takes its part of the reserve.
`due_policy` and `due_reference` say that this part is free, and that what the group needs beyond it
comes. So what is due comes to its end, its leases are released, and the next one is due: whatever
the room is, as long as the reserve fits into it.

A function of the step's events and of what was started, and of nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.gpu.driver import device_uuid
from common.step.schedule import (
    ORDER,
    OWN_WEIGHTS,
    PREFILL_FROM_LEASE,
    TABLE,
    AccumulationOrder,
    Condition,
)
from common.step.tasks import Task
from common.tensors.device import HOST
from common.tensors.errors import ArenaFull
from common.vlm.loading import text_config, vision_config
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import local_kv_heads
from common.vlm.prefix import packed_shape

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import Qwen2_5_VLConfig

    from common.step.machine import Subject
    from common.step.view import GroupView, StepView
    from common.worker.context import RunContext
    from common.worker.weights import ModelShape


GPU_PAGE_BYTES = 2 << 20
HOST_PAGE_BYTES = 4 << 10
SMALL_BYTES_PER_TOKEN = 64
"""Token ids, positions, kinds, log-probabilities and scores: 8 bytes each."""
ROLES = (Task.POLICY_PREFIX, Task.REFERENCE_PREFIX)
SMALL_BYTES = 64 << 10
"""A group's row, and what is lost to whole pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSizes:
    """Bytes of the leases of one group in the arena that the K/V are in."""

    kv_bytes_per_token: int
    gradient_bytes_per_token: int
    vision_bytes_per_token: int
    small_bytes_per_token: int = 0
    small_bytes: int = 0
    """Of a group's other leases, where they are in the same arena."""
    page_bytes: int = 1
    longest_tokens: int
    """Of a prompt that is not prepared yet."""

    def kv(self, state: GroupView) -> int:
        """Of one role."""
        return self._paged(self.kv_bytes_per_token * self._prefix_tokens(state))

    def gradient(self, state: GroupView) -> int:
        """Of the policy's K and V."""
        return self._paged(self.gradient_bytes_per_token * self._prefix_tokens(state))

    def small(self, state: GroupView) -> int:
        """Of everything else, as if all of it were there at once."""
        prompt = state.prepared
        vision = self.longest_tokens if prompt is None else prompt.vision_tokens
        tokens = self._prefix_tokens(state)
        return (
            self._paged(self.vision_bytes_per_token * vision)
            + self.small_bytes_per_token * tokens
            + self.small_bytes
        )

    def _prefix_tokens(self, state: GroupView) -> int:
        prompt = state.prepared
        return self.longest_tokens if prompt is None else prompt.prompt_tokens - 1

    def _paged(self, size_bytes: int) -> int:
        return -(-size_bytes // self.page_bytes) * self.page_bytes


def kv_admission(context: RunContext, shape: ModelShape, *, spilled_bytes: int) -> Admission:
    """Of one run, by the sizes that its model's tensors have.

    Args: spilled_bytes: of reference weights that leave the device behind the last score.
    """
    recipe, config, ranks = context.recipe, shape.config, context.arena_ranks
    # Ranks of one arena: each has its key/value heads, and a copy of whatever is not split.
    kv_heads = ranks * local_kv_heads(config_shape(config), context.degree)
    elements = math.prod(packed_shape(config, 1, kv_heads=kv_heads))
    on_gpu = context.device.type == "cuda"
    responses = recipe.rollout.samples_per_group * recipe.rollout.max_new_tokens
    vision_bytes = ranks * text_config(config).hidden_size * context.dtype.itemsize
    own_vision = not on_gpu and recipe.training.schedule in OWN_WEIGHTS
    if ranks > 1 or own_vision:
        vision_bytes += _pixel_bytes_per_token(config)
    small_bytes = SMALL_BYTES + ranks * SMALL_BYTES_PER_TOKEN * responses
    sizes = LeaseSizes(
        kv_bytes_per_token=elements * context.dtype.itemsize,
        gradient_bytes_per_token=elements * context.accumulator_dtype.itemsize,
        vision_bytes_per_token=vision_bytes,
        small_bytes_per_token=0 if on_gpu else SMALL_BYTES_PER_TOKEN,
        small_bytes=0 if on_gpu else small_bytes,
        page_bytes=GPU_PAGE_BYTES if on_gpu else HOST_PAGE_BYTES,
        longest_tokens=recipe.data.max_prompt_tokens,
    )
    device = device_uuid(context.device.index) if on_gpu else HOST
    places = recipe.rollout.max_slots // recipe.rollout.samples_per_group
    return Admission(sizes, device=device, decoding_groups=places, spilled_bytes=spilled_bytes)


def _pixel_bytes_per_token(config: Qwen2_5_VLConfig) -> int:
    """Of a prompt's pixels, in float32, for one token that they come to."""
    vision = vision_config(config)
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return int(patch * vision.spatial_merge_size**2) * torch.float32.itemsize


class Admission:
    """For `Lane.admits`."""

    def __init__(
        self, sizes: LeaseSizes, *, device: str, decoding_groups: int, spilled_bytes: int = 0
    ) -> None:
        """Args:
        device: whose room it is, as in `StepBegan.lease_room_bytes`.
        decoding_groups: most groups that decode at the same time in a replica of the rollout.
        spilled_bytes: of the reference weights, which that room leaves out; 0: they stay.
        """
        self._spilled_bytes = spilled_bytes
        self._sizes = sizes
        self._decoding_groups = decoding_groups
        self._device = device

    def __call__(self, view: StepView, started: Collection[Subject], wanted: Subject) -> bool:
        """Whether a task of a group may start, as far as its lease is concerned.

        Args: started: what this process has started in this epoch.
        """
        task, group = wanted
        room_bytes = view.lease_room_bytes.get(self._device)
        if room_bytes is None or group is None or task not in ROLES:
            return True
        state, leases = view.groups[group], Leases(view, started)
        if self._due(leases, task, state):
            return True
        more_bytes = self._sizes.kv(state) + self._reserve(view)
        return self._taken(leases) + more_bytes <= room_bytes

    def require_room(self, view: StepView) -> None:
        """Raises ArenaFull where the step could never end: no release would help."""
        room_bytes = view.lease_room_bytes.get(self._device)
        known = [state for state in view.living if state.prepared is not None]
        needed_bytes = self._chain(view, known)
        if room_bytes is not None and needed_bytes > room_bytes:
            raise ArenaFull(
                f"prefix K/V and their gradients need {needed_bytes} bytes at the same time; of "
                f"{self._device}, {room_bytes} bytes are not taken for the whole run: waiting "
                "cannot help; raise hbm_budget_gib (a GPU) or arena_gib (the host), or lower "
                "data.max_prompt_tokens, or, with fused, rollout.max_slots",
                size_bytes=needed_bytes,
            )

    def _taken(self, leases: Leases) -> int:
        """K, V and gradients of all groups."""
        sizes, taken = self._sizes, 0
        for state in leases.view.living:
            taken += sizes.kv(state) * (leases.policy(state) + leases.reference(state))
            if state.trained is not None and not state.done:
                taken += sizes.gradient(state)
        return taken

    def _reserve(self, view: StepView) -> int:
        left = [state for state in view.living if not state.done]
        return self._chain(view, left) + sum(self._sizes.small(state) for state in left)

    def _chain(self, view: StepView, states: list[GroupView]) -> int:
        """K, V and gradients that have to be there at the same time, for any of some groups."""
        sizes, count = self._sizes, self._policies_due(view)
        policies = sorted((sizes.kv(state) for state in states), reverse=True)[:count]
        if not policies:
            return 0
        policy = sum(policies)
        reference = policies[0] if view.needs_reference else 0
        trained = policy + max(sizes.gradient(state) for state in states)
        table = TABLE[view.plan.schedule]
        if Condition.REFERENCE_OVER not in table[Task.RESPONSE_TRAIN]:
            return trained + reference
        if Condition.REFERENCE_OVER not in table[Task.POLICY_PREFIX]:
            reference += policy
        return max(reference, trained - self._spilled_bytes)

    def _policies_due(self, view: StepView) -> int:
        """How many policy prefixes may be due at the same time, for all replicas of the rollout."""
        if view.plan.schedule not in PREFILL_FROM_LEASE:
            return 1
        return self._decoding_groups * len(view.rollouts)

    def _due(self, leases: Leases, task: Task, state: GroupView) -> bool:
        if task is Task.REFERENCE_PREFIX:
            return due_reference(leases, state)
        return due_policy(leases, state, at_once=self._decoding_groups)


class Leases:
    """Which K and V there are, or will be when what was started has ended."""

    def __init__(self, view: StepView, started: Collection[Subject]) -> None:
        self.view = view
        self._started = started

    def policy(self, state: GroupView) -> bool:
        """Whether there are the policy's K and V of a group."""
        return (Task.POLICY_PREFIX, state.group) in self._started and state.trained is None

    def reference(self, state: GroupView) -> bool:
        """Whether there are the reference's."""
        return (Task.REFERENCE_PREFIX, state.group) in self._started and state.scored is None


def due_policy(leases: Leases, state: GroupView, *, at_once: int = 1) -> bool:
    """Whether the step cannot go on without the policy's prefix of a group.

    Where groups train in group order, it is the first one that is not done. Where they decode from
    their prefix, a replica of the rollout admits its groups in group order, and decodes no further
    while it has a place for one that has not come: so it is the first of them without a prefix,
    while fewer than `at_once` before it, which is how many places there are, have still to be
    trained. Each replica has room of its own for that; and of all groups that wait to be trained,
    the first to complete waits for no replica that waits itself.
    """
    view = leases.view
    if ORDER[view.plan.schedule] is AccumulationOrder.GROUP:
        return view.holds(Condition.PREVIOUS_DONE, state)
    rollout = state.planned.rollout_replica
    its = [other for other in view.living if other.planned.rollout_replica == rollout]
    before = [other for other in its if other.group < state.group]
    untrained = [other for other in before if other.trained is None]
    return all(map(leases.policy, untrained)) and len(untrained) < at_once


def due_reference(leases: Leases, state: GroupView) -> bool:
    """Whether scoring cannot go on without the reference's prefix of a group.

    The group is generated, and no other one that is has a prefix to be scored from. What is not
    generated may need others trained before it is, so it must not be in their way.
    """
    generated = [other for other in leases.view.living if other.generated is not None]
    return state in generated and not any(map(leases.reference, generated))
