"""SGLang's real engine on the CPU, as the rollout drives it, on a policy of a few kilobytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from common.vlm.initialise import initialise, load_spec
from common.vlm.tiny import tiny_config
from tests.sglang.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sglang.policy import Driven

REPOSITORY = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "cpu"
VOCABULARY = 384
"""A multiple of the rows that SGLang pads tables to."""
VISION_INNER = 60
"""No multiple of the 8 that SGLang pads the tower's to, like the 3420 of the published models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An engine that is up, and what it samples from."""

    policy: Policy
    engine: Driven


@pytest.fixture(scope="session")
def engine_python(request: pytest.FixtureRequest) -> Path:
    """Interpreter that has SGLang; its processes find the stand-ins of what a CPU lacks."""
    path = Path(request.config.getoption("--sglang-python")).absolute()
    if not path.exists():
        pytest.fail(f"--sglang-python {path}: no interpreter; make test-sglang installs one")
    return path


@pytest.fixture(scope="session", autouse=True)
def stubs() -> Iterator[None]:
    """The engine's processes inherit this process's environment."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with `tiny_config`."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    initialise(load_spec(REPOSITORY / "rollplex" / "verify" / "model.toml"), path)
    config = tiny_config(vocab_size=VOCABULARY)
    config.vision_config.intermediate_size = VISION_INNER
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.to_json_file(path / "config.json", use_diff=False)
    return path


@pytest.fixture(scope="session")
def aliased(
    folder: Path, engine_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """One for all tests that leave it as it was: it takes long to start."""
    with Policy.of(folder) as policy:
        engine = policy.engine(engine_python, tmp_path_factory.mktemp("run"))
        engine.prepare()
        try:
            yield Running(policy=policy, engine=engine)
        finally:
            engine.close()
