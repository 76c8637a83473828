"""The imports in a script's first lines: a process that forks ranks can import them ahead of time. This module executes no code."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

QUIET = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)
"""Statements without an effect on later imports."""


def imports_of(text: bytes, folder: Path) -> list[str]:
    """Import statements of a script with its neighbours in ``folder``, in order, of modules that are installed.

    It stops at the first line that may affect an import, such as one that sets a variable of the environment.
    """
    return list(_Reader(folder).read(text))


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._over = folder, set[Path](), False

    def read(self, text: bytes) -> Iterator[str]:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # the process that executes the script reports it
            return
        yield from self._statements(tree.body)

    def _statements(self, body: Sequence[ast.stmt]) -> Iterator[str]:
        for statement in body:
            if self._over:
                return
            if isinstance(statement, ast.Import | ast.ImportFrom):
                yield from self._import(statement)
            elif isinstance(statement, ast.Try) and all(isinstance(each, ast.Import | ast.ImportFrom) for each in statement.body):
                yield from self._statements(statement.body)
            elif not _is_quiet(statement):
                self._over = True

    def _import(self, statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(statement, ast.ImportFrom) and (statement.level or statement.module is None):
            self._over = True  # other parts of its package would be imported first
            return
        names = [each.name for each in statement.names] if isinstance(statement, ast.Import) else [str(statement.module)]
        for name in names:
            for neighbour in self._neighbours(name):
                yield from self.read(neighbour.read_bytes())
        if not self._over and all(_is_installed(name) for name in names):
            yield ast.unparse(statement)

    def _neighbours(self, name: str) -> Iterator[Path]:
        """Files in the script's folder that an import of ``name`` executes, and that have not been read."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = self._folder.joinpath(*parts[:count])
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if file.is_file() and file not in self._seen:
                    self._seen.add(file)
                    yield file


def _is_quiet(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test).rpartition(".")[2] == "TYPE_CHECKING" and not statement.orelse
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        calls = statement.value is not None and any(isinstance(each, ast.Call) for each in ast.walk(statement.value))
        return not calls and all(isinstance(each, ast.Name) for each in targets)
    return isinstance(statement, QUIET) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))


def _is_installed(name: str) -> bool:
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
    return any("site-packages" in place or "dist-packages" in place for place in places)
