"""Specs of clusters for tests: one that says all there is to say, for each target."""

from __future__ import annotations

import copy
import shlex
import tomllib
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fleet.app.cli.cluster import accepts
from fleet.app.cli.main import app
from fleet.app.deploy.files import files
from fleet.app.deploy.spec import load

SPEC = """
name = "gpt"
script = "train.py"
store = "s3://bucket/runs"
world = 24
spares = 8
arguments = ["--set", "steps=4000", "--min-ranks", "8", "--shards", "96"]
image = "registry.example.com/team/gpt:1.2"
fleet = "dist/fleet_train-0.1.0-cp311-abi3-linux_x86_64.whl"
team = "vision"
activate = ". ~/venv/bin/activate"
env = {AWS_ENDPOINT_URL = "https://store.example.com", NCCL_SOCKET_IFNAME = "eth0"}

[nodes]
count = 4
cpus = 16
gpus = 8
memory_gib = 64
shm_gib = 16
disk_gib = 200
labels = {rack = "r7", pool = "train"}

[head]
disk_gib = 50

[kubernetes]
namespace = "research"
queue = "gpus"
priority_class = "high"
service_account = "trainer"
secret = "store-access"
secret_keys = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
node_selector = {"example.com/pool" = "train"}
operator_namespace = "kuberay-system"
pod_priority_class = "training"
pull_secrets = ["registry-access"]
tolerations = ["dedicated=train:NoSchedule", "spot"]
resources = {"rdma/hca" = "8", "hugepages-2Mi" = "5Gi"}
service_account_annotations = {"eks.amazonaws.com/role-arn" = "arn:aws:iam::123456789012:role/trainer"}

[slurm]
partition = "gpu"
time = "2-00:00:00"
"""
PROVIDERS = {
    "aws": {
        "provider": "aws", "region": "us-west-2", "instance_type": "p5.48xlarge", "head_instance_type": "m7i.2xlarge",
        "machine_image": "ami-0123456789abcdef0", "identity": "trainer",
    },
    "gcp": {
        "provider": "gcp", "region": "us-west1", "zone": "us-west1-a", "project": "example-project", "instance_type": "a3-highgpu-8g",
        "head_instance_type": "n2-standard-8", "machine_image": "projects/example/global/images/trainer",
        "identity": "trainer@example-project.iam.gserviceaccount.com", "ssh_private_key": "~/.ssh/trainer",
    },
    "local": {
        "provider": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"], "ssh_user": "ray",
        "ssh_private_key": "~/.ssh/trainer", "setup": ["pip install /shared/fleet_train-0.1.0-cp311-abi3-linux_x86_64.whl"],
    },
}  # fmt: skip
WAYS = ("ray-up aws", "ray-up gcp", "ray-up local", "kuberay", "jobset", "slurm")
"""Targets, with a provider where they have some."""


def content(way: str = "kuberay") -> dict[str, Any]:
    """What the file of the spec holds."""
    provider = way.partition(" ")[2]
    return tomllib.loads(SPEC) | ({"ray_up": copy.deepcopy(PROVIDERS[provider])} if provider else {})


def changed(way: str, field: str, value: Any) -> dict[str, Any]:
    """The same with one dotted field set; None takes it away."""
    whole = content(way)
    *tables, name = field.split(".")
    inner = whole
    for each in tables:
        inner = inner.setdefault(each, {})
    inner.pop(name, None)
    if value is not None:
        inner[name] = value
    return whole


def written(way: str, **more: Any) -> dict[str, str]:
    """The texts of all files."""
    target = way.partition(" ")[0]
    return files(load(content(way) | more, target), target, "deploy", "3.11")


def spec_in(folder: Path, whole: dict[str, Any]) -> Path:
    """A file of such a spec, with its script beside it."""
    from fleet.settings.fields import shown

    (folder / "train.py").write_text("def train(run):\n    pass\n")
    if (wheel := str(whole.get("fleet", ""))).endswith(".whl") and not wheel.startswith((".", "/")):
        (folder / wheel).parent.mkdir(parents=True, exist_ok=True)
        (folder / wheel).touch()
    path = folder / "cluster.toml"
    path.write_text("".join(f"{name} = {shown(value)}\n" for name, value in whole.items()))
    return path


def write_files(folder: Path, whole: dict[str, Any], target: str) -> Path:
    """The folder that ``fleet cluster write`` has made in ``folder``, beside the spec and a script."""
    to = folder / "deploy"
    command = ["cluster", "write", "--target", target, "--spec", str(spec_in(folder, whole)), str(to)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return to


def commands_of(text: str) -> list[list[str]]:
    """Each ``fleet run`` and ``fleet attach`` of a text in which commands may be arguments of others."""
    lines = text.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in (line, *_words(line)) if "fleet " in part]
    found = [_words(part[part.index("fleet ") :].removesuffix(" &")) for part in parts]
    return [words for words in found if words[:2] in (["fleet", "run"], ["fleet", "attach"])]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return []


__all__ = ["PROVIDERS", "SPEC", "WAYS", "accepts", "changed", "commands_of", "content", "spec_in", "write_files", "written"]
