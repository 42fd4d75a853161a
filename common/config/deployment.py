"""Where the processes of one node run: addresses, folders, memory, threads, deadlines."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from common.config.base import ConfigError, FrozenConfig
from common.config.environment import read_environment
from common.config.loading import load_config
from common.ids import WORKERS, Participant, Service
from common.step.gpus import shared_gpu
from common.step.partners import Partners
from common.step.place import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIX_SOCKET_PATH_LIMIT_BYTES = 107
"""Longest path of a Unix socket on Linux: `sun_path` less its closing zero."""

_SOCKET_NAMES = ("broker.sock", "hub.sock", "redis.sock", "supervisor.sock")
_PORT_OFFSETS: dict[Service, int] = {
    Service.CONTROLLER: 0,
    Service.BROKER: 1,
    Service.ROLLOUT: 10,
    Service.PREFIX_ENCODER: 20,
    Service.REFERENCE: 30,
    Service.LEARNER: 40,
}
_RANKS_LIMIT = 10
_TRAINING = (Service.PREFIX_ENCODER, Service.REFERENCE, Service.LEARNER)


class ServicePlacement(FrozenConfig):
    """Where one service listens; its rank r uses port + r."""

    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    """gRPC port of rank 0; 0: the system picks; unset: from `grpc_port_base`."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """HTTP port (health, metrics) of rank 0; 0: the system picks; unset: from `http_port_base`."""


class RedisPlacement(FrozenConfig):
    """Which Redis the node uses."""

    url: str | None = None
    """`redis://`, `rediss://` or `unix://` address; unset: the node runs a server of its own."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Loopback port of the node's own server, beside its Unix socket; unset: no port."""

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("has to begin with redis://, rediss:// or unix://")
        return url


class Deadlines(FrozenConfig):
    """How long things may take, in seconds."""

    start_s: float = Field(default=120.0, gt=0)
    """From the start of a process to SERVING."""
    drain_s: float = Field(default=10.0, gt=0)
    """From SIGTERM to the end of running work; what is left then is cut off."""
    call_s: float = Field(default=30.0, gt=0)
    """A gRPC call that does no long work."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Between two heartbeats of a registration."""
    registration_ttl_s: float = Field(default=5.0, gt=0)
    """A registration without heartbeats ends after this."""


