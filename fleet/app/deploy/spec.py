"""The spec of a cluster and its run: one small file in TOML, from which the files of each target are written. Pure."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import ConfigError
from fleet.settings import fields
from fleet.settings.fields import setting

LEFT_BEHIND = (".git", ".venv", "runs", "__pycache__")
"""Folders beside the spec that do not travel."""
TARGETS = ("ray-up", "kuberay", "jobset", "slurm")
PROVIDERS = ("aws", "gcp", "local")
LONGEST_NAME = 47
"""Characters. KubeRay adds its own to the name of a RayJob, and Kubernetes allows 63."""
WHEEL = re.compile(r"(?:(?!\.\.?/)[\w.+-]+/)*fleet_train-[\w.+!]+(-\d\w*)?(-[\w.]+){3}\.whl")
GIT = re.compile(r"git\+(?:https|ssh)://[^\s@]+(?:@[^\s@/]+/[^\s@]+)?@[\w./+-]+")
"""A URL that pip takes, with the tag or commit that was tested."""
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?")
NAME = "a name of Kubernetes': small letters, digits, - and ."
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
IMAGE = re.compile(r"[a-z0-9][\w./:-]*?(?::(?P<tag>[\w][\w.-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?")
TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){1,2}")
OURS = (
    "--address", "--world", "--spares", "--nodes", "--storage", "--store", "--name", "--detach", "--resume", "--resume-or-start",
    "--repeat", "--plain",
)  # fmt: skip
"""Options of ``fleet run`` that have a field of their own in the spec."""
ARN = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:instance-profile/[\w+=,.@/-]+")
TAINT = re.compile(r"(?P<key>[^=:]*)(?:=(?P<value>[^=:]*))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
RESERVED = {"cpu": "nodes.cpus", "memory": "nodes.memory_gib", "nvidia.com/gpu": "nodes.gpus", "ephemeral-storage": "nodes.disk_gib"}
"""Resource -> the field of the spec that sets it."""
QUANTITY = re.compile(r"[1-9]\d*([kMGTPE]i?)?")
LOOPBACK = re.compile(r"127\.|localhost$|::1$")


def _texts(meaning: str) -> Any:
    return field(default_factory=dict, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Nodes:
    """The worker nodes, all alike."""

    count: int = setting(0, "Worker nodes that hold ranks. The head is one more; on Slurm the first of them is the head, too.", least=1)
    cpus: int = setting(1, "CPUs of each.", least=1)
    gpus: int = setting(0, "GPUs of each.", least=0)
    memory_gib: int = setting(16, "Memory of each, GiB.", least=1)
    shm_gib: int = setting(
        4, "`/dev/shm` of each, GiB, out of its memory. Half is for Ray's object store, and Fleet needs 64 MiB.", least=1
    )
    disk_gib: int = setting(
        0, "Kubernetes: ephemeral storage of each, GiB, for logs and spilled objects of Ray; 0: none is asked for.", least=0
    )
    labels: Mapping[str, str] = _texts("Labels of Ray's that each node gets, such as `rack`.")

    @property
    def object_store_bytes(self) -> int:
        """Size of Ray's object store."""
        return _object_store_bytes(self.shm_gib)


