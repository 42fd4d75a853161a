from __future__ import annotations

import torch

from common.vlm.loading import empty_model, weight_layout
from common.vlm.parallel.model import config_shape
from common.vlm.parallel.shards import rank_layout, shards
from common.vlm.parallel.state import take_shard
from common.vlm.random_weights import fill_random
from common.vlm.tiny import tiny_config
from common.weights.binding import views


def _filled(*, seed: int = 3, train_vision: bool = False) -> dict[str, torch.Tensor]:
    config = tiny_config()
    layout = weight_layout(
        empty_model(config, dtype=torch.float32), train_vision=train_vision, dtype=torch.float32
    )
    flat = torch.full((layout.total_elements,), float("nan"))
    tensors = views(flat, layout)
    fill_random(tensors, seed=seed)
    assert all(bool(one.isfinite().all()) for one in tensors.values())
    return tensors


def test_values_do_not_depend_on_what_trains() -> None:
    frozen, trained = _filled(), _filled(train_vision=True)
    assert frozen.keys() == trained.keys()
    assert all(torch.equal(frozen[name], trained[name]) for name in frozen)


def test_ranks_have_the_parts_of_the_same_values() -> None:
    config, whole = tiny_config(), _filled()
    layout = weight_layout(
        empty_model(config, dtype=torch.float32), train_vision=False, dtype=torch.float32
    )
    for rank in range(2):
        parts = shards(layout, config_shape(config), rank=rank, degree=2)
        own = rank_layout(layout, parts, rank=rank, degree=2)
        tensors = views(torch.empty(own.total_elements), own)
        fill_random(tensors, seed=3, shards=parts)
        for name, view in tensors.items():
            assert torch.equal(view, take_shard(whole[name], parts[name])), name


def test_another_seed_gives_other_matrices() -> None:
    first, second = _filled(), _filled(seed=4)
    matrices = [name for name, view in first.items() if view.dim() > 1]
    assert not any(torch.equal(first[name], second[name]) for name in matrices)


def test_norms_are_one_and_matrices_keep_the_scale() -> None:
    filled = _filled()
    norms = [view for name, view in filled.items() if name.endswith("norm.weight")]
    assert norms
    assert all(bool((view == 1).all()) for view in norms)
    down = filled["model.language_model.layers.0.mlp.down_proj.weight"]
    assert abs(float(down.std()) * down.shape[1] ** 0.5 - 1) < 0.1
