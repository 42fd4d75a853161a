"""The whole system on one machine: make a model, start every service, train, stop everything.

`python -m examples.demo [--out runs/demo] [--schedule rollplex] [--steps N]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXAMPLE = Path("examples/digits")
MODEL = Path("runs/models/digits")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns 0 if the run succeeded."""
    arguments = _parser().parse_args(argv)
    out: Path = arguments.out
    _make_room(out)
    if not MODEL.is_dir():
        _rollplex("init-model", str(EXAMPLE / "model.toml"), str(MODEL))
    recipe = str(EXAMPLE / "recipe.toml")
    sets = [f"training.schedule={arguments.schedule}"]
    if arguments.steps is not None:
        sets.append(f"training.steps={arguments.steps}")
    with _node(out.with_name(f"{out.name}-node")) as address:
        options = [part for item in sets for part in ("--set", item)]
        return _rollplex("--address", address, "run", recipe, "--out", str(out), *options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the run")
    parser.add_argument("--schedule", default="rollplex", help="serial, rollplex or fused")
    parser.add_argument("--steps", type=int, help="updates; by default the recipe's")
    return parser


def _make_room(out: Path) -> None:
    """Remove an earlier demo's folder; never a folder that is something else."""
    if not out.exists():
        return
    if not (out / "recipe.json").is_file():
        raise SystemExit(f"error: {out} exists and is no run of this demo; give another --out")
    shutil.rmtree(out)


@contextlib.contextmanager
def _node(folder: Path) -> Iterator[str]:
    """Every service on free ports, stopped at the end whatever happens."""
    port = _free_port()
    deployment = {
        "name": f"demo-{port}",
        "state_dir": str(folder),
        "grpc_port_base": 0,
        "http_port_base": 0,
        "services": {"controller": {"grpc_port": port}},
        "arena_gib": 0.5,
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "deployment.json"
    config.write_text(json.dumps(deployment, indent=2), encoding="utf-8")
    local = [sys.executable, "-m", "deploy.local"]
    try:
        subprocess.run([*local, "up", "--config", str(config)], check=True)
        yield f"127.0.0.1:{port}"
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from error
    finally:
        subprocess.run([*local, "down", "--config", str(config)], check=True)


def _rollplex(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "rollplex.cli", *arguments]).returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
