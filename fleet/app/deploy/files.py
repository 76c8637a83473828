"""The files of each target, as texts. Pure: what writes them is ``fleet.app.cli.cluster``."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
import yaml

from fleet.app.deploy import entrypoint, kuberay, ray_up
from fleet.app.deploy.spec import WHEEL, Spec

ADDRESS = "$HEAD_IP:6379"
"""Of the head, in the batch script."""
TITLES = {"ray-up": "with ray up", "kuberay": "on Kubernetes", "slurm": "on Slurm"}
STORES = {"gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""What a store's URL needs beside what Fleet brings along."""


def files(spec: Spec, target: str, folder: str, python: str) -> dict[str, str]:
    """Name of a file -> its text.

    Args:
        folder: where they will lie, as commands name it.
        python: the version that all nodes need, such as 3.11: that of whoever begins the run.
    """
    match target:
        case "ray-up":
            own = {"cluster.yaml": _yaml([ray_up.cluster(spec)])}
        case "kuberay":
            own = {
                "rayjob.yaml": _yaml([kuberay.ray_job(spec)]),
                "raycluster.yaml": _yaml([kuberay.ray_cluster(spec)]),
                "disruption-budgets.yaml": _yaml(kuberay.budgets(spec)),
            }
        case _:
            own = {"job.sbatch": _template("job.sbatch.j2", spec=spec, start=_start(spec), command=_batch_command(spec))}
    if spec.image and target != "slurm":
        own |= {"Dockerfile": _dockerfile(spec, folder, python), "Dockerfile.dockerignore": "\n".join((*ray_up.LEFT_BEHIND, ""))}
    return own | {"README.md": _readme(spec, target, folder)}


def _yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    text: str = yaml.safe_dump_all(documents, sort_keys=False, width=1000, explicit_start=True)
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
    """The one word that the shell is to fill in stands in double quotes."""
    words = entrypoint.words(spec, "", ADDRESS)
    return " ".join(f'"{word}"' if word == ADDRESS else entrypoint.line([word]) for word in words)


def base_image(spec: Spec, python: str) -> str:
    """What the Dockerfile starts from."""
    kind = "gpu" if spec.nodes.gpus else "cpu"
    return spec.base or f"rayproject/ray:{kuberay.RAY}-py{python.replace('.', '')}-{kind}"


def _dockerfile(spec: Spec, folder: str, python: str) -> str:
    needed = STORES.get(spec.store.partition("://")[0])
    wheel = spec.fleet if WHEEL.fullmatch(spec.fleet) else ""
    source = f"/tmp/{posixpath.basename(wheel)}" if wheel else f"fleet-train @ {spec.fleet}"
    return _template(
        "Dockerfile.j2", spec=spec, folder=shlex.quote(folder), base=base_image(spec, python), code=kuberay.CODE, wheel=wheel,
        packages=entrypoint.line([source, *([needed] if needed else [])]),
    )  # fmt: skip


def _readme(spec: Spec, target: str, folder: str) -> str:
    """What to type."""
    code = {"ray-up": ray_up.CODE, "kuberay": kuberay.CODE}.get(target, "")
    resume = entrypoint.line(entrypoint.resume_words(spec, code))
    command, attach, stop = entrypoint.line(entrypoint.words(spec, code)), "", ""
    if target == "ray-up":
        command = ray_up.on_node(spec, entrypoint.line(entrypoint.words(spec, code, detach=True)))
        attach = ray_up.on_node(spec, f"fleet attach {spec.name}")
        stop = ray_up.stop(spec)
    return _template(
        "README.md.j2", spec=spec, target=target, title=TITLES[target], folder=shlex.quote(folder), command=command, attach=attach,
        stop=stop, code=code, resume=resume,
    )  # fmt: skip
