"""Faults in the files that bring up a cluster: their texts in, refusals out.

The judges are Ray's schema for ``ray up``, Kubernetes' schemas for its own objects, and the tables of ``rules.py`` for all of them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import yaml

from fleet.app.deploy import entrypoint, jobset, pod_security, pods, rules
from fleet.errors import ConfigError

KUBERNETES = "1.33"
"""The version whose schemas judge."""
RAY, JOB_SET = "ray.io/v1", "jobset.x-k8s.io/v1alpha2"
LEAST_PATIENCE_S = 60
LEAST_SHARED_B = 64 * 2**20
"""Bytes that Fleet needs in ``/dev/shm``."""
EXTRA = "kubernetes_validate"
YAML = (".yaml", ".yml")
OWN = {"PodDisruptionBudget": rules.BUDGET, "NetworkPolicy": rules.POLICY, "ServiceAccount": rules.ACCOUNT}
"""Kinds that Kubernetes' own schemas know -> Fleet's rules beside the schemas."""
KNOWN = (
    f"A cluster file of ray up, RayJob, RayCluster, JobSet, {', '.join(OWN)} can be checked; docs/deploy.md names tools for other files."
)


def check(name: str, text: str, accepts: entrypoint.Accepts, *, core: bool = True) -> list[ConfigError]:
    """All faults in a file.

    Args:
        name: of the file.
        text: its content.
        accepts: Fleet's own command line, which judges the commands in it.
        core: ask Kubernetes' schemas, too. They come with the extra ``kubernetes``.
    """
    if PurePosixPath(name).suffix not in YAML:
        raise ConfigError("FILE", name, "files of such a name cannot be checked", KNOWN)
    faults = _check_yaml(text, accepts, core)
    return [ConfigError(f"{name}: {error.field}", error.value, error.reason, error.way_out) for error in faults]


def has_core() -> bool:
    """Whether Kubernetes' schemas are installed."""
    return importlib.util.find_spec(EXTRA) is not None


def _check_yaml(text: str, accepts: entrypoint.Accepts, core: bool) -> Iterator[ConfigError]:
    try:
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}" if mark else ""
        yield ConfigError("YAML", "", f"it cannot be read{place}: {getattr(error, 'problem', None) or type(error).__name__}")
        return
    if not documents:
        yield ConfigError("YAML", "", "there is nothing in it", KNOWN)
    for number, document in enumerate(documents, 1):
        at = f"document {number}: " if len(documents) > 1 else ""
        for fault in _document(document, accepts, core):
            yield ConfigError(f"{at}{fault.field}", fault.value, fault.reason, fault.way_out)


def _document(document: Any, accepts: entrypoint.Accepts, core: bool) -> list[ConfigError]:
    if not isinstance(document, Mapping):
        return [ConfigError("YAML", rules.shown(document), "it is a list or a value, and no table", KNOWN)]
    match document.get("kind"):
        case "RayJob":
            return [*rules.broken(document, rules.metadata(RAY)), *_job(document, accepts, core)]
        case "RayCluster":
            cluster = document.get("spec")
            return [*rules.broken(document, rules.metadata(RAY)), *_cluster(cluster, "spec", core)]
        case "JobSet":
            return [*rules.broken(document, rules.metadata(JOB_SET)), *_job_set(document, accepts, core)]
        case str(kind) if kind in OWN:
            judged = _core(document) if core and rules.text(document.get("apiVersion")) else ()
            return [*judged, *rules.broken(document, OWN[kind]), *(_peers(document) if kind == "NetworkPolicy" else ())]
        case None if {"provider", "cluster_name"} & document.keys():
            return list(_ray_up(document))
        case None:
            return [ConfigError("kind", "", "it is missing", KNOWN)]
        case kind:
            return [ConfigError("kind", rules.shown(kind), "no rules are known for it", KNOWN)]


# ---- Kubernetes --------------------------------------------------------------------------------------------------------------------------


def _core(document: Mapping[str, Any], below: str = "") -> Iterator[ConfigError]:
    """The first refusal by Kubernetes' own schema, which refuses unknown fields, too. ``below``: text before each path."""
    import kubernetes_validate as schemas

    try:
        schemas.validate(dict(document), KUBERNETES, strict=True)
    except schemas.SchemaNotFoundError:
        reason = f"Kubernetes {KUBERNETES} has no {document.get('kind')} of this version"
        yield ConfigError("apiVersion", rules.shown(document.get("apiVersion")), reason)
    except jsonschema.ValidationError as error:
        yield _schema_fault(error, below)


