"""What is applied to Kubernetes: a RayJob or a RayCluster for KubeRay, and the budgets of disruption of its pods. Pure.

World and spares are one worker group of one object, so that Kueue admits all of them or none.
"""

from __future__ import annotations

from typing import Any

from fleet.app.deploy import entrypoint
from fleet.app.deploy.spec import Head, Nodes, Spec

RAY = "2.60.0"
"""The version of Ray that is written into files, and that the base image has."""
CODE = "/home/ray/code"
"""Where the image has the folder of the script."""
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
RUN, PART, TEAM = "fleet-run", "fleet-part", "fleet-team"
"""Labels of pods by which budgets find them. KubeRay's own names of clusters are not known beforehand."""
HEAD_HEALTH, NODE_HEALTH = ("/api/gcs_healthz", 8265), ("/api/local_raylet_healthz", 52365)
"""(path, port) of Ray's dashboard on the head, and of its agent on each node."""
RETRIES = 3
"""A run that fails by itself fails again, and is not tried for ever."""
READY_S, PATIENCE_S = 5, 120
"""How often it is asked, and for how long a node may be silent before Kubernetes ends its pod, which Fleet has given up long before."""


def ray_job(spec: Spec) -> dict[str, Any]:
    """A RayJob, whose cluster ends with the run."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(spec, queued=True),
        "spec": {
            "entrypoint": _literal(entrypoint.line(entrypoint.words(spec, CODE))),
            "shutdownAfterJobFinishes": True,  # Kueue admits no other
            "ttlSecondsAfterFinished": 60,
            "backoffLimit": RETRIES,  # each is a new cluster, on which the same command goes on with the run
            "submissionMode": "K8sJobMode",
            "rayClusterSpec": _cluster(spec),
        },
    }


def ray_cluster(spec: Spec) -> dict[str, Any]:
    """A RayCluster that stays, for several runs one after the other."""
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": _metadata(spec, queued=True), "spec": _cluster(spec)}


def budgets(spec: Spec) -> list[dict[str, Any]]:
    """What evictions must leave: the head, and all worker nodes but one.

    Both are said as the number that stays: Kubernetes cannot count pods of an owner that it does not know.
    """
    return [_budget(spec, "head", 1), _budget(spec, "worker", max(1, spec.nodes.count - 1))]


def _budget(spec: Spec, part: str, stay: int) -> dict[str, Any]:
    metadata = _metadata(spec)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata | {"name": f"{spec.name}-{part}"},
        "spec": {"minAvailable": stay, "selector": {"matchLabels": {RUN: spec.name, PART: part}}},
    }


def _metadata(spec: Spec, *, queued: bool = False) -> dict[str, Any]:
    labels = _labels(spec)
    if queued and spec.kuberay.queue:
        labels |= {QUEUE: spec.kuberay.queue} | ({PRIORITY: spec.kuberay.priority_class} if spec.kuberay.priority_class else {})
    return {"name": spec.name, "namespace": spec.kuberay.namespace, "labels": labels}


def _labels(spec: Spec) -> dict[str, str]:
    return {RUN: spec.name} | ({TEAM: spec.team} if spec.team else {})


def _cluster(spec: Spec) -> dict[str, Any]:
    labels = {"labels": dict(spec.nodes.labels)} if spec.nodes.labels else {}
    return {
        "rayVersion": RAY,
        "enableInTreeAutoscaling": False,  # world and spares are admitted together, and stay
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", "disable-usage-stats": "true"} | _store(spec.head),
            "template": _pod(spec, "head"),
        },
        "workerGroupSpecs": [
            {
                "groupName": "ranks", "replicas": spec.nodes.count, "minReplicas": spec.nodes.count, "maxReplicas": spec.nodes.count,
                "rayStartParams": _store(spec.nodes), **labels, "template": _pod(spec, "worker"),
            }
        ],
    }  # fmt: skip


def _store(part: Head | Nodes) -> dict[str, str]:
    return {"object-store-memory": str(part.object_store_bytes)}


def _pod(spec: Spec, part: str) -> dict[str, Any]:
    labels = _labels(spec) | {PART: part}
    account = {"serviceAccountName": spec.kuberay.service_account} if spec.kuberay.service_account else {}
    selector = {"nodeSelector": dict(spec.kuberay.node_selector)} if spec.kuberay.node_selector and part == "worker" else {}
    gpus = spec.nodes.gpus and part == "worker"
    shm_gib = spec.nodes.shm_gib if part == "worker" else spec.head.shm_gib
    return {
        "metadata": {"labels": labels},
        "spec": {
            "restartPolicy": "Never",  # a new pod is a new node: what is left of the old one cannot be in its way
            **account,
            **selector,
            **({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]} if gpus else {}),
            "topologySpreadConstraints": [_apart(labels)],
            "containers": [_container(spec, part)],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}}],
        },
    }


def _apart(labels: dict[str, str]) -> dict[str, Any]:
    """One host is one loss: pods go to as many as there are."""
    return {
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {RUN: labels[RUN]}},
    }  # fmt: skip


def _container(spec: Spec, part: str) -> dict[str, Any]:
    given: dict[str, Any] = {"cpu": str(spec.head.cpus), "memory": f"{spec.head.memory_gib}Gi"}
    if part == "worker":
        given = {"cpu": str(spec.nodes.cpus), "memory": f"{spec.nodes.memory_gib}Gi"}
        given |= {"nvidia.com/gpu": str(spec.nodes.gpus)} if spec.nodes.gpus else {}
    health = HEAD_HEALTH if part == "head" else NODE_HEALTH
    return {
        "name": f"ray-{part}",
        "image": spec.image,
        "env": _variables(spec),
        "resources": {"requests": given, "limits": dict(given)},
        "readinessProbe": _probe(health, READY_S * 3),
        "livenessProbe": _probe(NODE_HEALTH, PATIENCE_S),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _probe(health: tuple[str, int], silent_s: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": health[0], "port": health[1]}, "initialDelaySeconds": 10, "periodSeconds": READY_S, "timeoutSeconds": READY_S,
        "failureThreshold": silent_s // READY_S,
    }  # fmt: skip


def _variables(spec: Spec) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in spec.env.items()]
    kept = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": spec.kuberay.secret, "key": key}}} for key in spec.kuberay.secret_keys
    ]  # fmt: skip
    return [*plain, *kept]


def _literal(text: str) -> str:
    """As Kubernetes must be told it: ``$(NAME)`` in a variable's value, or in a container's arguments, is one that it fills in."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text
