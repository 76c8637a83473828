"""The file for KubeRay: a RayJob or a RayCluster. Pure.

World and spares are one worker group of one object, so that Kueue admits all of them or none.
"""

from __future__ import annotations

from typing import Any

from fleet.app.deploy import entrypoint, pods
from fleet.app.deploy.spec import Head, Nodes, Spec

RAY = "2.60.0"
"""The version of Ray that is written into files, and that the base image has."""


def ray_job(spec: Spec) -> dict[str, Any]:
    """A RayJob, whose cluster ends with the run."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": pods.metadata(spec, queued=True),
        "spec": {
            "entrypoint": pods.literal(entrypoint.line(entrypoint.words(spec, pods.CODE))),
            "shutdownAfterJobFinishes": True,  # Kueue admits no other
            "ttlSecondsAfterFinished": 60,
            "backoffLimit": pods.RETRIES,  # each is a new cluster, on which the same command goes on with the run
            "submissionMode": "K8sJobMode",
            "submitterPodTemplate": pods.submitter(spec),
            "rayClusterSpec": _cluster(spec),
        },
    }


def ray_cluster(spec: Spec) -> dict[str, Any]:
    """A RayCluster that stays, for several runs one after the other."""
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": pods.metadata(spec, queued=True), "spec": _cluster(spec)}


def _cluster(spec: Spec) -> dict[str, Any]:
    """A new pod is a new node (``Never``), so nothing that the old one left is in its way."""
    labels = {"labels": dict(spec.nodes.labels)} if spec.nodes.labels else {}
    return {
        "rayVersion": RAY,
        "enableInTreeAutoscaling": False,  # world and spares are admitted together, and stay
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", "disable-usage-stats": "true"} | _store(spec.head),
            "template": pods.pod(spec, pods.HEAD),
        },
        "workerGroupSpecs": [
            {
                "groupName": "ranks", "replicas": spec.nodes.count, "minReplicas": spec.nodes.count, "maxReplicas": spec.nodes.count,
                "rayStartParams": _store(spec.nodes), **labels, "template": pods.pod(spec, pods.WORKER),
            }
        ],
    }  # fmt: skip


def _store(part: Head | Nodes) -> dict[str, str]:
    return {"object-store-memory": str(part.object_store_bytes)}
