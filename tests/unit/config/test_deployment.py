from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from common.config.base import ConfigError
from common.config.deployment import (
    UNIX_SOCKET_PATH_LIMIT_BYTES,
    Deployment,
    load_deployment,
)
from common.config.environment import (
    read_environment,
    set_allocator,
    set_collectives,
    set_threads,
)
from common.ids import WORKERS, Participant, Service

BROKER = Participant(service=Service.BROKER)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("ROLLPLEX_STATE_DIR", raising=False)
    monkeypatch.delenv("ROLLPLEX_CONFIG", raising=False)


def test_default_addresses_are_distinct_and_loopback():
    deployment = load_deployment()
    assert deployment.controller_address == "127.0.0.1:7400"
    addresses = [
        address(participant)
        for participant in deployment.participants
        for address in (deployment.grpc_address, deployment.http_address)
    ]
    assert len(set(addresses)) == len(addresses) == 12
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_broker_and_controller_come_before_the_workers():
    names = [str(participant) for participant in load_deployment().participants]
    assert names[:2] == ["broker/0", "controller/0"]
    assert names[2:] == [f"{service}/0" for service in WORKERS]


def test_every_rank_has_ports_of_its_own():
    deployment = load_deployment(None, ["train_tp=10", "rollout_tp=10"])
    assert len(deployment.participants) == 42
    addresses = {deployment.grpc_address(participant) for participant in deployment.participants}
    assert len(addresses) == 42


def test_there_are_ports_for_ten_ranks_of_a_service():
    with pytest.raises(ConfigError, match="at most 10 processes, and learner 12; lower one"):
        load_deployment(None, ["train_tp=3", "rollout_tp=3", "dp=4"])
    with pytest.raises(ConfigError, match="at most 10 processes, and rollout 12; lower one"):
        load_deployment(None, ["rollout_tp=3", "rollout_dp=4"])


def test_ports_of_the_system_and_single_exceptions():
    deployment = load_deployment(None, ["grpc_port_base=0", "services.broker.grpc_port=9000"])
    assert deployment.grpc_address(BROKER) == "127.0.0.1:9000"
    assert deployment.controller_address == "127.0.0.1:0"
    assert deployment.http_address(BROKER) == "127.0.0.1:7501"
    sets = ["train_tp=2", "rollout_tp=2", "services.learner.grpc_port=0"]
    ranks = load_deployment(None, sets)
    assert ranks.grpc_address(Participant(service=Service.LEARNER, rank=1)) == "127.0.0.1:0"


