"""Plain values as text and back, in a closed format: for messages between ranks, and for the parts of a checkpoint beside tensors. Pure.

The format is JSON, where a list begins with a tag that names its kind. The reader imports and calls nothing that a text names, and refuses
unknown tags. These values can be written:

- None, bools, ints, floats (bit for bit), texts, bytes, complex numbers;
- lists, tuples, sets, and dicts in their order, with any of these values as keys;
- ``OrderedDict`` with its attributes, ``defaultdict``, ``Counter``, ``deque``;
- the kinds that a :class:`Format` is given.

The writer refuses objects of other classes, subclasses too, since their meaning in another process is not certain.

Two equal values have the same text, no matter which parts they share. A list that occurs twice is written, and read, as two lists.
"""

from __future__ import annotations

import base64
import collections
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import FleetError, ProtocolError

MARK = "plain1 "
"""The beginning of a text."""
_LARGE_INT = 1 << 2048
_DOUBLE = struct.Struct(">d")
_FACTORIES: dict[str, Any] = {
    "None": None, "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str, "tuple": tuple, "bool": bool,
}  # fmt: skip
_FACTORY_NAMES = {kind: name for name, kind in _FACTORIES.items()}
_REFERENCE = "@"

Tree = Any
"""A value that ``json`` can write."""


class NotPlain(FleetError):
    """A value cannot be written. ``path`` leads to it, ``kind`` is its class, ``why`` is the reason."""

    def __init__(self, kind: str, why: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(kind, why, path)
        self.kind, self.why, self.path = kind, why, path

    def __str__(self) -> str:
        return f"{' '.join(self.path) or 'the value'} is of class {self.kind}: {self.why}"


@dataclass(frozen=True, slots=True)
class Kind:
    """One more kind of value.

    Args:
        tag: the kind's tag in the text.
        types: its classes. ``derived``: their subclasses count, too.
        write: gives the parts behind the tag, as JSON values; raises NotPlain.
        read: the inverse; raises ValueError, TypeError or LookupError for parts that ``write`` never gives.
    """

    tag: str
    types: tuple[type, ...]
    write: Callable[[Any], list[Any]]
    read: Callable[..., Any]
    derived: bool = False


class Format:
    """The closed set of values: the built-in kinds, and ``kinds``.

    ``references`` are classes, such as tensors, of which the text has a number alone. The caller assigns the numbers.
    """

    def __init__(self, kinds: Iterable[Kind] = (), references: tuple[type, ...] = ()) -> None:
        self._kinds, self._references = tuple(kinds), references
        self._by_tag = {kind.tag: kind.read for kind in self._kinds}
        self.known: dict[type, Callable[[_Writer, Any], Tree]] = dict(_WRITERS)
        """Writers by class, as far as they were looked up."""

    def write(self, value: Any, refer: Callable[[Any], int] | None = None) -> str:
        """``value`` as text; ``refer`` gives the number of a reference. Raises NotPlain with the path to the refused value."""
        writer = _Writer(self, refer)
        try:
            return MARK + _dump(writer.tree(value))
        except NotPlain as error:
            raise writer.located(value, error) from None
        except RecursionError:
            raise NotPlain(_name(type(value)), "it contains itself, or is nested too deeply") from None

    def read(self, text: str, resolve: Callable[[int], Any] | None = None) -> Any:
        """The value; ``resolve`` gives the object of a number. Raises ProtocolError for a text that :meth:`write` does not give."""
        if not text.startswith(MARK):
            raise ProtocolError("this is no text of plain values")
        try:
            return _Reader(self._by_tag, resolve).value(json.loads(text[len(MARK) :], parse_constant=_no_constant))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, struct.error) as error:
            raise ProtocolError(f"a text of plain values is damaged: {type(error).__name__}: {str(error)[:200]}") from error

    def writer_of(self, kind: type) -> Callable[[_Writer, Any], Tree]:
        """The writer of a class. Raises NotPlain."""
        found = self.known[kind] = self._find(kind)
        return found

    def _find(self, kind: type) -> Callable[[_Writer, Any], Tree]:
        if issubclass(kind, self._references):
            return _Writer.reference
        for each in self._kinds:
            if kind in each.types or (each.derived and issubclass(kind, each.types)):
                return lambda _, value: [each.tag, *each.write(value)]
        raise NotPlain(_name(kind), "it is no plain value")


def _dump(tree: Tree) -> str:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number here")


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---- writing -----------------------------------------------------------------------------------------------------------------------------


class _Writer:
    def __init__(self, kinds: Format, refer: Callable[[Any], int] | None) -> None:
        self._kinds, self._refer, self._known = kinds, refer, kinds.known

    def tree(self, value: Any) -> Tree:
        """This runs for each value of a state after each step, so it looks up known classes without a further call."""
        kind = type(value)
        return (self._known.get(kind) or self._kinds.writer_of(kind))(self, value)

    def reference(self, value: Any) -> Tree:
        if self._refer is None:
            raise NotPlain(_name(type(value)), "this text may not refer to it")
        return [_REFERENCE, self._refer(value)]

    def located(self, value: Any, error: NotPlain) -> NotPlain:
        """The same error, with the path to the refused value."""
        for step, inner in _inside(value):
            try:
                self.tree(inner)
            except NotPlain as found:
                deeper = self.located(inner, found)
                return NotPlain(deeper.kind, deeper.why, (step, *deeper.path))
        return error

    def same(self, value: Any) -> Tree:
        return value

    def whole(self, value: int) -> Tree:
        return value if -_LARGE_INT < value < _LARGE_INT else ["i", hex(value)]

    def real(self, value: float) -> Tree:
        return value if math.isfinite(value) else ["f", _hex(value)]

    def text(self, value: str) -> Tree:
        """Halves of a surrogate pair, which JSON would join, are written by their numbers."""
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            return ["s", *map(ord, value)]
        return value

    def mapping(self, value: dict[Any, Any]) -> Tree:
        keys = list(map(self.tree, value))
        items = map(self.tree, value.values())
        if set(map(type, value)) <= _TEXT and set(map(type, keys)) <= _TEXT:
            return dict(zip(keys, items, strict=True))
        return ["d", *itertools.chain.from_iterable(zip(keys, items, strict=True))]


