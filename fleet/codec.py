"""Frozen dataclasses to JSON and back, for the wire and for the journal.

A value is written as ``["ClassName", field, field, ...]``; nested dataclasses and tuples are rebuilt from the class's own annotations, so a
record that lost a field or came from another version is refused by name instead of being half read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from fleet.errors import ProtocolError

Decoder = Callable[[Any], Any]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _same(value: Any) -> Any:
    return value


def _dataclass_decoder(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    parts = [_decoder(hints[field.name]) for field in dataclasses.fields(kind)]

    def decode(value: Any) -> Any:
        if len(value) != len(parts):
            raise ProtocolError(f"{kind.__name__} has {len(parts)} fields, the message has {len(value)}: is it from another version?")
        return kind(*[part(item) for part, item in zip(parts, value, strict=True)])

    return decode


def _union_decoder(arguments: tuple[Any, ...]) -> Decoder:
    inner = _decoder(next(a for a in arguments if a is not type(None)))
    return lambda value: None if value is None else inner(value)


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
    return _dataclass_decoder(hint) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else _same


class Codec:
    """Encodes and decodes one closed set of dataclasses, by class name."""

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}

    def to_json(self, value: Any) -> list[Any]:
        name = type(value).__name__
        if self._kinds.get(name) is not type(value):
            raise ProtocolError(f"{name} is not one of the messages this codec knows: {sorted(self._kinds)}")
        return [name, *_plain(value)]

    def from_json(self, value: list[Any]) -> Any:
        kind = self._kinds.get(value[0])
        if kind is None:
            raise ProtocolError(f"unknown message {value[0]!r}: is it from another version?")
        return _decoder(kind)(value[1:])

    def encode(self, value: Any) -> bytes:
        return json.dumps(self.to_json(value), separators=(",", ":")).encode()

    def decode(self, data: bytes | str) -> Any:
        return self.from_json(json.loads(data))