def _schema_fault(error: jsonschema.ValidationError, below: str = "") -> ConfigError:
    path = below
    for word in error.absolute_path:
        path += f"[{word}]" if isinstance(word, int) else f"{'.' if path else ''}{word}"
    names = error.validator in ("additionalProperties", "required")  # their messages name fields, others repeat values
    said = error.message if names else f"it asks for {error.validator} {rules.shown(error.validator_value)}"
    return ConfigError(path or "the file", rules.shown(error.instance), f"the schema refuses it: {said}")


def _job(document: Mapping[str, Any], accepts: entrypoint.Accepts, core: bool) -> Iterator[ConfigError]:
    yield from rules.broken(document, rules.JOB)
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        return
    cluster = spec.get("rayClusterSpec")
    yield from _cluster(cluster, "spec.rayClusterSpec", core)
    yield from _submitter(spec, core)
    if rules.text(spec.get("entrypoint")):
        room = _room(cluster) if isinstance(cluster, Mapping) else None
        yield from _command(spec["entrypoint"], "spec.entrypoint", accepts, room)
        yield from _tries(spec["entrypoint"], spec.get("backoffLimit"))


def _submitter(spec: Mapping[str, Any], core: bool) -> Iterator[ConfigError]:
    """The pod that hands the entrypoint in, where there is one."""
    at, template = "spec.submitterPodTemplate", spec.get("submitterPodTemplate")
    if isinstance(template, Mapping):
        yield from _judged(template, at, rules.SUBMITTER, core)
    elif template is not None or spec.get("submissionMode", "K8sJobMode") == "K8sJobMode":
        reason = "it takes a pod's template: KubeRay's own has no security context, and a restricted namespace refuses it"
        yield ConfigError(at, rules.shown(template or ""), reason)


def _job_set(document: Mapping[str, Any], accepts: entrypoint.Accepts, core: bool) -> Iterator[ConfigError]:
    yield from rules.broken(document, rules.JOB_SET)
    jobs = [(path, job) for path, job in rules.reached(document, ["spec", "replicatedJobs", "*"]) if isinstance(job, Mapping)]
    names = sorted(str(job.get("name")) for _, job in jobs)
    if jobs and names != [jobset.HEAD, jobset.RANKS]:
        yield ConfigError("spec.replicatedJobs", ", ".join(names), "it takes one job of the name head, and one of the name ranks")
    room = None
    for path, job in jobs:
        inner = job["template"] if isinstance(job.get("template"), Mapping) else {}
        if core:
            yield from _core({"apiVersion": "batch/v1", "kind": "Job", **inner}, f"{path}.template")
        yield from _same_counts(inner, path)
        template = dict(rules.reached(inner, ["spec", "template"])).get("spec.template")
        if isinstance(template, Mapping):
            yield from _pod(template, f"{path}.template.spec.template", core)
        room = _held(template, dict(rules.reached(inner, ["spec"])).get("spec", {})) if job.get("name") == jobset.RANKS else room
    for path, script in _scripts(document):
        yield from _command(jobset.command_of(script), path, accepts, room)


def _same_counts(job: Mapping[str, Any], path: str) -> Iterator[ConfigError]:
    spec = job.get("spec")
    counts = [spec.get(name) for name in ("parallelism", "completions")] if isinstance(spec, Mapping) else []
    if counts and all(map(rules.whole(1), counts)) and counts[0] != counts[1]:
        reason = f"completions is {counts[1]}, and each node is one pod that stays to the end"
        yield ConfigError(f"{path}.template.spec.parallelism", counts[0], reason, "Give both the same number.")


def _scripts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The script of the head's container, with its path."""
    for path, job in rules.reached(document, ["spec", "replicatedJobs", "*"]):
        if isinstance(job, Mapping) and job.get("name") == jobset.HEAD:
            for inner, words in rules.reached(job, ["template", "spec", "template", "spec", "containers", "*", "args"]):
                text = words[-1] if isinstance(words, list) and words else ""
                yield f"{path}.{inner}", text if isinstance(text, str) else ""


