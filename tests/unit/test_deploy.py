"""``fleet cluster write``: the spec, what is refused of it, and what the written files are."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from fleet.app.cli import cluster as cli_cluster
from fleet.app.cli.main import app
from fleet.app.deploy import checks, kuberay, pods
from fleet.app.deploy.files import base_image
from fleet.app.deploy.spec import load
from fleet.errors import ConfigError
from tests.support.blocks import ROOT, blocks_of
from tests.support.deploy import PROVIDERS, WAYS, accepts, changed, commands_of, content, spec_in, written
from tests.support.written import expanded, variables

RUNNER = CliRunner()


def write(folder: Path, whole: dict[str, Any], target: str) -> str:
    done = RUNNER.invoke(app, ["cluster", "write", "--target", target, "--spec", str(spec_in(folder, whole)), str(folder / "to")],
                         catch_exceptions=False)  # fmt: skip
    assert done.exit_code == 0, done.output
    return done.output


def refused(folder: Path, whole: dict[str, Any], target: str) -> ConfigError:
    spec = spec_in(folder, whole)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError) as error:
        RUNNER.invoke(app, ["cluster", "write", "--target", target, "--spec", str(spec), str(folder / "to")], catch_exceptions=False)
    assert sorted(folder.rglob("*")) == before, "nothing is half written"
    return error.value


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------

REFUSALS: list[tuple[str, str, Any]] = [
    *(("kuberay", name, value) for name, value in [
        ("name", None), ("name", "GPT"), ("name", "a" * 48), ("name", "-x"), ("name", 3), ("script", None), ("script", "missing.py"),
        ("script", "../train.py"), ("script", "/train.py"), ("script", "train.sh"), ("store", None), ("store", "/mnt/runs"),
        ("store", "runs"), ("world", None), ("world", 0), ("world", -1), ("world", "4"), ("world", 33), ("spares", -1), ("image", None),
        ("image", "gpt"), ("image", "gpt:latest"), ("image", "not an image"), ("base", "rayproject/ray:latest"), ("fleet", ""),
        ("fleet", "fleet-train==0.1.0"), ("fleet", "git+https://host.example.com/fleet.git"), ("fleet", "other-1.0.whl"),
        ("fleet", "../fleet_train-0.1.0-py3-none-any.whl"), ("fleet", "runs/fleet_train-0.1.0-py3-none-any.whl"),
        ("fleet", "dist/fleet_train.whl"), ("fleet", "git+file:///srv/fleet@v0.1.0"), ("script", "runs/train.py"),
        ("team", "no team!"),
        ("nodes.count", 0), ("nodes.count", -4), ("nodes.cpus", 0), ("nodes.gpus", -1), ("nodes.gpus", 1.5), ("nodes.memory_gib", -1),
        ("nodes.shm_gib", 64), ("nodes.shm_gib", 0), ("head.cpus", 0), ("head.memory_gib", 0), ("nodes.disk_gib", -1),
        ("head.disk_gib", -1), ("kubernetes.namespace", ""),
        ("kubernetes.namespace", "Research"), ("kubernetes.queue", "no queue"), ("kubernetes.queue", None),
        ("kubernetes.secret", "Not This"), ("kubernetes.secret", None), ("kubernetes.secret_keys", None),
        ("kubernetes.secret_keys", ["not-this"]),
        ("kubernetes.secret_keys", ["NCCL_SOCKET_IFNAME"]), ("kubernetes.service_account", "no account"),
        ("kubernetes.priority_class", "Very High"),
        ("kubernetes.operator_namespace", ""), ("kubernetes.pod_priority_class", "Very High"), ("kubernetes.pull_secrets", ["Not This"]),
        ("kubernetes.service_account", None), *(("kubernetes.tolerations", [taint]) for taint in ("=x", "a b", "a:Never", "a=b=c", "")),
    ]),
    ("kuberay", "env", {"no variable": "x"}), ("kuberay", "env", {"X": "two\nlines"}), ("kuberay", "nodes.labels", {"no label": "x"}),
    ("kuberay", "nodes.labels", {"rack": "no value!"}), ("kuberay", "kubernetes.node_selector", {"pool": "no value!"}),
    ("kuberay", "arguments", ["--world", "4"]), ("kuberay", "arguments", ["--detach"]), ("kuberay", "arguments", ["--name=x"]),
    ("kuberay", "arguments", ["--no-such-option"]), ("kuberay", "arguments", ["--min-ranks", "-3"]), ("kuberay", "activate", "a\nb"),
    *(("jobset", "kubernetes.resources", {name: value}) for name, value in [
        ("cpu", "4"), ("memory", "1Gi"), ("nvidia.com/gpu", "8"), ("ephemeral-storage", "1Gi"), ("no resource", "1"), ("rdma/hca", "0"),
        ("rdma/hca", "-1"), ("rdma/hca", "many"),
    ]),
    ("jobset", "kubernetes.service_account_annotations", {"no name": "x"}), ("jobset", "image", None), ("jobset", "store", "/mnt/runs"),
    ("ray-up aws", "ray_up.identity", "arn:aws:iam::123456789012:role/trainer"), ("ray-up aws", "ray_up.identity", "arn:aws:s3:::x"),
    ("slurm", "slurm.time", "for ever"), ("slurm", "slurm.partition", "two words"), ("slurm", "store", "runs"),
    ("ray-up aws", "ray_up.provider", None), ("ray-up aws", "ray_up.provider", "awz"), ("ray-up aws", "image", None),
    *(("ray-up aws", f"ray_up.{name}", None) for name in ("region", "instance_type", "head_instance_type")),
    *(("ray-up gcp", f"ray_up.{name}", None) for name in ("region", "zone", "project", "instance_type", "machine_image")),
    ("ray-up local", "ray_up.head_ip", None), ("ray-up local", "ray_up.worker_ips", ["10.0.0.2"]),
    ("ray-up local", "ray_up.worker_ips", ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.4"]),
    ("ray-up local", "ray_up.worker_ips", ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]),
    ("ray-up local", "ray_up.worker_ips", ["127.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]),
]  # fmt: skip
NAMED_OTHERWISE = {
    "kubernetes.queue": ("kubernetes.priority_class",), "kubernetes.secret": ("kubernetes.secret_keys",),
    "ray_up.head_ip": ("ray_up.worker_ips",),
    "activate": ("env, arguments, activate or setup",), "env": ("env, arguments, activate or setup",),
    "kubernetes.secret_keys": ("kubernetes.secret",), "kubernetes.service_account": ("kubernetes.service_account",),
}  # fmt: skip
"""A field that is missing or wrong may be refused by the name of the one that needs it."""


@pytest.mark.parametrize(("way", "field", "value"), REFUSALS)
def test_a_spec_that_cannot_be_is_refused_by_name(tmp_path: Path, way: str, field: str, value: Any) -> None:
    error = refused(tmp_path, changed(way, field, value), way.partition(" ")[0])
    assert error.field.startswith((field, *NAMED_OTHERWISE.get(field, ()))) or (field == "arguments" and error.field == "min_ranks"), error
    assert error.reason


def test_every_field_of_the_spec_is_used_or_refused() -> None:
    from fleet.app.deploy.spec import spec_keys

    used = {field for _, field, _ in REFUSALS} | {f"ray_up.{name}" for given in PROVIDERS.values() for name in given}
    assert set(spec_keys()) - used == set()


@pytest.mark.parametrize(
    ("field", "near"), [("imgae", "image"), ("nodes.cpu", "nodes.cpus"), ("kubernetes.namespaces", "kubernetes.namespace")]
)
def test_an_unknown_field_is_answered_with_the_nearest(tmp_path: Path, field: str, near: str) -> None:
    error = refused(tmp_path, changed("kuberay", field, "x"), "kuberay")
    assert error.field == field and near in error.way_out


def test_a_field_that_is_near_to_none_is_answered_with_all(tmp_path: Path) -> None:
    assert "ray_up.worker_ips" in refused(tmp_path, changed("kuberay", "zzzzzzzz", 1), "kuberay").way_out


@pytest.mark.parametrize("target", ["kubray", "nomad", ""])
def test_an_unknown_target_is_refused(tmp_path: Path, target: str) -> None:
    error = refused(tmp_path, content(), target)
    assert error.field == "--target" and "kuberay" in error.way_out


def test_a_folder_that_is_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").write_text("mine")
    assert refused(tmp_path, content(), "kuberay").field == "FOLDER"
    (tmp_path / "to" / "mine").unlink()
    assert "rayjob.yaml" in write(tmp_path, content(), "kuberay")


def test_nothing_is_left_where_a_file_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.write_text

    def full(path: Path, text: str, *arguments: Any, **more: Any) -> int:
        if path.name == "README.md":
            raise OSError(28, os.strerror(28))
        return whole(path, text, *arguments, **more)

    spec = spec_in(tmp_path, content())
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left"):
        RUNNER.invoke(app, ["cluster", "write", "--target", "kuberay", "--spec", str(spec), str(tmp_path / "to")], catch_exceptions=False)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("text", ["name = ", "\x00", "x" * (cli_cluster.LARGEST_B + 1)])
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        RUNNER.invoke(app, ["cluster", "write", "--target", "slurm", "--spec", str(tmp_path / "cluster.toml"), str(tmp_path / "to")],
                      catch_exceptions=False)  # fmt: skip
    assert error.value.field == "--spec" and not (tmp_path / "to").exists()


# ---- what is written ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if way != "slurm"])
def test_what_is_written_passes_its_check(tmp_path: Path, way: str) -> None:
    write(tmp_path, content(way), way.partition(" ")[0])
    done = RUNNER.invoke(app, ["cluster", "check", str(tmp_path / "to")], catch_exceptions=False)
    assert done.exit_code == 0 and checks.has_core(), done.output


@pytest.mark.parametrize("way", WAYS)
def test_yaml_has_no_references(way: str) -> None:
    for name, text in written(way).items():
        assert not re.search(r"^\s*(- )?([\w-]+: )?[&*]id\d", text, re.M), name


@pytest.mark.parametrize("way", WAYS)
def test_fleet_takes_every_command_that_is_written(way: str) -> None:
    commands = [words for text in written(way).values() for words in commands_of(text)]
    assert any(words[1] == "run" for words in commands)
    for _, command, *words in commands:
        accepts(words) if command == "run" else get_command(app).commands[command].make_context(command, words)  # type: ignore[attr-defined]
    runs = [words for words in commands if words[1] == "run" and "--resume" not in words]
    assert all(words[words.index("--world") + 1] == "24" and words[words.index("--spares") + 1] == "8" for words in runs)
    assert all(("--detach" in words) == way.startswith("ray-up") for words in runs), "only a cluster of ray up outlives the command"


@pytest.mark.parametrize("way", WAYS)
def test_a_readme_has_the_commands_that_use_each_file(way: str) -> None:
    texts = written(way)
    shell = "\n".join(re.findall(r"^```bash\n(.*?)^```$", texts["README.md"], re.M | re.S))
    assert all(f"deploy/{name}" in shell for name in texts if name not in ("README.md", "Dockerfile.dockerignore"))
    assert subprocess.run(["bash", "-n"], input=shell, text=True, timeout=30, check=False).returncode == 0


@pytest.mark.parametrize(("image", "gpus", "more"), [("", 0, {}), ("x:1", 8, {"env": {}, "activate": "", "team": ""})])
def test_a_batch_script_is_one_of_bashs(image: str, gpus: int, more: dict[str, Any]) -> None:
    nodes = content()["nodes"] | {"gpus": gpus, "labels": {}}
    text = written("slurm", image=image, nodes=nodes, slurm={}, **more)["job.sbatch"]
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=30, check=False).returncode == 0
    assert ("--gpus-per-node" in text) == bool(gpus)


def test_words_of_the_spec_stay_words_in_a_shell(tmp_path: Path) -> None:
    """A value with what a shell would act on: it is printed, and nothing else happens."""
    evil = 'a\'b $(touch evil) `touch evil` "c"'
    text = written("slurm", env={"EVIL": evil})["job.sbatch"]
    line = next(each for each in text.splitlines() if each.startswith("export EVIL="))
    done = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "$EVIL"'], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == evil and not (tmp_path / "evil").exists()


def test_world_and_spares_are_one_workload_of_kueues() -> None:
    job = yaml.safe_load(written("kuberay")["rayjob.yaml"])
    assert job["metadata"]["labels"] == {"fleet-run": "gpt", "fleet-team": "vision", pods.QUEUE: "gpus", pods.PRIORITY: "high"}
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == 32
    assert group["labels"] == {"rack": "r7", "pool": "train"}


def test_without_a_queue_there_is_no_label_of_kueues() -> None:
    whole = content()["kubernetes"]
    del whole["queue"], whole["priority_class"]
    texts = written("kuberay", kubernetes=whole)
    assert "kueue" not in texts["rayjob.yaml"] + texts["raycluster.yaml"]


def test_budgets_find_the_pods_of_both_objects() -> None:
    texts = written("kuberay")
    budgets = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(texts["disruption-budgets.yaml"])}
    assert {name: each["minAvailable"] for name, each in budgets.items()} == {"gpt-head": 1, "gpt-worker": 3}
    job, cluster = (yaml.safe_load(texts[name])["spec"] for name in ("rayjob.yaml", "raycluster.yaml"))
    assert job["rayClusterSpec"] == cluster
    for part, group in (("head", cluster["headGroupSpec"]), ("worker", cluster["workerGroupSpecs"][0])):
        wanted = budgets[f"gpt-{part}"]["selector"]["matchLabels"]
        assert wanted.items() <= group["template"]["metadata"]["labels"].items()


def test_credentials_are_named_and_never_told() -> None:
    job = yaml.safe_load(written("kuberay")["rayjob.yaml"])
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    kept = {each["name"]: each["valueFrom"] for each in pod["containers"][0]["env"] if "valueFrom" in each}
    assert kept == {
        key: {"secretKeyRef": {"name": "store-access", "key": key}} for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }  # fmt: skip


def test_ray_is_the_version_that_fleet_needs_and_its_agent_listens_where_probes_ask() -> None:
    from ray._private import ray_constants

    assert importlib.metadata.version("ray") == kuberay.RAY
    assert ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT == pods.NODE_HEALTH[1]
    assert ray_constants.DEFAULT_DASHBOARD_PORT == pods.HEAD_HEALTH[1]
    assert importlib.metadata.distribution("ray").read_text("entry_points.txt")


def test_paths_of_health_are_those_of_rays_dashboard() -> None:
    package = Path(str(importlib.metadata.distribution("ray").locate_file("ray")))
    agents, head = ((package / "dashboard" / name).read_text() for name in ("http_server_agent.py", "http_server_head.py"))
    assert pods.NODE_HEALTH[0] in agents and pods.HEAD_HEALTH[0] in head


def test_options_of_ray_start_exist() -> None:
    from ray.scripts.scripts import cli

    from fleet.app.deploy.rules import START

    known = {option.lstrip("-") for parameter in cli.commands["start"].params for option in parameter.opts}
    assert known >= START
    used = {word for way in WAYS for text in written(way).values() for word in re.findall(r"(?<=ray start )[^\n']*", text)}
    assert {option for line in used for option in re.findall(r"--([a-z-]+)", line)} <= known
    assert {"symmetric-run", "up", "down", "exec", "job"} <= {name.replace("_", "-") for name in cli.commands}


def test_variables_that_files_set_are_known() -> None:
    """Beside those of the spec there is one, of Ray's."""
    script = written("slurm")["job.sbatch"]
    package = Path(str(importlib.metadata.distribution("ray").locate_file("ray")))
    (ours,) = set(re.findall(r"^export (\w+)=", script, re.M)) - {"AWS_ENDPOINT_URL", "NCCL_SOCKET_IFNAME"}
    assert f'"{ours}"' in (package / "scripts" / "symmetric_run.py").read_text()


