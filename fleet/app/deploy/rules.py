"""What Fleet asks of a document, field by field, where no schema says it: the tables at the end. Pure.

A path is the keys from the top, with a space between two; ``*`` is each entry of a list.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.app.deploy import kuberay
from fleet.app.deploy.spec import LABEL, LONGEST_NAME, PROVIDERS, check_pinned, nearest
from fleet.errors import ConfigError

MISSING = object()
LONGEST_SHOWN = 80
"""Characters of a value in a refusal."""
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kMGTPE]i?)?")
Good = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """What the value at ``path`` must be. ``takes``: in words. ``needed``: it must be there."""

    path: str
    good: Good
    takes: str
    way_out: str = ""
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Keys:
    """The only keys that the table at ``path`` may have."""

    path: str
    known: Collection[str]


def broken(document: Mapping[str, Any], table: Sequence[Rule | Keys]) -> Iterator[ConfigError]:
    """A refusal for each place that breaks a rule, with its path."""
    for rule in table:
        for path, value in reached(document, rule.path.split()):
            yield from _unknown(path, value, rule) if isinstance(rule, Keys) else _not_good(path, value, rule)


def reached(value: Any, words: Sequence[str], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each place that a path leads to; MISSING where the way ends before."""
    if not words:
        yield path, value
    elif words[0] == "*":
        for place, each in enumerate(value if isinstance(value, list) else ()):
            yield from reached(each, words[1:], f"{path}[{place}]")
    else:
        inner = f"{path}.{words[0]}" if path else words[0]
        found = value.get(words[0], MISSING) if isinstance(value, Mapping) else MISSING
        yield from [(inner, MISSING)] if found is MISSING else reached(found, words[1:], inner)


def _unknown(path: str, value: Any, rule: Keys) -> Iterator[ConfigError]:
    if value is MISSING:
        return
    if not isinstance(value, Mapping):
        yield ConfigError(path, shown(value), "it is a table of fields, and this is a value")
        return
    for key in value:
        if key not in rule.known:
            way_out = nearest(str(key), rule.known, f"It may have {', '.join(sorted(rule.known))}.")
            yield ConfigError(f"{path}.{key}" if path else str(key), shown(value[key]), "there is no such field", way_out)


def _not_good(path: str, value: Any, rule: Rule) -> Iterator[ConfigError]:
    if value is MISSING:
        if rule.needed:
            yield ConfigError(path, "", f"it is missing: it takes {rule.takes}", rule.way_out)
    elif not rule.good(value):
        yield ConfigError(path, shown(value), f"it takes {rule.takes}", rule.way_out)


def shown(value: Any) -> Any:
    """A value as a refusal shows it."""
    return value if isinstance(value, int | float) else str(value)[:LONGEST_SHOWN]


# ---- what a value may be -----------------------------------------------------------------------------------------------------------------


def text(value: Any) -> bool:
    """A text that is not empty."""
    return isinstance(value, str) and bool(value)


def texts(value: Any) -> bool:
    """A table of texts."""
    return isinstance(value, Mapping) and all(isinstance(each, str) for pair in value.items() for each in pair)


def lines(value: Any) -> bool:
    """A list of texts."""
    return isinstance(value, list) and all(map(text, value))


def table(value: Any) -> bool:
    """A table."""
    return isinstance(value, Mapping)


