"""The skeleton of a training state: its plain values as text, with a number in the place of each tensor.

A rank writes it after each step. Most of it is then as before, and the rank keeps the text of a part that has not changed. A pickle of the
part, compared with the last one, shows a change. It takes a third of the time, and never leaves the process.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from actors.rank.plain_kinds import PLAIN
from fleet.errors import ConfigError, ProtocolError
from fleet.protocol.plain import MARK, NotPlain

WAY_OUT = (
    "Return numbers, texts, bytes, tensors, arrays, and lists, tuples, dicts and sets of these from state_dict(); make objects of them in "
    "load_state_dict()."
)


class _Written(NamedTuple):
    key: bytes
    text: str


class Skeletons:
    """Writes the skeletons of one state, one after the other."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], _Written] = {}

    def write(self, parts: Mapping[str, Any], number: Callable[[torch.Tensor], int]) -> str:
        """The state dicts ``parts`` by name, as ``PLAIN.write`` gives them. Raises ConfigError with the name of a value that is not
        plain."""
        texts = []
        for name, part in parts.items():
            try:
                texts.append(f"{json.dumps(name)}:{self._part((name,), part, number)}")
            except NotPlain as error:
                place = "".join(error.path)
                why = f"its state_dict(){' has ' + place if place else ''} is of class {error.kind}: {error.why}"
                raise ConfigError(name, error.kind, f"{why}. Other ranks could not take it over", WAY_OUT) from None
        return f"{MARK}{{{','.join(texts)}}}"

    def _part(self, path: tuple[str, ...], value: Any, number: Callable[[torch.Tensor], int]) -> str:
        """The text of one part. A dict is divided one level deep: an optimizer's rates change often, all else never."""
        if len(path) == 1 and type(value) is dict and all(type(key) is str and key.isascii() for key in value):
            return f"{{{','.join(f'{json.dumps(key)}:{self._within(path, key, item, number)}' for key, item in value.items())}}}"
        key, known = _key(value, number), self._known.get(path)
        if known is None or key is None or key != known.key:
            known = self._known[path] = _Written(key or b"", PLAIN.write(value, number)[len(MARK) :])
        return known.text

    def _within(self, path: tuple[str, ...], key: str, item: Any, number: Callable[[torch.Tensor], int]) -> str:
        try:
            return self._part((*path, key), item, number)
        except NotPlain as error:
            raise NotPlain(error.kind, error.why, (f"[{key!r}]", *error.path)) from None


class _Key(pickle.Pickler):
    def __init__(self, file: io.BytesIO, number: Callable[[torch.Tensor], int]) -> None:
        super().__init__(file, protocol=4)
        self._number = number

    def persistent_id(self, obj: Any) -> int | None:
        return self._number(obj) if isinstance(obj, torch.Tensor) else None


def _key(value: Any, number: Callable[[torch.Tensor], int]) -> bytes | None:
    """Bytes that are equal only if ``value`` is equal; None where it cannot be pickled."""
    file = io.BytesIO()
    try:
        _Key(file, number).dump(value)
    except Exception:  # noqa: BLE001 - a user's object may raise any error; PLAIN.write names the object
        return None
    return file.getvalue()


def read_skeleton(skeleton: str, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The state dicts by name, with ``tensors`` in their places. Raises ProtocolError."""
    parts = PLAIN.read(skeleton, tensors.__getitem__)
    if not isinstance(parts, dict):
        raise ProtocolError("this is no skeleton of a training state")
    return parts
