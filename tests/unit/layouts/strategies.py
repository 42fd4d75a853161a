"""Random models and layouts."""

from __future__ import annotations

from hypothesis import strategies as st

from common.layouts.box import Box
from common.layouts.kinds import ROLLOUT_LAYOUTS, TRAIN_LAYOUTS
from common.layouts.model import legal_degrees
from common.layouts.tensors import Layout, LogicalTensor, Part, RankTensor
from common.vlm.shape import MODEL_TYPES, QWEN3, ModelShape, VisionShape


@st.composite
def shapes(draw, *, layers=1):
    model_type = draw(st.sampled_from(MODEL_TYPES))
    newer = model_type == QWEN3
    heads, kv_heads = draw(st.sampled_from([(4, 2), (8, 2), (8, 8), (6, 2), (6, 3), (12, 4)]))
    return ModelShape(
        name="random",
        model_type=model_type,
        vocabulary=draw(st.integers(1430, 1536)),
        width=3,
        inner=24,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=2,
        attention_bias=draw(st.booleans()),
        output_bias=newer,
        head_norms=newer,
        tied=draw(st.booleans()),
        vision=VisionShape(
            depth=layers,
            width=8,
            inner=draw(st.sampled_from([8, 10, 24])),
            heads=draw(st.sampled_from([2, 4, 8])),
            patch_elements=2,
            merged_patches=2,
            out_width=3,
            deepstack=layers if newer else 0,
            positions=3 if newer else 0,
        ),
    )


@st.composite
def pairs(draw, *, layers=1, most_ranks=8):
    shape = draw(shapes(layers=layers))
    degrees = st.sampled_from([one for one in legal_degrees(shape) if one <= most_ranks])
    train = (draw(st.sampled_from(TRAIN_LAYOUTS)), draw(degrees))
    return shape, train, (draw(st.sampled_from(ROLLOUT_LAYOUTS)), draw(degrees))


@st.composite
def free_layouts(draw):
    """Two layouts of a few matrices: cut anywhere, joined in any order, in as many ranks each."""
    columns = draw(st.integers(1, 3))
    tensors = [
        LogicalTensor(name=name, shape=(draw(st.integers(1, 12)), columns)) for name in "abc"
    ]
    return tuple(draw(layouts_of(tensors)) for _ in range(2))


@st.composite
def layouts_of(draw, tensors):
    degree = draw(st.integers(1, 4))
    order = draw(st.permutations(tensors))
    joined = draw(st.sampled_from([[3], [1, 2], [2, 1], [1, 1, 1]]))
    per_rank = [{} for _ in range(degree)]
    for tensor in tensors:
        rows, columns = tensor.shape
        # every rank has at least one row: some rows may then be on two ranks
        cuts = sorted(
            draw(st.lists(st.integers(0, rows), min_size=degree - 1, max_size=degree - 1))
        )
        for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, rows], strict=True)):
            start = min(start, rows - 1)
            box = Box(((start, max(stop, start + 1)), (0, columns)))
            per_rank[rank][tensor.name] = Part(tensor, box)
    ranks = []
    for held in per_rank:
        parts = [held[tensor.name] for tensor in order]
        made = []
        for size in joined:
            group, parts = parts[:size], parts[size:]
            made.append(RankTensor((f"joined{len(made)}",), tuple(group)))
        ranks.append(tuple(made))
    return Layout(name="free", ranks=tuple(ranks), in_blocks=draw(st.booleans()))
