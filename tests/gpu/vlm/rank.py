"""One of two ranks, a GPU each: passes and decoder against those of one rank. Saves what came out.

Arguments: rank, file of the rendezvous, folder for results.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common.config.environment import set_collectives
from common.vlm.bound import bound_model
from common.vlm.kernels import split_model
from common.vlm.loading import empty_model
from common.vlm.parallel.mesh import tensor_mesh
from common.vlm.parallel.model import config_shape, parallel_model
from common.vlm.parallel.shards import rank_layout, shards
from common.vlm.parallel.state import take_shard
from common.vlm.prefix import PrefixKV, packed_shape, prefix_backward
from common.vlm.tiny import tiny_config, tiny_prompt
from common.weights.binding import bind_parameters, views
from tests.gpu.vlm.test_decoder import GROUPS, NEW, SAMPLES, decoder_of

WORLD = 2
TIMEOUT_S = 60.0
LENGTHS = [37, 0, 130, 64]


def whole(dtype):
    """The same weights on every rank, whatever the dtype."""
    config = tiny_config(hidden_size=256, heads=4, kv_heads=2, layers=3, intermediate_size=352)
    return bound_model(
        config,
        dtype=dtype,
        train_vision=True,
        gradient_dtype=torch.float32,
        device="cuda",
        std=0.05,
    )


def passes(split, gradients):
    """Log-probabilities of one group with one image; gradients are added."""
    prompt = tiny_prompt(split.config, images=[(1, 12, 8)], text_tokens=150).to("cuda")
    prefix = split.prefix_kv(prompt, split.vision_embeddings(prompt))
    shape = packed_shape(split.config, prefix.tokens, kv_heads=split.kv_heads)
    packed = torch.empty(shape, device="cuda", dtype=split.dtype)
    prefix.pack(packed)
    gradient = torch.zeros_like(packed, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    tokens_T = torch.randint(8, 200, (sum(LENGTHS),), generator=generator).cuda()
    logprobs = split.response_logprobs(
        last_token=prompt.last_token,
        start_position=prompt.start_position,
        prefix=PrefixKV.leaves(packed, gradient),
        tokens_T=tokens_T,
        lengths_G=LENGTHS,
        temperature=0.7,
        suppressed=torch.tensor([3, 4], device="cuda"),
    )
    (logprobs * torch.linspace(-1, 1, len(logprobs), device="cuda")).sum().backward()
    prefix_backward(prefix, gradient)
    return logprobs.detach().cpu(), gradients.cpu()


def decode(split, *, graph, recorded=None):
    """Tokens of all lanes and their log-probabilities."""
    decoder = decoder_of(split, forced=recorded is not None, early=graph)
    decoder.lanes.uniforms.uniform_(generator=torch.Generator(device="cuda").manual_seed(7))
    if recorded is not None:
        decoder.lanes.recorded.copy_(recorded)
    rows = [(slot, lane) for slot in range(GROUPS) for lane in range(SAMPLES)]
    decoder.set_rows(rows, bucket=16)
    if graph:
        decoder.capture(16)
    for _ in range(NEW):
        decoder.step(16)
    torch.cuda.synchronize()
    decoder.drop_graphs()
    return decoder.lanes.chosen.cpu(), decoder.lanes.logprobs.cpu()


def main(rank, rendezvous, folder):
    set_collectives()
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    mesh = tensor_mesh([list(range(WORLD))], device_type="cuda", timeout_s=TIMEOUT_S)
    made, exact = whole(torch.bfloat16), whole(torch.float32)
    exact.weights.copy_(made.weights)
    shape = config_shape(made.model.config)
    parts = shards(made.layout, shape, rank=rank, degree=WORLD)
    layout = rank_layout(made.layout, parts, rank=rank, degree=WORLD)
    weights = torch.zeros(layout.total_elements, dtype=torch.bfloat16, device="cuda")
    gradients = torch.zeros(layout.trainable_elements, device="cuda")
    model = empty_model(made.model.config, device="cuda", dtype=torch.bfloat16)
    split = parallel_model(model, mesh)
    assert split.fused
    bind_parameters(model, layout, weights, gradients)
    values = views(made.weights, made.layout)
    for name, view in views(weights, layout).items():
        view.copy_(take_shard(values[name], parts[name]))

    one = split_model(made.model, "auto")
    result = {
        "parts": parts,
        "layouts": (made.layout, layout),
        "exact": passes(split_model(exact.model, "plain"), exact.gradients),
        "one": passes(one, made.gradients),
        "ranks": passes(split, gradients),
        "launches": decode(split, graph=False),
        "graph": decode(split, graph=True),
    }
    result["one_decoded"] = decode(one, graph=False, recorded=result["graph"][0].cuda())
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
