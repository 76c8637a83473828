"""What ``fleet cluster write`` writes for KubeRay, carried out on hosts of this machine: a host is a pod, with one container.

Neither Kubernetes nor its operator is there. What they would do with each field of the files is done here instead, as KubeRay's and
Kubernetes' documents say: the command line of ``ray start`` from ``rayStartParams``, the limits and the labels; variables, also from
Secrets; volumes; probes, which are asked from another host; the command that hands in the entrypoint of a RayJob. A field that is not
known here raises KeyError. The image is this machine's Python, with a folder of the script and a user who is not root.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.app.deploy.pods import CODE
from fleet.app.deploy.rules import amount
from tests.support.host_store import write
from tests.support.hosts import Host
from tests.support.ray_hosts import GCS_PORT
from tests.support.waiting import until

IMAGE_HOME = str(Path(CODE).parent)
OWN = (str(Path(CODE).parents[1]),)
"""Folders that a host must have for itself to be a pod; see :class:`tests.support.hosts.Hosts`."""
AS_USER = ("setpriv", "--reuid=1000", "--regid=100", "--clear-groups", "--")
"""As the images of Ray's have it."""
SHELL = ("/bin/bash", "-c", "--")
WELL_S = 180.0
ASK = """
import sys, urllib.request
sys.exit(not 200 <= urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).status < 400)
"""


def start_line(part: str, group: Mapping[str, Any], service: str) -> str:
    """The command of a container, as KubeRay makes it.

    Args:
        part: head or worker.
        group: ``headGroupSpec``, or one of ``workerGroupSpecs``.
        service: the name by which workers find the head.
    """
    limits = container_of(group)["resources"]["limits"]
    gpus = dict([("num-gpus", str(math.ceil(amount(value)))) for name, value in limits.items() if name.endswith("gpu")][:1])
    labels = {"labels": ",".join(f"{name}={value}" for name, value in group["labels"].items())} if group.get("labels") else {}
    own = {"address": f"{service}:{GCS_PORT}"} if part == "worker" else {"dashboard-host": "0.0.0.0"}
    added = {"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365", **own, **gpus, **labels}
    added |= {"num-cpus": str(math.ceil(amount(limits["cpu"]))), "memory": str(math.ceil(amount(limits["memory"])))}
    params = {**added, **group["rayStartParams"], "block": "true"}
    given = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(params.items()) if value != "false"]
    return " ".join(["ulimit -n 65536; ray start", *["--head"] * (part == "head"), *given])


def container_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The one container of a group's pods."""
    [found] = group["template"]["spec"]["containers"]
    return dict(found)


