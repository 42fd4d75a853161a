from __future__ import annotations

import pytest
import torch

from common.vlm.bound import bound_model
from common.vlm.decode import decode_rows, start_groups
from common.vlm.decode_pool import DecodePool
from common.vlm.errors import DecodePoolFull, DecodeStateInvalid
from common.vlm.model import SplitModel
from common.vlm.tiny import tiny_config
from common.vlm.verification_cases import make_case


@pytest.fixture(scope="module")
def split():
    return SplitModel(bound_model(tiny_config(), dtype=torch.float32, train_vision=False).model)


def make_pool(split, **sizes):
    sizes = {"groups": 2, "samples": 3, "prefix_tokens": 40, "response_tokens": 8, **sizes}
    return DecodePool(split.config, dtype=torch.float32, device="cpu", **sizes)


def admit(split, pool, case):
    with torch.no_grad():
        prefix = split.prefix_kv(case.prompt, split.vision_embeddings(case.prompt))
    return pool.admit(
        prefix, last_token=case.prompt.last_token, start_position=case.prompt.start_position
    )


def test_one_lane_changes_no_other_ones_bits(split):
    case = make_case(split.config, (1,), images=[(1, 8, 8)])
    outcomes = []
    for token in (20, 30):
        pool = make_pool(split)
        slots = [admit(split, pool, case) for _ in range(2)]
        start_groups(split, pool, slots)
        for step in range(5):
            tokens = torch.tensor([40 + step, token + step, 60, 70, 80, 90])
            logits = decode_rows(split, pool, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], tokens)
        outcomes.append(logits)
    same = [torch.equal(a, b) for a, b in zip(*outcomes, strict=True)]
    assert same == [True, False, True, True, True, True]


def test_the_order_of_rows_is_only_an_order(split):
    case = make_case(split.config, (1,), images=[(1, 4, 4)])
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        pool = make_pool(split)
        start_groups(split, pool, [admit(split, pool, case)])
        logits = decode_rows(split, pool, [0, 0, 0], order, torch.tensor(order) + 20)
        results.append(logits[torch.argsort(torch.tensor(order))])
    torch.testing.assert_close(*results)


def test_a_reused_slot_has_no_trace_of_its_last_tenant(split):
    short = make_case(split.config, (1,), text_tokens=3)
    clean = make_pool(split, groups=1)
    expected = [start_groups(split, clean, [admit(split, clean, short)])]
    expected.append(decode_rows(split, clean, [0], [2], torch.tensor([9])))
    pool = make_pool(split, groups=1)
    slot = admit(split, pool, make_case(split.config, (1,), images=[(1, 8, 8)]))
    start_groups(split, pool, [slot])
    for _ in range(3):
        decode_rows(split, pool, [slot, slot], [0, 1], torch.tensor([20, 21]))
    written = pool.slot(slot).shared_tokens
    assert pool.shared[:, :, slot, :, :written].any(dim=-1).all()
    assert not pool.shared[:, :, slot, :, written:].any()
    assert not pool.private[..., 3:, :].any()
    pool.shared[:, :, slot, :, :written] = float("nan")
    pool.private[..., :3, :] = float("nan")
    pool.release(slot)
    assert admit(split, pool, short) == slot
    assert torch.equal(start_groups(split, pool, [slot]), expected[0])
    assert torch.equal(decode_rows(split, pool, [slot], [2], torch.tensor([9])), expected[1])


def test_a_pool_that_grows_keeps_what_its_slots_hold(split):
    short, long = (make_case(split.config, (1,), text_tokens=n) for n in (3, 30))
    pool, roomy = make_pool(split, prefix_tokens=10), make_pool(split, prefix_tokens=60)
    for each in (pool, roomy):
        start_groups(split, each, [admit(split, each, short)])
    with pytest.raises(DecodePoolFull, match="does not fit slots of 10"):
        admit(split, pool, long)
    before = pool.nbytes
    pool.grow(60)
    assert pool.prefix_tokens == 60
    assert pool.nbytes == roomy.nbytes > before
    pool.grow(20)
    assert pool.nbytes == roomy.nbytes
    for each in (pool, roomy):
        start_groups(split, each, [admit(split, each, long)])
    logits = [
        decode_rows(split, each, [0, 1], [0, 0], torch.tensor([9, 9])) for each in (pool, roomy)
    ]
    assert torch.equal(*logits)


def test_groups_come_and_go(split):
    cases = [make_case(split.config, (1,), seed=s, images=[(1, 4, 4 + 2 * s)]) for s in range(3)]
    pool = make_pool(split)
    start_groups(split, pool, [admit(split, pool, cases[0]), admit(split, pool, cases[1])])
    assert pool.free_slots == 0
    with pytest.raises(DecodePoolFull, match="all 2 slots"):
        admit(split, pool, cases[2])
    pool.release(0)
    late = admit(split, pool, cases[2])
    assert late == 0
    first = start_groups(split, pool, [late])
    mixed = decode_rows(split, pool, [1, 0], [0, 1], torch.tensor([30, 31]))
    alone = make_pool(split)
    torch.testing.assert_close(start_groups(split, alone, [admit(split, alone, cases[2])]), first)
    torch.testing.assert_close(decode_rows(split, alone, [0], [1], torch.tensor([31]))[0], mixed[1])


def test_limits_and_states_are_held(split):
    pool = make_pool(split, response_tokens=1)
    with pytest.raises(DecodePoolFull, match="does not fit"):
        admit(split, pool, make_case(split.config, (1,), images=[(1, 16, 16)]))
    with pytest.raises(DecodeStateInvalid, match="holds no group"):
        start_groups(split, pool, [0])
    slot = admit(split, pool, make_case(split.config, (1,)))
    token = torch.tensor([9])
    with pytest.raises(DecodeStateInvalid, match="cannot decode yet"):
        decode_rows(split, pool, [slot], [0], token)
    with pytest.raises(DecodeStateInvalid, match="named twice"):
        start_groups(split, pool, [slot, slot])
    start_groups(split, pool, [slot])
    with pytest.raises(DecodeStateInvalid, match="started already"):
        start_groups(split, pool, [slot])
    with pytest.raises(DecodeStateInvalid, match="named twice"):
        decode_rows(split, pool, [slot, slot], [1, 1], token.repeat(2))
    decode_rows(split, pool, [slot], [0], token)
    with pytest.raises(DecodePoolFull, match="already holds its 1 tokens"):
        decode_rows(split, pool, [slot], [0], token)
    pool.release(slot)
    with pytest.raises(DecodeStateInvalid, match="holds no group"):
        pool.release(slot)
