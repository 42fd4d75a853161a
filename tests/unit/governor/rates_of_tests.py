"""Rates that the tests of this folder calculate with; no measurement."""

from __future__ import annotations

from common.governor.table import CoRun, CoRunTable

_BACKGROUND = {46: 0.45, 66: 0.59, 92: 0.79}
_GAINS = {
    8: {46: 1.26, 66: 1.38, 92: 1.34},
    64: {46: 1.15, 66: 1.23, 92: 1.20},
    256: {46: 1.00, 66: 1.07, 92: 1.04},
}
TABLE = CoRunTable(
    device="of the tests",
    device_sms=132,
    entries=tuple(
        CoRun(rows=rows, sms=sms, gain=gain, background_rate=_BACKGROUND[sms])
        for rows, gains in _GAINS.items()
        for sms, gain in gains.items()
    ),
)
SHARES = (48, 64, 80, 96, 112)
