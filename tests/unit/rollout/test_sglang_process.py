"""The child process of an engine, without SGLang: what it says, and how it ends."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import sys
from pathlib import Path

import pytest
import torch

from services.rollout.engines.errors import EngineGone, EngineRefused
from services.rollout.engines.sglang.messages import START, GroupSampling, SampledResponse
from services.rollout.engines.sglang.process import EngineHost
from services.rollout.engines.sglang.wire import ChannelClosed, Frame, has_frame, receive, send

DEADLINE_S = 60.0


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


def settings(**others):
    fixed = {
        "model_path": "/nowhere",
        "device": "cpu",
        "gpu": 0,
        "ranks": 1,
        "dtype": "float32",
        "seed": 0,
        "max_requests": 1,
        "context_tokens": 1,
        "kv_tokens": 1,
        "step_tokens": 1,
        "memory_fraction": 0.5,
        "release_memory": True,
        "deterministic": False,
        "arguments": {},
    }
    return fixed | others


def test_a_frame_arrives_as_it_was_sent(pair):
    vision = torch.randn(3, 4, dtype=torch.bfloat16)
    sent = GroupSampling(
        group=7,
        token_ids=torch.arange(9),
        positions=torch.arange(27).reshape(3, 9),
        mm_token_type_ids=torch.zeros(9, dtype=torch.int64),
        vision=vision,
        limits=(3, 4),
        seed=2**62,
        step=5,
        sampling={"logit_bias": {"3": float("-inf")}},
    )
    send(pair[0], sent.frame())
    got = GroupSampling.of(receive(pair[1]))
    assert (got.group, got.limits, got.seed, got.step) == (7, (3, 4), 2**62, 5)
    assert got.sampling == sent.sampling
    assert got.vision.dtype is torch.bfloat16
    assert torch.equal(got.vision, vision)
    assert torch.equal(got.positions, sent.positions)


def test_a_response_without_tokens_travels(pair):
    empty = torch.zeros(0)
    sent = SampledResponse(
        group=1, sample=2, tokens=empty.long(), logprobs=empty, versions=("4",), cached_tokens=8
    )
    send(pair[0], sent.frame())
    got = SampledResponse.of(receive(pair[1]))
    assert (got.sample, got.versions, got.cached_tokens, len(got.tokens)) == (2, ("4",), 8, 0)


def test_descriptors_travel(pair):
    read, write = os.pipe()
    send(pair[0], Frame(kind="memory", descriptors=(write,)))
    (theirs,) = receive(pair[1]).descriptors
    os.write(theirs, b"x")
    assert os.read(read, 1) == b"x"
    for descriptor in (read, write, theirs):
        os.close(descriptor)


def test_the_end_of_a_channel_is_an_error(pair):
    pair[0].close()
    with pytest.raises(ChannelClosed):
        receive(pair[1])


def test_an_interpreter_that_is_not_there():
    with pytest.raises(EngineRefused, match="engine_python = '/no/python'"):
        EngineHost(Path("/no/python"), deadline_s=DEADLINE_S)


def test_an_environment_without_sglang_is_named():
    host = EngineHost(Path(sys.executable), deadline_s=DEADLINE_S)
    ranks = [{"layout": "", "memory": None}]
    body = {"settings": settings(), "ranks": ranks}
    try:
        with pytest.raises(EngineRefused, match="No module named 'sglang'"):
            host.ask(Frame(kind=START, body=body))
    finally:
        host.stop()
    assert not host.running


def test_a_host_that_ends_is_noticed():
    host = EngineHost(Path("/bin/true"), deadline_s=DEADLINE_S)
    with pytest.raises(EngineGone, match="exit code"):
        host.ask(Frame(kind=START))
    assert not host.running
    host.stop()


TALKER = """#!{python}
import sys, time
sys.path.insert(0, {root!r})
import socket
from services.rollout.engines.sglang.wire import Frame, send

channel = socket.socket(fileno=int(sys.argv[-2]))
while True:
    send(channel, Frame(kind="progress", body={{"tokens": 1}}))
    time.sleep(0.05)
"""


def test_reports_do_not_put_off_a_deadline(tmp_path):
    talker = tmp_path / "talker"
    talker.write_text(TALKER.format(python=sys.executable, root=str(Path.cwd())))
    talker.chmod(0o755)
    host = EngineHost(talker, deadline_s=DEADLINE_S)
    assert host.report(within_s=DEADLINE_S) is not None
    with pytest.raises(EngineGone, match="no answer to 'abort' within 1 s"):
        host.ask(Frame(kind="abort"), deadline_s=1.0, meanwhile=lambda _: None)
    assert not host.running


def test_descriptors_may_have_large_numbers(pair):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        far = socket.socket(fileno=fcntl.fcntl(pair[1], fcntl.F_DUPFD_CLOEXEC, 2048))
        with far:
            assert not has_frame(far, within_s=0.01)
            send(pair[0], Frame(kind="memory"))
            assert has_frame(far, within_s=DEADLINE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
