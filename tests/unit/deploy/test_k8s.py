from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.config.deployment import Deployment, ServicePlacement
from common.ids import WORKERS, Participant, Service
from common.service import bootstrap
from tests.unit.deploy.kustomize import Resource, build, containers, pod_specs

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "deploy" / "k8s"
VARIANTS = [K8S / "base", K8S / "overlays" / "cuda"]
# The oldest release in which every kind that is used is stable.
SCHEMA = "1.34"
UNITS = {"": 1.0, "m": 1e-3, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}

variants = pytest.mark.parametrize("folder", VARIANTS, ids=lambda folder: folder.name)


def quantity(text: str | float) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()
    return float(number) * UNITS[unit]


def deployment(resources: list[Resource]) -> Deployment:
    (config,) = [resource for resource in resources if resource["kind"] == "ConfigMap"]
    return Deployment.model_validate(tomllib.loads(config["data"]["rollplex.toml"]))


def workloads(resources: list[Resource]) -> list[Resource]:
    return [resource for resource in resources if pod_specs(resource)]


def services(resources: list[Resource]) -> dict[Service, tuple[Resource, Resource]]:
    """Each service of the deployment: its container and its workload."""
    found: dict[Service, tuple[Resource, Resource]] = {}
    for workload in workloads(resources):
        for container in containers(workload):
            command = container.get("command", [])
            if command[:2] == ["python", "-m"]:
                name = command[2].removeprefix("services.").replace("_", "-")
                assert Service(name) not in found, f"{name} is there twice"
                found[Service(name)] = (container, workload)
    return found


@variants
def test_resources_follow_the_official_schemas(folder: Path) -> None:
    for resource in build(folder):
        kubernetes_validate.validate(resource, SCHEMA, strict=True)


