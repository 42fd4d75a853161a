"""A small model folder that the tests of this folder share."""

from __future__ import annotations

import pytest

from common.data.processor import PromptLimits, PromptProcessor
from common.vlm.initialise import ModelSpec, TokenizerSpec, VisionSpec, initialise


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Pictures of 28 x 28 and more keep their size up to 112 x 112."""
    spec = ModelSpec(
        vision=VisionSpec(min_pixels=28 * 28, max_pixels=112 * 112),
        tokenizer=TokenizerSpec(texts=("Which digit is it?", "What comes next?")),
    )
    return initialise(spec, tmp_path_factory.mktemp("models") / "small").path


@pytest.fixture(scope="session")
def processor(model_folder):
    return PromptProcessor(model_folder, PromptLimits(max_prompt_tokens=200))
