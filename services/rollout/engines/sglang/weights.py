"""The policy's weights as the service offers them to the engine.

Shapes: E = `total_elements` of the layout.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from common.vlm.names import on_disk_name
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
        layout: where the weights lie.
        flat: [E], on the service's device; means something under a read hold only.
        tensor: name of `flat` among the tensors of `shared`.
        shared: the memory for the engine to map; None: weights travel in buckets.
        bucket_bytes: size of those.
    """

    layout: WeightLayout
    flat: Tensor
    tensor: str
    shared: SharedMemory | None
    bucket_bytes: int

    def offer(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """What `START` says of the weights, and the descriptors that go with it."""
        if self.shared is None:
            return {"layout": self.layout.to_json(), "memory": None}, ()
        offset_bytes = {spec.name: spec.offset_bytes for spec in self.shared.specs}[self.tensor]
        memory = WeightMemory(
            device=self.shared.device,
            size_bytes=self.shared.size_bytes,
            offset_bytes=offset_bytes,
        )
        body = {"layout": self.layout.to_json(), "memory": asdict(memory)}
        return body, (self.shared.descriptor,)

    def close(self) -> None:
        """Close the descriptor. Once."""
        if self.shared is not None:
            os.close(self.shared.descriptor)

    def buckets(self) -> Iterator[Frame]:
        """All weights by their names in a checkpoint; a tensor may be larger than a bucket."""
        bucket: dict[str, Tensor] = {}
        size_bytes = 0
        for name, view in views(self.flat, self.layout).items():
            if bucket and size_bytes + view.nbytes > self.bucket_bytes:
                yield Frame(kind=LOAD, tensors=bucket)
                bucket, size_bytes = {}, 0
            bucket[on_disk_name(name)] = view.to("cpu", copy=True)
            size_bytes += view.nbytes
        yield Frame(kind=LOAD, tensors=bucket)
