"""A model folder for data workers."""

from __future__ import annotations

import pytest

from common.vlm.initialise import ModelSpec, TokenizerSpec, initialise


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    spec = ModelSpec(tokenizer=TokenizerSpec(texts=("a question",)))
    return initialise(spec, tmp_path_factory.mktemp("models") / "small").path
