"""The cluster file of ``ray up``: machines of a cloud that it starts, or your own that it reaches by ssh. Pure."""

from __future__ import annotations

import shlex
from typing import Any

from fleet.app.deploy import entrypoint
from fleet.app.deploy.spec import LEFT_BEHIND, Head, Nodes, Spec

CODE = "~/code"
"""The folder of the script, on nodes."""
HEAD, WORKER = "head", "ranks"
"""Names of the kinds of nodes."""
START_HEAD = "ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml --num-cpus=0 --num-gpus=0 --disable-usage-stats"
FIRST_AUTOSCALER = "RAY_enable_autoscaler_v2=0 "
"""The first version. The second, which ``ray up`` asks for, takes the head for a worker on machines that are there already, and leaves
one of them out."""
FILES = "{ ulimit -n 65536 || true; }"
"""More open files for Ray, where the machine allows them."""
LOGIN = ("bash", "--login", "-i", "-c")
"""The shell in which Ray runs its commands on nodes."""


def cluster(spec: Spec) -> dict[str, Any]:
    """The cluster file."""
    local = spec.ray_up.provider == "local"
    return {
        "cluster_name": spec.name,
        "max_workers": spec.nodes.count,
        **({"docker": _docker(spec)} if spec.image else {}),
        "provider": _provider(spec),
        "auth": {"ssh_user": spec.ray_up.ssh_user}
        | ({"ssh_private_key": spec.ray_up.ssh_private_key} if spec.ray_up.ssh_private_key else {}),
        **({} if local else _kinds(spec)),
        "file_mounts": {CODE: "."},
        "rsync_exclude": list(LEFT_BEHIND),
        "setup_commands": list(spec.ray_up.setup),
        "head_start_ray_commands": [on_node(spec, "ray stop"), on_node(spec, f"{FILES} && {_start_head(spec)}")],
        "worker_start_ray_commands": [on_node(spec, "ray stop"), on_node(spec, f"{FILES} && {_start_worker(spec)}")],
    }


def on_node(spec: Spec, command: str) -> str:
    """A command in the environment of Ray and Fleet, as a shell of a node reads it."""
    exports = [f"export {entrypoint.line([f'{name}={value}'])}" for name, value in spec.env.items()]
    return " && ".join([*([spec.activate] if spec.activate else []), *exports, command])


def stop(spec: Spec) -> str:
    """The command that ends Ray on machines that are there, typed on the head before ``ray down``; "" where ``ray down`` ends it itself.

    ``ray down`` runs ``ray stop`` on the head alone, and there in no environment. Ray's daemons on other machines miss the head after a
    minute, and leave other processes behind. The head comes first: its autoscaler would start Ray again elsewhere.
    """
    if spec.ray_up.provider != "local" or spec.image:
        return ""
    here, given = on_node(spec, "ray stop"), spec.ray_up
    key = "-i ~/ray_bootstrap_key.pem " if given.ssh_private_key else ""
    there = f"ssh -tt -o StrictHostKeyChecking=no {key}{given.ssh_user}@$machine {shlex.quote(entrypoint.line([*LOGIN, here]))}"
    return f"{here}; for machine in {' '.join(given.worker_ips)}; do {there}; done"


def _start_head(spec: Spec) -> str:
    return f"{FIRST_AUTOSCALER if spec.ray_up.provider == 'local' else ''}{START_HEAD}{_store(spec, spec.head)}"


def _start_worker(spec: Spec) -> str:
    """The autoscaler tells a cloud's node its resources; this command tells a machine that was there."""
    start = f"ray start --address=$RAY_HEAD_IP:6379 --disable-usage-stats{_store(spec, spec.nodes)}"
    if spec.ray_up.provider != "local":
        return start
    labels = ",".join(f"{name}={value}" for name, value in spec.nodes.labels.items())
    given = [f"--num-cpus={spec.nodes.cpus}", f"--num-gpus={spec.nodes.gpus}", *([f"--labels={labels}"] if labels else [])]
    return f"{start} {entrypoint.line(given)}"


def _store(spec: Spec, part: Head | Nodes) -> str:
    """The option that sizes Ray's object store, where ``/dev/shm`` is a container's. A machine's own is half of its memory."""
    return f" --object-store-memory={part.object_store_bytes}" if spec.image else ""


def _docker(spec: Spec) -> dict[str, Any]:
    return {
        "image": spec.image, "container_name": spec.name, "pull_before_run": True, "disable_shm_size_detection": True,
        "run_options": ["--ulimit nofile=65536:65536"], "head_run_options": [f"--shm-size={spec.head.shm_gib}g"],
        "worker_run_options": [f"--shm-size={spec.nodes.shm_gib}g"],
    }  # fmt: skip


def _provider(spec: Spec) -> dict[str, Any]:
    given = spec.ray_up
    match given.provider:
        case "aws":
            return {"type": "aws", "region": given.region, "cache_stopped_nodes": False}
        case "gcp":
            return {"type": "gcp", "region": given.region, "availability_zone": given.zone, "project_id": given.project}
        case _:
            return {"type": "local", "head_ip": given.head_ip, "worker_ips": list(given.worker_ips)}


def _kinds(spec: Spec) -> dict[str, Any]:
    resources = {"CPU": spec.nodes.cpus} | ({"GPU": spec.nodes.gpus} if spec.nodes.gpus else {})
    worker = {
        "min_workers": spec.nodes.count, "max_workers": spec.nodes.count, "resources": resources,
        **({"labels": dict(spec.nodes.labels)} if spec.nodes.labels else {}),
        "node_config": _machine(spec, spec.ray_up.instance_type),
    }  # fmt: skip
    head = {"resources": {"CPU": 0}, "node_config": _machine(spec, spec.ray_up.head_instance_type)}
    return {"head_node_type": HEAD, "available_node_types": {HEAD: head, WORKER: worker}}


def _named_by(profile: str) -> str:
    return "Arn" if profile.startswith("arn:") else "Name"


def _machine(spec: Spec, kind: str) -> dict[str, Any]:
    given = spec.ray_up
    if given.provider == "aws":
        return {
            "InstanceType": kind,
            **({"ImageId": given.machine_image} if given.machine_image else {}),
            **({"IamInstanceProfile": {_named_by(given.identity): given.identity}} if given.identity else {}),
        }
    disk = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {"diskSizeGb": 100, "sourceImage": given.machine_image},
    }
    scopes = {"scopes": ["https://www.googleapis.com/auth/cloud-platform"]}
    account = {"serviceAccounts": [{"email": given.identity} | scopes]} if given.identity else {}
    return {"machineType": kind, "disks": [disk], **account}
