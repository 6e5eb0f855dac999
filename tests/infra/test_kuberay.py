"""The Kubernetes manifests: pods, config map and network policy by the schema of Kubernetes, KubeRay's own fields by a
strict model of its API (ray.io/v1) as far as it is used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.cluster_config import ClusterConfig
from pipeline.config_io import parse_job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "kuberay"
KUBERNETES = "1.31"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=50)


class Group(Strict):
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(Group):
    groupName: str
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int = Field(ge=0)


class AutoscalerOptions(Strict):
    idleTimeoutSeconds: int
    upscalingMode: Literal["Default", "Aggressive", "Conservative"]


class ClusterSpec(Strict):
    rayVersion: str
    headGroupSpec: Group
    workerGroupSpecs: list[WorkerGroup]
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None


class SubmitterConfig(Strict):
    backoffLimit: int


class JobSpec(Strict):
    entrypoint: str
    rayClusterSpec: ClusterSpec
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode"]
    submitterConfig: SubmitterConfig
    backoffLimit: int
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: int


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def cluster_of(name: str) -> ClusterSpec:
    if name == "raycluster":
        return RayCluster.model_validate(documents(name)[0]).spec
    return RayJob.model_validate(documents(name)[1]).spec.rayClusterSpec


def pods(spec: ClusterSpec) -> list[dict[str, Any]]:
    return [group.template["spec"] for group in (spec.headGroupSpec, *spec.workerGroupSpecs)]


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_kuberay_and_kubernetes_take_it(name: str) -> None:
    spec = cluster_of(name)
    for pod in pods(spec):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    for group in spec.workerGroupSpecs:
        assert group.minReplicas <= group.replicas <= group.maxReplicas


def test_the_checks_can_fail() -> None:
    (data,) = documents("raycluster")
    data["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(ValidationError, match="minReplica"):
        RayCluster.model_validate(data)
    pod = pods(cluster_of("raycluster"))[1]
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": {**pod, "terminationGrace": 60}}
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGrace"):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("document", [documents("rayjob")[0], *documents("networkpolicy")], ids=lambda d: d["kind"])
def test_kubernetes_takes_what_stands_beside(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_pods_run_the_pinned_ray_without_rights(name: str) -> None:
    spec = cluster_of(name)
    constraints = (ROOT / "infra" / "constraints.txt").read_text()
    assert f"ray=={spec.rayVersion}\n" in constraints
    for pod in pods(spec):
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert not container["image"].endswith("latest")
        assert not any(re.search("key|secret|token", variable["name"], re.I) for variable in container.get("env", []))
    assert spec.headGroupSpec.rayStartParams["num-cpus"] == "0"


@pytest.mark.parametrize("name", ["raycluster", "rayjob"])
def test_workers_drain_before_kubernetes_ends_them(name: str) -> None:
    """The preStop hook takes the default of `cluster.grace_s`, 16 s for one that does not let go, 8 s to stop Ray."""
    for group in cluster_of(name).workerGroupSpecs:
        pod = group.template["spec"]
        command, wait_s = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sevenleague-drain"
        assert int(wait_s) == ClusterConfig().grace_s + 16
        assert int(wait_s) + 8 < pod["terminationGracePeriodSeconds"]
    assert "infra/ray/drain.sh /usr/local/bin/sevenleague-drain" in (ROOT / "infra/docker/Dockerfile").read_text()


def test_the_job_of_the_rayjob_is_one_that_its_cluster_can_run() -> None:
    config_map, data = documents("rayjob")
    job = parse_job(yaml.safe_load(config_map["data"]["job.yaml"]))
    spec = RayJob.model_validate(data).spec
    (group,) = spec.rayClusterSpec.workerGroupSpecs
    assert job.cluster.address == "auto"
    assert job.cluster.workers == group.replicas
    limits = group.template["spec"]["containers"][0]["resources"]["limits"]
    assert job.cluster.gpus_per_worker == int(limits["nvidia.com/gpu"])
    head = spec.rayClusterSpec.headGroupSpec.template["spec"]
    (volume,), (mount,) = head["volumes"], head["containers"][0]["volumeMounts"]
    assert volume == {"name": mount["name"], "configMap": {"name": config_map["metadata"]["name"]}}
    assert spec.entrypoint == f"sevenleague run {mount['mountPath']}/job.yaml"


def test_only_pods_of_the_namespace_and_the_operator_reach_ray() -> None:
    (policy,) = documents("networkpolicy")
    assert policy["spec"]["podSelector"] == {"matchExpressions": [{"key": "ray.io/cluster", "operator": "Exists"}]}
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"][0] == {"podSelector": {}}
    assert set(rule["from"][1]) == {"namespaceSelector", "podSelector"}
