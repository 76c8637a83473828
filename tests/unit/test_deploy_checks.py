"""``fleet cluster check``: each field that matters, when it is changed, is refused by its path; and no file brings the check down."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.app.deploy import checks
from fleet.errors import ConfigError
from tests.support.deploy import WAYS, accepts, written

Path_ = tuple[str | int, ...]
RUNNER = CliRunner()
YAML = {
    "rayjob": "rayjob.yaml", "raycluster": "raycluster.yaml", "budgets": "disruption-budgets.yaml", "policies": "network-policies.yaml",
    "account": "service-account.yaml", "jobset": "jobset.yaml",
}  # fmt: skip
RAY_UP = {way: yaml.safe_load(written(way)["cluster.yaml"]) for way in WAYS if way.startswith("ray-up")}
TEXTS = written("jobset") | written("kuberay")
DOCUMENTS: dict[str, list[Any]] = {what: list(yaml.safe_load_all(TEXTS[name])) for what, name in YAML.items()}
FREE = ("labels", "matchLabels", "nodeSelector", "annotations")
"""Tables whose keys are the user's."""
NEEDED = ("fleet-run", "fleet-part")
"""But for these."""


@pytest.fixture(autouse=True, scope="module")
def schemas_read_once() -> Iterator[None]:
    """The validator reads 2 MB of schemas for each document that it judges, and looks through all of them for names."""
    from kubernetes_validate import utils

    right, made = jsonschema.validators.Draft202012Validator, dict[int, Any]()

    def once(schema: Any, registry: Any) -> Any:
        if id(schema) not in made:
            made[id(schema)] = right(schema, registry=registry.crawl())
        return made[id(schema)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        patch.setattr(utils, "all_versions", functools.cache(utils.all_versions))
        patch.setattr(jsonschema.validators, "Draft202012Validator", once)
        yield


def places(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Each place of a document, and what is there."""
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def own_places(what: str, document: Any) -> Iterator[tuple[Path_, Any]]:
    """But for the cluster of a RayCluster, which is that of the RayJob: `tests/unit/test_deploy.py` says that they are equal."""
    return ((path, value) for path, value in places(document) if path and (what != "raycluster" or path[0] != "spec" or len(path) < 3))


def put(document: Any, path: Path_, value: Any) -> Any:
    whole = copy.deepcopy(document)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


def renamed(document: Any, path: Path_) -> Any:
    whole = copy.deepcopy(document)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[f"{path[-1]}x"] = inner.pop(path[-1])
    return whole


def refusals(what: str, documents: list[Any]) -> list[ConfigError]:
    text = yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=False)
    with pytest.MonkeyPatch.context() as patch:  # half of the time is the parser's in Python
        patch.setattr(yaml, "safe_load_all", functools.partial(yaml.load_all, Loader=yaml.CSafeLoader))
        return checks.check(YAML[what], text, accepts)


def with_document(what: str, number: int, document: Any) -> list[Any]:
    return [document if place == number else each for place, each in enumerate(DOCUMENTS[what])]


def once(found: Iterator[tuple[str, int, Path_]]) -> list[Any]:
    """Of places whose last two names are the same in one document, the first: the same part of the schema judges them."""
    firsts = dict[tuple[str, int, tuple[str, ...]], Any]()
    for what, number, path in found:
        names = tuple(each for each in path if isinstance(each, str))[-2:]
        firsts.setdefault((what, number, names), pytest.param(what, number, path, id=f"{what} {number} {'.'.join(map(str, path))}"))
    return list(firsts.values())


def everywhere() -> Iterator[tuple[str, int, Path_, Any]]:
    for what, documents in DOCUMENTS.items():
        for number, document in enumerate(documents):
            yield from ((what, number, path, value) for path, value in own_places(what, document))


LEAVES = once((what, number, path) for what, number, path, value in everywhere() if not isinstance(value, dict | list))
KEYS = once(
    (what, number, path)
    for what, number, path, _ in everywhere()
    if isinstance(path[-1], str) and path[:-1] != ("metadata", "labels")
    if len(path) < 2 or path[-2] not in FREE or path[-1] in NEEDED
)


def test_as_they_are_written_nothing_is_refused() -> None:
    assert {what: refusals(what, documents) for what, documents in DOCUMENTS.items()} == {what: [] for what in DOCUMENTS}
    assert len(LEAVES) > 100 and len(KEYS) > 120


@pytest.mark.parametrize(("what", "number", "path"), LEAVES)
def test_a_value_of_another_kind_is_refused(what: str, number: int, path: Path_) -> None:
    found = refusals(what, with_document(what, number, put(DOCUMENTS[what][number], path, {"wrong": [1]})))
    assert found and all(error.reason for error in found)
    names = [str(each) for each in path if isinstance(each, str)]
    assert any(names[-1] in error.field or (len(names) > 1 and names[-2] in error.field) for error in found), found


@pytest.mark.parametrize(("what", "number", "path"), KEYS)
def test_a_key_that_is_misspelt_is_refused(what: str, number: int, path: Path_) -> None:
    found = refusals(what, with_document(what, number, renamed(DOCUMENTS[what][number], path)))
    assert found and str(path[-1]) in " ".join(f"{error.field} {error.value} {error.reason}" for error in found), found


JOB, POD = "spec.rayClusterSpec", "spec.rayClusterSpec.workerGroupSpecs.0.template"
SUBMITTER, SAFE = "spec.submitterPodTemplate", f"{POD}.spec.securityContext"
HEAD_JOB, RANKS_JOB = "spec.replicatedJobs.0", "spec.replicatedJobs.1"
SCRIPT = f"{HEAD_JOB}.template.spec.template.spec.containers.0.args"
HEAD, BOX = f"{JOB}.headGroupSpec", f"{POD}.spec.containers.0"
CHANGES: list[tuple[str, str, Any]] = [
    *(("rayjob", path, value) for path, value in [
        ("apiVersion", "ray.io/v1alpha1"), ("kind", "RayJobs"), ("metadata.name", "GPT"), ("metadata.name", "a" * 48),
        ("metadata.labels.kueue!queue-name", "no queue"), ("spec.shutdownAfterJobFinishes", False), ("spec.backoffLimit", -1),
        ("spec.ttlSecondsAfterFinished", -1), ("spec.submissionMode", "InteractiveMode"), ("spec.suspend", True),
        ("spec.clusterSelector", {"ray.io/cluster": "x"}), ("spec.entrypoint", "python train.py"),
        ("spec.entrypoint", "fleet run train.py --world 4"), ("spec.entrypoint", "fleet run train.py --address auto --wrold 4"),
        ("spec.entrypoint", "fleet run train.py --address auto --world 4 --detach"), ("spec.entrypoint", "fleet run 'train.py"),
        ("spec.entrypoint", "fleet run train.py --address auto --world 30 --spares 3 --shards 60"), ("spec.entrypoint", ""),
        ("spec.entrypoint", "fleet run train.py --address auto --world 0"),
        ("spec.entrypoint", "fleet run train.py --address auto --world x"),
        (f"{JOB}.rayVersion", "2.50.0"), (f"{JOB}.enableInTreeAutoscaling", True), (f"{JOB}.workerGroupSpecs", []),
        (f"{HEAD}.rayStartParams.num-cpus", "4"), (f"{HEAD}.rayStartParams.num-cpus", 0), (f"{HEAD}.rayStartParams.labels", "a=b"),
        (f"{HEAD}.rayStartParams.dashboard-host", "127.0.0.1"),
        (f"{JOB}.workerGroupSpecs.0.replicas", 0), (f"{JOB}.workerGroupSpecs.0.replicas", -1), (f"{JOB}.workerGroupSpecs.0.replicas", 3),
        (f"{JOB}.workerGroupSpecs.0.minReplicas", 1), (f"{JOB}.workerGroupSpecs.0.maxReplicas", 9),
        (f"{JOB}.workerGroupSpecs.0.numOfHosts", 2), (f"{JOB}.workerGroupSpecs.0.groupName", "Ranks"),
        (f"{POD}.spec.restartPolicy", "Always"), (f"{POD}.spec.containers", []), (f"{POD}.spec.volumes.0.emptyDir.medium", ""),
        (f"{POD}.spec.volumes.0.emptyDir.sizeLimit", "63Mi"), (f"{POD}.spec.volumes", []), (f"{BOX}.image", "gpt:latest"),
        (f"{BOX}.volumeMounts.0.mountPath", "/shm"), (f"{BOX}.resources.requests.cpu", "0"), (f"{BOX}.resources.limits.memory", "1Gi"),
        (f"{BOX}.resources.limits.nvidia!gpu", "4"), (f"{BOX}.resources.requests.memory", "much"),
        (f"{BOX}.readinessProbe.httpGet.path", "/"), (f"{BOX}.readinessProbe.httpGet.port", 8265),
        (f"{BOX}.livenessProbe.failureThreshold", 2), (f"{BOX}.livenessProbe.periodSeconds", 0),
        (f"{BOX}.livenessProbe.httpGet.port", 80), (f"{BOX}.env.0.value", 7), (f"{POD}.metadata.labels.fleet-part", "ranks"),
    ]),
    *(("rayjob", path, value) for path, value in [
        (f"{SAFE}.runAsNonRoot", False), (f"{SAFE}.runAsUser", 0), (f"{SAFE}.seccompProfile.type", "Unconfined"),
        (f"{SAFE}.sysctls", [{"name": "kernel.msgmax", "value": "1"}]), (f"{SAFE}.windowsOptions", {"hostProcess": True}),
        (f"{SAFE}.seLinuxOptions", {"type": "spc_t"}), (f"{SAFE}.seLinuxOptions", {"role": "x"}),
        (f"{SAFE}.appArmorProfile", {"type": "Unconfined"}), (f"{POD}.spec.hostNetwork", True), (f"{POD}.spec.hostPID", True),
        (f"{POD}.spec.hostIPC", True), (f"{POD}.spec.volumes.0", {"name": "shm", "hostPath": {"path": "/dev/shm"}}),
        (f"{BOX}.securityContext.allowPrivilegeEscalation", True), (f"{BOX}.securityContext.capabilities.drop", ["NET_RAW"]),
        (f"{BOX}.securityContext.capabilities.add", ["IPC_LOCK"]), (f"{BOX}.securityContext.privileged", True),
        (f"{BOX}.securityContext.procMount", "Unmasked"), (f"{BOX}.securityContext.runAsNonRoot", False),
        (f"{BOX}.securityContext.runAsUser", 0), (f"{BOX}.securityContext.seccompProfile", {"type": "Unconfined"}),
        (f"{BOX}.securityContext", {}), (f"{BOX}.ports", [{"containerPort": 80, "hostPort": 80}]),
        (f"{BOX}.livenessProbe.httpGet.host", "10.0.0.1"), (f"{POD}.spec.initContainers", [{"name": "x", "image": "x:1"}]),
        (SUBMITTER, None), (f"{SUBMITTER}.spec.securityContext", {}), (f"{SUBMITTER}.spec.containers.0.image", "gpt"),
        (f"{SUBMITTER}.spec.restartPolicy", "Always"), ("spec.submissionMode", "SidecarMode"),
    ]),
    *(("jobset", path, value) for path, value in [
        ("apiVersion", "jobset.x-k8s.io/v1alpha1"), ("spec.failurePolicy.restartStrategy", "InPlaceRestart"),
        ("spec.failurePolicy.maxRestarts", -1), ("spec.network.enableDNSHostnames", False), ("spec.network.subdomain", "No"),
        ("spec.network.publishNotReadyAddresses", False), ("spec.successPolicy.targetReplicatedJobs", ["ranks"]),
        ("spec.successPolicy.operator", "None"), ("spec.suspend", True), ("spec.replicatedJobs", []), (f"{HEAD_JOB}.name", "leader"),
        (f"{HEAD_JOB}.name", "ranks"), (f"{RANKS_JOB}.replicas", 4), (f"{RANKS_JOB}.template.spec.completionMode", "NonIndexed"),
        (f"{RANKS_JOB}.template.spec.parallelism", 3), (f"{RANKS_JOB}.template.spec.backoffLimit", -1),
        (f"{RANKS_JOB}.template.spec.template.spec.restartPolicy", "Never"), (f"{RANKS_JOB}.template.spec.template.spec.hostIPC", True),
        (SCRIPT, ["fleet run train.py --address auto --wrold 4"]), (SCRIPT, ["python train.py"]), (SCRIPT, []),
        (SCRIPT, ["fleet run train.py --address auto --world 30 --spares 3 --shards 60"]), (SCRIPT, ["fleet run train.py --world 4"]),
    ]),
    *(("policies", path, value) for path, value in [
        ("apiVersion", "extensions/v1beta1"), ("spec.podSelector", {}), ("spec.policyTypes", ["Egress"]), ("spec.ingress", []),
        ("spec.ingress.0.from", []), ("spec.ingress.0.from.0.podSelector", {}), ("spec.ingress.0.ports", []),
        ("spec.ingress.0.from.0.podSelector.matchLabels.fleet-run", "other"), ("spec.ingress.0.from.0.namespaceSelector", {}),
    ]),
    ("account", "automountServiceAccountToken", True), ("account", "metadata.name", "No Name"), ("account", "apiVersion", "v2"),
    ("raycluster", "spec.headGroupSpec.rayStartParams.num-cpus", "1"), ("raycluster", "spec.rayVersion", "3.0.0"),
    ("budgets", "spec.minAvailable", 0), ("budgets", "spec.minAvailable", "50%"), ("budgets", "apiVersion", "policy/v1beta1"),
    ("budgets", "spec.maxUnavailable", {"x": 1}), ("budgets", "spec.selector.matchLabels.fleet-part", "ranks"),
]  # fmt: skip
RENAMED = {"kueue!queue-name": "kueue.x-k8s.io/queue-name", "nvidia!gpu": "nvidia.com/gpu"}


@pytest.mark.parametrize(("what", "dotted", "value"), CHANGES)
def test_a_field_that_matters_is_refused_by_its_path(what: str, dotted: str, value: Any) -> None:
    path: Path_ = tuple(int(each) if each.isdigit() else RENAMED.get(each, each) for each in dotted.split("."))
    found = refusals(what, with_document(what, 0, put(DOCUMENTS[what][0], path, value)))
    fields = " ".join(error.field for error in found)
    leaf = next(str(each) for each in reversed(path) if isinstance(each, str))
    aliases = {"mountPath": "volumes", "minReplicas": "replicas", "maxReplicas": "replicas",
               "cpu": "resources", "memory": "resources",
               "nvidia.com/gpu": "resources", "periodSeconds": "livenessProbe", "maxUnavailable": "spec", "name": "replicatedJobs",
               "submitterPodTemplate": "submitterPodTemplate", "parallelism": "parallelism"}  # fmt: skip
    assert found and (leaf in fields or aliases.get(leaf, leaf) in fields), found


# ---- ray up ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", RAY_UP)
def test_rays_own_schema_judges_a_cluster_file_of_ray_up(way: str) -> None:
    def found(document: Any) -> list[str]:
        return [error.field for error in checks.check("cluster.yaml", yaml.safe_dump(document), accepts)]

    assert found(RAY_UP[way]) == []
    for path, value in (
        (("max_workers",), -1),
        (("provider",), [1]),
        (("auth", "ssh_user"), 7),
        (("head_start_ray_commands",), "ray start"),
    ):
        assert found(put(RAY_UP[way], path, value)) == [f"cluster.yaml: {'.'.join(path)}"]
    assert found(renamed(RAY_UP[way], ("max_workers",))) == ["cluster.yaml: the file"]


# ---- any file ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "field"), [
    ("", "YAML"), ("- a\n- b\n", "YAML"), ("a: [", "YAML"), ("a: 1\n", "kind"), ("kind: Deployment\n", "kind"), ("kind: {a: b}\n", "kind"),
    ("&a [*a]\n", "YAML"), ("kind: RayJob\n", "apiVersion"), ("kind: RayCluster\nspec: 7\n", "spec"), ("cluster_name: x\n", "the file"),
    ("provider: [1]\n", "provider"), ("kind: PodDisruptionBudget\n", "apiVersion"),
])  # fmt: skip
def test_a_file_that_is_something_else_is_refused(text: str, field: str) -> None:
    found = checks.check("x.yaml", text, accepts)
    assert any(error.field == f"x.yaml: {field}" for error in found), found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "local", "aws", "/dev/shm", "8265", "ray stop"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "name", "type", "env", "spec"]), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300)
@given(st.data())
def test_whatever_stands_in_a_place_the_check_answers(data: st.DataObject) -> None:
    what = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    document = DOCUMENTS[what][0]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path, _ in places(document) if path]))
        document = put(document, path, data.draw(JSON))
    assert all(isinstance(error, ConfigError) and str(error) for error in refusals(what, [document]))


def test_the_command_names_file_field_and_way_out(tmp_path: Path) -> None:
    job = put(DOCUMENTS["rayjob"][0], ("spec", "backoffLimit"), 3)
    job["spec"]["entrypoint"] = job["spec"]["entrypoint"].replace("--resume-or-start", "--name")
    (tmp_path / "rayjob.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "Dockerfile").write_text("FORM nothing")
    done = RUNNER.invoke(app, ["cluster", "check", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 2 and f"{tmp_path}/rayjob.yaml: spec.backoffLimit = 3" in done.output and "--resume" in done.output


@pytest.mark.parametrize("name", ["x.json", "notes", "missing.yaml", "Dockerfile", "job.sbatch", ""])
def test_a_file_of_no_known_kind_is_refused(tmp_path: Path, name: str) -> None:
    if name and not name.startswith("missing"):
        (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError) as error:
        RUNNER.invoke(app, ["cluster", "check", str(tmp_path / name)], catch_exceptions=False)
    assert error.value.field == "FILE"


def test_without_kubernetes_schemas_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "EXTRA", "no_such_module")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(RAY_UP["ray-up local"]))
    done = RUNNER.invoke(app, ["cluster", "check", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0 and "fleet-train[kubernetes]" in done.output
