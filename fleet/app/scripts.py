"""Loading a user's training script: found, importable, with a train function, and not shadowing a package of ours."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fleet.app.extras import WHERE
from fleet.errors import ConfigError

DISTRIBUTION = "fleet-train"
PACKAGES = ("fleet", "actors", "policies", "storage", "dashboards", "chaos")


def check_not_shadowed() -> None:
    """Our package names are ordinary words. Raises ConfigError when Python would import somebody else's, or loads what another
    distribution has written over one of ours."""
    ours = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        where = Path(found.origin).resolve() if found is not None and found.origin else None
        if where is None or where.parent.parent != ours:
            raise ConfigError(
                "package", name, f"Python finds {where or 'nothing'} for it instead of Fleet's own in {ours}",
                "Rename your module, or remove its folder from PYTHONPATH.",
            )  # fmt: skip
    for name in _written_over():
        raise ConfigError(
            "package", name, f"{ours / name / '__init__.py'} is not the file that came with Fleet: another distribution has that name",
            "Give each an environment of its own, or uninstall the other and run pip install --force-reinstall --no-deps FLEET, "
            f"where {WHERE}.",
        )  # fmt: skip


def _written_over() -> list[str]:
    """Packages of an installed wheel that begin otherwise than when they were installed; a checkout records none."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    begins = [file for file in files if file.name == "__init__.py" and file.parts[0] in PACKAGES and len(file.parts) == 2]
    return [file.parts[0] for file in begins if file.hash is not None and _digest(file, file.hash.mode) != file.hash.value]


def _digest(file: importlib.metadata.PackagePath, mode: str) -> str:
    """As the list of installed files has it."""
    return base64.urlsafe_b64encode(hashlib.new(mode, file.read_binary()).digest()).rstrip(b"=").decode()


def load_train(script: str, function: str = "train") -> Callable[[Any], None]:
    """The train function of ``script``.

    Raises:
        ConfigError: the file is missing, raises on import, has no such function, or one that does not take the run alone.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError("script", script, "no such file")
    _check_siblings(path)
    module = _imported(path)
    train = getattr(module, function, None)
    if not callable(train):
        raise ConfigError("script", script, f"it has no function {function}(run)", f"Define `def {function}(run: fleet.Run) -> None`.")
    try:
        inspect.signature(train).bind(None)
    except TypeError as error:
        raise ConfigError("script", script, f"{function} cannot be called with the run alone: {error}", "Give it one argument.") from error
    return cast(Callable[[Any], None], train)


def load_named(script: str, name: str) -> Any:
    """What ``script`` calls ``name``. Raises ConfigError when the file is missing, raises on import, or has nothing of that name."""
    path = Path(script)
    if not path.is_file():
        raise ConfigError("script", script, "no such file")
    _check_siblings(path)
    module = _imported(path)
    if not hasattr(module, name):
        raise ConfigError("script", script, f"it has nothing that is called {name}", "Give SCRIPT:NAME.")
    return getattr(module, name)


def _check_siblings(path: Path) -> None:
    """The script's folder comes first on the path of every rank, so a sibling named like one of our packages would hide it there."""
    folder = path.resolve().parent
    if folder == Path(__file__).resolve().parents[2]:
        return
    for name in PACKAGES:
        for sibling in (folder / f"{name}.py", folder / name / "__init__.py"):
            if sibling.exists():
                raise ConfigError("script", str(path), f"{sibling} shadows Fleet's own package {name!r}", "Rename it or move the script.")


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fleet_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        trace = traceback.TracebackException.from_exception(error)
        own = [frame for frame in trace.stack if frame.filename != __file__ and "importlib" not in frame.filename]
        trace.stack = traceback.StackSummary.from_list(own)
        raise ConfigError("script", str(path), "it raises when it is imported", "\n\n" + "".join(trace.format()).rstrip()) from error
    return module
