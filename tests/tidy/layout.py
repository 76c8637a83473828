"""How modules hang together, as pure functions: who imports whom, in circles or not; private names of others; what a class holds."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.tidy.rules import imports, nodes, parsed

OTHERS = {"_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_buffers", "_version", "_replace"}
"""Names of torch and of named tuples that begin with an underscore and are used from outside all the same."""


def module_name(path: str) -> str:
    """``fleet/a/b.py`` is ``fleet.a.b``, ``fleet/a/__init__.py`` is ``fleet.a``."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> modules that it imports, of ``sources`` (path -> text). All imports count: within functions, and for types alone."""
    names = {module_name(path) for path in sources}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path, source in sources.items():
        for _, imported in imports(path, parsed(source)):
            target = imported if imported in names else imported.rpartition(".")[0]
            if target in names and target != module_name(path):
                found[module_name(path)].add(target)
    return found


def reachable(edges: Mapping[str, set[str]], start: str) -> set[str]:
    """Every module that ``start`` imports, by itself or by others."""
    seen: set[str] = set()
    ahead = list(edges[start])
    while ahead:
        if (name := ahead.pop()) not in seen:
            seen.add(name)
            ahead += edges[name]
    return seen


def circles(sources: Mapping[str, str]) -> set[frozenset[str]]:
    """The sets of modules that import each other."""
    edges = graph(sources)
    reach = {name: reachable(edges, name) for name in edges}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in edges if name in reach[name]}


def _own(tree: ast.AST) -> set[str]:
    """The names that a module defines, as functions, classes, variables or attributes of its own objects."""
    found: set[str] = set()
    for node in nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OTHERS


def private_faults(sources: Mapping[str, str]) -> list[str]:
    """Private names of one module of ``sources`` that another one uses. Those of libraries do not count here."""
    trees = {path: parsed(source) for path, source in sources.items()}
    owned = {path: _own(tree) for path, tree in trees.items()}
    faults: list[str] = []
    for path, tree in trees.items():
        theirs = set[str]().union(*(names for other, names in owned.items() if other != path)) - owned[path]
        for node in nodes(tree):
            match node:
                case ast.Attribute(value=value, attr=name, lineno=line) if _private(name) and name in theirs:
                    if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                        faults.append(f"{path}:{line}: {ast.unparse(node)} is private to another module")
                case ast.ImportFrom(module=str(module), names=names, lineno=line) if module.split(".")[0] in {
                    p.split("/")[0] for p in sources
                }:
                    faults += [f"{path}:{line}: {alias.name} is private to {module}" for alias in names if _private(alias.name)]
    return faults


def _is_plain(node: ast.ClassDef) -> bool:
    """A record: a frozen dataclass, a named tuple, or words."""
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    return "frozen=True" in decorators or any(ast.unparse(base).endswith(("NamedTuple", "TypedDict", "Enum")) for base in node.bases)


def _attributes(node: ast.ClassDef) -> set[str]:
    """What its objects hold: fields, and what its methods set."""
    fields = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}
    plain = (target for part in node.body if isinstance(part, ast.Assign) for target in part.targets)
    named = {target.id for target in plain if isinstance(target, ast.Name) and not target.id.startswith("__")}
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    stored = [part for method in methods for part in nodes(method) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    return fields | named | {part.attr for part in stored if isinstance(part.value, ast.Name) and part.value.id == "self"}


def attributes(sources: Mapping[str, str]) -> dict[str, int]:
    """Class -> how many attributes an object of it has, its own and inherited ones. Records are left out."""
    classes = {node.name: node for source in sources.values() for node in nodes(parsed(source)) if isinstance(node, ast.ClassDef)}

    def held(name: str, below: frozenset[str] = frozenset()) -> set[str]:
        if name not in classes or name in below:
            return set()
        bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in classes[name].bases)
        return _attributes(classes[name]).union(*(held(base, below | {name}) for base in bases))

    return {name: len(held(name)) for name, node in classes.items() if not _is_plain(node)}
