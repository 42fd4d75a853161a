"""Which tensors are on a GPU in which phase: naive colocation, and each schedule of Rollplex.

Naive colocation runs the same processes without lifetimes: all that a process ever needs stays,
so every phase has the sum of all largest amounts. Rollplex's lifetimes are those of its leases,
storages and graphs; a schedule is `common.step.schedule.TABLE`. Of `disaggregated` the table is a
training GPU's; `rollout_apart` is the other kind's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.step.schedule import OWN_WEIGHTS, Schedule
from rollplex.plan.sizes import RESERVE_BYTES
from rollplex.plan.table import Phase, Table, TensorClass

if TYPE_CHECKING:
    from rollplex.plan.sizes import Sizes

_DECODING = (Phase.PREFILL, Phase.WINDOW)
_BEFORE_UPDATE = tuple(phase for phase in Phase if phase is not Phase.UPDATE)
_AFTER_WINDOW = (Phase.REFERENCE, Phase.TRAINING)
ONE_BY_ONE = frozenset({Schedule.SERIAL, Schedule.DISAGGREGATED})
"""Schedules in which one policy prefix at a time runs forward and backward."""


def naive(sizes: Sizes, *, graphs: int, inputs: bool) -> Table:
    """Every process keeps everything it ever needs.

    Args:
        sizes: with plain modules' activations.
        graphs: prefixes whose graph is kept from window to training.
        inputs: with `graphs`, layer inputs only.
    """
    request, batch = sizes.request, sizes.request.batch
    table = Table()
    groups, row = request.groups, batch.row_tokens
    for name, size in (
        (TensorClass.POLICY, sizes.weights(request.train_tp)),
        (TensorClass.ROLLOUT, sizes.weights(request.rollout_tp)),
        (TensorClass.REFERENCE, sizes.weights(request.train_tp)),
        (TensorClass.ACCUMULATOR, sizes.accumulator),
        (TensorClass.MASTERS, sizes.masters),
        (TensorClass.MOMENTS, sizes.moments),
        (TensorClass.POOL_PREFIX, sizes.pool_prefix),
        (TensorClass.POOL_PRIVATE, sizes.pool_private),
        (TensorClass.POLICY_KV, groups * sizes.prefix_kv),
        (TensorClass.REFERENCE_KV, groups * sizes.prefix_kv),
        (TensorClass.KV_GRADIENTS, sizes.prefix_kv_gradients),
        (TensorClass.GRAPHS, graphs * sizes.graph(inputs=inputs)),
        (TensorClass.VISION_GRAPHS, groups * sizes.vision_graph(inputs=inputs)),
        (TensorClass.RESPONSES, sizes.response),
        (TensorClass.VISION, groups * (sizes.embeddings + sizes.pixels)),
        (TensorClass.LOGITS, sizes.logits(backward=True) + sizes.logits(backward=False)),
        (
            TensorClass.WORK,
            max(sizes.vision_work(), sizes.encoder_work(inputs=inputs))
            + sizes.forward_work(row, request.train_tp)
            + max(sizes.backward_work(row), sizes.update_work())
            + max(sizes.prefill_work(), sizes.decode_work()),
        ),
        (TensorClass.RESERVE, RESERVE_BYTES),
    ):
        table.put(name, size)
    return table


def scheduled(
    sizes: Sizes, schedule: Schedule, *, graphs: int, inputs: bool, restore_ahead: int
) -> Table:
    """A schedule of Rollplex, on a GPU that trains.

    Args:
        sizes: of the kernels that a GPU runs.
        graphs: prefixes whose graph is kept at a time.
        inputs: with `graphs`, layer inputs only.
        restore_ahead: groups still to be trained when the optimizer's state comes back to the
            device; 0: its parts come back in the update, a few at a time.
    """
    table = Table()
    _storages(table, sizes, schedule)
    _prompts(table, sizes, schedule)
    if schedule not in OWN_WEIGHTS:
        _pools(table, sizes)
    _leases(table, sizes, schedule)
    where = training_phases(schedule)
    table.put(TensorClass.KV_GRADIENTS, sizes.prefix_kv_gradients, where)
    table.put(TensorClass.RESPONSES, sizes.response, where)
    _logits(table, sizes, schedule)
    _work(table, sizes, schedule, inputs=inputs)
    _graphs(
        table,
        sizes,
        schedule,
        graphs=graphs,
        inputs=inputs,
        restore_ahead=restore_ahead,
    )
    return table


def rollout_apart(sizes: Sizes) -> Table:
    """A GPU of a rollout that shares none with training.

    Args: sizes: as for `scheduled`.
    """
    table = Table()
    table.put(TensorClass.ROLLOUT, sizes.weights(sizes.request.rollout_tp))
    _pools(table, sizes)
    prompts = sizes.request.decoding_groups * (sizes.embeddings + sizes.pixels)
    table.put(TensorClass.VISION, prompts, (Phase.VISION, *_DECODING))
    table.put(TensorClass.WORK, sizes.vision_work(), (Phase.VISION,))
    prefill = max(sizes.prefill_work(), sizes.vision_work(), sizes.decode_work())
    table.put(TensorClass.WORK, prefill, (Phase.PREFILL,))
    table.put(TensorClass.WORK, sizes.decode_work(), (Phase.WINDOW,))
    table.put(TensorClass.RESERVE, RESERVE_BYTES)
    return table


def _pools(table: Table, sizes: Sizes) -> None:
    """K/V of the rollout."""
    table.put(TensorClass.POOL_PREFIX, sizes.pool_prefix, _DECODING)
    table.put(TensorClass.POOL_PRIVATE, sizes.pool_private, _DECODING)


def training_phases(schedule: Schedule) -> tuple[Phase, ...]:
    """Where response and prefix backwards may run."""
    if schedule is Schedule.FUSED:
        return (Phase.WINDOW, *_AFTER_WINDOW)
    return (Phase.TRAINING,)


def graph_phases(schedule: Schedule) -> tuple[Phase, ...]:
    """Where graphs of prefixes live."""
    if schedule in ONE_BY_ONE:
        return (Phase.TRAINING,)
    first = (Phase.PREFILL,) if schedule is Schedule.FUSED else ()
    return (*first, Phase.WINDOW, *_AFTER_WINDOW)


def reference_phases(schedule: Schedule) -> tuple[Phase, ...]:
    """Where reference weights are on the device, or on their way, if they leave it."""
    if schedule is Schedule.SERIAL:
        return (Phase.REFERENCE,)
    last = (Phase.TRAINING,) if schedule is Schedule.FUSED else ()
    return (Phase.VISION, *_DECODING, Phase.REFERENCE, *last)


def _storages(table: Table, sizes: Sizes, schedule: Schedule) -> None:
    request = sizes.request
    if schedule in OWN_WEIGHTS:
        table.put(TensorClass.POLICY, sizes.weights(request.train_tp))
    elif request.layouts_nest:
        widest = min(request.train_tp, request.rollout_tp)
        table.put(TensorClass.POLICY, sizes.weights(widest))
    else:
        table.put(TensorClass.POLICY, sizes.weights(request.train_tp))
        table.put(TensorClass.ROLLOUT, sizes.weights(request.rollout_tp))
    read = reference_phases(schedule) if request.spill_reference else tuple(Phase)
    table.put(TensorClass.REFERENCE, sizes.weights(request.train_tp), read)
    table.put(TensorClass.ACCUMULATOR, sizes.accumulator)
    if request.spill_optimizer:
        # beside the vision tower the last parts are on their way to the host
        _optimizer(table, sizes, sizes.in_flight_elements, (Phase.VISION, Phase.UPDATE))
    else:
        _optimizer(table, sizes, sizes.optimizer_elements, tuple(Phase))
    table.put(TensorClass.RESERVE, RESERVE_BYTES)


def _optimizer(table: Table, sizes: Sizes, elements: int, phases: tuple[Phase, ...]) -> None:
    """Masters and moments of so many parameters."""
    table.put(TensorClass.MASTERS, sizes.masters_of(elements), phases)
    table.put(TensorClass.MOMENTS, sizes.moments_of(elements), phases)


def _prompts(table: Table, sizes: Sizes, schedule: Schedule) -> None:
    """Pixels, embeddings, the tower's graphs. A frozen tower works ahead inside a window."""
    groups, frozen = sizes.request.groups, not sizes.request.train_vision
    embeddings = groups * sizes.embeddings
    pixels = groups * sizes.pixels
    # the reference needs the pixels again where it has a tower of its own
    table.put(TensorClass.VISION, embeddings + (0 if frozen else pixels), _BEFORE_UPDATE)
    table.put(TensorClass.VISION, embeddings + pixels, (Phase.VISION,))
    if sizes.request.ahead and frozen and schedule not in ONE_BY_ONE:
        table.put(TensorClass.VISION, 2 * embeddings + pixels, (Phase.WINDOW, *_AFTER_WINDOW))
        table.put(TensorClass.VISION, embeddings, (Phase.UPDATE,))
    # on a GPU a tower that trains keeps its blocks' inputs only
    graphs = groups * sizes.vision_graph(inputs=True)
    table.put(TensorClass.VISION_GRAPHS, graphs, _BEFORE_UPDATE)


