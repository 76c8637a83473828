"""The house rules as pure functions: text in, complaints out. ``test_tidy.py`` applies them, ``test_rules.py`` shows that each can fail."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHIPPED = ("fleet", "actors", "policies", "storage", "dashboards", "chaos")
OURS = (*SHIPPED, "benchmarks", "examples", "tests")
ANY = ("*",)

ROOF, GROUND = "fleet.app", "fleet.host"
"""What composes: it may import all, and the fronts of the package alone import it. What touches the machine: it decides nothing."""

FRONTS = ("fleet/__init__.py", "fleet/__main__.py", "fleet/data.py", "fleet/integrations/", "fleet/testing.py")
"""What users import or call. What lies behind it is loaded on first use."""


@dataclass(frozen=True)
class Zone:
    """What files under ``prefix`` may import besides the standard library. A longer match in ``ours`` or ``never`` beats a shorter one."""

    prefix: str | tuple[str, ...]
    ours: tuple[str, ...]
    third: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


ZONES = (
    Zone(FRONTS, ("fleet", "actors.rank", "policies"), (), ("torch", "ray")),
    Zone(("fleet/app/cluster/", "fleet/app/deploy/"), ("fleet", "fleet.app.cluster", "fleet.app.deploy"), ANY, ("torch", ROOF)),
    Zone("fleet/app/", SHIPPED, ANY, ("torch",)),
    Zone("fleet/host/", ("fleet.errors", "fleet.protocol", "fleet.ledger", GROUND)),
    Zone(("fleet/laws/", "fleet/planning/", "fleet/simulation/"), ("fleet",), ("numpy", "scipy"), (ROOF, GROUND)),
    Zone("fleet/", ("fleet",), (), (ROOF, GROUND)),
    Zone("policies/", ("fleet", "policies"), ANY, ("torch", "ray", ROOF, GROUND)),
    Zone("storage/", ("fleet", "storage"), ANY, ("ray", ROOF)),
    Zone("chaos/", ("fleet", "chaos"), ANY, ("torch", "ray", ROOF)),
    Zone("dashboards/", ("fleet", "dashboards"), ANY, ("torch", "ray", ROOF)),
    Zone(("actors/__init__.py", "actors/rank/", "actors/plain/"), ("fleet", "actors.rank", "actors.plain"), ANY, ("ray", ROOF)),
    Zone("actors/", ("fleet", "actors"), ANY, (ROOF,)),
    Zone("examples/ray_train/", ("fleet", "examples"), ANY, (ROOF,)),
    Zone("examples/", ("fleet", "examples"), ANY, ("ray", ROOF)),
    Zone(("benchmarks/", "tests/"), OURS, ANY),
)
"""The first that fits a file is its own."""
MOST_ZONES = 15
"""A rule for each file is no rule."""

RAY_WALL = ("actors/ray_internals.py", "fleet/app/cluster/ray_internals.py", "fleet/app/cluster/lean_agent.py")
"""The only ones that use what Ray promises to nobody, with one test for each thing."""
RAYS_OWN = ("ray._private", "ray._common", "ray._raylet", "ray.train.v2", "ray.train._internal", "ray.experimental", "ray.dashboard")

KERNEL_WALL = "fleet/host/linux.py"
KERNEL_CALLS = ("os.sched_", "os.nice", "os.getpriority", "os.setpriority", "ctypes.CDLL")
"""Scheduling, affinity, and what only the C library has. They stand together, each behind a function."""

PURE = ("fleet/", "policies/", "chaos/")
IMPURE = (
    *(f"fleet/host/{name}.py" for name in ("clock", "lines", "ports", "processes", "refusals", "secret")),
    *("fleet/app/cli/", "fleet/app/cluster/", "fleet/app/plans.py", "fleet/app/progress_calls.py", "fleet/app/recipes.py"),
    *("chaos/ballast.py", "chaos/confine.py", "chaos/relay.py", "chaos/signaller.py"),
)
"""``PURE`` less ``IMPURE`` takes time and randomness as arguments."""

TIMES = ["time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "sleep"]
BANNED = {f"time.{name}" for name in TIMES} | {"datetime.datetime.now", "datetime.datetime.utcnow", "datetime.date.today", "os.urandom"}
BANNED_MODULES = ("random.", "uuid.", "secrets.", "numpy.random.")
SEEDED = {"random.Random", *(f"numpy.random.{name}" for name in ("default_rng", "Generator", "SeedSequence", "PCG64", "Philox"))}

SKIPS = {"skip", "skipif", "xfail", "importorskip", "skipIf", "skipUnless", "skipTest", "expectedFailure"}
OLD_WORDS = {
    "aside", "blow", "blows", "borrow", "borrowed", "borrower", "borrows", "bring", "brings", "brought", "choreography", "conduct",
    "conductor", "conducts", "deal", "deals", "dealt", "foresaw", "foresee", "foreseen", "foresees", "gift", "gifts", "hear", "heard",
    "hearing", "hears", "lend", "lender", "lenders", "lending", "lends", "lent", "lineage", "lineages", "loan", "loaned", "loans", "park",
    "parked", "parking", "parks", "saboteur", "sat", "seat", "seated", "seats", "sit", "sits", "sitting", "strike", "strikes", "striking",
    "struck", "tell", "teller", "tellers", "telling", "tells", "told", "wish", "wished", "wishes",
}  # fmt: skip
"""Words of a language that only this project had; ``docs/glossary.md`` has the ones that took their place."""
OLD_WORDS_KEPT = {
    "Lineage": "what samples went into a step is their lineage, the word of data engineers for it",
    "_lineage": "the same, of a run that the command line names",
    "check_lineage": "the same, of a journal",
    "tell": "a method of Python's own files, which others read",
}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
MACHINE_PATHS = re.compile(r"(?<![\w.~:/-])/(?:{}|{})(?:/|\b)".format("work", "root"))


@functools.cache
def parsed(source: str) -> ast.Module:
    """Parsed once, whatever number of rules look at it."""
    return ast.parse(source)


@functools.cache
def nodes(tree: ast.AST) -> Sequence[ast.AST]:
    """Each node of a tree that is parsed once."""
    return list(ast.walk(tree))


def within(name: str, prefixes: Iterable[str]) -> int:
    """Length of the longest of the dotted ``prefixes`` that ``name`` lies under, 0 when there is none."""
    return max((len(prefix) for prefix in prefixes if name == prefix or name.startswith(prefix + ".")), default=0)


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import at any depth; ``from a import b`` is ``a.b``."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = Path(path).parent.parts
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            yield from ((node.lineno, f"{base}{node.module or ''}.{alias.name}".replace("..", ".")) for alias in node.names)


def allowed(zone: Zone, name: str) -> bool:
    top = name.split(".", maxsplit=1)[0]
    if within(name, zone.never) > within(name, zone.ours):
        return False
    if top in OURS:
        return within(name, zone.ours) > 0
    return top in sys.stdlib_module_names or zone.third == ANY or top in zone.third


def zone_of(path: str, zones: Sequence[Zone] = ZONES) -> Zone | None:
    """The first that fits."""
    return next((zone for zone in zones if path.startswith(zone.prefix)), None)


def zone_faults(zones: Sequence[Zone], paths: Iterable[str]) -> list[str]:
    """Too many zones, and those that are nobody's."""
    used = {id(zone_of(path, zones)) for path in paths}
    faults = [f"{len(zones)} zones, at most {MOST_ZONES}"] if len(zones) > MOST_ZONES else []
    return faults + [f"no file lies in the zone of {zone.prefix}" for zone in zones if id(zone) not in used]


