"""Hands the policy's memory to the process that loads the model, and hears what became of it."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from typing import TYPE_CHECKING

from services.rollout.engines.sglang.messages import FAILED
from services.rollout.engines.sglang.wire import ChannelClosed, Frame, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Self


class WeightHandshake:
    """Listens until one process has attached; a context manager.

    Attributes:
        address: name of the socket, in Linux's abstract namespace.
    """

    def __init__(
        self,
        body: Mapping[str, Any],
        descriptors: tuple[int, ...],
        *,
        refused: Callable[[Frame], None],
    ) -> None:
        """Args:
        body: see `host.weights.attach`.
        descriptors: closed when a process has attached.
        refused: given a failure at once: SGLang ends this process because of it.
        """
        self._refused = refused
        self.address = f"rollplex-sglang-{uuid.uuid4().hex}"
        self._offer = Frame(kind="memory", body=body, descriptors=descriptors)
        self._answer: Frame | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, name="handshake", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def answer(self) -> Frame | None:
        """What the process said: `DONE` with bytes by kind, or `FAILED`; None: nothing."""
        return self._answer

    def _serve(self) -> None:
        try:
            channel, _ = self._listener.accept()
            with channel:
                send(channel, self._offer)
                self._answer = receive(channel)
            if self._answer.kind == FAILED:
                self._refused(self._answer)
        except (OSError, ChannelClosed):
            return  # the listener was closed, or the process ended: there is no answer
        finally:
            for descriptor in self._offer.descriptors:
                os.close(descriptor)
