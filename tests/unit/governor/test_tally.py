from __future__ import annotations

from common.governor.rates import Rates
from common.governor.tally import StepTally
from common.step.tasks import Task

RATES = Rates(decode=0.75, background=0.5)


def test_a_step_is_summed_up_by_kind():
    tally = StepTally()
    assert tally.lines() == {}
    for share, seconds, rate in ((64, 1.0, 0.8), (64, 1.0, None), (96, 1.0, 0.2)):
        tally.add(
            Task.RESPONSE_TRAIN,
            share,
            seconds=seconds,
            decode_rate=rate,
            sampled=rate is not None,
            rates=RATES,
        )
    lines = tally.lines()
    assert list(lines) == ["response_train"]
    line = lines["response_train"]
    assert line.startswith("2 on 64 SMs (gain 1.25), 1 on 96 SMs (gain 1.25); 3.00 s, 2 samples")
    # beside 2 measured seconds the decode did what takes 1 second alone
    assert line.endswith("decode slow-down 2.00")


def test_an_unknown_slow_down_is_said_to_be():
    tally = StepTally()
    tally.add(Task.POLICY_PREFIX, 64, seconds=1.0, decode_rate=None, sampled=False, rates=RATES)
    assert tally.lines()["policy_prefix"].endswith("slow-down unknown")
