"""Pictures and videos become the patches that the vision tower expects."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from common.data.errors import SampleError, SampleFault
from common.data.vision import VisionProcessor, group_frames, seconds_per_frame
from common.vlm.errors import ModelFilesError
from common.vlm.loading import load_config

MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


@pytest.fixture(scope="module")
def vision(model_folder):
    return VisionProcessor(model_folder, load_config(model_folder))


def random_frames(count, height, width, seed=0):
    shape = (count, height, width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def naive_patches(frames, patch=14, merge=2, temporal=2):
    """Cut frames by the definition: blocks of merge x merge patches, channel before time."""
    frames = list((frames / 255.0 - MEAN) / STD)
    while len(frames) % temporal:
        frames.append(frames[-1])
    rows = []
    height, width, _ = frames[0].shape
    for t in range(0, len(frames), temporal):
        for block_y in range(height // patch // merge):
            for block_x in range(width // patch // merge):
                for in_y in range(merge):
                    for in_x in range(merge):
                        y = (block_y * merge + in_y) * patch
                        x = (block_x * merge + in_x) * patch
                        cube = np.stack(frames[t : t + temporal])
                        cut = cube[:, y : y + patch, x : x + patch]
                        rows.append(cut.transpose(3, 0, 1, 2).ravel())
    return np.stack(rows)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_video_is_cut_by_the_definition(vision, count):
    frames = random_frames(count, 56, 28)
    patches = vision.video({"type": "video", "video": frames, "fps": 4.0}, "s")
    assert patches.grid_thw == (-(-count // 2), 4, 2)
    assert patches.values.dtype == np.float32
    np.testing.assert_allclose(patches.values, naive_patches(frames), atol=2e-6)
    assert patches.second_per_grid == pytest.approx(0.5)


def test_a_picture_is_a_video_of_its_repetition(vision):
    frame = random_frames(1, 28, 56)[0]
    patches = vision.image({"type": "image", "image": frame}, "s")
    assert patches.grid_thw == (1, 2, 4)
    np.testing.assert_allclose(patches.values, naive_patches(np.stack([frame, frame])), atol=2e-6)


def test_frames_keep_their_places_in_a_temporal_patch():
    patches = np.arange(3 * 2, dtype=np.float32).reshape(6, 1) + np.zeros((1, 3 * 2 * 4))
    grouped = group_frames(patches, 3, 2).reshape(2, 2, 3, 2, 4)
    assert (grouped[0, :, 0, 0, 0] == [0, 1]).all()
    assert (grouped[0, :, 0, 1, 0] == [2, 3]).all()
    assert (grouped[1, :, 0, 0, 0] == [4, 5]).all()
    assert (grouped[1, :, 0, 1, 0] == [4, 5]).all()


def test_lists_paths_and_arrays_give_the_same_video(vision, tmp_path):
    frames = random_frames(4, 28, 28)
    np.save(tmp_path / "clip.npy", frames)
    pictures = [Image.fromarray(frame) for frame in frames]
    paths = []
    for number, picture in enumerate(pictures):
        paths.append(str(tmp_path / f"{number}.png"))
        picture.save(paths[-1])
    values = [
        vision.video({"video": source}, "s").values
        for source in (frames, str(tmp_path / "clip.npy"), pictures, paths)
    ]
    for other in values[1:]:
        np.testing.assert_array_equal(other, values[0])


def test_pixel_limits_resize_exactly_once(model_folder):
    config = load_config(model_folder)
    small = VisionProcessor(model_folder, config, max_pixels=56 * 56)
    assert small.image({"image": random_frames(1, 224, 224)[0]}, "s").grid_thw == (1, 4, 4)
    large = VisionProcessor(model_folder, config, min_pixels=112 * 112)
    assert large.image({"image": random_frames(1, 28, 28)[0]}, "s").grid_thw == (1, 8, 8)
    with pytest.raises(ModelFilesError, match="min_pixels is 12544, over max_pixels 3136"):
        VisionProcessor(model_folder, config, min_pixels=112 * 112, max_pixels=56 * 56)


@pytest.mark.parametrize(
    ("frames", "fps", "indices", "seconds"),
    [
        (4, None, None, 0.5),
        (4, 8.0, None, 0.125),
        (3, 30, [0, 15, 30], 0.5),
        (3, 10.0, [2, 3, 10], 0.4),
        (1, 5.0, [7], 0.2),
    ],
)
def test_the_users_rate_and_places_win(frames, fps, indices, seconds):
    assert seconds_per_frame(frames, fps=fps, indices=indices) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"video": []}, "no frames"),
        ({"video": random_frames(2, 28, 28), "fps": 0}, "fps is 0"),
        ({"video": random_frames(2, 28, 28), "fps": float("nan")}, "fps is nan"),
        ({"video": random_frames(2, 28, 28), "frames_indices": [1]}, "1 frames_indices for 2"),
        ({"video": random_frames(2, 28, 28), "frames_indices": [3, 3]}, "do not increase"),
        ({"video": [random_frames(1, 28, 28)[0], random_frames(1, 28, 56)[0]]}, "different sizes"),
        ({"video": random_frames(2, 28, 28)[0]}, "not \\[frames"),
        ({"video": "clip.mp4"}, "must be a .npy"),
        ({"video": "/no/clip.npy"}, "/no/clip.npy"),
        ({"video": 3}, "not int"),
    ],
)
def test_bad_videos_are_named(vision, part, words):
    with pytest.raises(SampleError, match=words) as caught:
        vision.video(part, "train[4]")
    assert caught.value.fault is SampleFault.UNREADABLE_VIDEO
    assert "train[4]" in str(caught.value)


def test_bad_pictures_are_named(vision, tmp_path):
    text = tmp_path / "text.png"
    text.write_text("no picture")
    cut = tmp_path / "cut.png"
    Image.fromarray(random_frames(1, 64, 64)[0]).save(cut)
    cut.write_bytes(cut.read_bytes()[:500])
    bad = (str(text), str(cut), "/no/a.png", np.zeros((28, 28, 3)), 3, None, np.zeros(4, np.uint8))
    for source in (*bad, random_frames(1, 1, 300)[0]):
        with pytest.raises(SampleError) as caught:
            vision.image({"image": source}, "train[4]")
        assert caught.value.fault is SampleFault.UNREADABLE_IMAGE
        if isinstance(source, str):
            assert source in str(caught.value)


def test_grey_and_transparent_pictures_become_rgb(vision, tmp_path):
    grey = random_frames(1, 28, 28)[0][:, :, 0]
    rgb = vision.image({"image": np.stack([grey] * 3, axis=-1)}, "s").values
    np.testing.assert_array_equal(vision.image({"image": grey}, "s").values, rgb)
    clear = np.dstack([grey, grey, grey, np.full_like(grey, 255)])
    Image.fromarray(clear).save(tmp_path / "clear.png")
    from_file = vision.image({"image": str(tmp_path / "clear.png")}, "s").values
    np.testing.assert_array_equal(from_file, rgb)
