"""Memory that an engine's own processes take of the device, in the broker's ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.ids import RunId
    from common.tensors.client import BrokerClient


class WindowMemory:
    """One reservation: a part for as long as the run is loaded, a part while the engine decodes.

    Args:
        name: in the ledger.
        lasting_bytes: of the first part.
        window_bytes: of the second part. Both 0: the engine has no processes of its own.
    """

    def __init__(
        self,
        broker: BrokerClient,
        run_id: RunId,
        *,
        name: str = "",
        lasting_bytes: int = 0,
        window_bytes: int = 0,
    ) -> None:
        self._broker = broker
        self._run_id = run_id
        self._name = name
        self._lasting_bytes = lasting_bytes
        self._window_bytes = window_bytes
        self._taken = False

    async def take(self, *, timeout_s: float | None) -> None:
        """Reserve both parts; `release` has to follow, whatever comes of it. Idempotent.

        Args:
            timeout_s: longest wait for room; None: refused if there is none now.
        Raises: ArenaFull, BrokerTimeout with the ledger.
        """
        size_bytes = self._lasting_bytes + self._window_bytes
        if size_bytes and not self._taken:
            self._taken = True
            await self._broker.reserve(self._run_id, self._name, size_bytes, timeout_s=timeout_s)

    def release(self) -> None:
        """Give the window's part back, which the engine has returned. Any thread; idempotent."""
        if self._taken and self._window_bytes:
            self._taken = False
            self._broker.shrink_reservation(
                self._run_id,
                self._name,
                self._lasting_bytes,
                away_bytes=self._window_bytes,
            )
