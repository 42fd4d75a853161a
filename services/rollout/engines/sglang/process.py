"""The engine's host as a child process: started, asked, ended in order or by force.

All of the engine's processes are in one group, which ends with the service, however that ends: the
host holds the other end of a pipe that only the service keeps open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from services.rollout.engines.errors import EngineGone, EngineRefused
from services.rollout.engines.sglang.messages import DONE, FAILED, STOP
from services.rollout.engines.sglang.wire import ChannelClosed, Frame, has_frame, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[4]
"""Folder of this project's packages."""
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from services.rollout.engines.sglang.host.program import run; "
    "run(int(sys.argv[2]), int(sys.argv[3]))"
)
"""The project's folder comes last: it may have packages of another environment beside it."""
_STOP_S = 5.0


class EngineHost:
    """One host process. Not to be shared by threads.

    Args:
        python: interpreter of the environment that has SGLang.
        deadline_s: longest wait for an answer, and for a sign of life while sequences decode.
    """

    def __init__(self, python: Path, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._stopped = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        life_read, self._life = os.pipe()
        self._channel = ours
        self._channel.settimeout(deadline_s)
        with theirs:
            inherited = (theirs.fileno(), life_read)
            command = [str(python), "-c", _PROGRAM, str(_ROOT), *map(str, inherited)]
            try:
                self._process = subprocess.Popen(  # noqa: S603 - the deployment's interpreter
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                    pass_fds=inherited,
                    start_new_session=True,
                )
            except OSError as error:
                self._channel.close()
                os.close(self._life)
                raise EngineRefused(
                    f"engine_python = {str(python)!r} cannot be run: {error}"
                ) from error
            finally:
                os.close(life_read)

    @property
    def pid(self) -> int:
        """Of the host; its process group has the same number."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the host has not ended."""
        # not reaped before its group is killed: the group's number is no other's until then
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return not self._stopped and os.waitid(os.P_PID, self.pid, how) is None

    def ask(
        self,
        frame: Frame,
        *,
        deadline_s: float | None = None,
        meanwhile: Callable[[Frame], None] | None = None,
    ) -> Frame:
        """Send a frame and wait for the answer.

        Args:
            deadline_s: another one than the host's; for the answer, whatever is reported before.
            meanwhile: takes the reports that come before the answer.
        Raises: EngineRefused for a failure; EngineGone, after which the processes have ended.
        """
        self.tell(frame)
        within_s = self._deadline_s if deadline_s is None else deadline_s
        give_up_s = time.monotonic() + within_s
        while True:
            if time.monotonic() > give_up_s:
                raise self._gone(f"no answer to {frame.kind!r} within {within_s:.0f} s")
            answer = self._receive(within_s, frame)
            if answer.kind == DONE:
                return answer
            if answer.kind == FAILED:
                raise EngineRefused(f"SGLang, asked to {frame.kind}: {answer.body['message']}")
            if meanwhile is not None:
                meanwhile(answer)

    def tell(self, frame: Frame) -> None:
        """Send a frame that has no answer. Raises EngineGone."""
        try:
            send(self._channel, frame)
        except (ChannelClosed, TimeoutError) as error:
            raise self._gone(f"it did not take {frame.kind!r}: {error}") from error

    def report(self, *, within_s: float) -> Frame | None:
        """The next report, if one comes in time. Raises EngineGone."""
        if not has_frame(self._channel, within_s=within_s):
            return None
        return self._receive(self._deadline_s, None)

    def overdue(self, what: str) -> EngineGone:
        """End the processes, which have given no sign of life; the error to raise."""
        return self._gone(f"{what} within {self._deadline_s:.0f} s")

    def stop(self) -> None:
        """End the engine in order, or by force if it does not end in time. Idempotent."""
        if self._stopped:
            return
        with contextlib.suppress(ChannelClosed, TimeoutError):
            send(self._channel, Frame(kind=STOP))
            give_up_s = time.monotonic() + _STOP_S
            while has_frame(self._channel, within_s=max(0.0, give_up_s - time.monotonic())):
                receive(self._channel)
        self.kill()

    def kill(self) -> None:
        """End all of the engine's processes at once. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        os.close(self._life)

    def _receive(self, deadline_s: float, asked: Frame | None) -> Frame:
        if not has_frame(self._channel, within_s=deadline_s):
            what = "no answer" if asked is None else f"no answer to {asked.kind!r}"
            raise self._gone(f"{what} within {deadline_s:.0f} s")
        try:
            return receive(self._channel)
        except (ChannelClosed, TimeoutError) as error:
            raise self._gone(str(error)) from error

    def _gone(self, cause: str) -> EngineGone:
        self.kill()
        code = self._process.returncode
        log.error("engine ended", extra={"cause": cause, "exit_code": code})
        return EngineGone(f"SGLang's host {self.pid}: {cause} (exit code {code})")
