"""The parts that all targets on Kubernetes share: pods of a head and of worker nodes, and the objects beside them. Pure."""

from __future__ import annotations

from typing import Any

from fleet.app.deploy.spec import Head, Nodes, Spec, toleration

CODE = "/home/ray/code"
"""The folder of the script, in the image."""
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
RUN, PART, TEAM = "fleet-run", "fleet-part", "fleet-team"
"""Labels of pods by which budgets and policies find them. Names that KubeRay and JobSet give are not known beforehand."""
HEAD, WORKER, SUBMITTER = "head", "worker", "submitter"
"""Parts of a run."""
HEAD_HEALTH, NODE_HEALTH = ("/api/gcs_healthz", 8265), ("/api/local_raylet_healthz", 52365)
"""(path, port) of Ray's dashboard on the head, and of its agent on each node."""
RETRIES = 3
"""A run that fails by itself fails again, and is not tried for ever."""
READY_S, PATIENCE_S = 5, 120
"""Seconds between probes, and of silence before Kubernetes ends a node's pod. Fleet has given up the node long before."""
USER, GROUP = 1000, 100
"""User and group of Ray's images, as numbers: Kubernetes cannot see that a name is not root's."""
PORTS = {"protocol": "TCP", "port": 1024, "endPort": 65535}
"""Ports of the coordinator, agents, ranks and Ray: the system gives nearly all of them, from the free ones."""
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
"""Label of KubeRay's operator."""


def metadata(spec: Spec, *, queued: bool = False, suffix: str = "") -> dict[str, Any]:
    """Metadata of an object. ``queued``: Kueue admits it."""
    found = labels(spec)
    if queued and spec.kubernetes.queue:
        found |= {QUEUE: spec.kubernetes.queue} | ({PRIORITY: spec.kubernetes.priority_class} if spec.kubernetes.priority_class else {})
    return {"name": spec.name + suffix, "namespace": spec.kubernetes.namespace, "labels": found}


def labels(spec: Spec) -> dict[str, str]:
    """Labels of all objects of the run."""
    return {RUN: spec.name} | ({TEAM: spec.team} if spec.team else {})


def literal(text: str) -> str:
    """``text`` so that Kubernetes keeps it as it is: it fills in ``$(NAME)`` in a variable's value and in a container's arguments."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


# ---- pods --------------------------------------------------------------------------------------------------------------------------------


def pod(spec: Spec, part: str, restart: str = "Never", **container: Any) -> dict[str, Any]:
    """Template of a pod that is a node of Ray's. ``container``: more fields of its one container."""
    selector = {"nodeSelector": dict(spec.kubernetes.node_selector)} if spec.kubernetes.node_selector and part == WORKER else {}
    shm_gib = spec.nodes.shm_gib if part == WORKER else spec.head.shm_gib
    return _template(spec, part, {
        "restartPolicy": restart,
        **selector,
        "topologySpreadConstraints": [_apart(spec)],
        "containers": [_container(spec, part) | container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}}],
    })  # fmt: skip


def submitter(spec: Spec) -> dict[str, Any]:
    """Template of the pod that hands in the entrypoint of a RayJob. KubeRay's own has no security context."""
    given = {"cpu": "500m", "memory": "1Gi"}
    container = {
        "name": "ray-job-submitter", "image": spec.image, "resources": {"requests": given, "limits": dict(given)},
        "securityContext": _container_security(),
    }  # fmt: skip
    return _template(spec, SUBMITTER, {"restartPolicy": "Never", "containers": [container]})


def _template(spec: Spec, part: str, own: dict[str, Any]) -> dict[str, Any]:
    given = spec.kubernetes
    common: dict[str, Any] = {
        "automountServiceAccountToken": False,  # nothing in the pod speaks with Kubernetes
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": GROUP, "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    if given.service_account:
        common["serviceAccountName"] = given.service_account
    if given.pod_priority_class:
        common["priorityClassName"] = given.pod_priority_class
    if given.pull_secrets:
        common["imagePullSecrets"] = [{"name": name} for name in given.pull_secrets]
    if tolerated := _tolerations(spec, part):
        common["tolerations"] = tolerated
    return {"metadata": {"labels": labels(spec) | {PART: part}}, "spec": common | own}


def _tolerations(spec: Spec, part: str) -> list[dict[str, str]]:
    gpus = spec.nodes.gpus and part == WORKER
    ours = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}] if gpus else []
    return [*ours, *(toleration(each) for each in spec.kubernetes.tolerations)]


