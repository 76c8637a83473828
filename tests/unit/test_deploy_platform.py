"""What a platform team asks of the files that ``fleet cluster write`` writes, and what their commands do."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fleet.app.cli.main import app
from fleet.app.deploy import pod_security, pods
from fleet.errors import ConfigError
from tests.support.deploy import content, spec_in, written
from tests.support.waiting import until

LIMIT_S = 60.0


def cluster_of(texts: Mapping[str, str]) -> dict[str, Any]:
    return dict(yaml.safe_load(texts["rayjob.yaml"])["spec"]["rayClusterSpec"])


def templates(**more: Any) -> dict[str, dict[str, Any]]:
    """Each pod that is written, by where it comes from."""
    texts = written("kuberay", **more)
    job, cluster = yaml.safe_load(texts["rayjob.yaml"])["spec"], cluster_of(texts)
    head, ranks = yaml.safe_load(written("jobset", **more)["jobset.yaml"])["spec"]["replicatedJobs"]
    return {
        "ray head": cluster["headGroupSpec"]["template"], "ray worker": cluster["workerGroupSpecs"][0]["template"],
        "submitter": job["submitterPodTemplate"], "jobset head": head["template"]["spec"]["template"],
        "jobset worker": ranks["template"]["spec"]["template"],
    }  # fmt: skip


# ---- pods --------------------------------------------------------------------------------------------------------------------------------


def test_each_pod_passes_the_level_restricted() -> None:
    for name, template in templates().items():
        assert list(pod_security.refused(template)) == [], name
        spec, [container] = template["spec"], template["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 1000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert spec["automountServiceAccountToken"] is False


def test_a_pod_without_a_security_context_is_refused_by_each_rule() -> None:
    bare = {"spec": {"containers": [{"name": "x", "image": "x:1"}]}}
    fields = {error.field for error in pod_security.refused(bare)}
    at = "spec.containers[0].securityContext"
    assert fields == {at, f"{at}.runAsNonRoot", f"{at}.seccompProfile.type"}


def test_what_the_spec_says_of_pods_reaches_all_of_them() -> None:
    for name, template in templates().items():
        spec = template["spec"]
        assert spec["serviceAccountName"] == "trainer" and spec["priorityClassName"] == "training", name
        assert spec["imagePullSecrets"] == [{"name": "registry-access"}]
        assert spec["tolerations"][-2:] == [
            {"key": "dedicated", "operator": "Equal", "value": "train", "effect": "NoSchedule"},
            {"key": "spot", "operator": "Exists"},
        ]


def test_storage_and_cards_are_asked_for_where_ranks_are() -> None:
    found = {name: template["spec"]["containers"][0]["resources"]["limits"] for name, template in templates().items()}
    for name in ("ray worker", "jobset worker"):
        assert found[name]["ephemeral-storage"] == "200Gi" and found[name]["rdma/hca"] == "8" and found[name]["hugepages-2Mi"] == "5Gi"
    for name in ("ray head", "jobset head"):
        assert found[name]["ephemeral-storage"] == "50Gi" and "rdma/hca" not in found[name]


def test_a_short_spec_asks_for_none_of_it() -> None:
    for name, template in templates(kubernetes={}, nodes=content()["nodes"] | {"disk_gib": 0, "gpus": 0, "cpus": 32}, head={}).items():
        assert not {"priorityClassName", "imagePullSecrets", "tolerations", "serviceAccountName"} & template["spec"].keys(), name
        assert "ephemeral-storage" not in template["spec"]["containers"][0]["resources"]["limits"]
    assert "service-account.yaml" not in written("kuberay", kubernetes={"service_account": "trainer"})


def test_a_cloud_knows_the_service_account_by_its_annotations() -> None:
    account = yaml.safe_load(written("jobset")["service-account.yaml"])
    assert account["metadata"]["name"] == "trainer" and account["metadata"]["namespace"] == "research"
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/trainer"}


@pytest.mark.parametrize(
    ("identity", "named"), [("trainer", "Name"), ("arn:aws-cn:iam::123456789012:instance-profile/team/trainer", "Arn")]
)
def test_an_instance_profile_is_named_or_has_an_arn(identity: str, named: str) -> None:
    given = content("ray-up aws")["ray_up"] | {"identity": identity}
    kinds = yaml.safe_load(written("ray-up aws", ray_up=given)["cluster.yaml"])["available_node_types"]
    assert {str(each["node_config"]["IamInstanceProfile"]) for each in kinds.values()} == {str({named: identity})}


# ---- who may connect ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["kuberay", "jobset"])
def test_pods_of_a_run_reach_each_other_and_nothing_else_reaches_them(target: str) -> None:
    every, *others = [each["spec"] for each in yaml.safe_load_all(written(target)["network-policies.yaml"])]
    own = {"matchLabels": {"fleet-run": "gpt"}}
    assert every["podSelector"] == own and every["policyTypes"] == ["Ingress"]
    assert every["ingress"] == [{"from": [{"podSelector": own}], "ports": [{"protocol": "TCP", "port": 1024, "endPort": 65535}]}]
    assert len(others) == (target == "kuberay")
    for template in templates().values():
        assert own["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_only_the_operator_reaches_the_head_from_elsewhere() -> None:
    _, policy = yaml.safe_load_all(written("kuberay")["network-policies.yaml"])
    assert policy["spec"]["podSelector"]["matchLabels"] == {"fleet-run": "gpt", "fleet-part": "head"}
    [rule] = policy["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": pods.HEAD_HEALTH[1]}]
    [peer] = rule["from"]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-system"}}
    assert peer["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}


# ---- JobSet ------------------------------------------------------------------------------------------------------------------------------


def test_a_job_set_restarts_in_place_and_ends_with_its_head() -> None:
    spec = yaml.safe_load(written("jobset")["jobset.yaml"])["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["head"]}
    head, ranks = (each["template"]["spec"] for each in spec["replicatedJobs"])
    assert (head["completions"], ranks["completions"]) == (1, 4)
    assert (head["backoffLimit"], ranks["backoffLimit"]) == (pods.RETRIES, 2**31 - 1)
    assert {each["template"]["spec"]["restartPolicy"] for each in (head, ranks)} == {"OnFailure"}
    host = f"gpt-head-0-0.{spec['network']['subdomain']}:6379"
    for each in (head, ranks):
        assert host in each["template"]["spec"]["containers"][0]["args"][0]


STUB = """#!/bin/bash
echo "${0##*/} $*" >>"$SAID"
case "${0##*/} $1" in
"ray symmetric-run") trap 'exit 130' USR1; echo >"$BEGUN"; while [ -z "$ENDS" ]; do sleep 0.05; done; exit "$ENDS" ;;
"fleet stop") kill -USR1 "$(pgrep -f "^/bin/bash $STUBS/ray symmetric-run")" ;;
esac
"""


@contextmanager
def head_of_a_job_set(folder: Path, ends: str = "") -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The script of a head's container beside the block, and what it has called; ``ends``: how the run ends by itself."""
    stubs, said, begun = folder / "bin", folder / "said", folder / "begun"
    stubs.mkdir()
    for name in ("ray", "fleet", "find", "getent"):
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    [container] = yaml.safe_load(written("jobset")["jobset.yaml"])["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    env = {"PATH": f"{stubs}:/usr/bin:/bin", "SAID": str(said), "BEGUN": str(begun), "ENDS": ends, "STUBS": str(stubs)}
    process = subprocess.Popen([*container["command"], *container["args"]], env=env, cwd=folder)
    try:
        until(begun.exists, "the run has begun", LIMIT_S)
        yield process, said
    finally:
        process.kill()
        process.wait(LIMIT_S)


@pytest.mark.parametrize(("ends", "code"), [("0", 0), ("1", 1), ("130", 0)])
def test_a_head_is_tried_again_unless_the_run_is_over_or_was_stopped(tmp_path: Path, ends: str, code: int) -> None:
    with head_of_a_job_set(tmp_path, ends) as (process, said):
        assert process.wait(LIMIT_S) == code
        [line] = [line for line in said.read_text().splitlines() if line.startswith("ray symmetric-run")]
        assert "--min-nodes 5 " in line and " -- fleet run /home/ray/code/train.py " in line and "--resume-or-start gpt" in line


def test_a_head_that_is_drained_stops_the_run_and_another_pod_goes_on(tmp_path: Path) -> None:
    with head_of_a_job_set(tmp_path) as (process, said):
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 130
        assert "fleet stop gpt --address gpt-head-0-0.gpt:6379" in said.read_text()


# ---- the image ---------------------------------------------------------------------------------------------------------------------------


def test_a_wheel_that_is_not_there_is_refused(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, content())
    (tmp_path / content()["fleet"]).unlink()
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(
            app, ["cluster", "write", "--target", "kuberay", "--spec", str(spec), str(tmp_path / "to")], catch_exceptions=False
        )
    assert error.value.field == "fleet" and not (tmp_path / "to").exists()


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    lines = [line.split(maxsplit=1) for line in dockerfile.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, rest in lines]


def test_the_commands_of_the_image_install_the_wheel(tmp_path: Path) -> None:
    """In a virtual environment; folders of the image are below a folder of this test. The wheel has Fleet's name, and is empty."""
    wheel = "dist/fleet_train-0.1.0-py3-none-any.whl"
    context, root = tmp_path / "context", tmp_path / "root"
    (context / "dist").mkdir(parents=True)
    (root / "tmp").mkdir(parents=True)
    with zipfile.ZipFile(context / wheel, "w") as archive:
        inside = "fleet_train-0.1.0.dist-info"
        archive.writestr(f"{inside}/METADATA", "Metadata-Version: 2.1\nName: fleet-train\nVersion: 0.1.0\n")
        archive.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{inside}/RECORD", f"{inside}/METADATA,,\n{inside}/WHEEL,,\n{inside}/RECORD,,\n")
    venv.create(tmp_path / "venv", with_pip=False)
    (tmp_path / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {tmp_path}/venv/bin/python "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    given = content() | {"fleet": wheel, "store": "s3://bucket/runs"}
    for name, rest in instructions(written("kuberay", **given)["Dockerfile"]):
        if name == "COPY" and not rest.startswith("--chown"):
            source, target = rest.split()
            shutil.copy(context / source, root / target.lstrip("/"))
        if name == "RUN":
            command = re.sub(r"(?<= )/(?=tmp/|home/)", f"{root}/", rest)
            subprocess.run(["sh", "-c", command], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=LIMIT_S)
    assert list((tmp_path / "venv").rglob("fleet_train-0.1.0.dist-info")) and (root / "home/ray/code").is_dir()


def test_an_image_runs_as_the_user_that_pods_run_as() -> None:
    texts = written("kuberay")
    *_, last = instructions(texts["Dockerfile"])
    context = cluster_of(texts)["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert last == ("USER", f"{context['runAsUser']}:{context['runAsGroup']}")
