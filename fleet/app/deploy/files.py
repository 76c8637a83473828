"""The files of each target, as texts. Pure: ``fleet.app.cli.cluster`` writes them."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import yaml

from fleet.app.deploy import entrypoint, jobset, kuberay, pods, ray_up
from fleet.app.deploy.spec import LEFT_BEHIND, WHEEL, Spec

ADDRESS = "$HEAD_IP:6379"
"""Address of the head, in the batch script."""
TITLES = {"ray-up": "with ray up", "kuberay": "on Kubernetes", "jobset": "on Kubernetes, without KubeRay", "slurm": "on Slurm"}
BESIDE = ("service-account.yaml", "network-policies.yaml", "disruption-budgets.yaml")
"""Files of the objects beside the pods, in the order in which they are applied."""
FENCE = (
    "The budgets keep the head, and all workers but one, from evictions; a drain of the head's host waits for the end of the run. "
    "The policies let nothing but pods of this run connect to them: add a rule for a Prometheus of yours."
)
STORES = {"gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""Scheme of a store's URL -> the package that it needs beside those of Fleet."""


def files(spec: Spec, target: str, folder: str, python: str) -> dict[str, str]:
    """Name of a file -> its text.

    Args:
        folder: where they will lie, as commands name it.
        python: the version that all nodes need, such as 3.11: that of the driver.
    """
    match target:
        case "ray-up":
            own = {"cluster.yaml": _yaml([ray_up.cluster(spec)])}
        case "kuberay":
            own = {
                "rayjob.yaml": _yaml([kuberay.ray_job(spec)]),
                "raycluster.yaml": _yaml([kuberay.ray_cluster(spec)]),
                **_beside(spec, operator=True),
            }
        case "jobset":
            own = {"jobset.yaml": _yaml([jobset.job_set(spec)]), **_beside(spec, operator=False)}
        case _:
            own = {"job.sbatch": _template("job.sbatch.j2", spec=spec, start=_start(spec), command=_batch_command(spec))}
    if spec.image and target != "slurm":
        own |= {"Dockerfile": _dockerfile(spec, folder, python), "Dockerfile.dockerignore": "\n".join((*LEFT_BEHIND, ""))}
    beside = [name for name in own if name in BESIDE]
    return own | {"README.md": _readme(spec, target, folder, beside)}


def _beside(spec: Spec, *, operator: bool) -> dict[str, str]:
    """Files of the objects beside the pods in their namespace. ``operator``: KubeRay's is there."""
    account = {"service-account.yaml": _yaml([pods.service_account(spec)])} if spec.kubernetes.service_account_annotations else {}
    policies = {"network-policies.yaml": _yaml(pods.policies(spec, operator=operator))}
    return {**account, **policies, "disruption-budgets.yaml": _yaml(pods.budgets(spec))}


DUMPER: Any = type("Dumper", (yaml.SafeDumper,), {})
"""Writes a text of several lines as lines."""
DUMPER.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None))


def _yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    text: str = yaml.dump_all(documents, Dumper=DUMPER, sort_keys=False, width=1000, explicit_start=True)
    return text


def _template(name: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fleet.app.deploy"), undefined=jinja2.StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell and Markdown: values are quoted by the filter below
    )  # fmt: skip
    environment.filters["quoted"] = shlex.quote
    return environment.get_template(name).render(**values)


def _start(spec: Spec) -> str:
    """Options of ``ray start`` on each host of an allocation."""
    labels = ",".join(f"{name}={value}" for name, value in spec.nodes.labels.items())
    given = [f"--num-cpus={spec.nodes.cpus}", f"--num-gpus={spec.nodes.gpus}", *([f"--labels={labels}"] if labels else [])]
    return entrypoint.line([*given, "--disable-usage-stats"])


def _batch_command(spec: Spec) -> str:
    """The batch script's command. The one word that the shell fills in stands in double quotes."""
    words = entrypoint.words(spec, "", ADDRESS)
    return " ".join(f'"{word}"' if word == ADDRESS else entrypoint.line([word]) for word in words)


def base_image(spec: Spec, python: str) -> str:
    """The image that the Dockerfile starts from."""
    kind = "gpu" if spec.nodes.gpus else "cpu"
    return spec.base or f"rayproject/ray:{kuberay.RAY}-py{python.replace('.', '')}-{kind}"


def _dockerfile(spec: Spec, folder: str, python: str) -> str:
    needed = STORES.get(spec.store.partition("://")[0])
    wheel = spec.fleet if WHEEL.fullmatch(spec.fleet) else ""
    source = f"/tmp/{posixpath.basename(wheel)}" if wheel else f"fleet-train @ {spec.fleet}"
    return _template(
        "Dockerfile.j2", spec=spec, folder=shlex.quote(folder), base=base_image(spec, python), code=pods.CODE, wheel=wheel,
        user=f"{pods.USER}:{pods.GROUP}",
        packages=entrypoint.line([source, *([needed] if needed else [])]),
    )  # fmt: skip


def _readme(spec: Spec, target: str, folder: str, beside: Iterable[str]) -> str:
    """The commands to type. ``beside``: names of the files of the objects beside the pods."""
    code = {"ray-up": ray_up.CODE, "kuberay": pods.CODE, "jobset": pods.CODE}.get(target, "")
    resume = entrypoint.line(entrypoint.resume_words(spec, code))
    command, attach, stop = entrypoint.line(entrypoint.words(spec, code)), "", ""
    if target == "ray-up":
        command = ray_up.on_node(spec, entrypoint.line(entrypoint.words(spec, code, detach=True)))
        attach = ray_up.on_node(spec, f"fleet attach {spec.name}")
        stop = ray_up.stop(spec)
    return _template(
        "README.md.j2", spec=spec, target=target, title=TITLES[target], folder=shlex.quote(folder), command=command, attach=attach,
        stop=stop, code=code, resume=resume, fence=FENCE, beside="".join(f" -f {shlex.quote(folder)}/{name}" for name in beside),
    )  # fmt: skip