def _peers(policy: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Refusals of a policy that lets in pods of its own namespace that are not of its run."""
    wanted = ["spec", "podSelector", "matchLabels", pods.RUN]
    own = next((value for _, value in rules.reached(policy, wanted)), None)
    for path, labels in rules.reached(policy, wanted[:-1]):
        for name in (labels.keys() - {pods.RUN, pods.PART}) if isinstance(labels, Mapping) else ():
            way_out = f"Use {pods.RUN} and {pods.PART}."
            yield ConfigError(f"{path}.{name}", rules.shown(labels[name]), "pods of a run have no such label", way_out)
    for path, peer in rules.reached(policy, ["spec", "ingress", "*", "from", "*"]):
        if isinstance(peer, Mapping) and peer.get("namespaceSelector") == {}:
            yield ConfigError(f"{path}.namespaceSelector", "", "it lets in pods of all namespaces", "Name the labels of one.")
        if isinstance(peer, Mapping) and not {"namespaceSelector", "ipBlock"} & peer.keys():
            for inner, name in rules.reached(peer, wanted[1:]):
                if name != own:
                    shown = "" if name is rules.MISSING else rules.shown(name)
                    yield ConfigError(f"{path}.{inner}", shown, "it lets in pods that are not of this run", f"Set it to {own}.")


def _command(text: str, field: str, accepts: entrypoint.Accepts, room: int | None) -> Iterator[ConfigError]:
    """The error of ``entrypoint.check``, as a refusal of ``field``."""
    try:
        entrypoint.check(text, field, accepts, room)
    except ConfigError as error:
        reason = error.reason if error.field == field else f"{error.field} = {error.value!r}: {error.reason}"
        yield ConfigError(field, rules.shown(text), reason, error.way_out)


def _tries(command: str, tries: Any) -> Iterator[ConfigError]:
    if rules.whole(1)(tries) and "--resume" not in command:
        reason = "each new try is a new cluster, on which this command begins the run anew"
        yield ConfigError("spec.backoffLimit", tries, reason, "Put --resume-or-start NAME into the entrypoint, or set it to 0.")


def _cluster(cluster: Any, at: str, core: bool) -> Iterator[ConfigError]:
    if not isinstance(cluster, Mapping):
        return
    for error in (*rules.broken(cluster, rules.CLUSTER), *_replicas(cluster)):
        yield ConfigError(f"{at}.{error.field}", error.value, error.reason, error.way_out)
    for path, template in (
        *rules.reached(cluster, ["headGroupSpec", "template"]),
        *rules.reached(cluster, ["workerGroupSpecs", "*", "template"]),
    ):
        if isinstance(template, Mapping):
            yield from _pod(template, f"{at}.{path}", core)
            for error in rules.broken(template, [rules.NEW_POD]):
                yield ConfigError(f"{at}.{path}.{error.field}", error.value, error.reason, error.way_out)


def _replicas(cluster: Mapping[str, Any]) -> Iterator[ConfigError]:
    for path, group in rules.reached(cluster, ["workerGroupSpecs", "*"]):
        counts = [group.get(name) for name in ("minReplicas", "replicas", "maxReplicas")] if isinstance(group, Mapping) else []
        if counts and all(map(rules.whole(0), counts)) and len(set(counts)) > 1:
            reason = f"minReplicas is {counts[0]} and maxReplicas {counts[2]}, and world and spares are one workload of a fixed size"
            yield ConfigError(f"{path}.replicas", counts[1], reason, "Give all three the same number.")


def _pod(template: Mapping[str, Any], at: str, core: bool) -> Iterator[ConfigError]:
    """A pod that is a node of Ray's. ``at``: path of the template."""
    yield from _judged(template, at, rules.POD, core)
    for error in (*_shared_memory(template), *_spread(template)):
        yield ConfigError(f"{at}.{error.field}", error.value, error.reason, error.way_out)


def _judged(template: Mapping[str, Any], at: str, table: Sequence[rules.Rule | rules.Keys], core: bool) -> Iterator[ConfigError]:
    """Refusals of any pod, and those of the table."""
    if core:
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        yield from _core(pod, at)
    for error in (*rules.broken(template, table), *pod_security.refused(template), *_containers(template)):
        yield ConfigError(f"{at}.{error.field}", error.value, error.reason, error.way_out)


def _shared_memory(template: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Refusals of a pod without enough: by default it has 64 MiB, and Ray would put its objects on a disk."""
    volumes = [value for _, value in rules.reached(template, ["spec", "volumes", "*"]) if isinstance(value, Mapping)]
    mounts = [value for _, value in rules.reached(template, ["spec", "containers", "*", "volumeMounts", "*"]) if isinstance(value, Mapping)]
    names = [each.get("name") for each in mounts if each.get("mountPath") == "/dev/shm"]
    sizes = [each["emptyDir"] for each in volumes if each.get("name") in names and isinstance(each.get("emptyDir"), Mapping)]
    if not sizes:
        yield ConfigError(
            "spec.volumes", "", "nothing is mounted at /dev/shm, where ranks of a node speak to each other", "Mount an emptyDir."
        )
    for each in sizes:
        if each.get("medium") != "Memory":
            yield ConfigError("spec.volumes.emptyDir.medium", rules.shown(each.get("medium")), "at /dev/shm it takes Memory")
        if rules.amount(each.get("sizeLimit")) < LEAST_SHARED_B:
            yield ConfigError("spec.volumes.emptyDir.sizeLimit", rules.shown(each.get("sizeLimit")), "at /dev/shm it takes 64Mi or more")


def _spread(template: Mapping[str, Any]) -> Iterator[ConfigError]:
    labels: Any = dict(rules.reached(template, ["metadata", "labels"])).get("metadata.labels")
    for path, wanted in rules.reached(template, ["spec", "topologySpreadConstraints", "*", "labelSelector", "matchLabels"]):
        names = list(wanted) if isinstance(wanted, Mapping) and isinstance(labels, Mapping) else []
        for name in names:
            if wanted[name] != labels.get(name):
                yield ConfigError(
                    f"{path}.{name}", rules.shown(wanted[name]), "the pod itself has no such label, so that it is not counted"
                )


def _containers(template: Mapping[str, Any]) -> Iterator[ConfigError]:
    for path, container in rules.reached(template, ["spec", "containers", "*"]):
        if not isinstance(container, Mapping):
            continue
        resources = container.get("resources")
        sides: list[Any] = [resources.get(name) for name in ("requests", "limits")] if isinstance(resources, Mapping) else []
        if all(isinstance(each, Mapping) for each in sides) and sides and sides[0] != sides[1]:
            others = sorted({str(name) for one, two in (sides, sides[::-1]) for name in one if one[name] != two.get(name)})
            reason = f"requests differ from them in {', '.join(others)}: such pods are ended first when their host is short of memory"
            yield ConfigError(f"{path}.resources.limits", rules.shown(sides[1]), reason, "Give both the same quantities.")
        yield from _probes(container, path)


def _probes(container: Mapping[str, Any], path: str) -> Iterator[ConfigError]:
    for name in ("readinessProbe", "livenessProbe"):
        for _, asked in rules.reached(container, [name, "httpGet"]):
            pair: tuple[Any, Any] = (asked.get("path"), asked.get("port")) if isinstance(asked, Mapping) else pods.NODE_HEALTH
            known = dict((pods.HEAD_HEALTH, pods.NODE_HEALTH))
            if rules.one_of(*known)(pair[0]) and rules.one_of(*known.values())(pair[1]) and known[pair[0]] != pair[1]:
                yield ConfigError(f"{path}.{name}.httpGet.port", pair[1], f"{pair[0]} is answered at {known[pair[0]]}")
    alive = container.get("livenessProbe")
    times: list[Any] = [alive.get(name) for name in ("periodSeconds", "failureThreshold")] if isinstance(alive, Mapping) else []
    if times and all(map(rules.whole(1), times)) and times[0] * times[1] < LEAST_PATIENCE_S:
        reason = f"a node that is silent for {times[0] * times[1]} s would be ended, though it may only be paused"
        yield ConfigError(f"{path}.livenessProbe.failureThreshold", times[1], reason, f"Allow at least {LEAST_PATIENCE_S} s.")


def _room(cluster: Mapping[str, Any]) -> int | None:
    """Ranks that the worker groups hold. None: not known."""
    held = [_held(group.get("template"), group) if isinstance(group, Mapping) else None
            for _, group in rules.reached(cluster, ["workerGroupSpecs", "*"])]  # fmt: skip
    known = [each for each in held if each is not None]
    return sum(known) if len(known) == len(held) else None


def _held(template: Any, group: Any) -> int | None:
    """Ranks that a group of like pods holds: one for each GPU, or for each CPU where there is no GPU. None: not known."""
    count = next((group[name] for name in ("replicas", "parallelism") if name in group), None) if isinstance(group, Mapping) else None
    found = [value for _, value in rules.reached(template, ["spec", "containers", "*", "resources", "limits"])]
    if count is None or not found or not isinstance(found[0], Mapping) or not rules.whole(0)(count):
        return None
    return int(count) * int(rules.amount(found[0].get("nvidia.com/gpu", 0)) or rules.amount(found[0].get("cpu")))


# ---- ray up ------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def _ray_schema() -> Any:
    """As Ray's own command has it. Ray is not imported for that."""
    spec = importlib.util.find_spec("ray")
    places = (spec.submodule_search_locations if spec else None) or []
    return json.loads(Path(next(iter(places)), "autoscaler", "ray-schema.json").read_text())


def _ray_up(document: Mapping[str, Any]) -> Iterator[ConfigError]:
    judge = jsonschema.Draft7Validator(_ray_schema())
    return (_schema_fault(error) for error in judge.iter_errors(dict(document)))