@pytest.mark.parametrize(("store", "needed"), [("gs://bucket/runs", "gcsfs"), ("s3://bucket/runs", ""), ("abfs://c/runs", "adlfs")])
def test_an_image_has_what_its_store_needs(store: str, needed: str) -> None:
    text = written("kuberay", store=store)["Dockerfile"]
    assert re.search(r"^COPY dist/fleet_train-0.1.0-cp311-abi3-linux_x86_64.whl /tmp/$", text, re.M)
    assert re.search(rf"^RUN pip install .*/tmp/fleet_train-0.1.0-cp311-abi3-linux_x86_64.whl ?{needed}$", text, re.M)


@pytest.mark.parametrize("url", ["git+https://host.example.com/team/fleet.git@v0.1.0", "git+ssh://git@host.example.com/fleet@3f2a"])
def test_an_image_has_fleet_from_a_git_url_that_names_what_was_tested(url: str) -> None:
    text = written("kuberay", fleet=url)["Dockerfile"]
    assert f"'fleet-train @ {url}'" in text and "COPY dist" not in text


def test_the_base_image_is_pinned_to_ray_and_python() -> None:
    whole = content()
    assert base_image(load(whole, "kuberay"), "3.12") == f"rayproject/ray:{kuberay.RAY}-py312-gpu"
    assert base_image(load(whole | {"base": "mine:2"}, "kuberay"), "3.12") == "mine:2"