def variables(container: Mapping[str, Any], secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The environment of a container; ``secrets``: name of a Secret -> what is in it."""
    found = {}
    for each in container["env"]:
        source = each["valueFrom"]["secretKeyRef"] if "valueFrom" in each else None
        found[each["name"]] = secrets[source["name"]][source["key"]] if source else expanded(each["value"], found)
    return found


def expanded(text: str, known: Mapping[str, str]) -> str:
    """What Kubernetes makes of the value of a variable, and of a container's arguments: ``$(NAME)`` is filled in, ``$$`` is one ``$``."""
    return re.sub(r"\$(?:\$|\((\w+)\))", lambda match: known.get(match[1], match[0]) if match[1] else "$", text)


def mounts(group: Mapping[str, Any]) -> list[list[str]]:
    """The commands that make the volumes of a pod, each where its container has it."""
    kinds = {each["name"]: each["emptyDir"] for each in group["template"]["spec"]["volumes"]}
    steps = []
    for mount in container_of(group)["volumeMounts"]:
        kind, path = kinds[mount["name"]], mount["mountPath"]
        size = f"size={math.ceil(amount(kind['sizeLimit']))},mode=1777"
        steps += [["mkdir", "-p", path], ["mount", "-t", {"Memory": "tmpfs"}[kind["medium"]], "-o", size, mount["name"], path]]
    return steps


def answers(outside: Host, host: Host, probe: Mapping[str, Any]) -> bool:
    """One try of a probe of a container on ``host``, asked from another one."""
    url = f"http://{host.address}:{probe['httpGet']['port']}{probe['httpGet']['path']}"
    return outside.run([outside.python, "-c", ASK, url, str(probe["timeoutSeconds"])], check=False).returncode == 0


class Pods:
    """The pods of a RayJob or a RayCluster; each on a host that :data:`OWN` was given to.

    Args:
        document: the RayJob, or the RayCluster.
        hosts: of the head and of each worker, in order.
        outside: a host that is no pod: where probes are asked from, and a job is handed in.
        secrets: name of a Secret -> what is in it.
        code: name of a file in the image's folder of the script -> its text.
        logs: a folder of this machine for what containers say.
    """

    def __init__(
        self, document: Mapping[str, Any], hosts: Sequence[Host], outside: Host, secrets: Mapping[str, Mapping[str, str]],
        code: Mapping[str, str], logs: Path,
    ) -> None:  # fmt: skip
        spec = document["spec"]
        cluster = spec.get("rayClusterSpec", spec)
        [self._ranks] = cluster["workerGroupSpecs"]
        self._head, self._job, self.name = cluster["headGroupSpec"], spec, f"{document['metadata']['name']}-x2b7q"
        self.head, self.workers, self._outside = hosts[0], list(hosts[1:]), outside
        assert len(self.workers) == self._ranks["replicas"]
        self._secrets, self._code, self._logs = secrets, code, logs
        self.service = f"{self.name}-head-svc.{document['metadata']['namespace']}.svc.cluster.local"
        self.running = dict[str, subprocess.Popen[bytes]]()
        """Name of a host -> the process of its container."""
        self._resolve(outside)

    def group(self, host: Host) -> dict[str, Any]:
        """What the document says of the pods of a host's kind."""
        return dict(self._head if host is self.head else self._ranks)

    def start(self, host: Host) -> None:
        """A pod on an empty host: image, volumes, environment, container. Workers wait for the head first, as KubeRay has them do."""
        part, group = "head" if host is self.head else "worker", self.group(host)
        self._resolve(host)
        for name, text in self._code.items():
            write(host, f"{CODE}/{name}", text)
        for step in (*mounts(group), ["chown", "-R", "1000:100", IMAGE_HOME]):
            host.run(step)
        if part == "worker":
            self._wait_for_the_head(host)
        self._start_container(host, start_line(part, group, self.service))

    def run(self, host: Host, line: str, check: bool = True, timeout_s: float = WELL_S) -> subprocess.CompletedProcess[str]:
        """A command line in a container, as ``kubectl exec`` has it."""
        return host.run([*AS_USER, *SHELL, line], timeout_s, check, cwd=CODE, env=self._environment(host))

    def well(self, host: Host, probe: str) -> bool:
        """One try of a probe: ``readinessProbe`` or ``livenessProbe``."""
        return answers(self._outside, host, container_of(self.group(host))[probe])

    def wait_until_well(self, host: Host) -> None:
        """Until both probes succeed, each within the time that it is given before its pod is not ready, or is ended."""
        for probe in ("readinessProbe", "livenessProbe"):
            asked = container_of(self.group(host))[probe]
            allowed_s = max(WELL_S, asked["initialDelaySeconds"] + asked["periodSeconds"] * asked["failureThreshold"])
            until(lambda probe=probe: self.well(host, probe), f"{probe} of {host.hostname}", allowed_s, tick_s=1.0)

    @contextmanager
    def submitted(self, job_id: str) -> Iterator[subprocess.Popen[str]]:
        """The pod that hands in the entrypoint of a RayJob, and shows what it says, beside the block."""
        assert self._job["submissionMode"] == "K8sJobMode"
        at = f"--address http://{self.service}:8265"
        line = (
            f"if ! ray job status {at} {job_id} >/dev/null 2>&1 ; then ray job submit {at} --no-wait --submission-id {job_id} -- "
            f"{self._job['entrypoint']} ; fi ; ray job logs {at} --follow {job_id}"
        )
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = {"PYTHONUNBUFFERED": "1"}
        process = self._outside.popen([*SHELL, expanded(line, env)], env=env, **pipes)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def job_status(self, job_id: str) -> str:
        """What Ray says of a job, by which KubeRay knows how it ended."""
        return self._outside.run([*SHELL, f"ray job status --address http://{self.service}:8265 {job_id}"], WELL_S).stdout

    def _resolve(self, host: Host) -> None:
        host.run(["sh", "-c", f"echo '{self.head.address} {self.service}' >>/etc/hosts"])

    def _environment(self, host: Host) -> dict[str, str]:
        """What the file says, and what KubeRay adds that Ray reads."""
        at = self.service if host is not self.head else "127.0.0.1"
        kind = {"RAY_NODE_TYPE_NAME": self.group(host).get("groupName", "headgroup"), "RAY_CLOUD_INSTANCE_ID": host.hostname}
        added = {"RAY_CLUSTER_NAME": self.name, "RAY_PORT": str(GCS_PORT), "RAY_ADDRESS": f"{at}:{GCS_PORT}", **kind}
        user = {"HOME": IMAGE_HOME, "USER": "ray", "RAY_USAGE_STATS_KUBERAY_IN_USE": "1", "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1"}
        return user | added | variables(container_of(self.group(host)), self._secrets)

    def _wait_for_the_head(self, host: Host) -> None:
        line = f"ray health-check --address {self.service}:{GCS_PORT} >/dev/null 2>&1"
        until(lambda: self.run(host, line, check=False).returncode == 0, "a worker's pod sees the head", WELL_S, tick_s=5.0)

    def _start_container(self, host: Host, line: str) -> None:
        env = self._environment(host) | {"KUBERAY_GEN_RAY_START_CMD": line.partition("; ")[2]}
        with (self._logs / f"{host.hostname}.log").open("ab") as log:
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.running[host.hostname] = host.popen([*AS_USER, *SHELL, line], env=env, cwd=CODE, **quiet)
