"""``fleet cluster write`` and ``check``: files that start a cluster with a run on it, and mistakes in them. Nothing is started or asked."""

from __future__ import annotations

import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.app.cli import run as cli_run
from fleet.errors import ConfigError
from fleet.host import extras
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from fleet.app.deploy.spec import Spec

LARGEST_B = 1024 * 1024
"""Of a spec, and of a file that is checked."""
NOT_HELD = f"not held against Kubernetes' own schemas: {extras.command('kubernetes')}"
console = cli_print.Terminal(stderr=True)


def write(
    folder: Annotated[Path, typer.Argument(help="Folder for the files, which must not be there yet, or be empty.", show_default=False)],
    target: Annotated[str, typer.Option(help="ray-up, kuberay, jobset or slurm.", show_default=False)],
    spec: Annotated[Path, typer.Option(help="Description of the cluster and of the run; see docs/deploy.md.")] = Path("cluster.toml"),
) -> None:
    """Write the files for TARGET into FOLDER: all of them, or none. README.md there has the commands that use them."""
    from fleet.app.deploy import checks
    from fleet.app.deploy.files import files
    from fleet.app.deploy.spec import load

    given = load(_toml(spec), target)
    _check_run(given, spec.parent)
    _check_free(folder)
    texts = files(given, target, str(folder), ".".join(map(str, sys.version_info[:2])))
    _check_written(texts, core=checks.has_core())
    _write_all(texts, folder)
    cli_print.write(*(f"written to {folder / name}" for name in texts))
    if not checks.has_core() and target in ("kuberay", "jobset"):
        console.print(NOT_HELD, markup=False)


def _toml(path: Path) -> dict[str, Any]:
    text = _text(path, "--spec")
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("--spec", str(path), f"it is no TOML: {error}") from None


def _text(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_B + 1)
        if len(content) > LARGEST_B:
            raise ConfigError(option, str(path), f"it has more than {LARGEST_B} bytes")
        return content.decode()
    except OSError as error:
        raise ConfigError(option, str(path), f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(option, str(path), "it is no text in UTF-8") from None


def _check_run(spec: Spec, folder: Path) -> None:
    """The command line of the run, before a cluster is paid for."""
    from fleet.app.deploy import entrypoint

    wheel = spec.fleet if spec.fleet.endswith(".whl") else ""
    for name, path in (("script", spec.script), ("fleet", wheel)):
        if path and not (folder / path).is_file():
            raise ConfigError(name, path, f"there is no such file in {folder}", "Name it from the spec's folder.")
    accepts(entrypoint.words(spec, "")[2:])


def accepts(words: Sequence[str]) -> None:
    """Check the words behind ``fleet run`` as that command would. Raises ConfigError."""
    if "--resume" not in words:
        cli_run.checked(words[0] if words else "", words[1:], Path())


def _check_free(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ConfigError("FOLDER", str(folder), "it is there, and not an empty folder", "Name another, or remove it.")


def _check_written(texts: Mapping[str, str], core: bool) -> None:
    """Nothing is written that ``fleet cluster check`` would refuse. Raises ConfigError."""
    from fleet.app.deploy import checks

    for name, text in texts.items():
        for error in checks.check(name, text, accepts, core=core) if name.endswith(checks.YAML) else ():
            raise error


def _write_all(texts: Mapping[str, str], folder: Path) -> None:
    """Into a folder beside it, which then takes its name. Raises ConfigError."""
    beside: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        for name, text in texts.items():
            (beside / name).write_text(text)
        beside.chmod(0o755)
        beside.rename(folder)
    except OSError as error:
        raise ConfigError("FOLDER", str(folder), f"it cannot be written: {error.strerror}") from None
    finally:
        if beside is not None and beside.exists():
            shutil.rmtree(beside)


def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML files, or folders of them.", show_default=False)],
) -> None:
    """Name the mistakes in each FILE. Exit code 2: there are some. Nothing is sent anywhere."""
    from fleet.app.deploy import checks

    if not checks.has_core():
        console.print(NOT_HELD, markup=False)
    paths = [inner for path in files for inner in _yaml_of(path)]
    found = [error for path in paths for error in checks.check(str(path), _text(path, "FILE"), accepts, core=checks.has_core())]
    cli_print.write(*map(str, found))
    if found:
        raise typer.Exit(Exit.REFUSED)
    console.print("nothing is wrong in them that can be seen without a cluster")


def _yaml_of(path: Path) -> list[Path]:
    from fleet.app.deploy.checks import KNOWN, YAML

    found = sorted(inner for inner in path.iterdir() if inner.suffix in YAML) if path.is_dir() else [path]
    if not found:
        raise ConfigError("FILE", str(path), "there is no YAML in this folder", KNOWN)
    return found
