"""Values that a script keeps from one shard to the next without tracking them: variables, closures, attributes, caches; each with its line.

It examines the modules beside the train function, and variables of its frames that had a value before the loop.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import linecache
import os
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from actors.rank.trial.recording import digest
from fleet.host.packages import PACKAGES
from fleet.ledger.sameness import KeptValue

MOST, DEEPEST = 20_000, 6
"""How many values are examined, and how many levels below a variable."""
LARGEST_BYTES = 1 << 28
"""For larger tensors and arrays, and for those mapped from files, only the shape counts: they are data."""
OF_MODULES = frozenset(vars(nn.Module()))
LIBRARIES = ("site-packages", "dist-packages", "<")


class KeptValues:
    """The values that a script keeps at one moment of its trial.

    Args:
        at: the moment when this (step, shard) begins; a shard of -1: the first of the step. None: no moment.

    Attributes:
        train: the train function, once the script is loaded.
        found: the values that it keeps.
        taken: number of steps that it has taken.
    """

    def __init__(self, at: tuple[int, int] | None) -> None:
        self._at, self.taken = at, 0
        self.train: Any = None
        self.found: tuple[KeptValue, ...] = ()

    def look(self, step: int, shard: int) -> None:
        """This shard begins. Called from within the train function."""
        code = getattr(self.train, "__code__", None)
        wanted = self._at is not None and self._at[0] == step and self._at[1] in (shard, -1)
        if wanted and not self.found and isinstance(code, CodeType):
            census = _Census(os.path.dirname(code.co_filename))
            census.look()
            self.found = tuple(census.found)


class _Census:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.found: list[KeptValue] = []
        self._seen = set[int]()

    def look(self) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if self._is_users(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
                self._frame(frame)
            frame = frame.f_back
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and self._is_users(getattr(module, "__file__", None) or ""):
                self._module(module)

    def _is_users(self, file: str) -> bool:
        return file.startswith(self._folder + os.sep) and not any(each in file for each in LIBRARIES)

    def _frame(self, frame: FrameType) -> None:
        code = frame.f_code
        older = _older_than_its_loop(code, frame.f_lineno)
        for name, value in frame.f_locals.items():
            if name in older or name in code.co_freevars:
                line = _stored(code.co_filename, name, code.co_firstlineno) or code.co_firstlineno
                self._value(f"{name} in {code.co_name}", value, _at(code.co_filename, line))

    def _module(self, module: ModuleType) -> None:
        file = str(module.__file__)
        for name, value in _own(vars(module)):
            self._value(f"{name} of module {module.__name__}", value, _at(file, _stored(file, name) or 1))

    def _value(self, what: str, value: Any, line: str, depth: int = 0) -> None:
        """Note a variable, or its parts if they have names."""
        foreign = isinstance(value, ModuleType) or (_is_ours(type(value)) and not _is_data(value))
        if foreign or depth > DEEPEST or len(self.found) > MOST:
            return
        inner = self._inner(what, value, line)
        if inner is None:
            self.found.append(KeptValue(what, line, _digest(value)))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            for name, part, where in inner:
                self._value(name, part, where, depth + 1)

    def _inner(self, what: str, value: Any, line: str) -> list[tuple[str, Any, str]] | None:
        """(name, value, line) of parts that have names; None: ``value`` is a single value."""
        if isinstance(value, functools._lru_cache_wrapper):
            function = inspect.unwrap(value)
            return [(f"the cache of {_name(function)}", tuple(value.cache_info()), _line_of(function))]
        if isinstance(value, FunctionType):
            return self._of_function(value) if self._is_users(value.__code__.co_filename) else []
        if isinstance(value, MethodType | functools.partial):
            held = value.__self__ if isinstance(value, MethodType) else (value.func, value.args, value.keywords)
            return [(what, held, line)]
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, nn.Module):
            return list(_of_modules(what, value))
        if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler) or _is_data(value):
            return None if _is_data(value) else []
        fields = getattr(value, "__dict__", None)
        if isinstance(fields, dict):
            return [(f"{what}: its {name}", part, _attribute(type(value), name, line)) for name, part in _own(fields)]
        return None

    def _of_function(self, function: FunctionType) -> list[tuple[str, Any, str]]:
        name, line = _name(function), _line_of(function)
        found = [(f"{cell} in the closure of {name}", _content(each), line) for cell, each in _cells(function)]
        found += [
            (f"a default of {name}", each, line) for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        ]
        return found + [(f"{name}.{key}", each, line) for key, each in vars(function).items()]

    def _of_class(self, kind: type) -> list[tuple[str, Any, str]]:
        if not self._is_users(getattr(sys.modules.get(kind.__module__), "__file__", None) or ""):
            return []
        plain = [(name, each) for name, each in _own(vars(kind)) if not _is_code(each)]
        return [(f"{kind.__qualname__}.{name}", each, _attribute(kind, name, "")) for name, each in plain]


def _of_modules(what: str, module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Attributes, parameters and buffers, without modules and torch's own attributes."""
    for path, inner in module.named_modules():
        named = f"{path} of {what}" if path else what
        for name, value in (*vars(inner).items(), *inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False)):
            if name not in OF_MODULES and not isinstance(value, nn.Module):
                yield f"{named}: its {name}", value, _attribute(type(inner), name, "")