class Deployment(FrozenConfig):
    """One node. Everything in it is the same for all of the node's processes."""

    name: str = Field(default="local", pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """Names the deployment in Redis, so that several can share one server."""
    state_dir: Path = Path(".rollplex")
    """Logs, sockets, Redis data. Relative: to the folder in which the command was started."""
    node: str = Field(default_factory=socket.gethostname, min_length=1)
    """This node's name in the registry; by default the host name."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address that gRPC and HTTP listen on. There is no authentication: keep it loopback or
    inside a closed network."""
    grpc_port_base: int = Field(default=7400, ge=0, le=65000)
    """gRPC port of the controller; the others follow. 0: the system picks every port."""
    http_port_base: int = Field(default=7500, ge=0, le=65000)
    """HTTP port of the controller; the others follow. 0: the system picks every port."""
    services: dict[Service, ServicePlacement] = Field(default_factory=dict)
    """Exceptions for single services, by service name."""
    redis: RedisPlacement = RedisPlacement()
    """The Redis server."""
    train_tp: int = Field(default=1, ge=1, le=_RANKS_LIMIT)
    """Tensor-parallel ranks of learner, prefix-encoder and reference: that many processes of each,
    with device = "cuda" on a GPU each (docs/parallel.md)."""
    rollout_tp: int = Field(default=1, ge=1, le=_RANKS_LIMIT)
    """Tensor-parallel ranks of the rollout, as many as train_tp or not; as for train_tp."""
    dp: int = Field(default=1, ge=1, le=_RANKS_LIMIT)
    """Data-parallel replicas of training's ranks, each with groups of its own in every step: so
    many times as many processes, and with device = "cuda" GPUs (docs/parallel.md)."""
    rollout_dp: int | None = Field(default=None, ge=1, le=_RANKS_LIMIT)
    """Replicas of the rollout's ranks, likewise; dp has to be a multiple of it, or it of dp. Unset:
    as many as fill training's GPUs, train_tp * dp / rollout_tp. Others than that, or a rollout_tp
    other than train_tp, need device = "cpu"."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda)$")
    """What the workers compute on."""
    rollout_gpus: Literal["shared", "own"] = "shared"
    """Which GPUs the rollout computes on. shared: those of training, rank by rank. own: as many
    others, behind those; for recipes with `schedule = "disaggregated"`, and for no others. On a CPU
    it means nothing."""
    mps: Literal["auto", "off"] = "auto"
    """Whether the services of a GPU share it through NVIDIA's Multi-Process Service. auto: where
    the driver has the daemon; without it they take turns, and hiding work cannot pay."""
    governor: Literal["auto", "on", "off"] = "auto"
    """Whether work beside the decode is kept to a share of a GPU's SMs, by co-run rates that are
    measured meanwhile. off: it starves the decode; for comparisons. on: on a CPU as well, where
    there are no shares and work takes turns; for rehearsals."""
    governor_table: Path | None = None
    """Co-run rates that the shares are chosen by, and by them alone: TOML or JSON, or a folder of
    JSON files such as the `governor` folder of a run (`common.governor.table`). Relative: as for
    `state_dir`. Unset: those of an H200, scaled to the GPU's SMs, until enough is measured."""
    arena_gib: float = Field(default=4.0, gt=0)
    """Memory of the machine that the broker may hand out, in GiB."""
    hbm_budget_gib: float | None = Field(default=None, gt=0)
    """Memory of each GPU for everything: what the broker hands out and reserves, and what the
    processes take themselves, their allocators and CUDA contexts, in GiB. Unset: the broker may
    hand out the GPU less 8 GiB (at most a quarter); what processes take is counted, and a GPU that
    is full keeps a request waiting below that."""
    spill_gib: float | None = Field(default=None, ge=0)
    """Memory of the machine for what is moved out of arenas while nobody needs it, such as the
    optimizer's state beside a rollout, in GiB; on a GPU node it is pinned. 0: nothing is moved.
    Unset: half of the machine's memory, which is taken only as far as it is needed."""
    arena: Literal["auto", "vmm", "ipc"] = "auto"
    """How GPU memory is shared between processes: `vmm` by file descriptors, `ipc` by legacy CUDA
    IPC handles, for drivers that cannot do the former; `ipc` takes its whole budget at the start
    and keeps it. `auto`: vmm where it works."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Compute threads of each worker. All workers have the same number: results are equal bit for
    bit only then. Unset: the node's cores divided among the workers, at least 1."""
    engine_python: Path | None = None
    """Python interpreter of the environment that has SGLang, which runs the engine of recipes with
    `rollout.engine = "sglang"`. Relative: as for `state_dir`. Unset: those are refused."""
    deadlines: Deadlines = Deadlines()
    """How long things may take."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines that are written."""

    @field_validator("state_dir", "governor_table", "engine_python")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="after")
    def _sides_go_together(self) -> Self:
        sides = (
            f"train_tp = {self.train_tp} and dp = {self.dp} with rollout_tp = {self.rollout_tp} "
            f"and rollout_dp = {self.rollout_replicas}"
        )
        if self.dp % self.rollout_replicas and self.rollout_replicas % self.dp:
            raise ValueError(
                f"{sides}: replicas share groups where dp is a multiple of rollout_dp, or it of "
                "dp; set rollout_dp to such a number"
            )
        differ = (self.train_tp, self.dp) != (self.rollout_tp, self.rollout_replicas)
        if differ and (self.device != "cpu" or self.governor == "on"):
            raise ValueError(
                f'{sides}: sides that differ run on device = "cpu" without a governor; device = '
                f"{self.device!r}, governor = {self.governor!r}: set both degrees to the same "
                "number, and leave rollout_dp unset"
            )
        for service in (Service.LEARNER, Service.ROLLOUT):
            if self.ranks(service) > _RANKS_LIMIT:
                raise ValueError(
                    f"{sides}: a service has at most {_RANKS_LIMIT} processes, and {service} "
                    f"{self.ranks(service)}; lower one of them"
                )
        return self

    @property
    def governed(self) -> bool:
        """Whether background work runs on shares of the SMs."""
        if self.apart:
            return False  # nothing runs beside the decode
        return self.governor == "on" or (self.governor == "auto" and self.device == "cuda")

    @property
    def participants(self) -> tuple[Participant, ...]:
        """Every process of the node, in the order in which they are started."""
        order = (Service.BROKER, Service.CONTROLLER, *WORKERS)
        return tuple(
            Participant(service=service, rank=rank)
            for service in order
            for rank in range(self.ranks(service))
        )

    def ranks(self, service: Service) -> int:
        """Processes of a service."""
        return self.degree(service) * self.replicas(service)

    def degree(self, service: Service) -> int:
        """Tensor-parallel ranks of one replica of a service."""
        if service in _TRAINING:
            return self.train_tp
        return self.rollout_tp if service is Service.ROLLOUT else 1

    def replicas(self, service: Service) -> int:
        """Replicas of a service."""
        if service in _TRAINING:
            return self.dp
        return self.rollout_replicas if service is Service.ROLLOUT else 1

    @property
    def rollout_replicas(self) -> int:
        """Replicas of the rollout, the default worked out."""
        if self.rollout_dp is not None:
            return self.rollout_dp
        return max(1, self.train_tp * self.dp // self.rollout_tp)

    @property
    def partners(self) -> Partners:
        """Which ranks of the services work with each other."""
        return Partners(
            {service: self.degree(service) for service in WORKERS},
            {service: self.replicas(service) for service in WORKERS},
        )

    def place(self, participant: Participant) -> Place:
        """Where a process that computes stands among those of its service."""
        return Place(
            rank=participant.rank,
            degree=self.degree(participant.service),
            replicas=self.replicas(participant.service),
        )

    def placement(self, service: Service) -> ServicePlacement:
        """The placement of a service, defaults included."""
        return self.services.get(service, ServicePlacement())

    def grpc_address(self, participant: Participant) -> str:
        """`host:port` to listen on for gRPC; port 0: the system picks, Redis knows the result."""
        given = self.placement(participant.service).grpc_port
        return f"{self.host}:{_port(given, self.grpc_port_base, participant)}"

    def http_address(self, participant: Participant) -> str:
        """`host:port` to listen on for health and metrics over HTTP; port 0 as for gRPC."""
        given = self.placement(participant.service).http_port
        return f"{self.host}:{_port(given, self.http_port_base, participant)}"

    @property
    def controller_address(self) -> str:
        """Where clients reach the public API."""
        return self.grpc_address(Participant(service=Service.CONTROLLER))

    @property
    def arena_bytes(self) -> int:
        """Size of the broker's arena."""
        return int(self.arena_gib * 2**30)

    @property
    def spill_bytes(self) -> int:
        """Host memory for spilled contents, the default worked out."""
        if self.spill_gib is not None:
            return int(self.spill_gib * 2**30)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    @property
    def gpus(self) -> int:
        """How many GPUs of the node are used."""
        if self.device != "cuda":
            return 0
        if self.apart:
            return self.ranks(Service.LEARNER) + self.ranks(Service.ROLLOUT)
        return max(self.ranks(service) for service in WORKERS)

    @property
    def apart(self) -> bool:
        """Whether rollout and training are on different GPUs."""
        return self.device == "cuda" and self.rollout_gpus == "own"

    def gpu(self, participant: Participant) -> int:
        """Which of the node's GPUs a worker computes on, of those that its process sees."""
        if self.apart:
            behind = self.ranks(Service.LEARNER) if participant.service is Service.ROLLOUT else 0
            return behind + participant.rank
        return shared_gpu(self.partners, participant)

    @property
    def worker_threads(self) -> int:
        """Compute threads of each worker, the default worked out."""
        if self.threads_per_worker is not None:
            return self.threads_per_worker
        workers = sum(self.ranks(service) for service in WORKERS)
        return max(1, len(os.sched_getaffinity(0)) // workers)

    def threads(self, participant: Participant) -> int:
        """Compute threads of one process; controller and broker compute nothing."""
        return self.worker_threads if participant.service in WORKERS else 1

    @property
    def log_dir(self) -> Path:
        """Where each process's log file is."""
        return self.state_dir / "logs"

    @property
    def redis_dir(self) -> Path:
        """Data of the node's own Redis server."""
        return self.state_dir / "redis"

    @property
    def socket_dir(self) -> Path:
        """Folder of the Unix sockets: in `state_dir`, or a short one where that is too long."""
        folder = self.state_dir / "run"
        longest = max(len(os.fsencode(folder / name)) for name in _SOCKET_NAMES)
        if longest <= UNIX_SOCKET_PATH_LIMIT_BYTES:
            return folder
        digest = hashlib.sha256(os.fsencode(self.state_dir)).hexdigest()[:16]
        return Path("/tmp") / f"rollplex-{os.getuid()}-{digest}"  # noqa: S108 - owner is checked

    @property
    def broker_socket(self) -> Path:
        """Unix socket of the broker's data plane."""
        return self.socket_dir / "broker.sock"

    @property
    def context_lock(self) -> Path:
        """File that is locked by whoever creates and measures a CUDA context."""
        return self.state_dir / "cuda-context.lock"

    @property
    def hub_address(self) -> str:
        """ZeroMQ address of the event hub."""
        return f"ipc://{self.socket_dir / 'hub.sock'}"

    @property
    def redis_socket(self) -> Path:
        """Unix socket of the node's own Redis server."""
        return self.socket_dir / "redis.sock"

    @property
    def supervisor_socket(self) -> Path:
        """Unix socket of the local supervisor."""
        return self.socket_dir / "supervisor.sock"

    @property
    def redis_url(self) -> str:
        """Where Redis is: the configured address, else the node's own server."""
        return self.redis.url or f"unix://{self.redis_socket}"

    def make_dirs(self) -> None:
        """Create the node's folders, private to this user. Idempotent.

        Raises:
            ConfigError: one cannot be made, or belongs to someone else.
        """
        for folder in (self.state_dir, self.log_dir, self.redis_dir, self.socket_dir):
            _make_private(folder)


def load_deployment(path: Path | None = None, sets: Sequence[str] = ()) -> Deployment:
    """Read the deployment: `sets`, then `ROLLPLEX_STATE_DIR`, then the file, then the defaults.

    Args:
        path: the file; None: `ROLLPLEX_CONFIG`, else defaults only.
        sets: `key=value` items, as after `--set`.

    Raises:
        ConfigError: a wrong value in any of these places.
    """
    environment = read_environment()
    overrides = {} if environment.state_dir is None else {"state_dir": str(environment.state_dir)}
    return load_config(Deployment, path or environment.config, sets=sets, overrides=overrides)


def _port(given: int | None, base: int, participant: Participant) -> int:
    if given is None:
        given = base + _PORT_OFFSETS[participant.service] if base else 0
    return given + participant.rank if given else 0


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be made: {error}; set another state_dir") from (
            error
        )
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} has to be a folder that belongs to user {os.getuid()}, but belongs to user "
            f"{status.st_uid}; set another state_dir"
        )
