from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from common.service.http import HttpServer, Verdict
from deploy.containers.healthcheck import NotAService, main, service_address

if TYPE_CHECKING:
    from pathlib import Path


def cmdline(*arguments: str) -> bytes:
    return b"".join(argument.encode() + b"\0" for argument in arguments)


def learner(port: int) -> bytes:
    return cmdline(
        "python", "-m", "services.learner", "--set", f"services.learner.http_port={port}"
    )


def test_address_follows_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "rollplex.toml"
    config.write_text('host = "0.0.0.0"\nhttp_port_base = 9500\n')
    line = cmdline(
        "/sbin/init", "--", "python", "-m", "services.prefix_encoder", "--config", str(config)
    )
    assert service_address(line) == "127.0.0.1:9520"


def test_rank_moves_the_port() -> None:
    line = cmdline("python", "-m", "services.learner", "--rank", "1")
    assert service_address(line) == "127.0.0.1:7541"


def test_host_is_kept() -> None:
    line = cmdline("python", "-m", "services.broker", "--set", 'host="10.1.2.3"')
    assert service_address(line) == "10.1.2.3:7501"


def test_other_processes_are_named() -> None:
    with pytest.raises(NotAService, match="rollplex list"):
        service_address(cmdline("python", "rollplex", "list"))


def test_port_that_the_system_picked_is_refused() -> None:
    with pytest.raises(NotAService, match="learner/0 has no fixed http_port"):
        service_address(learner(0))


@pytest.mark.parametrize(("healthy", "code"), [(True, 0), (False, 1)])
def test_exit_code_and_line_are_the_services(
    healthy: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict(healthy=healthy, reason="draining")
    with closing(HttpServer("127.0.0.1:0", CollectorRegistry(), lambda: verdict)) as server:
        (tmp_path / "cmdline").write_bytes(learner(int(server.address.rpartition(":")[2])))
        assert main(tmp_path / "cmdline") == code
    assert capsys.readouterr().out == "draining\n"


def test_service_that_does_not_listen_is_unhealthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = HttpServer(
        "127.0.0.1:0", CollectorRegistry(), lambda: Verdict(healthy=True, reason="")
    )
    port = int(server.address.rpartition(":")[2])
    server.close()
    (tmp_path / "cmdline").write_bytes(learner(port))
    assert main(tmp_path / "cmdline") == 1
    assert "refused" in capsys.readouterr().out


def test_deployment_that_cannot_be_read_is_unhealthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = cmdline("python", "-m", "services.broker", "--config", str(tmp_path / "none.toml"))
    (tmp_path / "cmdline").write_bytes(line)
    assert main(tmp_path / "cmdline") == 1
    assert "none.toml" in capsys.readouterr().out
