"""The file for JobSet: a head and worker nodes, each a pod that starts Ray itself. Pure.

A container that ends starts again in its pod, on its host. A worker's restart touches no other pod. After the head's, the run goes on from
its newest durable checkpoint. JobSet's own ``InPlaceRestart`` starts all pods again when one is lost, and Fleet does not need that.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import jinja2

from fleet.app.deploy import entrypoint, pods
from fleet.app.deploy.spec import Spec
from fleet.protocol.exit_codes import Exit

HEAD, RANKS = "head", "ranks"
"""Names of the two replicated jobs."""
PORT = 6379
UNLIMITED = 2**31 - 1
"""Restarts of a worker node's container: Fleet goes on without it, and takes it back."""
START_S = 600
"""How long a node may take to start: a worker waits for the head, and the head for its image."""
GRACE_S = 120
"""Seconds that the run has for its last checkpoint when its head is told to end."""
KEEP_S = 3600
PREPARE = "find /dev/shm -mindepth 1 -delete # left by the last container\nulimit -n 65536 || true"


def job_set(spec: Spec) -> dict[str, Any]:
    """The JobSet. It is complete when the head's job is."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(spec, queued=True),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": spec.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [HEAD]},
            "failurePolicy": {"maxRestarts": 0, "restartStrategy": "Recreate"},  # containers start again in place instead
            "ttlSecondsAfterFinished": KEEP_S,
            "replicatedJobs": [
                _job(HEAD, 1, pods.RETRIES, _pod(spec, pods.HEAD, _head_script(spec), {"terminationGracePeriodSeconds": GRACE_S})),
                _job(RANKS, spec.nodes.count, UNLIMITED, _pod(spec, pods.WORKER, _worker_script(spec), {})),
            ],
        },
    }


def command_of(script: str) -> str:
    """The line of a head's script that runs Fleet; "" where there is none."""
    lines = (line.strip().removesuffix("&").strip() for line in script.splitlines())
    return next((line for line in lines if line.startswith("fleet run ")), "")


def _job(name: str, count: int, retries: int, pod: Mapping[str, Any]) -> dict[str, Any]:
    spec = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": retries, "template": dict(pod)}
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _pod(spec: Spec, part: str, script: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """``OnFailure``: the container is started again in its pod."""
    command: dict[str, Any] = {
        "command": ["/bin/bash", "-c", "--"], "args": [pods.literal(script)], "workingDir": pods.CODE,
        "startupProbe": pods.kubelet_probe(pods.NODE_HEALTH, START_S),
    }  # fmt: skip
    template = pods.pod(spec, part, "OnFailure", **command)
    return template | {"spec": template["spec"] | more}


def _host(spec: Spec) -> str:
    return f"{spec.name}-{HEAD}-0-0.{spec.name}"


def _head_script(spec: Spec) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fleet.app.deploy"), undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
        autoescape=False,  # shell: all words are quoted
    )  # fmt: skip
    address = f"{_host(spec)}:{PORT}"
    start = ["--num-cpus=0", "--num-gpus=0", "--dashboard-host=0.0.0.0", _store(spec.head.object_store_bytes), "--disable-usage-stats"]
    return environment.get_template("jobset_head.sh.j2").render(
        prepare=PREPARE, name=spec.name, host=_host(spec), address=address, nodes=spec.nodes.count + 1, start=entrypoint.line(start),
        command=entrypoint.line(entrypoint.words(spec, pods.CODE, address)), stopped=int(Exit.STOPPED),
    )  # fmt: skip


def _worker_script(spec: Spec) -> str:
    labels = ",".join(f"{name}={value}" for name, value in spec.nodes.labels.items())
    address = f"{_host(spec)}:{PORT}"
    start = [
        "ray", "start", f"--address={address}", "--block", f"--num-cpus={spec.nodes.cpus}", f"--num-gpus={spec.nodes.gpus}",
        _store(spec.nodes.object_store_bytes), *([f"--labels={labels}"] if labels else []), "--disable-usage-stats",
    ]  # fmt: skip
    wait = f"until ray health-check --address {shlex.quote(address)} > /dev/null 2>&1; do sleep 2; done"
    return f"{PREPARE}\n{wait}\nexec {entrypoint.line(start)}\n"


def _store(size_bytes: int) -> str:
    return f"--object-store-memory={size_bytes}"
