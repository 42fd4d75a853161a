"""Hands the policy's memory to the processes that load the model, and hears what became of it."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from typing import TYPE_CHECKING

from services.rollout.engines.sglang.messages import FAILED
from services.rollout.engines.sglang.wire import ChannelClosed, Frame, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Self

_ANSWERED_S = 10.0
"""Longest wait for answers once the engine is up: they were given before."""


class WeightHandshake:
    """Listens until the process of each of the engine's ranks has attached; a context manager.

    Attributes:
        address: name of the socket, in Linux's abstract namespace.
        refused: whether a rank has failed, and the service was told.
    """

    def __init__(
        self,
        offers: Sequence[Mapping[str, Any]],
        descriptors: tuple[int, ...],
        *,
        refused: Callable[[Frame], None],
    ) -> None:
        """Args:
        offers: by rank; see `host.weights.attach`.
        descriptors: of each rank's memory, or none; closed when all have attached.
        refused: given the first failure at once: SGLang ends this process because of it.
        """
        self._refuse = refused
        self.refused = False
        self.address = f"rollplex-sglang-{uuid.uuid4().hex}"
        self._offers = offers
        self._descriptors = descriptors
        self._answers: list[Frame] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.address)
        self._listener.listen(len(offers))
        self._thread = threading.Thread(target=self._serve, name="handshake", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def attached(self) -> dict[str, int]:
        """Bytes of the weights by kind, of all ranks. Raises RuntimeError if one has none."""
        self._thread.join(_ANSWERED_S)
        if len(self._answers) < len(self._offers):
            raise RuntimeError(
                f"{len(self._answers)} of {len(self._offers)} ranks of the engine have a model"
            )
        names = self._answers[0].body
        return {name: sum(answer.body[name] for answer in self._answers) for name in names}

    def _serve(self) -> None:
        try:
            for _ in self._offers:
                channel, _ = self._listener.accept()
                with channel:
                    self._attach(channel)
        except (OSError, ChannelClosed):
            return  # the listener was closed, or a process ended: there is no answer
        finally:
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _attach(self, channel: socket.socket) -> None:
        rank = receive(channel).body["rank"]
        descriptors = self._descriptors[rank : rank + 1]
        send(channel, Frame(kind="memory", body=self._offers[rank], descriptors=descriptors))
        answer = receive(channel)
        if answer.kind != FAILED:
            self._answers.append(answer)
        elif not self.refused:
            self.refused = True
            self._refuse(answer)
