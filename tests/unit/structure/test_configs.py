from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from common.config.deployment import Deployment
from common.config.loading import load_config
from common.config.recipe import Recipe
from common.vlm.initialise import ModelSpec
from tests.unit.structure.source import PACKAGES, ROOT, files, name_of

if TYPE_CHECKING:
    from pathlib import Path

    from common.config.base import FrozenConfig

# By the beginning of the file's name.
MODELS: dict[str, type[FrozenConfig]] = {
    "model": ModelSpec,
    "recipe": Recipe,
    "rollplex": Deployment,
}


def _configs() -> list[Path]:
    return [
        path
        for path in files()
        if path.suffix == ".toml" and path.relative_to(ROOT).parts[0] in PACKAGES
    ]


@pytest.mark.parametrize("path", _configs(), ids=name_of)
def test_config_is_read_by_its_model(path: Path) -> None:
    (model,) = [model for prefix, model in MODELS.items() if path.name.startswith(prefix)]
    load_config(model, path)


def test_there_are_configs_of_every_kind() -> None:
    names = [path.name for path in _configs()]
    assert all(any(name.startswith(prefix) for name in names) for prefix in MODELS)