# ---- values ------------------------------------------------------------------------------------------------------------------------------


def _own(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(fields.items()) if not name.startswith("__")]


def _is_data(value: Any) -> bool:
    plain = (torch.Tensor, np.ndarray, bool, int, float, complex, str, bytes, Mapping, Sequence, AbstractSet, deque)
    return value is None or isinstance(value, (*plain, torch.Generator, random.Random, np.random.Generator, GeneratorType))


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | staticmethod | classmethod | property) or inspect.isdatadescriptor(value)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PACKAGES


def _digest(value: Any) -> str:
    return digest(_plainly(value, 0, set()))


def _plainly(value: Any, depth: int, above: set[int]) -> Any:
    """``value`` in a form for ``digest``. A value that cannot be examined is given by its type."""
    if depth > DEEPEST or id(value) in above:
        return "..."
    inner = functools.partial(_plainly, depth=depth + 1, above=above | {id(value)})
    if value is None:
        return repr(value)
    if isinstance(value, torch.Tensor | np.ndarray) and (_is_no_memory(value) or value.nbytes > LARGEST_BYTES):
        return [type(value).__qualname__, list(value.shape)]
    if isinstance(value, (torch.Tensor, bool, int, float, str, bytes)):
        return value
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), value.tobytes() if value.dtype != object else repr(value)]
    if isinstance(value, Mapping):
        return [[inner(key), inner(each)] for key, each in list(value.items())]
    if isinstance(value, AbstractSet):
        return sorted(digest(inner(each)) for each in value)
    if isinstance(value, list | tuple | deque):
        return [str(len(value)), *map(inner, list(value))]
    if isinstance(value, type | FunctionType):
        return value.__qualname__
    if (state := _position(value)) is not None:
        return inner(state)
    if dataclasses.is_dataclass(value) or isinstance(getattr(value, "__dict__", None), dict):
        return [type(value).__qualname__, inner({} if _is_ours(type(value)) else dict(_own(vars(value))))]
    return type(value).__qualname__ if " at 0x" in (text := repr(value)) else text


def _is_no_memory(value: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    return isinstance(value, np.memmap) or (isinstance(value, torch.Tensor) and value.device.type == "meta")


def _position(value: Any) -> Any:
    """The position of a generator or an iterator; None: ``value`` is neither."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, GeneratorType):
        return [getattr(value.gi_frame, "f_lasti", -1), inspect.getgeneratorlocals(value)]
    if hasattr(value, "__next__") and type(value).__module__ == "builtins":
        return [part for part in value.__reduce__()[1:] if part is not None]
    return None


def _cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty so far
        return None


# ---- lines -------------------------------------------------------------------------------------------------------------------------------


def _at(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2]


def _line_of(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return _at(code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else ""


@functools.lru_cache(maxsize=64)
def _tree(file: str, text: str) -> ast.Module:
    return ast.parse(text)


def _body(file: str, first_line: int = 0) -> ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function that begins at ``first_line``, decorators included; 0: the module."""
    try:
        tree = _tree(file, "".join(linecache.getlines(file)))
    except SyntaxError:
        return None
    if not first_line:
        return tree
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return next((node for node in functions if first_line in (node.lineno, *(each.lineno for each in node.decorator_list))), None)


def _stored(file: str, name: str, first_line: int = 0) -> int:
    """The first line that assigns a variable of a function, or of the module; 0: there is none."""
    body = _body(file, first_line)
    nodes = ast.walk(body) if body is not None else ()
    return next((node.lineno for node in nodes if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)), 0)


def _attribute(kind: type, name: str, line: str) -> str:
    """The line of a class that assigns ``self.name``; else the line of the class, or ``line``."""
    try:
        file, first = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return line
    body = _body(file)
    classes = [node for node in ast.walk(body) if isinstance(node, ast.ClassDef)] if body is not None else []
    mine = next((node for node in classes if node.lineno == first or first in [each.lineno for each in node.decorator_list]), None)
    for node in ast.walk(mine) if mine is not None else ():
        named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if named == name and isinstance(getattr(node, "ctx", None), ast.Store):
            return _at(file, node.lineno)  # type: ignore[attr-defined]
    return _at(file, first)


def _older_than_its_loop(code: CodeType, line: int) -> frozenset[str]:
    """Variables of a function that have a value before the outermost loop around ``line``; without a loop all variables."""
    body = _body(code.co_filename, code.co_firstlineno)
    if body is None:
        return frozenset(code.co_varnames)
    loops = [node for node in ast.walk(body) if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
    around = [loop for loop in loops if loop.lineno <= line <= (loop.end_lineno or line)]
    within = set(map(id, ast.walk(min(around, key=lambda loop: loop.lineno)))) if around else set()
    names = {
        node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in within
    }
    return frozenset(names | {each.arg for each in ast.walk(body) if isinstance(each, ast.arg)})
