"""Step-scoped leases as a process holds them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from common.tensors.errors import LeaseMisuse
from protos.rollplex.v1 import broker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from common.ids import Epoch, LeaseId
    from common.tensors.device import DeviceBytes
    from common.tensors.mapping import Mapping
    from common.tensors.reaper import CudaEvent
    from common.tensors.spec import TensorSpec


class Claim:
    """What this process owes the broker for one lease: exactly one closing message.

    It is sent when the lease is closed by hand, or else when the last view of its bytes is gone,
    so that a lease that an exception left behind does not outlive its use. For memory of a GPU it
    is sent when the bytes are unmapped, in both cases: the ledger must not call them free before.
    """

    def __init__(
        self,
        mapping: Mapping,
        *,
        lease_id: LeaseId,
        epoch: Epoch,
        tell: Callable[[pb.BrokerRequest], None],
        left_behind: pb.BrokerRequest,
        forget: Callable[[], None],
    ) -> None:
        self.lease_id = lease_id
        self.epoch = epoch
        self._left_behind = left_behind
        self._forget = forget
        self._departure = mapping.departure

        def close_left_behind() -> None:
            tell(left_behind)
            forget()

        self.tell = tell
        self._ending = mapping.when_over(close_left_behind)

    @property
    def open(self) -> bool:
        """Whether the closing message is still owed."""
        return self._ending.alive

    def close(self, message: pb.BrokerRequest | None = None, *, at_once: bool = False) -> bool:
        """Send the closing message if it was not sent; any thread.

        Args:
            message: None: the one for a lease left behind.
            at_once: whether memory of a GPU may still be mapped when it is sent.

        Returns: whether the lease was open.
        """
        if self._ending.detach() is None:
            return False
        message = self._left_behind if message is None else message
        if at_once or self._departure is None:
            self.tell(message)
        else:
            self._departure.when_over(partial(self.tell, message))
        self._forget()
        return True


class Lease:
    """One lease, held by its producer until sealed or by one consumer until released.

    As a context manager it is released at the end of the block.

    Attributes:
        id: number by which consumers acquire it.
        epoch: the epoch that it belongs to.
        generation: of the memory behind it.
    """

    def __init__(self, mapping: Mapping, claim: Claim, *, generation: int, producer: bool) -> None:
        self.id = claim.lease_id
        self.epoch = claim.epoch
        self.generation = generation
        self._mapping = mapping
        self._claim = claim
        self._producer = producer
        self._abandoned = False

    def __repr__(self) -> str:
        return f"<Lease {self.id} {self.name} of epoch {self.epoch}>"

    @property
    def name(self) -> str:
        """Tensor class, such as ``policy.prefix_kv``."""
        return self._mapping.name

    @property
    def device(self) -> str:
        """Where it lies: ``cpu``, or a GPU's UUID."""
        return self._mapping.device

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors by name, in the order in which they lie."""
        return self._mapping.specs

    @property
    def held(self) -> bool:
        """Whether this process still holds it."""
        return self._claim.open

    def spec(self, name: str) -> TensorSpec:
        """What the tensor is. Raises LeaseMisuse for a name that is not there."""
        return self._mapping.spec(name)

    def buffer(self, name: str) -> memoryview:
        """The tensor's bytes, zero-copy; writable for the producer only.

        Raises:
            LeaseMisuse: no such tensor, the lease was let go, or it lies on a GPU.
        """
        return self._mapping.view(name)

    def device_buffer(self, name: str) -> DeviceBytes:
        """The tensor's bytes on a GPU, zero-copy. To be written by the producer only.

        Raises:
            LeaseMisuse: no such tensor, the lease was let go, or it lies in host memory.
        """
        return self._mapping.device_view(name)

    def seal(self, *, after: CudaEvent | None = None) -> None:
        """Producer: the contents are complete, not merely asked for. One-way; any thread.

        The producer's hold ends here: `buffer` no longer works, views made before stay readable.
        On a GPU the kernels that fill it have to have ended: see `cuda_events.finished`.

        Args:
            after: see `release`.

        Raises:
            LeaseMisuse: not the producer's, or no longer open.
        """
        self._producer_only("sealed")
        sealed = pb.BrokerRequest(seal=pb.Seal(lease_id=self.id, generation=self.generation))
        if not self._claim.close(sealed, at_once=True):
            raise LeaseMisuse(f"{self!r} was sealed, abandoned or ended with its epoch before")
        self._mapping.drop(after=after)

    def abandon(self, reason: str) -> None:
        """Producer: nobody will need it, sealed or not. One-way; any thread; idempotent.

        Consumers that have not acquired it get StaleLease with the reason; the others keep their
        bytes.
        """
        self._producer_only("abandoned")
        message = pb.BrokerRequest(free=pb.FreeLease(lease_ids=[self.id], reason=reason))
        if not self._claim.close(message) and not self._abandoned:
            self._claim.tell(message)
        self._abandoned = True
        self._mapping.drop()

    def release(self, *, after: CudaEvent | None = None) -> None:
        """Let go; a producer's unsealed lease is abandoned. One-way; any thread; idempotent.

        Memory of a GPU is given back when no view is left and its kernels have ended, without
        anybody waiting for it here.

        Args:
            after: recorded behind the last kernel that uses the bytes, when no view is left.
                Without it all GPU work of this process is waited for.
        """
        self._claim.close()
        self._mapping.drop(after=after)

    def _producer_only(self, what: str) -> None:
        if not self._producer:
            raise LeaseMisuse(f"{self!r} is a consumer's hold; only its producer's can be {what}")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
