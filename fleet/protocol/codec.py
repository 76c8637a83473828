"""Frozen dataclasses to JSON and back, for the wire and for the journal.

A value is written as ``["ClassName", field, field, ...]``. The class's annotations say how nested dataclasses and tuples are rebuilt. So
the codec refuses, by name, a record that lacks a field or came from another version. A nested dataclass is written without its name,
unless it is :class:`Tagged`: a field may hold one of several :class:`Tagged` classes. A last field that is :data:`LEFT_OUT` is not
written where it is empty, and the codec reads a record without it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from fleet.errors import ProtocolError

Decoder = Callable[[Any], Any]
BARE = frozenset((str, int, float, bool, type(None)))
LEFT_OUT = {"left_out": True}
"""Metadata of a last field whose default is an empty tuple."""
COMPACT = json.JSONEncoder(separators=(",", ":"))
"""``json.dumps`` would make an encoder for each message. That takes longer than to encode the message."""


class Tagged:
    """A frozen dataclass that is always written with its name, since a field may hold one of several classes."""

    __slots__ = ()


def plain(value: Any) -> Any:
    """``value`` as JSON's lists, dicts and plain values."""
    if (kind := type(value)) in BARE:
        return value
    if dataclasses.is_dataclass(kind):
        parts = [plain(getattr(value, name)) for name in _names(kind)]
        if parts and parts[-1] == [] and _leaves_out(kind):
            parts.pop()
        return [kind.__name__, *parts] if issubclass(kind, Tagged) else parts
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


@functools.cache
def fields(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    """Fields of a dataclass in the order in which they are written. Keyword-only fields, which may come from a base class, are last."""
    return tuple(sorted(dataclasses.fields(kind), key=lambda field: bool(field.kw_only)))


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@functools.cache
def _leaves_out(kind: type) -> bool:
    """Whether the last field is left out where it is empty."""
    return any("left_out" in field.metadata for field in fields(kind)[-1:])


def _same(value: Any) -> Any:
    return value


@functools.cache
def _dataclass_decoder(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    parts = [_decoder(hints[name]) for name in _names(kind)]
    named = tuple(field.name for field in fields(kind) if field.kw_only)
    own, leaves_out = len(parts) - len(named), _leaves_out(kind)

    def decode(value: Any) -> Any:
        if leaves_out and len(value) == len(parts) - 1:
            value = [*value, ()]
        if len(value) != len(parts):
            raise ProtocolError(f"{kind.__name__} has {len(parts)} fields, the message has {len(value)}: is it from another version?")
        found = [part(item) for part, item in zip(parts, value, strict=True)]
        return kind(*found[:own], **dict(zip(named, found[own:], strict=True))) if named else kind(*found)

    return decode


def _union_decoder(arguments: tuple[Any, ...]) -> Decoder:
    kinds = [kind for kind in arguments if kind is not type(None)]
    inner = _tagged_decoder(kinds) if len(kinds) > 1 else _decoder(kinds[0])
    return lambda value: None if value is None else inner(value)


def _tagged_decoder(kinds: Iterable[type]) -> Decoder:
    """A decoder that takes the class by the name in front."""
    known = {kind.__name__: kind for kind in kinds}

    def decode(value: Any) -> Any:
        kind = known.get(value[0])
        if kind is None:
            raise ProtocolError(f"unknown kind {value[0]!r}, not one of {', '.join(known)}: is it from another version?")
        return _dataclass_decoder(kind)(value[1:])

    return decode


def _enum_decoder(kind: type[enum.Enum]) -> Decoder:
    def decode(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError as error:
            raise ProtocolError(f"{error}: is it from another version?") from error

    return decode


def _tuple_decoder(arguments: tuple[Any, ...]) -> Decoder:
    if not arguments:
        return tuple
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        each = _decoder(arguments[0])
        return tuple if each is _same else lambda value: tuple([each(item) for item in value])
    parts = [_decoder(argument) for argument in arguments]
    return lambda value: tuple([part(item) for part, item in zip(parts, value, strict=True)])


@functools.cache
def _decoder(hint: Any) -> Decoder:
    """The function that rebuilds a value annotated ``hint`` from JSON."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _union_decoder(arguments)
    if origin is tuple or hint is tuple:
        return _tuple_decoder(arguments)
    if not isinstance(hint, type):
        return _same
    if issubclass(hint, enum.Enum):
        return _enum_decoder(hint)
    if issubclass(hint, Tagged):
        return _tagged_decoder([hint])
    return _dataclass_decoder(hint) if dataclasses.is_dataclass(hint) else _same


def rebuilt(kind: type, value: Any) -> Any:
    """Inverse of :func:`plain`, for a value of ``kind``. Raises ProtocolError."""
    return _decoder(kind)(value)


class Codec:
    """Encodes and decodes one closed set of dataclasses, by class name."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def to_json(self, value: Any) -> list[Any]:
        name = type(value).__name__
        if self._kinds.get(name) is not type(value):
            raise ProtocolError(f"{name} is not one of the messages this codec knows: {sorted(self._kinds)}")
        return [name, *plain(value)]

    def from_json(self, value: list[Any]) -> Any:
        kind = self._kinds.get(value[0])
        if kind is None:
            raise ProtocolError(f"unknown message {value[0]!r}: is it from another version?")
        return rebuilt(kind, value[1:])

    def encode(self, value: Any) -> bytes:
        return COMPACT.encode(self.to_json(value)).encode()

    def decode(self, data: bytes | str) -> Any:
        return self.from_json(json.loads(data))
