from __future__ import annotations

import pytest
import torch

from services.rollout.engines.protocol import FinishedGroup
from services.rollout.recording import Recording, RecordingInvalid


def group(index: int, lengths: list[int]) -> FinishedGroup:
    tokens = sum(lengths)
    return FinishedGroup(
        group=index,
        tokens=torch.arange(tokens) + 100 * index,
        lengths=torch.tensor(lengths),
        logprobs=torch.zeros(tokens),
        finish_reasons=torch.zeros(len(lengths), dtype=torch.uint8),
        decode_iteration=1,
        weights_version=0,
    )


def test_what_was_written_is_read(tmp_path):
    groups = [group(0, [2, 0, 3]), group(3, [1])]
    Recording.write(tmp_path / "responses", 7, groups)
    recording = Recording.read(tmp_path / "responses", 7)
    for one in groups:
        found = recording.responses(one.group)
        assert torch.equal(found.tokens, one.tokens)
        assert torch.equal(found.lengths, one.lengths)
    assert [path.name for path in (tmp_path / "responses").iterdir()] == [
        "step-00000007.safetensors"
    ]


def test_a_step_that_is_run_again_replaces_its_recording(tmp_path):
    Recording.write(tmp_path, 0, [group(0, [2]), group(1, [2])])
    Recording.write(tmp_path, 0, [group(0, [4])])
    recording = Recording.read(tmp_path, 0)
    assert recording.responses(0).lengths.tolist() == [4]
    with pytest.raises(RecordingInvalid, match=r"no responses of group 1"):
        recording.responses(1)


def test_replicas_record_their_groups_apart(tmp_path):
    Recording.write(tmp_path, 3, [group(0, [2]), group(2, [3])])
    Recording.write(tmp_path, 3, [group(1, [4])], replica=1)
    recording = Recording.read(tmp_path, 3)
    found = [recording.responses(number).lengths.tolist() for number in range(3)]
    assert found == [[2], [4], [3]]
    # Run again with one replica.
    Recording.write(tmp_path, 3, [group(0, [5]), group(1, [6])])
    assert Recording.read(tmp_path, 3).responses(1).lengths.tolist() == [6]
    (tmp_path / "step-00000003.1.safetensors").write_bytes(b"")
    with pytest.raises(RecordingInvalid, match=r"step-00000003\.1\.safetensors"):
        Recording.read(tmp_path, 3)


def test_a_replica_whose_groups_were_all_dropped_records_nothing(tmp_path):
    Recording.write(tmp_path, 3, [group(1, [4])], replica=1)
    Recording.write(tmp_path, 3, [group(2, [5])], replica=2)
    recording = Recording.read(tmp_path, 3)
    assert [recording.responses(number).lengths.tolist() for number in (1, 2)] == [[4], [5]]


@pytest.mark.parametrize("contents", [None, b"", b"not safetensors"])
def test_a_missing_or_broken_recording_is_named(tmp_path, contents):
    if contents is not None:
        (tmp_path / "step-00000002.safetensors").write_bytes(contents)
    with pytest.raises(RecordingInvalid, match=r"step-00000002\.safetensors"):
        Recording.read(tmp_path, 2)
