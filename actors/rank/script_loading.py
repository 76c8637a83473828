"""Find and check a user's training script: it can be executed, has a train function, and hides no package of Fleet."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from actors.rank.current import looking
from actors.rank.preloads import imports_of
from actors.rank.script import FUNCTION, Script
from fleet.errors import ConfigError
from fleet.host.packages import PACKAGES

OURS = (__file__, inspect.getfile(Script))
"""Files whose lines are left out of tracebacks, as they are not the script's."""


def load_train(script: str, arguments: Sequence[str] = (), module: bool = False) -> Script:
    """The train function of ``script``, for ranks. This process executes the script once, to check it.

    Args:
        arguments: the script's arguments in ``sys.argv``.
        module: ``script`` is the name of a module, as for ``python -m``.

    Raises:
        ConfigError: the script is missing or raises, or its train function is missing or needs other arguments than the run.
    """
    train = found(script, arguments, module)
    with _looked_at():
        train_of(train)
    return train


def found(script: str, arguments: Sequence[str] = (), module: bool = False) -> Script:
    """``script``, without executing it. Raises ConfigError: it is missing, or a file beside it hides a package of Fleet."""
    if module:
        name, path = _module(script)
        folder = Path.cwd()
    else:
        path = Path(script).resolve()
        folder = path.parent
        if not path.is_file():
            raise ConfigError("script", script, "no such file")
        name = _name(path)
    _check_siblings(script, folder)
    text = path.read_bytes()
    return Script(name, str(path), text, str(folder), tuple(arguments), imports=tuple(imports_of(text, folder)))


def train_of(script: Script) -> Callable[[Any], None]:
    """The train function of ``script``, which this process executes. Raises ConfigError as :func:`load_train` does."""
    train = getattr(_executed(script), FUNCTION, None)
    if not callable(train):
        raise ConfigError("script", script.file, f"it has no function {FUNCTION}(run)", f"Define `def {FUNCTION}(run: fleet.Run) -> None`.")
    try:
        inspect.signature(train).bind(None)
    except TypeError as error:
        reason = f"{FUNCTION} cannot be called with the run alone: {error}"
        raise ConfigError("script", script.file, reason, "Give it one argument.") from error
    return cast(Callable[[Any], None], train)


def folder_of(train: Callable[..., Any], script: str) -> str:
    """The folder from which ``script``, with the train function ``train``, imports modules beside it."""
    return train.folder if isinstance(train, Script) else str(Path(script).resolve().parent)


def load_named(script: str, name: str) -> Any:
    """The object ``name`` of ``script``. Raises ConfigError: the file is missing, raises, or has no such name."""
    with _looked_at():
        module = _executed(found(script))
    if not hasattr(module, name):
        raise ConfigError("script", script, f"it has nothing that is called {name}", "Give SCRIPT:NAME.")
    return getattr(module, name)


@contextmanager
def _looked_at() -> Iterator[None]:
    """Context in which this process executes a script to check it. The script's output goes to stderr, and ``sys.argv`` is restored."""
    before = sys.argv
    try:
        with looking(), redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv = before


def _module(name: str) -> tuple[str, Path]:
    """(a module's name, its file), found as ``python -m`` finds it; for a package, its ``__main__``. Raises ConfigError."""
    if sys.path[:1] != [str(Path.cwd())]:
        sys.path.insert(0, str(Path.cwd()))
    spec: ModuleSpec | None = None
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise ConfigError("script", name, f"it cannot be found as a module: {error}", "Name it as for python -m.") from error
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        reason = f"no module of this name, with a file of Python, is found from {Path.cwd()}"
        raise ConfigError("script", name, reason, "Name it as for python -m.")
    return spec.name, Path(str(spec.origin)).resolve()


def _name(path: Path) -> str:
    """The name of a script's module: its own name, unless that is taken. Other processes, such as a DataLoader's, can import it by that."""
    own, folder = path.stem, path.parent
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != folder]
    first, other = PathFinder.find_spec(own, [str(folder)]), PathFinder.find_spec(own, elsewhere)
    is_first = first is not None and first.origin == str(path)
    if own.isidentifier() and is_first and other is None and own not in sys.stdlib_module_names:
        return own
    return "fleet_user_" + re.sub(r"\W", "_", own)


def _check_siblings(script: str, folder: Path) -> None:
    """The script's folder comes first on the path of each rank, so a file named as a package of Fleet would hide the package there."""
    if folder == Path(__file__).resolve().parents[2]:
        return
    for name in PACKAGES:
        for sibling in (folder / f"{name}.py", folder / name / "__init__.py"):
            if sibling.exists():
                raise ConfigError("script", script, f"{sibling} shadows Fleet's own package {name!r}", "Rename it or move the script.")


def _executed(script: Script) -> ModuleType:
    try:
        return script.execute()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        trace = traceback.TracebackException.from_exception(error)
        own = [frame for frame in trace.stack if frame.filename not in OURS and "importlib" not in frame.filename]
        trace.stack = traceback.StackSummary.from_list(own)
        reason = "it raises when it is executed"
        raise ConfigError("script", script.file, reason, "\n\n" + "".join(trace.format()).rstrip()) from error