def import_faults(path: str, source: str) -> list[str]:
    """Imports that the zone of ``path`` does not allow."""
    zone = zone_of(path)
    if zone is None:
        return [f"{path}: lies in no zone of tests/tidy/rules.py"]
    return [
        f"{path}:{line}: may not import {name}, see ZONES in tests/tidy/rules.py"
        for line, name in imports(path, parsed(source))
        if not allowed(zone, name)
    ]  # fmt: skip


def rays_internals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each use of what Ray keeps to itself: imported, or reached from ``ray``."""
    known, seen = _names(tree), set[int]()
    yield from ((line, name) for line, name in imports("", tree) if within(name, RAYS_OWN))
    for node in nodes(tree):
        name = _dotted(node, known) if id(node) not in seen else ""
        if name.startswith("ray.") and within(name, RAYS_OWN):
            seen |= {id(inner) for inner in ast.walk(node)}
            yield getattr(node, "lineno", 0), name


def ray_faults(path: str, source: str) -> list[str]:
    """Use of Ray's internals outside the wall, by import, by attribute or by a module's name in a string."""
    if path in RAY_WALL:
        return []
    tree = parsed(source)
    texts = ((node.lineno, node.value) for node in nodes(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    named = ((line, text) for line, text in texts if text.isascii() and " " not in text and within(text, RAYS_OWN))
    return [f"{path}:{line}: {name} is Ray's own: use it in {RAY_WALL[0]}, with a fact" for line, name in (*rays_internals(tree), *named)]


def kernel_faults(path: str, source: str) -> list[str]:
    """Calls of the kernel about threads and cores outside the one module that has them."""
    if path == KERNEL_WALL:
        return []
    tree = parsed(source)
    known = _names(tree)
    found = ((getattr(node, "lineno", 0), _dotted(node, known)) for node in nodes(tree))
    return [f"{path}:{line}: {name}: give it a function in {KERNEL_WALL}" for line, name in found if _is_kernel_call(name)]


def _is_kernel_call(name: str) -> bool:
    return name.startswith(KERNEL_CALLS) and not name.startswith("os.sched_yield")


def third_party(path: str, source: str) -> set[str]:
    """Top-level names that come from neither this project nor the standard library."""
    return {name.split(".")[0] for _, name in imports(path, parsed(source))} - set(OURS) - set(sys.stdlib_module_names)


def function_lengths(source: str) -> list[tuple[int, int, str]]:
    """(lines, first line, name) of every function, its docstring included."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in nodes(parsed(source)) if isinstance(node, kinds)]
    return [((node.end_lineno or node.lineno) - node.lineno + 1, node.lineno, node.name) for node in functions]


