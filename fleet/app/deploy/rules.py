"""Fleet's rules for a document, field by field, where no schema has them: the tables at the end. Pure.

A path is the keys from the top, with a space between two; ``*`` is each entry of a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.app.deploy import jobset, pods
from fleet.app.deploy.spec import DOMAIN, LABEL, LONGEST_NAME, check_pinned, nearest
from fleet.errors import ConfigError

MISSING = object()
LONGEST_SHOWN = 80
"""Characters of a value in a refusal."""
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|[kMGTPE]i?)?")
Good = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for the value at ``path``: ``good`` judges it, and ``takes`` is the rule in words. ``needed``: the value must be there."""

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
    """(dotted path, value) of each place that a path leads to; the value is MISSING where the path ends early."""
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


# ---- tests of a value --------------------------------------------------------------------------------------------------------------------


def text(value: Any) -> bool:
    """A text that is not empty."""
    return isinstance(value, str) and bool(value)


def texts(value: Any) -> bool:
    """A table of texts."""
    return isinstance(value, Mapping) and all(isinstance(each, str) for pair in value.items() for each in pair)


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


# ---- the tables --------------------------------------------------------------------------------------------------------------------------


def _probe(name: str) -> tuple[Rule, ...]:
    at = f"spec containers * {name}"
    count = "a whole number, at least 1"
    return (
        Rule(f"{at} httpGet path", one_of(pods.HEAD_HEALTH[0], pods.NODE_HEALTH[0]), "one of Ray's two paths of health",
             f"{pods.HEAD_HEALTH[0]} on the head, {pods.NODE_HEALTH[0]} on any node."),
        Rule(f"{at} httpGet port", one_of(pods.HEAD_HEALTH[1], pods.NODE_HEALTH[1]), "8265 for the head, 52365 for a node's agent"),
        Rule(f"{at} periodSeconds", whole(1), count),
        Rule(f"{at} timeoutSeconds", whole(1), count),
        Rule(f"{at} failureThreshold", whole(1), count), Rule(f"{at} initialDelaySeconds", whole(0), "a whole number", "", False),
    )  # fmt: skip


LABEL_OF_RUN = Rule(f"metadata labels {pods.RUN}", text, "the run's name, by which budgets and policies find the pod")
SUBMITTER: tuple[Rule | Keys, ...] = (
    LABEL_OF_RUN,
    Rule(f"metadata labels {pods.PART}", one_of(pods.SUBMITTER), "submitter"),
    Rule("spec restartPolicy", one_of("Never", "OnFailure"), "Never or OnFailure"),
    Rule("spec containers", some(99), "one container or more"),
    Rule("spec containers * image", pinned, "an image by its tag or digest", "Name the version that was tested."),
)
"""Rules for the template of the pod that hands in the entrypoint of a RayJob."""

POD: tuple[Rule | Keys, ...] = (
    LABEL_OF_RUN,
    Rule(f"metadata labels {pods.PART}", one_of(pods.HEAD, pods.WORKER), "head or worker"),
    Rule("spec containers", some(99), "one container or more"),
    Rule("spec containers * image", pinned, "an image by its tag or digest", "Name the version that was tested."),
    *(Rule(f"spec containers * resources {side} {what}", positive, "a quantity above 0")
      for side in ("requests", "limits") for what in ("cpu", "memory")),
    *_probe("readinessProbe"),
    *_probe("livenessProbe"),
)  # fmt: skip
"""Rules for the template of a pod of Ray's."""

NEW_POD = Rule("spec restartPolicy", one_of("Never"), "Never: a new pod is a new node of Ray's")
"""For pods that KubeRay replaces when they are lost."""

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
"""Rules for ``spec`` of a RayCluster, and for ``spec.rayClusterSpec`` of a RayJob."""


