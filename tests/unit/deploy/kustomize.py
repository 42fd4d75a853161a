"""Builds the part of kustomize that deploy/k8s uses, so that its tests need no cluster tools.

Anything that this reader does not know in a kustomization is an error, never ignored.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from pathlib import Path

Resource = dict[str, Any]

_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "labels",
    "images",
    "configMapGenerator",
    "patches",
}
_CLUSTER_SCOPED = {"Namespace"}
# What makes two entries of a list the same one, when a patch is merged.
_MERGE_KEYS = {"ports": "containerPort", "volumeMounts": "mountPath"}


def build(folder: Path) -> list[Resource]:
    """Every resource of a kustomization, patched. Generated names carry no hash."""
    return copy.deepcopy(_build(folder))


@cache
def _build(folder: Path) -> list[Resource]:
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(settings) - _KNOWN
    assert not unknown, f"{folder}: this reader does not know {unknown}"
    resources: list[Resource] = []
    for name in settings["resources"]:
        path = (folder / name).resolve()
        assert path.exists(), f"{folder}/kustomization.yaml names {name}, which is not there"
        resources += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for generator in settings.get("configMapGenerator", ()):
        _generate(resources, folder, generator)
    for patch in settings.get("patches", ()):
        _patch(resources, yaml.safe_load((folder / patch["path"]).read_text()))
    for resource in resources:
        if resource["kind"] not in _CLUSTER_SCOPED:
            resource["metadata"]["namespace"] = settings["namespace"]
        for rule in settings.get("labels", ()):
            _label(resource, rule["pairs"], templates=rule.get("includeTemplates", False))
        for image in settings.get("images", ()):
            _rename_image(resource, image)
    return resources


def merge(base: Any, patch: Any, key: str = "") -> Any:
    """A strategic merge: tables by key, lists of named things by name, all else replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for name, value in patch.items():
            merged[name] = merge(base[name], value, name) if name in base else value
        return merged
    if isinstance(base, list) and isinstance(patch, list):
        by = _MERGE_KEYS.get(key, "name")
        if all(isinstance(item, dict) and by in item for item in (*base, *patch)):
            items = {item[by]: item for item in base}
            for item in patch:
                items[item[by]] = merge(items[item[by]], item) if item[by] in items else item
            return list(items.values())
    return patch


def pod_specs(resource: Resource) -> list[Resource]:
    """The pod template's specification, if the resource has one."""
    template = resource.get("spec", {}).get("template")
    return [template["spec"]] if isinstance(template, dict) else []


def containers(resource: Resource) -> list[Resource]:
    """Every container of the resource's pods, initial ones included."""
    return [
        container
        for spec in pod_specs(resource)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
    ]


def _generate(resources: list[Resource], folder: Path, generator: dict[str, Any]) -> None:
    data = {name: (folder / name).read_text() for name in generator["files"]}
    if generator.get("behavior") == "merge":
        (old,) = [
            resource
            for resource in resources
            if resource["kind"] == "ConfigMap" and resource["metadata"]["name"] == generator["name"]
        ]
        old["data"] = {**old["data"], **data}
        return
    resources.append(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": generator["name"]},
            "data": data,
        }
    )


def _patch(resources: list[Resource], patch: Resource) -> None:
    wanted = (patch["kind"], patch["metadata"]["name"])
    (index,) = [
        index
        for index, resource in enumerate(resources)
        if (resource["kind"], resource["metadata"]["name"]) == wanted
    ]
    resources[index] = merge(resources[index], patch)


def _label(resource: Resource, pairs: dict[str, str], *, templates: bool) -> None:
    holders = [resource]
    if templates and pod_specs(resource):
        holders += [resource["spec"]["template"], *resource["spec"].get("volumeClaimTemplates", ())]
    for holder in holders:
        labels = holder.setdefault("metadata", {}).setdefault("labels", {})
        labels.update(pairs)


def _rename_image(resource: Resource, image: dict[str, str]) -> None:
    for container in containers(resource):
        if container["image"].partition(":")[0] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"