def length_faults(path: str, source: str, file_lines: int = 600, function_lines: int = 70) -> list[str]:
    """A file or a function that is too long to be read at once."""
    count = len(source.splitlines())
    faults = [f"{path}: {count} lines, at most {file_lines}"] if count > file_lines else []
    long = [
        f"{path}:{line}: {name} has {n} lines, at most {function_lines}" for n, line, name in function_lengths(source) if n > function_lines
    ]
    return faults + long


def _names(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it was imported as."""
    known: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            whole = [(alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2 for alias in node.names]
            known |= dict(whole)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, known)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_pure(path: str) -> bool:
    return path.startswith(PURE) and not path.startswith(IMPURE)


def clock_and_chance_faults(path: str, source: str) -> list[str]:
    """Reads of a clock or of unseeded randomness, called or passed on."""
    tree = parsed(source)
    known, faults = _names(tree), []
    unseeded = {id(node.func) for node in nodes(tree) if isinstance(node, ast.Call) and not node.args and not node.keywords}
    for node in nodes(tree):
        name = _dotted(node, known)
        bad = name in BANNED or (name.startswith(BANNED_MODULES) and (name not in SEEDED or id(node) in unseeded))
        if bad and within(name, SEEDED) in (0, len(name)):
            faults.append(f"{path}:{getattr(node, 'lineno', 0)}: {name}: time and randomness are arguments here")
    return faults


def handler_faults(path: str, source: str) -> list[str]:
    """``except:`` without a type, and handlers that do nothing at all."""
    faults = []
    for node in nodes(parsed(source)):
        if isinstance(node, ast.ExceptHandler):
            idle = [isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in node.body]
            faults += [f"{path}:{node.lineno}: a handler that hides the error"] if all(idle) else []
            faults += [f"{path}:{node.lineno}: a handler without a type"] if node.type is None else []
    return faults


def skip_faults(path: str, source: str, reasons: Collection[str] = ()) -> list[str]:
    """Tests that are skipped or expected to fail, but for those whose ``path`` is in the allow-list."""
    skips = [node for node in nodes(parsed(source)) if isinstance(node, ast.Attribute) and node.attr in SKIPS]
    named = [node for node in skips if isinstance(node.value, (ast.Name, ast.Attribute))]
    return [] if path in reasons else [f"{path}:{node.lineno}: {node.attr} without a reason in SKIPPED" for node in named]


def docstring_faults(path: str, source: str) -> list[str]:
    """Public modules, classes and functions that say nothing about themselves. ``__all__`` narrows what is public."""
    tree = parsed(source)
    faults = [] if ast.get_docstring(tree) or not tree.body else [f"{path}: the module has no docstring"]
    listed = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    public = set(ast.literal_eval(listed[0])) if listed else None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bare = [node for node in tree.body if isinstance(node, kinds) and not ast.get_docstring(node) and not node.name.startswith("_")]
    return faults + [f"{path}:{n.lineno}: {n.name} has no docstring" for n in bare if public is None or n.name in public]


def machine_path_faults(path: str, text: str) -> list[str]:
    """Absolute paths of the machine that something was written on."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{path}:{number}: names {found[0]}" for number, line in lines if (found := MACHINE_PATHS.search(line))]


WORDS = {"reason", "cause", "detail", "error", "why"}
"""Names, or last words of names, under which sentences for people stand. Where they hold a fact, it is compared with facts."""
READS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition", "find", "rfind", "index",
    "count", "replace", "casefold", "lower",
}  # fmt: skip
PATTERNS = {"match", "fullmatch", "search", "findall", "finditer", "sub"}