def metadata(version: str) -> tuple[Rule | Keys, ...]:
    """Rules for an object that no schema of Kubernetes' own knows. ``version``: its ``apiVersion``."""
    return (
        Keys("", {"apiVersion", "kind", "metadata", "spec", "status"}),
        Keys("metadata", {"name", "namespace", "labels", "annotations", "finalizers", "ownerReferences"}),
        Rule("apiVersion", one_of(version), version),
        Rule("metadata name", like(LABEL, LONGEST_NAME), f"small letters, digits and -, at most {LONGEST_NAME}"),
        Rule("metadata namespace", text, "the namespace", "", False),
        Rule("metadata labels", texts, "a table of texts", "Put numbers in quotes.", False),
        Rule(f"metadata labels {pods.QUEUE}", like(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"), "the name of a local queue", "", False),
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
    Rule("spec submissionMode", one_of("K8sJobMode", "HTTPMode"), "K8sJobMode or HTTPMode: a sidecar has no security context", "", False),
    Rule("spec suspend", one_of(False), "false: Kueue says itself when the job starts", "Leave it out.", False),
    Rule("spec clusterSelector", one_of({}), "nothing: Kueue admits no job of a cluster that is there", "Leave it out.", False),
    Rule("spec rayClusterSpec", table, "a cluster of its own"),
)  # fmt: skip

BUDGET: tuple[Rule | Keys, ...] = (
    Rule("apiVersion", one_of("policy/v1"), "policy/v1"),
    Rule("metadata name", like(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"), "small letters, digits, - and ."),
    Rule("spec minAvailable", whole(1), "a whole number of pods, at least 1: Kubernetes cannot count those of an owner it does not know",
         "Use minAvailable, not maxUnavailable, and no percentage."),
    Rule(f"spec selector matchLabels {pods.RUN}", text, "the run's name, as its pods have it"),
    Rule(f"spec selector matchLabels {pods.PART}", one_of("head", "worker"), "head or worker"),
)  # fmt: skip
"""Rules for a PodDisruptionBudget, beside Kubernetes' own schema."""

POLICY: tuple[Rule | Keys, ...] = (
    Rule("apiVersion", one_of("networking.k8s.io/v1"), "networking.k8s.io/v1"),
    Rule("metadata name", like(DOMAIN), "small letters, digits, - and ."),
    Rule(f"spec podSelector matchLabels {pods.RUN}", text, "the run's name, as its pods have it"),
    Rule(f"spec podSelector matchLabels {pods.PART}", one_of(pods.HEAD, pods.WORKER), "head or worker", "", False),
    Rule("spec policyTypes", one_of(["Ingress"], ["Ingress", "Egress"]), "Ingress: it limits connections to the pods"),
    Rule("spec ingress", some(99), "one rule or more"),
    Rule("spec ingress * from", some(99), "the peers that it lets in: a rule without any lets all in"),
    Rule("spec ingress * ports", some(99), "the ports that it opens"),
)
"""Rules for a NetworkPolicy, beside Kubernetes' own schema."""

ACCOUNT: tuple[Rule | Keys, ...] = (
    Rule("apiVersion", one_of("v1"), "v1"),
    Rule("metadata name", like(DOMAIN), "small letters, digits, - and ."),
    Rule("automountServiceAccountToken", one_of(False), "false: nothing in the pods speaks with Kubernetes"),
)
"""Rules for a ServiceAccount, beside Kubernetes' own schema."""

JOB_SET: tuple[Rule | Keys, ...] = (
    Keys("spec", {
        "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator", "managedBy",
        "ttlSecondsAfterFinished", "volumeClaimPolicies",
    }),
    Keys("spec network", {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}),
    Keys("spec successPolicy", {"operator", "targetReplicatedJobs"}),
    Keys("spec failurePolicy", {"maxRestarts", "restartStrategy", "rules"}),
    Keys("spec replicatedJobs *", {"name", "groupName", "replicas", "template", "dependsOn"}),
    Rule("spec network enableDNSHostnames", one_of(True), "true: workers find the head by its name"),
    Rule("spec network subdomain", like(LABEL, 63), "small letters, digits and -", "", False),
    Rule("spec network publishNotReadyAddresses", one_of(True), "true: workers look for a head that is not ready yet", "", False),
    Rule("spec successPolicy operator", one_of("All", "Any"), "All or Any"),
    Rule("spec successPolicy targetReplicatedJobs", one_of([jobset.HEAD]), "[head]: the JobSet ends with its run"),
    Rule("spec failurePolicy maxRestarts", whole(0), "a whole number, at least 0", "", False),
    Rule("spec failurePolicy restartStrategy", one_of("Recreate", "BlockingRecreate"),
         "Recreate or BlockingRecreate: InPlaceRestart starts all pods again when one is lost, and Fleet does not need that",
         "Containers with restartPolicy OnFailure start again in place, each by itself.", False),
    Rule("spec ttlSecondsAfterFinished", whole(0), "a whole number of seconds, at least 0", "", False),
    Rule("spec suspend", one_of(False), "false: Kueue says itself when the job starts", "Leave it out.", False),
    Rule("spec replicatedJobs", some(99), "a head and its workers"),
    Rule("spec replicatedJobs * name", one_of(jobset.HEAD, jobset.RANKS), "head or ranks: the commands have the head's host name in them"),
    Rule("spec replicatedJobs * replicas", one_of(1), "1: the number of nodes is that of a job's pods"),
    Rule("spec replicatedJobs * template spec completionMode", one_of("Indexed"), "Indexed: a pod has its name by its index"),
    Rule("spec replicatedJobs * template spec parallelism", whole(1), "a whole number, at least 1"),
    Rule("spec replicatedJobs * template spec completions", whole(1), "a whole number, at least 1"),
    Rule("spec replicatedJobs * template spec backoffLimit", whole(0), "a whole number, at least 0"),
    Rule("spec replicatedJobs * template spec template", table, "a pod's template"),
    Rule("spec replicatedJobs * template spec template spec restartPolicy", one_of("OnFailure"),
         "OnFailure: a container starts again in place"),
)  # fmt: skip
"""Rules for a JobSet."""