_TEXT = {str}


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    """(path, value) of each value in a container."""
    if isinstance(value, Mapping):
        yield from ((f"key {key!r}"[:80], key) for key in value)
        yield from ((f"[{key!r}]"[:80], item) for key, item in value.items())
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
    elif isinstance(value, Sequence | collections.deque) and not isinstance(value, str | bytes | bytearray):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from (("one of the set", item) for item in value)


# ---- reading -----------------------------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, kinds: Mapping[str, Callable[..., Any]], resolve: Callable[[int], Any] | None) -> None:
        self._kinds, self._resolve = kinds, resolve

    def value(self, tree: Tree) -> Any:
        if type(tree) is dict:
            return {key: self.value(item) for key, item in tree.items()}
        if type(tree) is not list:
            return tree
        tag, parts = tree[0], tree[1:]
        if tag in _READERS:
            return _READERS[tag](*map(self.value, parts))
        return self._reference(*parts) if tag == _REFERENCE else self._kinds[tag](*parts)

    def _reference(self, number: Tree) -> Any:
        if self._resolve is None or type(number) is not int or number < 0:
            raise ValueError(f"{number!r} refers to nothing")
        return self._resolve(number)


# ---- the built-in kinds ------------------------------------------------------------------------------------------------------------------


def _hex(value: float) -> str:
    return _DOUBLE.pack(value).hex()


def _real(text: str) -> float:
    return float(_DOUBLE.unpack(bytes.fromhex(text))[0])


def _octets(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _flat(value: Mapping[Any, Any]) -> Iterable[Any]:
    return itertools.chain.from_iterable(value.items())


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _ordered(attributes: dict[str, Any] | None, *values: Any) -> collections.OrderedDict[Any, Any]:
    """An ``OrderedDict`` with its attributes: a module's state dict keeps the versions of its modules there."""
    found = collections.OrderedDict(_pairs(values))
    vars(found).update(attributes or {})
    return found


def _made_by(value: collections.defaultdict[Any, Any]) -> str:
    name = _FACTORY_NAMES.get(value.default_factory)
    if name is None:
        raise NotPlain("collections.defaultdict", f"its default is made by {value.default_factory!r}, which is not plain")
    return name


_ROWS: tuple[tuple[str, type, Callable[[Any], Iterable[Any]], Callable[..., Any]], ...] = (
    ("l", list, iter, lambda *values: list(values)),
    ("t", tuple, iter, lambda *values: values),
    ("set", set, iter, lambda *values: set(values)),
    ("frozen", frozenset, iter, lambda *values: frozenset(values)),
    ("deque", collections.deque, lambda value: (value.maxlen, *value), lambda most, *values: collections.deque(values, most)),
    ("count", collections.Counter, _flat, lambda *values: collections.Counter(dict(_pairs(values)))),
    ("od", collections.OrderedDict, lambda value: (vars(value) or None, *_flat(value)), _ordered),
    (
        "dd", collections.defaultdict, lambda value: (_made_by(value), *_flat(value)),
        lambda made_by, *values: collections.defaultdict(_FACTORIES[made_by], _pairs(values)),
    ),
    ("b", bytes, lambda value: (base64.b64encode(value).decode(),), _octets),
    ("ba", bytearray, lambda value: (base64.b64encode(value).decode(),), lambda text: bytearray(_octets(text))),
    ("c", complex, lambda value: map(_hex, (value.real, value.imag)), lambda real, imaginary: complex(_real(real), _real(imaginary))),
)  # fmt: skip
"""Tag, class, the function that gives the parts of a value, and its inverse."""


def _writer(tag: str, kind: type, parts: Callable[[Any], Iterable[Any]]) -> Callable[[_Writer, Any], Tree]:
    if kind in (set, frozenset):  # equal sets have the same text
        return lambda writer, value: [tag, *sorted(map(writer.tree, value), key=_dump)]
    return lambda writer, value: [tag, *map(writer.tree, parts(value))]


_WRITERS: dict[type, Callable[[_Writer, Any], Tree]] = {
    type(None): _Writer.same, bool: _Writer.same, int: _Writer.whole, float: _Writer.real, str: _Writer.text, dict: _Writer.mapping,
} | {kind: _writer(tag, kind, parts) for tag, kind, parts, _ in _ROWS}  # fmt: skip
_READERS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": _real,
    "s": lambda *numbers: "".join(map(chr, numbers)),
    "d": lambda *values: dict(_pairs(values)),
    **{tag: read for tag, _, _, read in _ROWS},
}