def test_specs_of_the_documents_are_specs() -> None:
    specs = [tomllib.loads(block.text) for block in blocks_of("docs/deploy.md") if block.language == "toml"]
    assert len(specs) >= 2
    for whole in specs:
        target = next(target for table, target in (("kubernetes", "kuberay"), ("ray_up", "ray-up"), ("slurm", "slurm")) if table in whole)
        load(whole, target)
    assert (ROOT / "docs/deploy.md").is_file()


def test_what_kubernetes_would_fill_in_reaches_the_run_as_it_was_said() -> None:
    reported = "a b; $HOME $(HOME) $$ $"
    document = yaml.safe_load(written("kuberay", env={"GREETING": reported}, arguments=["--set", f"note={reported}"])["rayjob.yaml"])
    container = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    secrets = {"store-access": {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}}
    assert variables(container, secrets)["GREETING"] == reported
    assert f"note={reported}" in shlex.split(expanded(document["spec"]["entrypoint"], {"HOME": "elsewhere"}))


def test_ray_is_stopped_on_every_machine_that_ray_down_does_not_care_for() -> None:
    def stops(way: str, **more: Any) -> list[str]:
        lines = written(way, **more)["README.md"].splitlines()
        return [line for line in lines if line.startswith("ray exec") and "ray stop" in line]

    [line] = stops("ray-up local", image="")
    here, _, others = shlex.split(line)[-1].partition("; ")
    assert here.startswith(". ~/venv/bin/activate && ") and here.endswith(" && ray stop")
    assert others.startswith("for machine in 10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5; do ssh ") and "ray@$machine" in others
    [inner] = [word for word in shlex.split(others.replace("; done", "")) if word.startswith("bash --login")]
    assert shlex.split(inner)[-1] == here
    assert not stops("ray-up local") and not stops("ray-up aws")