@dataclass(frozen=True, slots=True)
class Head:
    """The head node, which holds no ranks: Ray's own processes, the run's coordinator and its driver."""

    cpus: int = setting(2, "CPUs of the head.", least=1)
    memory_gib: int = setting(8, "Memory of the head, GiB.", least=1)
    disk_gib: int = setting(0, "Kubernetes: ephemeral storage of the head, GiB; 0: none is asked for.", least=0)

    @property
    def shm_gib(self) -> int:
        """`/dev/shm` of the head, out of its memory."""
        return max(1, self.memory_gib // 4)

    @property
    def object_store_bytes(self) -> int:
        """Size of Ray's object store."""
        return _object_store_bytes(self.shm_gib)


def _object_store_bytes(shm_gib: int) -> int:
    """Half of ``/dev/shm``. By default Ray takes 30 % of a node's memory, and puts it on a disk where ``/dev/shm`` is smaller."""
    return shm_gib * 2**30 // 2


@dataclass(frozen=True, slots=True)
class RayUp:
    """For ``ray up``: machines of a cloud, or your own by ssh."""

    provider: str = setting("", "aws, gcp, or local: machines that are there, by ssh.")
    region: str = setting("", "aws, gcp: the region.")
    zone: str = setting("", "gcp: the zone.")
    project: str = setting("", "gcp: the project's id.")
    instance_type: str = setting("", "aws, gcp: kind of machine of the worker nodes.")
    head_instance_type: str = setting("", "aws, gcp: kind of machine of the head.")
    machine_image: str = setting("", "The disk image: needed on gcp; on aws an AMI, or Ray's choice.")
    identity: str = setting(
        "", "Identity of nodes at the store: on aws an instance profile by name or ARN, on gcp the e-mail of a service account."
    )
    head_ip: str = setting("", "local: address of the head.")
    worker_ips: tuple[str, ...] = setting((), "local: addresses of the worker nodes.")
    ssh_user: str = setting("ubuntu", "User that logs in.")
    ssh_private_key: str = setting("", "Path of the key to log in with; on aws and gcp Ray makes one otherwise.")
    setup: tuple[str, ...] = setting(
        (), "Shell commands that make a node ready, such as the installation of Fleet where there is no image."
    )


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """For Kubernetes with KubeRay or JobSet, and with Kueue if there is a queue."""

    namespace: str = setting("default", "Namespace of all objects.")
    operator_namespace: str = setting("default", "kuberay: namespace of KubeRay's operator, which asks the head at 8265.")
    queue: str = setting("", "Kueue's local queue; empty: no Kueue.")
    priority_class: str = setting("", "Kueue's workload priority class.")
    pod_priority_class: str = setting("", "Priority class of the pods.")
    service_account: str = setting("", "Service account of the pods, by which a cloud lets them into the store.")
    service_account_annotations: Mapping[str, str] = _texts(
        "Annotations by which a cloud knows that account. With any, `service-account.yaml` makes it; without, it must be there."
    )
    pull_secrets: tuple[str, ...] = setting((), "Names of Secrets in the namespace by which the image is pulled.")
    secret: str = setting("", "Name of a Secret in the namespace that holds credentials.")
    secret_keys: tuple[str, ...] = setting((), "Its keys that pods get as environment variables of the same names.")
    node_selector: Mapping[str, str] = _texts("Labels of Kubernetes that the worker nodes must have.")
    tolerations: tuple[str, ...] = setting((), "Taints of hosts that pods bear, as `kubectl taint` writes them: `KEY=VALUE:EFFECT`.")
    resources: Mapping[str, str] = _texts('More resources of each worker node, such as cards for RDMA: `{"rdma/hca" = "1"}`.')


@dataclass(frozen=True, slots=True)
class Slurm:
    """For a batch script."""

    partition: str = setting("", "Partition; empty: the usual one.")
    time: str = setting("1-00:00:00", "Time limit, as Slurm writes it: days-hours:minutes:seconds.")


@dataclass(frozen=True, slots=True)
class Spec:
    """A cluster and a run on it."""

    name: str = setting("", "Name of cluster and run: small letters, digits and -, at most 47.")
    script: str = setting("", "The Python file with `train(run)`, by its path from the spec's folder. This folder travels.")
    store: str = setting("", "URL of the store that every node reaches.")
    world: int = setting(0, "Ranks that train.", least=1)
    spares: int = setting(0, "Ranks that stand by.", least=0)
    arguments: tuple[str, ...] = setting((), "More options of `fleet run`, one word each.")
    image: str = setting("", "Container image that nodes run, with its tag: needed but for Slurm and `local`.")
    base: str = setting("", "Image that the Dockerfile starts from, with its tag; empty: Ray's of the version that Fleet needs.")
    fleet: str = setting("", "Source of Fleet for the image: a wheel below the spec's folder, or a git URL with a tag or commit.")
    team: str = setting("", "Team that pays: Slurm's account, and a label of pods.")
    activate: str = setting("", "Shell command before each command of Ray and Fleet, such as `. ~/venv/bin/activate`.")
    env: Mapping[str, str] = _texts("Environment variables of all nodes. No secrets.")
    nodes: Nodes = field(default_factory=Nodes)
    head: Head = field(default_factory=Head)
    ray_up: RayUp = field(default_factory=RayUp)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    slurm: Slurm = field(default_factory=Slurm)

    @property
    def ranks(self) -> int:
        """Ranks with spares."""
        return self.world + self.spares

    @property
    def slots(self) -> int:
        """Ranks that a node has room for: one for each GPU, or for each CPU where it has no GPU."""
        return self.nodes.gpus or self.nodes.cpus


def spec_keys() -> Mapping[str, fields.Key]:
    """Dotted name -> field of the spec."""
    return fields.keys(Spec)


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """The advice for a slip in ``word``: the nearest of the ``known`` words, or ``otherwise``."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Nearest: {near[0]}." if near else otherwise


def toleration(taint: str) -> dict[str, str]:
    """The toleration of a taint, as a pod has it. A taint is ``KEY`` or ``KEY=VALUE``, with or without ``:EFFECT``. Raises ConfigError."""
    match = TAINT.fullmatch(taint)
    if match is None or not LABEL_KEY.fullmatch(match["key"]) or not LABEL_VALUE.fullmatch(match["value"] or ""):
        way_out = "Write KEY=VALUE:EFFECT or KEY:EFFECT; EFFECT is NoSchedule, PreferNoSchedule or NoExecute."
        raise ConfigError("kubernetes.tolerations", taint, "it is no taint as kubectl taint writes it", way_out)
    valued = {"operator": "Equal", "value": match["value"]} if match["value"] is not None else {"operator": "Exists"}
    return {"key": match["key"], **valued, **({"effect": match["effect"]} if match["effect"] else {})}


def load(content: Mapping[str, Any], target: str) -> Spec:
    """A spec for ``target`` from the content of its file. Raises ConfigError with the first fault."""
    if target not in TARGETS:
        raise ConfigError("--target", target, "there is no such target", nearest(target, TARGETS, f"One of {', '.join(TARGETS)}."))
    known = spec_keys()
    spec = fields.build(Spec, fields.flat(known, content, way_out=f"A spec has {', '.join(known)}."))
    _check(spec)
    {"ray-up": _check_ray_up, "kuberay": _check_kubernetes, "jobset": _check_kubernetes, "slurm": _check_slurm}[target](spec)
    return spec


# ---- checks of every spec ----------------------------------------------------------------------------------------------------------------


def _check(spec: Spec) -> None:
    for name in ("name", "script", "store"):
        _need(name, getattr(spec, name))
    _match("name", spec.name, LABEL, "small letters, digits and -, a letter first", LONGEST_NAME)
    if spec.team:
        _match("team", spec.team, LABEL_VALUE, "letters, digits and . _ -, at most 63", 63)
    _check_script(spec.script)
    _check_counts(spec)
    for name, words in (("image", spec.image), ("base", spec.base)):
        if words:
            check_pinned(name, words)
    if spec.fleet and not (WHEEL.fullmatch(spec.fleet) or GIT.fullmatch(spec.fleet)):
        way_out = "Name a wheel, dist/fleet_train-VERSION-....whl, or a git URL, git+https://HOST/PATH@TAG."
        raise ConfigError("fleet", spec.fleet, "it is neither a wheel of Fleet's nor a git URL with a tag or commit", way_out)
    _check_travels("fleet", spec.fleet)
    for key, value in spec.nodes.labels.items():
        _match(f"nodes.labels.{key}", key, LABEL_KEY, "a label's name: letters, digits and . _ -")
        _match(f"nodes.labels.{key}", value, LABEL_VALUE, "a label's value: letters, digits and . _ -, at most 63")
    for key in spec.env:
        _match(f"env.{key}", key, VARIABLE, "the name of a variable")
    for each in (*spec.env.values(), *spec.arguments, spec.activate, *spec.ray_up.setup):
        if "\n" in each or "\0" in each:
            raise ConfigError("env, arguments, activate or setup", each, "it has more than one line", "Write a script, and name it.")
    _check_arguments(spec.arguments)


def _check_script(script: str) -> None:
    if posixpath.isabs(script) or ".." in script.split("/"):
        raise ConfigError("script", script, "it is not below the spec's folder, the one that travels", "Put the spec beside the script.")
    _check_travels("script", script)
    if not script.endswith(".py"):
        raise ConfigError("script", script, "it is no Python file", "Name the file with train(run).")


def _check_travels(name: str, path: str) -> None:
    if path.partition("/")[0] in LEFT_BEHIND:
        raise ConfigError(name, path, f"this folder does not travel: {', '.join(LEFT_BEHIND)} stay behind", "Put it elsewhere.")


def _check_counts(spec: Spec) -> None:
    for part, prefix in ((spec, ""), (spec.nodes, "nodes."), (spec.head, "head.")):
        fields.within(part, prefix)
    if spec.nodes.shm_gib >= spec.nodes.memory_gib:
        raise ConfigError("nodes.shm_gib", spec.nodes.shm_gib, f"it is a part of the {spec.nodes.memory_gib} GiB of a node's memory")
    room, kind = spec.nodes.count * spec.slots, "GPU" if spec.nodes.gpus else "CPU"
    if spec.ranks > room:
        reason = f"with {spec.spares} spares that is {spec.ranks} ranks, one {kind} each, and {spec.nodes.count} nodes have {room}"
        raise ConfigError("world", spec.world, reason, "Ask for more nodes, or fewer ranks.")


def _check_arguments(arguments: tuple[str, ...]) -> None:
    for word in arguments:
        if (option := word.partition("=")[0]) in OURS:
            raise ConfigError("arguments", word, "the spec says this itself", f"Leave {option} out of them.")


def check_pinned(name: str, image: str) -> None:
    """Raises ConfigError where the name may mean another image tomorrow."""
    match = IMAGE.fullmatch(image)
    if match is None:
        raise ConfigError(name, image, "it is no name of an image")
    if not match["digest"] and match["tag"] in (None, "latest"):
        raise ConfigError(name, image, "it is not pinned: nodes of one run could get different images", "Give it a tag, or a digest.")


def _need(name: str, value: object, why: str = "") -> None:
    if not value:
        raise ConfigError(name, value, f"it is missing{why}", f"The spec must say {name}.")


def _match(name: str, value: str, pattern: re.Pattern[str], takes: str, most: int = 253) -> None:
    if not pattern.fullmatch(value) or len(value) > most:
        raise ConfigError(name, value, f"it takes {takes}" + (f", at most {most} characters" if len(value) > most else ""))


# ---- checks of each target ---------------------------------------------------------------------------------------------------------------


def _check_ray_up(spec: Spec) -> None:
    given = spec.ray_up
    _need("ray_up.provider", given.provider)
    if given.provider not in PROVIDERS:
        way_out = nearest(given.provider, PROVIDERS, f"One of {', '.join(PROVIDERS)}.")
        raise ConfigError("ray_up.provider", given.provider, "no files are written for it", way_out)
    if given.provider == "local":
        _check_local(spec)
        return
    needed = ["region", "instance_type", "head_instance_type", *(("zone", "project", "machine_image") if given.provider == "gcp" else ())]
    for name in needed:
        _need(f"ray_up.{name}", getattr(given, name), f", and {given.provider} needs it")
    if given.identity.startswith("arn:") and not ARN.fullmatch(given.identity):
        way_out = "Name an instance profile: arn:aws:iam::ACCOUNT:instance-profile/NAME. A role is inside of one."
        raise ConfigError("ray_up.identity", given.identity, "it is no ARN of an instance profile", way_out)
    _need("image", spec.image, ": machines of a cloud come without Fleet")
    _need("fleet", spec.fleet, ": the image installs Fleet from it, as no index has it")
    _check_far(spec)


def _check_local(spec: Spec) -> None:
    given = spec.ray_up
    _need("ray_up.head_ip", given.head_ip, ", and machines that are there need it")
    if len(given.worker_ips) != spec.nodes.count:
        reason = f"these are {len(given.worker_ips)}, and nodes.count says {spec.nodes.count}"
        raise ConfigError("ray_up.worker_ips", list(given.worker_ips), reason)
    if len({given.head_ip, *given.worker_ips}) <= spec.nodes.count:
        raise ConfigError("ray_up.worker_ips", list(given.worker_ips), "a machine is named twice; the head is one of its own")
    for address in (given.head_ip, *given.worker_ips):
        if LOOPBACK.match(address):
            raise ConfigError("ray_up.worker_ips", address, "other nodes cannot reach it by this address")
    _check_shared(spec)


def _check_kubernetes(spec: Spec) -> None:
    _need("image", spec.image, ": pods come from one")
    _need("fleet", spec.fleet, ": the image installs Fleet from it, as no index has it")
    given, needed = spec.kubernetes, ("namespace", "operator_namespace")
    for name in (*needed, "queue", "priority_class", "pod_priority_class", "service_account", "secret"):
        if name in needed or getattr(given, name):
            _match(f"kubernetes.{name}", getattr(given, name), DOMAIN, NAME)
    for name in given.pull_secrets:
        _match("kubernetes.pull_secrets", name, DOMAIN, NAME)
    _check_secret(spec)
    for key, value in given.node_selector.items():
        _match(f"kubernetes.node_selector.{key}", key, LABEL_KEY, "a label's name")
        _match(f"kubernetes.node_selector.{key}", value, LABEL_VALUE, "a label's value")
    for taint in given.tolerations:
        toleration(taint)
    for key, value in given.resources.items():
        if key in RESERVED:
            raise ConfigError(f"kubernetes.resources.{key}", value, "the spec says this elsewhere", f"Set {RESERVED[key]}.")
        _match(f"kubernetes.resources.{key}", key, LABEL_KEY, "a resource's name, such as rdma/hca")
        _match(f"kubernetes.resources.{key}", value, QUANTITY, "a whole quantity above 0, such as 1 or 5Gi")
    for key, value in given.service_account_annotations.items():
        _match(f"kubernetes.service_account_annotations.{key}", key, LABEL_KEY, "an annotation's name")
        _need("kubernetes.service_account", given.service_account, f": {key} = {value} is an annotation of it")
    if given.priority_class and not given.queue:
        raise ConfigError(
            "kubernetes.priority_class", given.priority_class, "it is Kueue's, and no queue is named", "Set kubernetes.queue."
        )
    _check_far(spec)


def _check_secret(spec: Spec) -> None:
    given = spec.kubernetes
    if bool(given.secret) != bool(given.secret_keys):
        name = "kubernetes.secret_keys" if given.secret else "kubernetes.secret"
        raise ConfigError(name, "", "it is missing: a Secret and its keys go together", "Name both, or neither.")
    for key in given.secret_keys:
        _match("kubernetes.secret_keys", key, VARIABLE, "names of variables")
        if key in spec.env:
            raise ConfigError("kubernetes.secret_keys", key, "env has a variable of the same name")


def _check_slurm(spec: Spec) -> None:
    _match("slurm.time", spec.slurm.time, TIME, "days-hours:minutes:seconds")
    if spec.slurm.partition:
        _match("slurm.partition", spec.slurm.partition, re.compile(r"[\w.,-]+"), "names of partitions")
    _check_shared(spec)


def _check_far(spec: Spec) -> None:
    if "://" not in spec.store:
        raise ConfigError("store", spec.store, "no folder is the same one on all of these nodes", "Name a URL, such as s3://bucket/runs.")


def _check_shared(spec: Spec) -> None:
    if "://" not in spec.store and not posixpath.isabs(spec.store):
        raise ConfigError("store", spec.store, "it is another folder on each node", "Name a URL, or the absolute path of a shared folder.")