def _apart(spec: Spec) -> dict[str, Any]:
    """Spread the pods over as many hosts as there are: one host is one loss."""
    return {
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {RUN: spec.name}},
    }  # fmt: skip


def _container(spec: Spec, part: str) -> dict[str, Any]:
    given = _quantities(spec.head)
    if part == WORKER:
        given = _quantities(spec.nodes) | ({"nvidia.com/gpu": str(spec.nodes.gpus)} if spec.nodes.gpus else {})
        given |= spec.kubernetes.resources
    return {
        "name": f"ray-{part}",
        "image": spec.image,
        "env": _variables(spec),
        "resources": {"requests": given, "limits": dict(given)},
        "securityContext": _container_security(),
        "readinessProbe": kubelet_probe(HEAD_HEALTH if part == HEAD else NODE_HEALTH, READY_S * 3),
        "livenessProbe": kubelet_probe(NODE_HEALTH, PATIENCE_S),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _quantities(part: Head | Nodes) -> dict[str, str]:
    disk = {"ephemeral-storage": f"{part.disk_gib}Gi"} if part.disk_gib else {}
    return {"cpu": str(part.cpus), "memory": f"{part.memory_gib}Gi"} | disk


def _container_security() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def kubelet_probe(health: tuple[str, int], silent_s: int) -> dict[str, Any]:
    """A probe of one of Ray's health paths, which may stay without an answer for ``silent_s``."""
    return {
        "httpGet": {"path": health[0], "port": health[1]}, "initialDelaySeconds": 10, "periodSeconds": READY_S, "timeoutSeconds": READY_S,
        "failureThreshold": silent_s // READY_S,
    }  # fmt: skip


def _variables(spec: Spec) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in spec.env.items()]
    given = spec.kubernetes
    kept = [{"name": key, "valueFrom": {"secretKeyRef": {"name": given.secret, "key": key}}} for key in given.secret_keys]
    return [*plain, *kept]


# ---- beside them -------------------------------------------------------------------------------------------------------------------------


def budgets(spec: Spec) -> list[dict[str, Any]]:
    """Limits of evictions: the head, and all worker nodes but one, must stay.

    Both are numbers of pods that stay: Kubernetes cannot count pods of an owner that it does not know.
    """
    return [_budget(spec, HEAD, 1), _budget(spec, WORKER, max(1, spec.nodes.count - 1))]


def _budget(spec: Spec, part: str, stay: int) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(spec, suffix=f"-{part}"),
        "spec": {"minAvailable": stay, "selector": {"matchLabels": {RUN: spec.name, PART: part}}},
    }


def policies(spec: Spec, *, operator: bool) -> list[dict[str, Any]]:
    """Pods of the run accept connections of each other, and with ``operator`` the head's dashboard those of KubeRay's operator.

    Kubernetes itself lets in a host's kubelet, which asks the probes. Pods may connect to any address: no policy can name a store.
    """
    own = {"from": [{"podSelector": {"matchLabels": {RUN: spec.name}}}], "ports": [dict(PORTS)]}
    found = [_policy(spec, "", {RUN: spec.name}, own)]
    if operator:
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": spec.kubernetes.operator_namespace}}
        peer = {"namespaceSelector": namespace, "podSelector": {"matchLabels": dict(OPERATOR)}}
        rule = {"from": [peer], "ports": [{"protocol": "TCP", "port": HEAD_HEALTH[1]}]}
        found.append(_policy(spec, f"-{HEAD}", {RUN: spec.name, PART: HEAD}, rule))
    return found


def _policy(spec: Spec, suffix: str, pods: dict[str, str], rule: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(spec, suffix=suffix),
        "spec": {"podSelector": {"matchLabels": pods}, "policyTypes": ["Ingress"], "ingress": [rule]},
    }


def service_account(spec: Spec) -> dict[str, Any]:
    """The account of the pods, which a cloud knows by its annotations."""
    given = spec.kubernetes
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(spec) | {"name": given.service_account, "annotations": dict(given.service_account_annotations)},
        "automountServiceAccountToken": False,
    }