@variants
def test_every_file_of_the_folder_is_used(folder: Path) -> None:
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    used = {
        *settings["resources"],
        *(patch["path"] for patch in settings.get("patches", ())),
        *(name for generator in settings["configMapGenerator"] for name in generator["files"]),
    }
    there = {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
    assert there == {name for name in used if "/" not in name}


@variants
def test_names_are_unique(folder: Path) -> None:
    names = [(resource["kind"], resource["metadata"]["name"]) for resource in build(folder)]
    assert sorted(names) == sorted(set(names))


@variants
def test_selectors_match_the_labels_of_exactly_one_workload(folder: Path) -> None:
    resources = build(folder)
    labels = {
        workload["metadata"]["name"]: workload["spec"]["template"]["metadata"]["labels"]
        for workload in workloads(resources)
    }
    selectors = [
        (resource["metadata"]["name"], resource["spec"]["selector"])
        for resource in resources
        if resource["kind"] == "Service"
    ] + [
        (workload["metadata"]["name"], workload["spec"]["selector"]["matchLabels"])
        for workload in workloads(resources)
    ]
    assert len(selectors) == 6
    for name, selector in selectors:
        matched = [owner for owner, own in labels.items() if selector.items() <= own.items()]
        assert matched == [name]


@variants
def test_services_lead_to_a_port_of_their_pods(folder: Path) -> None:
    resources = build(folder)
    ports = {
        workload["metadata"]["name"]: {
            port["name"]: port["containerPort"]
            for container in containers(workload)
            for port in container.get("ports", ())
        }
        for workload in workloads(resources)
    }
    for resource in resources:
        if resource["kind"] == "Service":
            for port in resource["spec"]["ports"]:
                assert ports[resource["metadata"]["name"]][port["targetPort"]] == port["port"]


@variants
def test_every_service_of_the_deployment_has_one_container(folder: Path) -> None:
    resources = build(folder)
    wanted = {participant.service for participant in deployment(resources).participants}
    assert set(services(resources)) == wanted == set(Service)
    pods = {
        service: owner["metadata"]["name"] for service, (_, owner) in services(resources).items()
    }
    assert {pods[service] for service in (Service.BROKER, *WORKERS)} == {"rollplex-node"}


@variants
def test_ports_and_probes_are_those_of_the_deployment(folder: Path) -> None:
    resources = build(folder)
    config = deployment(resources)
    for service, (container, _) in services(resources).items():
        participant = Participant(service=service)
        grpc_port = int(config.grpc_address(participant).rpartition(":")[2])
        http_port = int(config.http_address(participant).rpartition(":")[2])
        assert [port["containerPort"] for port in container["ports"]] == [grpc_port, http_port]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == grpc_port, (service, probe)
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= config.deadlines.start_s


@variants
def test_pods_end_later_than_their_services_do(folder: Path) -> None:
    resources = build(folder)
    longest_s = deployment(resources).deadlines.drain_s + bootstrap._CUT_OFF_AFTER_DRAIN_S
    for _, workload in services(resources).values():
        assert pod_specs(workload)[0]["terminationGracePeriodSeconds"] > longest_s


@variants
def test_no_variable_of_kubernetes_looks_like_one_of_rollplex(folder: Path) -> None:
    for workload in workloads(build(folder)):
        assert pod_specs(workload)[0]["enableServiceLinks"] is False
        for container in containers(workload):
            assert not [
                variable["name"]
                for variable in container.get("env", ())
                if variable["name"].startswith("ROLLPLEX_")
            ]


@variants
def test_containers_are_confined_and_bounded(folder: Path) -> None:
    for workload in workloads(build(folder)):
        pod = pod_specs(workload)[0]["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] == 10001
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(workload):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            for kind in ("cpu", "memory"):
                resources = container["resources"]
                request = quantity(resources["requests"][kind])
                assert 0 < request <= quantity(resources["limits"][kind])


@variants
def test_workers_have_the_cores_of_their_threads_and_room_for_the_arena(folder: Path) -> None:
    resources = build(folder)
    config = deployment(resources)
    for service in WORKERS:
        limits = services(resources)[service][0]["resources"]["limits"]
        assert quantity(limits["cpu"]) == config.threads_per_worker
        assert quantity(limits["memory"]) >= config.arena_bytes + 2**30
    limits = services(resources)[Service.BROKER][0]["resources"]["limits"]
    assert quantity(limits["memory"]) >= config.spill_bytes + 2**30


@variants
def test_volumes_are_declared_and_state_is_not_the_top_of_one(folder: Path) -> None:
    resources = build(folder)
    state_dir = deployment(resources).state_dir
    for workload in workloads(resources):
        spec = pod_specs(workload)[0]
        claims = workload["spec"].get("volumeClaimTemplates", ())
        volumes = {volume["name"] for volume in spec.get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        for container in containers(workload):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    made = ["mkdir", "--parents", "--mode=700", str(state_dir)]
    for _, workload in services(resources).values():
        (init,) = [
            container
            for container in pod_specs(workload)[0]["initContainers"]
            if container["name"] == "state-dir"
        ]
        assert init["command"] == made
        assert [mount["mountPath"] for mount in init["volumeMounts"]] == [str(state_dir.parent)]


@variants
def test_services_read_the_mounted_deployment_and_share_runs(folder: Path) -> None:
    resources = build(folder)
    config = deployment(resources)
    for container, _ in services(resources).values():
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert container["args"][:2] == ["--config", "/etc/rollplex/rollplex.toml"]
        assert container["args"][2:] == ["--set", "node=$(POD_IP)"]
        assert mounts["/etc/rollplex"] == "config"
        assert mounts[str(config.state_dir / "runs")] == "runs"
        (pod_ip,) = [item for item in container["env"] if item["name"] == "POD_IP"]
        assert pod_ip["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@variants
def test_redis_is_durable_and_where_the_deployment_looks(folder: Path) -> None:
    resources = build(folder)
    (redis,) = [
        workload
        for workload in workloads(resources)
        if workload["metadata"]["name"] == "rollplex-redis"
    ]
    (container,) = containers(redis)
    options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "always"
    assert options["--dir"] == container["volumeMounts"][0]["mountPath"]
    assert redis["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "data"
    port = container["ports"][0]["containerPort"]
    assert deployment(resources).redis_url == f"redis://rollplex-redis:{port}"


@variants
def test_one_process_of_each_service_is_placed(folder: Path) -> None:
    config = deployment(build(folder))
    assert all(config.placement(service) == ServicePlacement() for service in Service)


def test_overlay_gives_one_gpu_and_the_mps_daemon_to_the_whole_node() -> None:
    resources = build(K8S / "overlays" / "cuda")
    found = services(resources)
    spec = pod_specs(found[Service.LEARNER][1])[0]
    assert deployment(resources).device == "cuda"
    (claim,) = spec["resourceClaims"]
    (template,) = [
        resource for resource in resources if resource["kind"] == "ResourceClaimTemplate"
    ]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (mps,) = [item for item in spec["initContainers"] if item["name"] == "mps"]
    assert mps["restartPolicy"] == "Always"
    assert spec["shareProcessNamespace"] is True
    for container in (mps, *(found[service][0] for service in (Service.BROKER, *WORKERS))):
        assert container["resources"]["claims"] == [{"name": claim["name"]}]
        variables = {item["name"]: item.get("value") for item in container["env"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts[variables["CUDA_MPS_PIPE_DIRECTORY"]] == "mps"
        assert mounts["/dev/shm"] == "shm"
        assert container["image"] == "rollplex:cuda"


def _sorted(value: Any) -> Any:
    """Lists of tables in one order: kustomize puts a patch's entries first."""
    if isinstance(value, dict):
        return {key: _sorted(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sorted(map(_sorted, value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@variants
def test_reader_builds_what_kubectl_builds(folder: Path) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True
    ).stdout
    unhashed = re.sub(r"rollplex-config-[0-9a-z]{10}", "rollplex-config", built)

    def by_name(resources: list[Resource]) -> dict[tuple[str, str], Any]:
        return {(item["kind"], item["metadata"]["name"]): _sorted(item) for item in resources}

    assert by_name(build(folder)) == by_name(list(yaml.safe_load_all(unhashed)))
