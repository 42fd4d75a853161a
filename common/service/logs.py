"""One line a log record: time, level, participant, message, key=value."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.ids import Participant

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """Formats `log.info("lease freed", extra={"lease": 17})` as `… lease freed lease=17`."""

    def __init__(self, participant: Participant | str) -> None:
        super().__init__()
        self._participant = str(participant)

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on lines of its own."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = record.getMessage().replace("\n", "\\n")
        pairs = " ".join(
            f"{key}={_value(value)}" for key, value in vars(record).items() if key not in _STANDARD
        )
        line = (
            f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._participant} "
            f"{message}{' ' if pairs else ''}{pairs}"
        )
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def setup_logging(participant: Participant | str, level: str) -> None:
    """Send the whole process's log to stderr, replacing earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(participant))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def _value(value: object) -> str:
    text = str(value).replace("\n", "\\n")
    return repr(text) if " " in text or text == "" else text
