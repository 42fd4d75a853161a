"""Sweeps over the cuts of the decode step's kernels.

Every layer's weights are used in turn inside one graph, so that no weight comes from a cache and
no launch is seen.
"""

from __future__ import annotations

import dataclasses
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from bench.timing import measure
from common.vlm.loading import head_dim, text_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from bench.shapes import RandomModel
    from bench.timing import Report


class Sweep:
    """Finds the fastest cuts for one batch."""

    def __init__(
        self,
        made: RandomModel,
        report: Report,
        device: torch.device,
        groups: int,
        samples: int,
        *,
        sms: int | None = None,
    ) -> None:
        """Args: sms: multiprocessors that the kernels may fill; None: all."""
        from common.vlm.cuda.decode_parts import LayerWeights

        self.made, self.report, self.device = made, report, device
        self.groups, self.samples, self.rows = groups, samples, groups * samples
        language = made.model.model.language_model
        self.layers = [LayerWeights.of(layer) for layer in language.layers]
        self.head = made.model.lm_head.weight.detach()
        self.found: dict[str, Any] = {}
        self._sms = sms

    def best(self) -> Any:
        """The fastest cuts of all products and of attention."""
        from common.vlm.cuda.decode_parts import Cuts

        return dataclasses.replace(Cuts.of(rows=self.rows), **self.found)

    def products(self, name: str) -> None:
        """Each projection by library and by tiles."""
        for role in ("qkv", "out", "gate_up", "down", "head"):
            self.report.case(f"product {role} {name}", lambda r=role: self._product(r))

    def attention(self, name: str, pool_of: Callable[..., Any], batch: Any) -> None:
        """Both attention kernels together."""
        self.report.case(f"attention {name}", lambda: self._attention(pool_of, batch))

    def row_kernels(self) -> dict[str, Any]:
        """Microseconds of what is neither product nor attention."""
        from common.vlm.cuda.decode_rows import sum_norm
        from common.vlm.cuda.decode_sampling import Choice, ChunkFacts, Lanes, choose

        width, rows = self.head.shape[1], self.rows
        hidden, normed = (self._random(rows, width) for _ in range(2))
        parts = torch.randn(8, rows, width, device=self.device)
        norm = self.layers[0].first_norm
        lanes = Lanes.make(lanes=rows, new_tokens=8, device=self.device)
        ints = torch.arange(rows, dtype=torch.int32, device=self.device)
        choice = Choice(
            temperature=1.0,
            forced=False,
            stops=ints[:2],
            suppressed=ints[:2],
            limits=torch.full_like(ints, 1 << 30),
        )
        logits = self._random(rows, self.head.shape[0])
        chunks = ChunkFacts.make(rows=rows, vocabulary=logits.shape[1], device=self.device)

        def sampled() -> None:
            lanes.tokens.zero_()
            choose(logits, ints, lanes, choice, chunks)

        return {
            "sum_norm_8": self._micros([lambda: sum_norm(hidden, parts, norm, 1e-6, normed)] * 20),
            "sum_norm_2": self._micros(
                [lambda: sum_norm(hidden, parts[:2], norm, 1e-6, normed)] * 20
            ),
            "sample": self._micros([sampled] * 20),
        }

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.made.weights.dtype)

    def _micros(self, calls: list[Callable[[], Any]]) -> float:
        """Microseconds of one call of several in a graph."""

        def all_calls() -> None:
            for call in calls:
                call()

        with torch.no_grad():
            if self.device.type != "cuda":
                return _once(calls[0])
            side = decode_stream(self.device, self._sms)
            with torch.cuda.stream(side):
                all_calls()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side):
                    all_calls()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                milliseconds = measure(
                    lambda _: graph.replay(), device=self.device, repeats=7
                ).median_ms
        return milliseconds * 1e3 / len(calls)

    def _product(self, role: str) -> dict[str, Any]:
        from common.vlm.cuda.decode_linear import gated_linear, linear, splits

        gated = role == "gate_up"
        run = gated_linear if gated else linear
        weights = (
            [self.head] * 2 if role == "head" else [getattr(each, role) for each in self.layers]
        )
        columns, inner = weights[0].shape
        columns //= 2 if gated else 1
        x = self._random(self.rows, inner)
        kind = self.made.weights.dtype if role in ("head", "gate_up") else torch.float32
        micros: dict[str, Any] = {}
        best: tuple[float, Any] | None = None
        for tiles in self._candidates(role):
            out = torch.empty(splits(tiles), self.rows, columns, dtype=kind, device=self.device)
            label = "library" if tiles is None else _label(tiles)
            try:
                spent = self._micros(
                    [lambda w=weight, o=out, t=tiles: run(x, w, o, t) for weight in weights]
                )
            except Exception as error:  # noqa: BLE001 - a cut that does not fit is no candidate
                micros[label] = f"failed: {str(error)[:60]}"
                continue
            micros[label] = round(spent, 2)
            if best is None or spent < best[0]:
                best = (spent, tiles)
        assert best is not None
        self.found[role] = best[1]
        tbs = weights[0].nbytes / best[0] / 1e6
        return {"best": str(best[1] and _label(best[1])), "us": best[0], "tbs": tbs, **micros}

    def _candidates(self, role: str) -> list[Any]:
        from common.vlm.cuda.decode_linear import Tiles

        def tiles(columns: int, inner: int, splits: int, stages: int, warps: int) -> Tiles:
            return Tiles(columns=columns, inner=inner, splits=splits, stages=stages, warps=warps)

        if self.device.type != "cuda":
            return [None, tiles(64, 128, 1, 4, 4)]
        narrow = [(32, 128, 4, 3, 4), (64, 128, 2, 6, 4), (64, 64, 4, 4, 4), (64, 128, 4, 3, 4)]
        table: dict[str, list[tuple[int, int, int, int, int]]] = {
            "qkv": narrow,
            "out": narrow,
            "gate_up": [
                (32, 64, 1, 4, 4),
                (64, 64, 1, 3, 4),
                (64, 64, 1, 4, 4),
                (64, 128, 1, 3, 4),
                (128, 64, 1, 4, 8),
            ],
            "down": [
                (64, 128, 4, 6, 4),
                (64, 64, 8, 4, 4),
                (128, 64, 4, 4, 4),
                (128, 64, 2, 8, 4),
                (128, 64, 8, 4, 4),
            ],
            "head": [(128, 64, 1, 3, 4), (128, 64, 1, 4, 4), (128, 128, 1, 3, 4)],
        }
        return [None, *(tiles(*sizes) for sizes in table[role])]

    def _attention(self, pool_of: Callable[..., Any], batch: Any) -> dict[str, Any]:
        pool = pool_of(self.made, batch, self.device)
        text, width = text_config(self.made.model.config), head_dim(self.made.model.config)
        query = self._random(self.rows, text.num_attention_heads, width)
        micros: dict[str, Any] = {}
        best: tuple[float, Any, int] | None = None
        for items, blocks in self._attention_candidates():
            label = f"i{items} k{blocks.prefix_keys}/{blocks.own_keys} s{blocks.stages}"
            label += f" w{blocks.warps}"
            calls = self._attention_calls(pool, batch, query, items, blocks)
            try:
                spent = self._micros(calls)
            except Exception as error:  # noqa: BLE001 - a cut that does not fit is no candidate
                micros[label] = f"failed: {str(error)[:60]}"
                continue
            micros[label] = round(spent, 2)
            if best is None or spent < best[0]:
                best = (spent, blocks, items)
        assert best is not None
        self.found |= {"attention": best[1], "items": best[2]}
        token_bytes = 2 * text.num_key_value_heads * width * query.element_size()
        kept = self.groups * batch.prefix_tokens + self.rows * batch.private_tokens
        tbs = kept * token_bytes / best[0] / 1e6
        return {"best": f"i{best[2]} {best[1]}", "us": best[0], "tbs": tbs, **micros}

    def _attention_calls(
        self, pool: Any, batch: Any, query: Tensor, items: int, blocks: Any
    ) -> list[Callable[[], Any]]:
        """The attention of every layer."""
        from common.vlm.cuda.decode_attention import Places, Scratch, attend, plan_items

        heads, kv_heads = query.shape[1], pool.shared.shape[3]
        lane = torch.arange(self.rows, dtype=torch.int32, device=self.device)
        flat, ranges = plan_items(
            [(slot, batch.prefix_tokens) for slot in range(self.groups)],
            slots=self.groups,
            items=items,
            block=blocks.prefix_keys,
        )
        places = Places(
            row_lane=lane,
            lane_row=lane,
            lane_tokens=torch.full_like(lane, batch.private_tokens),
            items=torch.tensor(flat, dtype=torch.int32, device=self.device),
            ranges=torch.tensor(ranges, dtype=torch.int32, device=self.device),
        )
        scratch = Scratch.make(
            items=items,
            lanes=self.samples,
            rows=self.rows,
            kv_heads=kv_heads,
            per_kv=heads // kv_heads,
            width=query.shape[2],
            device=self.device,
        )
        call = partial(attend, query, places=places, scratch=scratch, blocks=blocks)
        out = torch.empty_like(query)
        return [
            partial(call, pool.shared[n], pool.private[n], out) for n in range(len(self.layers))
        ]

    def _attention_candidates(self) -> list[tuple[int, Any]]:
        from common.vlm.cuda.decode_attention import Blocks

        if self.device.type != "cuda":
            return [(8, Blocks())]
        whole = 132 // text_config(self.made.model.config).num_key_value_heads
        found: list[tuple[int, Any]] = []
        for items in sorted({max(whole, self.groups), 2 * whole, 3 * whole}):
            found += [
                (items, Blocks()),
                (items, Blocks(own_keys=32)),
                (items, Blocks(stages=2)),
                (items, Blocks(stages=4)),
                (items, Blocks(warps=8)),
                (items, Blocks(prefix_keys=128, stages=2, warps=8)),
                (items, Blocks(prefix_keys=32, own_keys=32, stages=4)),
            ]
        return found


@cache
def decode_stream(device: torch.device, sms: int | None) -> torch.cuda.Stream:
    """A stream whose kernels fill no more than so many multiprocessors; None: all."""
    if sms is None:
        return torch.cuda.Stream(device)
    from common.gpu.green_streams import GreenStreams

    return GreenStreams(device.index or 0, (sms,)).stream(sms)


def _label(tiles: Any) -> str:
    return f"{tiles.columns}x{tiles.inner} /{tiles.splits} s{tiles.stages} w{tiles.warps}"


def _once(call: Callable[[], Any]) -> float:
    """Microseconds of one call, where figures mean nothing anyway."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6