def test_workers_share_the_cores_equally_and_the_rest_compute_nothing(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    deployment = load_deployment()
    threads = {str(p): deployment.threads(p) for p in deployment.participants}
    assert threads.pop("broker/0") == threads.pop("controller/0") == 1
    assert set(threads.values()) == {4}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert load_deployment().worker_threads == 1
    assert load_deployment(None, ["threads_per_worker=3"]).worker_threads == 3


def test_set_threads_bounds_every_library():
    variables = {}
    set_threads(3, variables)
    assert variables["OMP_NUM_THREADS"] == variables["MKL_NUM_THREADS"] == "3"


def test_the_allocator_of_the_user_stays():
    variables = {}
    set_allocator(variables)
    assert "large_segment_size_mb:256" in variables["PYTORCH_ALLOC_CONF"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {name: "expandable_segments:False"}
        set_allocator(chosen)
        assert chosen == {name: "expandable_segments:False"}


def test_collectives_stay_on_the_node_unless_the_user_says_otherwise():
    variables = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_GRAPH_REGISTER": "1"}
    set_collectives(variables)
    assert variables == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_GRAPH_REGISTER": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


@pytest.mark.parametrize("length", [10, 80, 85, 90, 200])
def test_socket_paths_fit_whatever_the_state_dir(tmp_path, length):
    deployment = Deployment(state_dir=Path("/") / ("x" * length))
    for path in (
        deployment.broker_socket,
        deployment.redis_socket,
        deployment.supervisor_socket,
        Path(deployment.hub_address.removeprefix("ipc://")),
    ):
        assert len(os.fsencode(path)) <= UNIX_SOCKET_PATH_LIMIT_BYTES
    other = Deployment(state_dir=Path("/") / ("y" * length))
    assert deployment.socket_dir != other.socket_dir


def test_folders_are_made_private(tmp_path):
    deployment = Deployment(state_dir=tmp_path / "state")
    deployment.make_dirs()
    deployment.make_dirs()
    for folder in (deployment.state_dir, deployment.log_dir, deployment.redis_dir):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    deployment.socket_dir.rmdir()


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*set another state_dir"):
        Deployment(state_dir=tmp_path / "file").make_dirs()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"link has to be a folder"):
        Deployment(state_dir=tmp_path / "link").make_dirs()


def test_relative_paths_are_from_where_the_command_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_deployment().state_dir == tmp_path / ".rollplex"
    assert load_deployment(None, ["governor_table=rates"]).governor_table == tmp_path / "rates"


def test_environment_gives_file_and_state_dir(tmp_path, monkeypatch):
    file = tmp_path / "d.toml"
    file.write_text('name = "there"\nstate_dir = "/ignored"\n')
    monkeypatch.setenv("ROLLPLEX_CONFIG", str(file))
    monkeypatch.setenv("ROLLPLEX_STATE_DIR", str(tmp_path / "s"))
    deployment = load_deployment()
    assert (deployment.name, deployment.state_dir) == ("there", tmp_path / "s")
    assert load_deployment(None, ["state_dir=/elsewhere"]).state_dir == Path("/elsewhere")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ROLLPLEX_STATE_DIR", "", "set but empty"),
        ("ROLLPLEX_STATE_DIR", __file__, "is a file"),
        ("ROLLPLEX_CONFIG", "/absent.toml", "is not a file"),
        ("ROLLPLEX_STATEDIR", "/x", "legal are ROLLPLEX_STATE_DIR, ROLLPLEX_CONFIG"),
    ],
)
def test_bad_environment_raises(name, value, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_environment({name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("redis.url=localhost", "has to begin with redis://"),
        ("services.lerner.grpc_port=1", "should be 'controller', 'broker'"),
        ("device=tpu", "device = 'tpu'"),
        ("name=Has Space", "name = 'Has Space'"),
        ("train_tp=11", "less than or equal to 10"),
        ("dp=11", "less than or equal to 10"),
    ],
)
def test_wrong_value_is_named(item, words):
    with pytest.raises(ConfigError, match=words):
        load_deployment(None, [item])


def test_every_replica_has_all_ranks():
    deployment = load_deployment(None, ["train_tp=2", "rollout_tp=2", "dp=3"])
    assert {service: deployment.ranks(service) for service in Service} == {
        Service.CONTROLLER: 1,
        Service.BROKER: 1,
        **dict.fromkeys(WORKERS, 6),
    }
    place = deployment.place(Participant(service=Service.ROLLOUT, rank=5))
    assert (place.replica, place.tensor_rank) == (2, 1)


@pytest.mark.parametrize(("dp", "gpus"), [(1, 2), (3, 6)])
def test_every_rank_of_every_replica_has_a_gpu_and_is_governed(dp, gpus):
    deployment = load_deployment(
        None, ["train_tp=2", "rollout_tp=2", f"dp={dp}", "device=cuda", "governor=on"]
    )
    assert deployment.gpus == gpus
    assert deployment.governed
    for service in WORKERS:
        ranks = [Participant(service=service, rank=rank) for rank in range(gpus)]
        assert [deployment.gpu(rank) for rank in ranks] == list(range(gpus))


@pytest.mark.parametrize("item", ["device=cuda", "governor=on"])
def test_degrees_that_differ_run_ungoverned_on_the_cpu(item):
    name, _, value = item.partition("=")
    for train_tp, rollout_tp in ((2, 1), (1, 2)):
        refused = f"train_tp = {train_tp} .* rollout_tp = {rollout_tp} .*: .*{name} = '{value}'"
        with pytest.raises(ConfigError, match=refused):
            load_deployment(None, [f"train_tp={train_tp}", f"rollout_tp={rollout_tp}", item])


@pytest.mark.parametrize("item", ["device=cuda", "governor=on"])
def test_so_do_replicas_of_the_rollout_of_a_number_of_their_own(item):
    with pytest.raises(ConfigError, match=r"dp = 1 with rollout_tp = 1 and rollout_dp = 2: sides"):
        load_deployment(None, ["rollout_dp=2", item])
    assert load_deployment(None, ["rollout_dp=1", item]).rollout_replicas == 1


@pytest.mark.parametrize(
    ("training", "rollout_tp", "replicas"),
    [
        ((1, 1), 1, 1),
        ((2, 1), 1, 2),
        ((4, 1), 2, 2),
        ((1, 1), 2, 1),
        ((1, 2), 2, 1),
        ((2, 2), 4, 1),
        ((2, 2), 2, 2),
        ((3, 2), 1, 6),
    ],
    ids=str,
)
def test_the_rollout_fills_the_gpus_of_training(training, rollout_tp, replicas):
    train_tp, dp = training
    items = [f"train_tp={train_tp}", f"dp={dp}", f"rollout_tp={rollout_tp}"]
    deployment = load_deployment(None, items)
    assert deployment.rollout_replicas == replicas
    assert deployment.ranks(Service.ROLLOUT) == rollout_tp * replicas
    assert deployment.ranks(Service.REFERENCE) == train_tp * dp


def test_the_rollout_may_have_more_or_fewer_replicas():
    for replicas in (1, 2, 8):
        deployment = load_deployment(None, ["dp=4", f"rollout_dp={replicas}"])
        place = deployment.place(Participant(service=Service.ROLLOUT))
        assert place.replicas == deployment.ranks(Service.ROLLOUT) == replicas
        assert deployment.partners.replica_count(Service.ROLLOUT) == replicas
        assert deployment.place(Participant(service=Service.LEARNER)).replicas == 4


@pytest.mark.parametrize(
    ("items", "numbers"),
    [
        (["dp=2", "rollout_dp=3"], "dp = 2 with rollout_tp = 1 and rollout_dp = 3"),
        (
            ["train_tp=3", "dp=2", "rollout_tp=2"],
            "dp = 2 with rollout_tp = 2 and rollout_dp = 3",
        ),
    ],
)
def test_replicas_that_cannot_share_groups_are_refused(items, numbers):
    with pytest.raises(ConfigError, match=f"{numbers}: .* a multiple .*set rollout_dp"):
        load_deployment(None, items)


def test_a_rank_has_the_gpu_that_has_its_weights():
    deployment = load_deployment(None, ["train_tp=4", "rollout_tp=2"])
    ranks = [Participant(service=Service.ROLLOUT, rank=rank) for rank in range(4)]
    assert [deployment.gpu(one) for one in ranks] == [0, 2, 1, 3]
    assert deployment.gpu(Participant(service=Service.LEARNER, rank=3)) == 3


def test_every_worker_has_the_ranks_of_its_side():
    deployment = load_deployment(None, ["train_tp=2", "rollout_tp=4"])
    expected = {
        Service.CONTROLLER: 1,
        Service.BROKER: 1,
        **dict.fromkeys(WORKERS, 2),
        Service.ROLLOUT: 4,
    }
    assert {service: deployment.ranks(service) for service in Service} == expected
    assert deployment.partners.ranks == {service: expected[service] for service in WORKERS}


def test_redis_of_the_node_or_the_configured_one():
    assert load_deployment().redis_url.endswith("/run/redis.sock")
    assert load_deployment(None, ["redis.url=redis://h:1"]).redis_url == "redis://h:1"


@pytest.mark.parametrize(
    ("device", "governor", "governed"),
    [
        ("cpu", "auto", False),
        ("cpu", "on", True),
        ("cpu", "off", False),
        ("cuda", "auto", True),
        ("cuda", "on", True),
        ("cuda", "off", False),
    ],
)
def test_background_work_is_governed_where_there_is_a_gpu_or_it_is_asked_for(
    device, governor, governed
):
    assert Deployment(node="here", device=device, governor=governor).governed is governed


@pytest.mark.parametrize(
    ("device", "rollout_gpus", "gpus", "of_rollout"),
    [("cpu", "own", 0, 0), ("cuda", "shared", 1, 0), ("cuda", "own", 2, 1)],
)
def test_a_rollout_apart_has_the_gpus_behind_those_of_training(
    device, rollout_gpus, gpus, of_rollout
):
    deployment = Deployment(device=device, rollout_gpus=rollout_gpus)
    assert deployment.gpus == gpus
    assert deployment.gpu(Participant(service=Service.ROLLOUT)) == of_rollout
    assert deployment.gpu(Participant(service=Service.LEARNER)) == 0
    assert deployment.governed is (device == "cuda" and rollout_gpus == "shared")


def test_a_rollout_apart_comes_behind_all_replicas_of_training():
    settings = {"device": "cuda", "rollout_gpus": "own", "train_tp": 2, "rollout_tp": 2, "dp": 2}
    deployment = Deployment(**settings)
    assert deployment.gpus == 8
    ranks = [Participant(service=Service.ROLLOUT, rank=rank) for rank in range(4)]
    assert [deployment.gpu(rank) for rank in ranks] == [4, 5, 6, 7]
