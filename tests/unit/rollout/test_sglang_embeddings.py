"""What a request has of its prompt's embeddings, in another process."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from services.rollout.engines.sglang.host.embeddings import SharedEmbeddings
from tests.unit.structure.source import ROOT

VISION = torch.arange(24, dtype=torch.float32).reshape(6, 4)
CODE = """
import pickle, sys
tensor = pickle.loads(bytes.fromhex(sys.argv[1]))
print(tuple(tensor.shape), tensor.dtype, tensor.double().sum().item())
"""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def vision(request):
    return VISION.to(request.param)


def test_another_process_reads_the_rows_where_they_are(vision):
    shared = SharedEmbeddings(vision)
    try:
        pickled = pickle.dumps(shared.rows(2, 5))
        done = subprocess.run(
            [sys.executable, "-c", CODE, pickled.hex()],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        shared.close()
    assert done.stdout.strip() == f"(3, 4) {vision.dtype} {float(vision[2:5].sum())}"


def test_a_mapping_outlives_the_memory_s_owner(vision):
    shared = SharedEmbeddings(vision)
    rows = pickle.loads(pickle.dumps(shared.rows(0, 6)))
    shared.close()
    assert torch.equal(rows, vision)


def test_rows_that_are_left_out_have_the_digest_of_all(vision):
    shared = SharedEmbeddings(vision)
    try:
        rows = shared.rows(1, 4)
        short = rows.left_out()
        others = {shared.rows(0, 3).digest, shared.rows(1, 3).digest}
        again = SharedEmbeddings(vision[1:4])
        assert again.rows(0, 3).digest == rows.digest == short.digest
        again.close()
        assert rows.digest not in others
        assert pickle.loads(pickle.dumps(short)).shape == (0, 4)
    finally:
        shared.close()


def test_what_travels_does_not_grow_with_the_prompt():
    sizes = []
    for tokens in (4, 4096):
        shared = SharedEmbeddings(torch.zeros((tokens, 64)))
        sizes.append(len(pickle.dumps(shared.rows(0, tokens))))
        shared.close()
    assert sizes[1] < sizes[0] + 16