def _leases(table: Table, sizes: Sizes, schedule: Schedule) -> None:
    whole = sizes.request.groups * sizes.prefix_kv
    if schedule in ONE_BY_ONE:
        table.put(TensorClass.REFERENCE_KV, whole, _scoring_phases(schedule))
        table.put(TensorClass.POLICY_KV, sizes.prefix_kv, (Phase.TRAINING,))
        return
    table.put(TensorClass.POLICY_KV, whole, graph_phases(schedule))
    scored = _AFTER_WINDOW if schedule is Schedule.FUSED else (Phase.REFERENCE,)
    if sizes.request.ahead:
        table.put(TensorClass.REFERENCE_KV, whole)
        table.put(TensorClass.REFERENCE_KV, 2 * whole, (Phase.WINDOW, *scored))
    else:
        table.put(TensorClass.REFERENCE_KV, whole, (Phase.WINDOW, *scored))


def _scoring_phases(schedule: Schedule) -> tuple[Phase, ...]:
    """Where finished groups are scored, beside their training in `fused`."""
    apart = schedule is Schedule.DISAGGREGATED
    return (Phase.WINDOW, Phase.REFERENCE) if apart else (Phase.REFERENCE,)


def _logits(table: Table, sizes: Sizes, schedule: Schedule) -> None:
    score, train = sizes.logits(backward=False), sizes.logits(backward=True)
    table.put(TensorClass.LOGITS, score, _scoring_phases(schedule))
    both = score if schedule is Schedule.FUSED else 0
    table.put(TensorClass.LOGITS, train + both, training_phases(schedule))


