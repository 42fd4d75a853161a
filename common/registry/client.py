"""Which service processes live, and where. A registration is a lease: heartbeats keep it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from common.errors import Stale, Unavailable
from common.ids import Incarnation, Participant
from common.registry.connection import RedisBroken, open_redis, retry_redis
from common.registry.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from common.config.deployment import Deployment

_POLL_S = 0.1

# A heartbeat with an epoch above the counter means that Redis lost its data: the counter is
# restored, so that the order of registrations stays what it was.
_HEARTBEAT = """
local counter = tonumber(redis.call('GET', KEYS[2]) or '0')
local mine = tonumber(ARGV[1])
if counter > mine then return counter end
if counter < mine then redis.call('SET', KEYS[2], mine) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return mine
"""

_DEREGISTER = """
if tonumber(redis.call('GET', KEYS[2]) or '0') == tonumber(ARGV[1]) then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEntry:
    """One living process, as others find it.

    Attributes:
        participant: who it is.
        node: host name.
        pid: process id there.
        grpc_address: `host:port`.
        http_address: `host:port` of health and metrics.
        incarnation: this life of the process.
        epoch: grows with every registration of this participant; 0: not registered yet.
        serving: whether its health is SERVING.
        phase: what it does, in one word or two.
    """

    participant: Participant
    node: str
    pid: int
    grpc_address: str
    http_address: str
    incarnation: Incarnation
    epoch: int = 0
    serving: bool = False
    phase: str = ""

    def to_json(self) -> str:
        """The value in Redis."""
        return json.dumps({**asdict(self), "participant": str(self.participant)})

    @classmethod
    def from_json(cls, text: str) -> ServiceEntry:
        """Read the value in Redis. Raises RedisBroken."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "participant": Participant.parse(fields["participant"])})
        except (ValueError, TypeError, KeyError) as error:
            raise RedisBroken(f"service entry {text!r} cannot be read: {error}") from error


class Registry:
    """The registrations of one deployment."""

    def __init__(
        self, url: str, deployment: str, *, ttl_s: float = 5.0, deadline_s: float | None = None
    ) -> None:
        """Args:
        url: Redis address.
        deployment: its name; part of every key.
        ttl_s: life of a registration without heartbeats.
        deadline_s: how long calls wait while Redis is away; None: for ever.
        """
        self.url = url
        self.keys = Keys(deployment)
        self._ttl_s = ttl_s
        self._deadline_s = deadline_s
        self._redis = open_redis(url)

    @classmethod
    def of(cls, deployment: Deployment, *, deadline_s: float | None = None) -> Registry:
        """The registry that a deployment names."""
        return cls(
            deployment.redis_url,
            deployment.name,
            ttl_s=deployment.deadlines.registration_ttl_s,
            deadline_s=deadline_s,
        )

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._redis.aclose()

    async def register(self, entry: ServiceEntry) -> ServiceEntry:
        """Take over as this participant; an older process of the same name is fenced out.

        Returns: the entry with its epoch, to be given to `heartbeat`.
        """
        key = self.keys.service_epoch(entry.participant)
        epoch = await self._retry(f"registering {entry.participant}", lambda: self._redis.incr(key))
        registered = replace(entry, epoch=epoch)
        await self.heartbeat(registered)
        return registered

    async def heartbeat(self, entry: ServiceEntry) -> None:
        """Write the entry and make it live for another TTL.

        Raises:
            Stale: a newer process registered as this participant.
        """
        ttl_ms = str(int(self._ttl_s * 1000))
        newest = await self._retry(
            f"heartbeat of {entry.participant}",
            lambda: self._redis.eval(
                _HEARTBEAT, 2, *self._pair(entry.participant), entry.epoch, entry.to_json(), ttl_ms
            ),
        )
        if int(newest) > entry.epoch:
            raise Stale(
                f"{entry.participant} (pid {entry.pid}, epoch {entry.epoch}) was replaced by a "
                f"newer process with epoch {newest}",
                participant=str(entry.participant),
                epoch=entry.epoch,
            )

    async def deregister(self, entry: ServiceEntry) -> None:
        """End the registration, unless a newer process holds it. Idempotent."""
        await self._retry(
            f"deregistering {entry.participant}",
            lambda: self._redis.eval(_DEREGISTER, 2, *self._pair(entry.participant), entry.epoch),
        )

    async def find(self, participant: Participant) -> ServiceEntry | None:
        """The living process of that name; None: there is none."""
        text = await self._retry(
            f"finding {participant}", lambda: self._redis.get(self.keys.service(participant))
        )
        return ServiceEntry.from_json(text) if text is not None else None

    async def services(self) -> list[ServiceEntry]:
        """All living processes, by name."""

        async def read() -> Any:
            names = {key async for key in self._redis.scan_iter(self.keys.services_pattern)}
            return await self._redis.mget(sorted(names)) if names else []

        texts = await self._retry("listing the services", read)
        return [ServiceEntry.from_json(text) for text in texts if text is not None]

    async def wait_for(self, participant: Participant, *, timeout_s: float) -> ServiceEntry:
        """Wait until that process is registered and serving.

        Raises:
            Unavailable: it was not within `timeout_s`.
        """
        give_up_s = time.monotonic() + timeout_s
        while True:
            entry = await self.find(participant)
            if entry is not None and entry.serving:
                return entry
            if time.monotonic() > give_up_s:
                found = "is not registered" if entry is None else f"is in phase {entry.phase!r}"
                raise Unavailable(f"{participant} was not serving within {timeout_s} s: it {found}")
            await asyncio.sleep(_POLL_S)

    def _pair(self, participant: Participant) -> tuple[str, str]:
        return self.keys.service(participant), self.keys.service_epoch(participant)

    async def _retry(self, what: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        return await retry_redis(operation, what=what, url=self.url, deadline_s=self._deadline_s)
