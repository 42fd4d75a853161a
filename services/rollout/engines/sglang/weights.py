"""The policy's weights as the service offers them to the engine.

Shapes: E = `total_elements` of the layout.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from common.vlm.names import VISUAL, on_disk_name
from common.weights.binding import views
from services.rollout.engines.sglang.messages import LOAD, WeightMemory
from services.rollout.engines.sglang.wire import Frame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from torch import Tensor

    from common.tensors.intake import SharedMemory
    from common.weights.layout import WeightLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedWeights:
    """One run's policy.

    Attributes:
        layouts: where the weights lie, of each rank of the engine.
        flat: [E] of the first rank, on the service's device; means something under a read hold.
        tensor: name of the weights among the tensors of `shared`.
        shared: by rank, the memory for the engine to map; empty: the one rank's weights travel in
            buckets.
        bucket_bytes: size of those.
    """

    layouts: tuple[WeightLayout, ...]
    flat: Tensor
    tensor: str
    shared: tuple[SharedMemory, ...]
    bucket_bytes: int

    def offer(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What `START` says of the weights, and the descriptors that go with it."""
        memories: list[dict[str, Any] | None] = [asdict(self._memory(one)) for one in self.shared]
        ranks = [
            {"layout": layout.to_json(), "memory": memory}
            for layout, memory in zip(self.layouts, memories or [None], strict=True)
        ]
        return {"ranks": ranks}, tuple(one.descriptor for one in self.shared)

    def close(self) -> None:
        """Close the descriptors. Once."""
        for one in self.shared:
            os.close(one.descriptor)

    def buckets(self) -> Iterator[Frame]:
        """The text model's weights by their names in a checkpoint; one may be larger than a
        bucket."""
        bucket: dict[str, Tensor] = {}
        size_bytes = 0
        for name, view in views(self.flat, self.layouts[0]).items():
            if name.startswith(VISUAL):
                continue
            if bucket and size_bytes + view.nbytes > self.bucket_bytes:
                yield Frame(kind=LOAD, tensors=bucket)
                bucket, size_bytes = {}, 0
            bucket[on_disk_name(name)] = view.to("cpu", copy=True)
            size_bytes += view.nbytes
        yield Frame(kind=LOAD, tensors=bucket)

    def _memory(self, shared: SharedMemory) -> WeightMemory:
        offset_bytes = {spec.name: spec.offset_bytes for spec in shared.specs}[self.tensor]
        return WeightMemory(
            device=shared.device, size_bytes=shared.size_bytes, offset_bytes=offset_bytes
        )