def _work(table: Table, sizes: Sizes, schedule: Schedule, *, inputs: bool) -> None:
    """Workspaces of the services that work in a phase: each keeps its own, so they add up."""
    request = sizes.request
    prefix, row = request.batch.prefix_tokens, request.batch.row_tokens
    encode = sizes.forward_work(prefix, request.train_tp)
    score = sizes.forward_work(row, request.train_tp)
    train = sizes.encoder_work(inputs=inputs) + sizes.backward_work(row)
    decode = sizes.decode_work()
    own_prefill = sizes.prefill_work()
    fused = schedule is Schedule.FUSED
    window = {
        Schedule.SERIAL: decode,
        Schedule.DISAGGREGATED: max(encode, sizes.vision_work()) + score,
        Schedule.ROLLPLEX: encode + decode,
        Schedule.FUSED: score + train + decode,
    }
    prefill = encode if fused else max(own_prefill, decode)
    for phase, size in (
        (Phase.VISION, sizes.vision_work()),
        (Phase.PREFILL, 0 if schedule in OWN_WEIGHTS else prefill),
        (Phase.WINDOW, window[schedule]),
        (Phase.REFERENCE, score + (encode if schedule in ONE_BY_ONE else 0)),
        (Phase.TRAINING, train),
        (Phase.UPDATE, sizes.update_work()),
    ):
        table.put(TensorClass.WORK, size, (phase,))
    if fused:
        table.put(TensorClass.WORK, score + train, _AFTER_WINDOW)


def _graphs(
    table: Table,
    sizes: Sizes,
    schedule: Schedule,
    *,
    graphs: int,
    inputs: bool,
    restore_ahead: int,
) -> None:
    """Graphs, and the optimizer's state that returns when few groups are left to train."""
    one = sizes.graph(inputs=inputs)
    # in order of completion a group without a graph may come while all kept ones wait
    again = 1 if schedule is Schedule.FUSED and graphs < sizes.request.groups else 0
    table.put(TensorClass.GRAPHS, graphs * one, graph_phases(schedule))
    table.put(TensorClass.GRAPHS, (graphs + again) * one, training_phases(schedule))
    late = min(graphs + again, restore_ahead)
    if not (sizes.request.spill_optimizer and restore_ahead):
        return
    _optimizer(table, sizes, sizes.optimizer_elements, (Phase.UPDATE,))
    if late * one + sizes.masters + sizes.moments >= (graphs + again) * one:
        table.put(TensorClass.GRAPHS, late * one, (Phase.TRAINING,))
        _optimizer(table, sizes, sizes.optimizer_elements, (Phase.TRAINING,))