def reason_faults(path: str, source: str) -> list[str]:
    """Code that reads the text of a reason, or a key of a decision's figures: what it needs to know is data."""
    found = [(node, what) for node in nodes(parsed(source)) for what in _read_of_text(node)]
    return [f"{path}:{getattr(node, 'lineno', 0)}: {what}: what code reads is data, see fleet/protocol/causes.py" for node, what in found]


def _read_of_text(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Call(func=ast.Attribute(attr="split"), args=[], keywords=[]):
            return  # of white space alone
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in READS and _is_text(value):
            yield f"{ast.unparse(value)}.{attr}"
        case ast.Call(func=ast.Attribute(attr=attr), args=arguments) if attr in PATTERNS and any(map(_is_text, arguments)):
            yield f"{attr} of {ast.unparse(node)}"
        case (
            ast.Call(func=ast.Attribute(value=ast.Attribute(attr="fields"), attr="get")) | ast.Subscript(value=ast.Attribute(attr="fields"))
        ):
            yield f"a key of {ast.unparse(node)}"
        case ast.Compare(left=left, ops=operators, comparators=others):
            pairs = zip([left, *others], operators, others, strict=False)
            yield from (f"comparison {ast.unparse(node)}" for one, operator, other in pairs if _compares(one, operator, other))
        case ast.MatchClass(kwd_attrs=names, kwd_patterns=patterns):
            yield from (
                f"pattern {name}" for name, pattern in zip(names, patterns, strict=True) if _is_word(name) and _matches_text(pattern)
            )


def _is_word(name: str) -> bool:
    return name.lower().rpartition("_")[2] in WORDS and not name.isupper()


def _is_text(node: ast.AST) -> bool:
    """Whether this is a sentence for people: by its name, or made of one that is."""
    match node:
        case ast.Attribute(attr="args", value=inner):
            return _is_text(inner)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return _is_word(name)
        case ast.Subscript(slice=ast.Constant(value=str() as name)):
            return _is_word(name)
        case ast.Call(func=ast.Name(id="str" | "repr" | "sentence"), args=[inner]):
            return _is_text(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[ast.Constant(value=str() as name), *_]):
            return _is_word(name)
        case ast.Call(func=ast.Attribute(value=inner)) | ast.Subscript(value=inner):
            return _is_text(inner)
    return False


def _compares(one: ast.AST, operator: ast.cmpop, other: ast.AST) -> bool:
    if isinstance(operator, ast.In | ast.NotIn):
        return _is_text(other) or (_is_text(one) and _holds_text(other))
    if isinstance(operator, ast.Eq | ast.NotEq):
        return (_is_text(one) and _holds_text(other)) or (_is_text(other) and _holds_text(one))
    return False


def _holds_text(node: ast.AST) -> bool:
    """Words that somebody wrote: a text that is not empty, or a constant of the module."""
    match node:
        case ast.Constant(value=str() as text):
            return bool(text)
        case ast.JoinedStr():
            return True
        case ast.Name(id=name):
            return name.isupper()
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(map(_holds_text, parts))
    return False


def _matches_text(pattern: ast.pattern) -> bool:
    match pattern:
        case ast.MatchValue(value=ast.Constant(value=str())):
            return True
        case ast.MatchOr(patterns=patterns):
            return any(map(_matches_text, patterns))
    return False


def bound_names(node: ast.AST) -> Iterator[str]:
    """The names that one node of a tree gives to something."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname
    elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name


def old_words(name: str) -> list[str]:
    """Those of ``OLD_WORDS`` that an identifier holds. A test's name is a sentence."""
    if name in OLD_WORDS_KEPT or name.startswith("test_"):
        return []
    held = [word.lower() for word in WORD.findall(name)]
    pairs = [f"{one}_{other}" for one, other in itertools.pairwise(held)]
    return [word for word in (*held, *pairs) if word in OLD_WORDS or word == "let_go"]


def old_word_faults(path: str, source: str) -> list[str]:
    found = sorted({(getattr(node, "lineno", 0), name) for node in nodes(parsed(source)) for name in bound_names(node) if old_words(name)})
    return [f"{path}:{line}: {name}: {', '.join(old_words(name))} is an old word: see docs/glossary.md" for line, name in found]


def twice_defined(sources: Mapping[str, str]) -> list[str]:
    """Public classes of one name, with the places of all of them."""
    places = defaultdict[str, list[str]](list)
    for path, source in sorted(sources.items()):
        for node in nodes(parsed(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(found)}: a class has a name of its own" for name, found in sorted(places.items()) if len(found) > 1]