def whole(least: int) -> Good:
    """A whole number of at least ``least``."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def one_of(*known: Any) -> Good:
    """One of these, and of the same type."""
    return lambda value: any(type(value) is type(each) and value == each for each in known)


def like(pattern: str | re.Pattern[str], most: int = 253) -> Good:
    """A text of this form."""
    return lambda value: isinstance(value, str) and len(value) <= most and re.fullmatch(pattern, value) is not None


def some(most: int) -> Good:
    """A list of 1 to ``most`` entries."""
    return lambda value: isinstance(value, list) and 1 <= len(value) <= most


def pinned(value: Any) -> bool:
    """A container image by tag or digest."""
    try:
        check_pinned("image", value if isinstance(value, str) else "")
    except ConfigError:
        return False
    return True


def amount(value: Any) -> float:
    """A quantity of Kubernetes' as a number; 0 where it is none."""
    match = QUANTITY.fullmatch(str(value))
    if match is None or isinstance(value, bool):
        return 0.0
    powers = {"k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
    unit = match[2] or ""
    scale = 0.001 if unit == "m" else (1024.0 if unit.endswith("i") else 1000.0) ** powers.get(unit[:1], 0)
    return float(match[1]) * scale


def positive(value: Any) -> bool:
    """A quantity of Kubernetes' above 0."""
    return amount(value) > 0


RESOURCES = ("CPU", "GPU", "TPU", "memory", "object_store_memory")


def resources(value: Any) -> bool:
    """Amounts by name. A name of the user's own that is near to one of Ray's is a slip."""
    names = [each for each in value if each not in RESOURCES] if isinstance(value, Mapping) else [""]
    return not any(difflib.get_close_matches(str(each), RESOURCES, n=1, cutoff=0.8) or each == "" for each in names)


# ---- the tables --------------------------------------------------------------------------------------------------------------------------


def _probe(name: str) -> tuple[Rule, ...]:
    at = f"spec containers * {name}"
    count = "a whole number, at least 1"
    return (
        Rule(f"{at} httpGet path", one_of(kuberay.HEAD_HEALTH[0], kuberay.NODE_HEALTH[0]), "one of Ray's two paths of health",
             f"{kuberay.HEAD_HEALTH[0]} on the head, {kuberay.NODE_HEALTH[0]} on any node."),
        Rule(f"{at} httpGet port", one_of(kuberay.HEAD_HEALTH[1], kuberay.NODE_HEALTH[1]), "8265 for the head, 52365 for a node's agent"),
        Rule(f"{at} periodSeconds", whole(1), count),
        Rule(f"{at} timeoutSeconds", whole(1), count),
        Rule(f"{at} failureThreshold", whole(1), count), Rule(f"{at} initialDelaySeconds", whole(0), "a whole number", "", False),
    )  # fmt: skip


POD: tuple[Rule | Keys, ...] = (
    Rule(f"metadata labels {kuberay.RUN}", text, "the run's name, by which budgets find the pod"),
    Rule(f"metadata labels {kuberay.PART}", one_of("head", "worker"), "head or worker"),
    Rule("spec restartPolicy", one_of("Never"), "Never: a new pod is a new node of Ray's"),
    Rule("spec containers", some(99), "one container or more"),
    Rule("spec containers * image", pinned, "an image by its tag or digest", "Name the version that was tested."),
    *(Rule(f"spec containers * resources {side} {what}", positive, "a quantity above 0")
      for side in ("requests", "limits") for what in ("cpu", "memory")),
    *_probe("readinessProbe"),
    *_probe("livenessProbe"),
)  # fmt: skip
"""Of a pod of Ray's, as its template."""

START = {
    "address", "port", "num-cpus", "num-gpus", "memory", "object-store-memory", "resources", "dashboard-host", "dashboard-port",
    "node-ip-address", "metrics-export-port", "block", "plasma-directory", "no-monitor", "disable-usage-stats",
    "dashboard-agent-listen-port", "min-worker-port", "max-worker-port", "node-manager-port", "object-manager-port", "log-color",
}  # fmt: skip
"""Options of ``ray start`` that KubeRay hands on. Labels are not among them: a group has a field for them."""

CLUSTER: tuple[Rule | Keys, ...] = (
    Keys("", {
        "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs", "headServiceAnnotations",
        "suspend", "gcsFaultToleranceOptions", "managedBy", "authOptions", "upgradeStrategy",
    }),
    Keys("headGroupSpec", {
        "serviceType", "headService", "enableIngress", "rayStartParams", "template", "resources", "labels",
    }),
    Keys("headGroupSpec rayStartParams", START),
    Keys("workerGroupSpecs *", {
        "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template", "scaleStrategy", "suspend",
        "idleTimeoutSeconds", "resources", "labels",
    }),
    Keys("workerGroupSpecs * rayStartParams", START),
    Rule("rayVersion", like(r"2\.60\.\d+"), "2.60: Fleet uses parts of Ray that change with minor versions"),
    Rule("enableInTreeAutoscaling", one_of(False), "false: world and spares are admitted together, and stay", "", False),
    Rule("headGroupSpec rayStartParams", texts, "a table of texts", "Put numbers in quotes."),
    Rule("headGroupSpec rayStartParams num-cpus", one_of("0"), '"0": the head holds no ranks, so that their load cannot end the run'),
    Rule("headGroupSpec rayStartParams dashboard-host", one_of("0.0.0.0"), '"0.0.0.0": its probe asks from outside the pod', "", False),
    Rule("headGroupSpec template", table, "a pod's template"),
    Rule("workerGroupSpecs", some(7), "1 to 7 groups: Kueue admits no more in one workload"),
    Rule("workerGroupSpecs * groupName", like(LABEL), "small letters, digits and -"),
    Rule("workerGroupSpecs * replicas", whole(1), "a whole number, at least 1"),
    Rule("workerGroupSpecs * minReplicas", whole(0), "a whole number, at least 0"),
    Rule("workerGroupSpecs * maxReplicas", whole(1), "a whole number, at least 1"),
    Rule("workerGroupSpecs * numOfHosts", one_of(1), "1: a lost pod must not take others along", "", False),
    Rule("workerGroupSpecs * rayStartParams", texts, "a table of texts, which may be empty", "Put numbers in quotes."),
    Rule("workerGroupSpecs * labels", texts, "a table of texts", "Put numbers in quotes.", False),
    Rule("workerGroupSpecs * template", table, "a pod's template"),
)  # fmt: skip
"""Of ``spec`` of a RayCluster, and of ``spec.rayClusterSpec`` of a RayJob."""

METADATA: tuple[Rule | Keys, ...] = (
    Keys("", {"apiVersion", "kind", "metadata", "spec", "status"}),
    Keys("metadata", {"name", "namespace", "labels", "annotations", "finalizers", "ownerReferences"}),
    Rule("apiVersion", one_of("ray.io/v1"), "ray.io/v1"),
    Rule("metadata name", like(LABEL, LONGEST_NAME), f"small letters, digits and -, at most {LONGEST_NAME}"),
    Rule("metadata namespace", text, "the namespace", "", False),
    Rule("metadata labels", texts, "a table of texts", "Put numbers in quotes.", False),
    Rule(f"metadata labels {kuberay.QUEUE}", like(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"), "the name of a local queue", "", False),
    Rule("spec", table, "a table"),
)  # fmt: skip

JOB: tuple[Rule | Keys, ...] = (
    Keys("spec", {
        "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata", "clusterSelector",
        "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode",
        "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes", "suspend",
        "preRunningDeadlineSeconds",
    }),
    Rule("spec entrypoint", text, "the command of the run"),
    Rule("spec shutdownAfterJobFinishes", one_of(True), "true: nodes are given back with the run, and Kueue admits no other"),
    Rule("spec ttlSecondsAfterFinished", whole(0), "a whole number of seconds, at least 0", "", False),
    Rule("spec activeDeadlineSeconds", whole(1), "a whole number of seconds, at least 1", "", False),
    Rule("spec backoffLimit", whole(0), "a whole number, at least 0", "", False),
    Rule("spec submissionMode", one_of("K8sJobMode", "HTTPMode", "SidecarMode"), "K8sJobMode, HTTPMode or SidecarMode", "", False),
    Rule("spec suspend", one_of(False), "false: Kueue says itself when the job starts", "Leave it out.", False),
    Rule("spec clusterSelector", one_of({}), "nothing: Kueue admits no job of a cluster that is there", "Leave it out.", False),
    Rule("spec rayClusterSpec", table, "a cluster of its own"),
)  # fmt: skip

BUDGET: tuple[Rule | Keys, ...] = (
    Rule("apiVersion", one_of("policy/v1"), "policy/v1"),
    Rule("metadata name", like(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"), "small letters, digits, - and ."),
    Rule("spec minAvailable", whole(1), "a whole number of pods, at least 1: Kubernetes cannot count those of an owner it does not know",
         "Use minAvailable, not maxUnavailable, and no percentage."),
    Rule(f"spec selector matchLabels {kuberay.RUN}", text, "the run's name, as its pods have it"),
    Rule(f"spec selector matchLabels {kuberay.PART}", one_of("head", "worker"), "head or worker"),
)  # fmt: skip
"""Of a PodDisruptionBudget, beside Kubernetes' own schema."""

RAY_UP: tuple[Rule | Keys, ...] = (
    Rule("cluster_name", like(LABEL, LONGEST_NAME), f"small letters, digits and -, at most {LONGEST_NAME}"),
    Rule("max_workers", whole(1), "a whole number, at least 1"),
    Rule("provider type", one_of(*PROVIDERS), f"one of {', '.join(PROVIDERS)}"),
    Rule("auth ssh_user", like(r"[a-z_][a-z0-9_-]*"), "the name of a user"),
    Rule("auth ssh_private_key", text, "the path of a key", "", False),
    Rule("docker image", pinned, "an image by its tag or digest", "Name the version that was tested.", False),
    Rule("docker container_name", like(r"[a-zA-Z0-9][\w.-]*"), "a container's name", "", False),
    Rule("docker pull_before_run", one_of(True, False), "true or false", "", False),
    *(Rule(f"docker {name}", lines, "a list of texts", "", False) for name in ("run_options", "head_run_options", "worker_run_options")),
    Rule("file_mounts", texts, "remote folder: local folder", "", False),
    Rule("rsync_exclude", lines, "a list of patterns", "", False),
    Rule("head_start_ray_commands", lines, "commands"),
    Rule("worker_start_ray_commands", lines, "commands"),
)  # fmt: skip

ADDRESS = r"(?!127\.)[\w.:-]+"
PROVIDER: dict[str, tuple[Rule | Keys, ...]] = {
    "local": (
        Keys("provider", {"type", "head_ip", "worker_ips"}),
        Rule("provider head_ip", like(ADDRESS), "an address that the other machines can use"),
        Rule("provider worker_ips", some(10_000), "a list of addresses"),
        Rule("provider worker_ips *", like(ADDRESS), "an address that the other machines can use"),
    ),
    "aws": (
        Keys("provider", {"type", "region", "availability_zone", "cache_stopped_nodes", "use_internal_ips", "security_group"}),
        Rule("provider region", like(r"[a-z]+(-[a-z]+)+-\d"), "a region, such as us-west-2"),
        Rule("provider cache_stopped_nodes", one_of(False), "false: a stopped machine keeps what was on it, and costs", "", False),
    ),
    "gcp": (
        Keys("provider", {"type", "region", "availability_zone", "project_id", "use_internal_ips"}),
        Rule("provider region", like(r"[a-z]+-[a-z]+\d"), "a region, such as us-west1"),
        Rule("provider availability_zone", like(r"[a-z]+-[a-z]+\d-[a-z]"), "a zone, such as us-west1-a"),
        Rule("provider project_id", like(r"[a-z][a-z0-9-]{4,28}[a-z0-9]"), "a project's id"),
    ),
}  # fmt: skip

MACHINE: dict[str, tuple[Rule | Keys, ...]] = {
    "aws": (
        Keys("node_config", {
            "InstanceType", "ImageId", "IamInstanceProfile", "InstanceMarketOptions", "BlockDeviceMappings", "KeyName", "SubnetIds",
            "SubnetId", "SecurityGroupIds", "NetworkInterfaces", "Placement", "TagSpecifications", "EbsOptimized", "UserData",
            "CpuOptions", "Monitoring", "CapacityReservationSpecification", "MetadataOptions", "LaunchTemplate",
        }),
        Rule("node_config InstanceType", like(r"[a-z0-9-]+\.[a-z0-9-]+"), "a kind of machine, such as m7i.2xlarge"),
        Rule("node_config ImageId", like(r"ami-[0-9a-f]{8,17}"), "an AMI", "", False),
        Rule("node_config IamInstanceProfile Name", text, "an instance profile", "", False),
        Keys("node_config IamInstanceProfile", {"Name", "Arn"}),
    ),
    "gcp": (
        Keys("node_config", {
            "machineType", "disks", "serviceAccounts", "scheduling", "networkInterfaces", "guestAccelerators", "metadata", "labels", "tags",
            "minCpuPlatform", "networkPerformanceConfig", "reservationAffinity", "sourceMachineImage",
        }),
        Rule("node_config machineType", like(r"[a-z0-9]+-[a-z0-9-]+"), "a kind of machine, such as n2-standard-8"),
        Rule("node_config disks", some(99), "one disk or more"),
        Rule("node_config disks * boot", one_of(True, False), "true or false"),
        Rule("node_config disks * autoDelete", one_of(True), "true: a disk must not outlive its machine"),
        Rule("node_config disks * type", one_of("PERSISTENT", "SCRATCH"), "PERSISTENT or SCRATCH"),
        Rule("node_config disks * initializeParams sourceImage", text, "a disk image"),
        Rule("node_config disks * initializeParams diskSizeGb", whole(10), "GB, at least 10"),
        Rule("node_config serviceAccounts * email", like(r"[^@\s]+@[^@\s]+"), "the e-mail of a service account"),
        Rule("node_config serviceAccounts * scopes", lines, "a list of scopes"),
    ),
}  # fmt: skip
"""Of each entry of ``available_node_types``."""

BATCH: tuple[Rule | Keys, ...] = (
    Keys("", {
        "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time", "partition", "account", "exclusive",
        "no-kill", "output", "error", "qos", "constraint", "reservation", "exclude", "nodelist", "mail-type", "mail-user", "requeue",
        "signal", "open-mode", "comment", "licenses", "gres", "switches",
    }),
    Rule("job-name", like(LABEL, LONGEST_NAME), f"small letters, digits and -, at most {LONGEST_NAME}"),
    Rule("nodes", like(r"[1-9]\d*"), "a number of hosts, at least 1"),
    Rule("ntasks-per-node", one_of("1"), "1: one node of Ray's on each host"),
    Rule("cpus-per-task", like(r"[1-9]\d*"), "a number of CPUs, at least 1"),
    Rule("gpus-per-node", like(r"(\w+:)?[1-9]\d*"), "a number of GPUs, at least 1", "Leave it out where there are none.", False),
    Rule("mem", like(r"[1-9]\d*[KMGT]?"), "an amount of memory, such as 16G", "", False),
    Rule("time", like(r"(\d+-)?\d{1,2}(:\d{2}){1,2}"), "days-hours:minutes:seconds"),
    Rule("partition", like(r"[\w.,-]+"), "names of partitions", "", False),
    Rule("account", like(r"[\w.-]+"), "the name of an account", "", False),
    Rule("exclusive", one_of(""), "no value: hosts of its own, as all of Ray on them is stopped at the end", "Write #SBATCH --exclusive."),
    Rule("no-kill", one_of(""), "no value: the job goes on without a host that is lost", "Write #SBATCH --no-kill."),
    Rule("requeue", one_of(""), "no value: a job whose time is over is queued again, and its run goes on", "Write #SBATCH --requeue."),
    Rule("open-mode", one_of("append"), "append: what was printed before it was queued again stays"),
    Rule("signal", like(r"B:USR1@([6-9]\d|[1-9]\d{2,})"), "B:USR1@SECONDS, 60 at least: so long before its end the run is stopped"),
    Rule("output", like(r"\S+"), "a file", "", False),
)  # fmt: skip
"""Of the lines ``#SBATCH --key=value``."""
