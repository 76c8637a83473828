"""Settings of components. Each component has a frozen dataclass with the meanings and the defaults of its settings. Pure.

A setting has a dotted name, such as ``straggler.gain``. Values come as nested mappings (a file, Python) or as text (a command line). This
module turns them into flat values, a later one over an earlier one, and then into dataclasses. The dataclasses check values together.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fleet.errors import ConfigError

T = TypeVar("T")
NONE = "none"
"""This word stands for no value, where a setting may have none: TOML has no word for that."""
WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
TAKES: dict[type, str] = {
    bool: "on or off", int: "a whole number", float: "a number", str: "text", tuple: "a list of texts", dict: "a table",
}  # fmt: skip


BOUNDS = {
    "least": (operator.ge, "at least"), "above": (operator.gt, "greater than"), "most": (operator.le, "at most"),
    "below": (operator.lt, "less than"),
}  # fmt: skip


def setting(default: T, meaning: str, *, live: bool = False, **bounds: float) -> T:
    """A field of a settings class. ``live``: it may change while a run goes on, see ``fleet runs set``. ``bounds``: see :func:`within`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "live": live, "bounds": bounds})


def within(settings: Any, prefix: str = "") -> None:
    """Raises ConfigError for the first number that is not within its field's bounds, which are keys of ``BOUNDS``.

    It has to be finite, too, unless ``most`` is infinite.
    """
    for field in dataclasses.fields(settings):
        value, bounds = getattr(settings, field.name), field.metadata.get("bounds", {})
        tests = [BOUNDS[name][0](value, bound) for name, bound in bounds.items() if value is not None]
        if tests and not (all(tests) and (math.isfinite(value) or bounds.get("most") == math.inf)):
            words = " and ".join(f"{BOUNDS[name][1]} {bound:g}" for name, bound in bounds.items())
            said, default = field.metadata.get("meaning", ""), field.default
            way_out = said if default in (dataclasses.MISSING, None) else f"{said} The default is {default}.".strip()
            raise ConfigError(f"{prefix}{field.name}", value, f"must be {words}", way_out)


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its dotted name, the kind of value (one of ``TAKES``), whether it may have none, and its field's metadata.

    ``texts``: whether the values of a table are texts.
    """

    name: str
    kind: type
    optional: bool
    default: Any
    meaning: str
    live: bool
    texts: bool = False

    @property
    def takes(self) -> str:
        return TAKES[self.kind] + (f", or {NONE}" if self.optional else "")


@functools.cache
def keys(cls: Any, prefix: str = "") -> Mapping[str, Key]:
    """Dotted name -> setting, of a dataclass and its inner dataclasses. Raises TypeError for a field of a type that no setting can have."""
    hints, found = typing.get_type_hints(cls), dict[str, Key]()
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= keys(hint, f"{name}.")
            continue
        kind, optional, texts = _kind(name, hint)
        given = field.default is not dataclasses.MISSING
        default = field.default if given else field.default_factory() if field.default_factory is not dataclasses.MISSING else None
        said = field.metadata
        found[name] = Key(name, kind, optional, default, said.get("meaning", ""), said.get("live", False), texts)
    return found


def _kind(name: str, hint: Any) -> tuple[type, bool, bool]:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = [part for part in (typing.get_args(hint) if union else (hint,)) if part is not types.NoneType]
    plain = parts[0] if len(parts) == 1 else None
    kind: Any = typing.get_origin(plain) or plain
    if isinstance(kind, type) and issubclass(kind, Mapping):
        kind = dict
    if kind not in TAKES:
        raise TypeError(f"{name} is declared as {hint}, and a setting is one of bool, int, float, str, tuple[str, ...] and Mapping")
    return kind, union and types.NoneType in typing.get_args(hint), kind is dict and typing.get_args(plain)[1] is str


# ---- from values -------------------------------------------------------------------------------------------------------------------------


ALL = "fleet init fleet.toml writes all settings."


def flat(known: Mapping[str, Key], given: Mapping[str, Any], prefix: str = "", way_out: str = ALL) -> dict[str, Any]:
    """Dotted name -> value, checked one by one. Raises ConfigError: a name is unknown, or a value is not of its kind.

    The error of an unknown name has ``way_out`` where no known name is near.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        full = f"{prefix}{name}"
        if full in known:
            found[full] = _checked(known[full], value)
        elif any(each.startswith(f"{full}.") for each in known):
            if not isinstance(value, Mapping):
                raise ConfigError(full, value, "it is a table of settings, and this is a value", f"Set one of {_of(full, known)}.")
            found |= flat(known, value, f"{full}.", way_out)
        else:
            raise unknown(full, value, known, way_out)
    return found


def _of(table: str, known: Iterable[str]) -> str:
    return ", ".join(each for each in known if each.startswith(f"{table}."))


def unknown(name: str, value: object, known: Iterable[str], way_out: str = ALL) -> ConfigError:
    """The error for a setting that does not exist, with the nearest known names."""
    known = list(known)
    same = [each for each in known if each.rpartition(".")[2] == name.rpartition(".")[2]]
    names = [*known, *dict.fromkeys(each.rpartition(".")[0] for each in known if "." in each)]
    near = dict.fromkeys([*same, *difflib.get_close_matches(name, names, n=3, cutoff=0.5)])
    way_out = f"Nearest: {', '.join(near)}." if near else way_out
    return ConfigError(name, value, "there is no such setting", way_out)


def _checked(key: Key, value: Any) -> Any:
    if key.optional and value in (None, NONE):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.kind is float and number and not math.isnan(value):
        return float(value)
    if key.kind is tuple and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    if key.kind is dict and isinstance(value, Mapping):
        return {str(name): _text(f"{key.name}.{name}", each) if key.texts else each for name, each in value.items()}
    if (key.kind is int and number and isinstance(value, int)) or (key.kind in (bool, str) and isinstance(value, key.kind)):
        return value
    raise ConfigError(key.name, value, f"it takes {key.takes}", f"The default is {shown(key.default)}.")


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(name, value, "it takes text", "Write it as the train function reads it, in quotes.")
    return str(value)


def from_text(known: Mapping[str, Key], name: str, text: str) -> dict[str, Any]:
    """The value of ``NAME=TEXT``, in the form of :func:`flat`. Raises ConfigError: the name is unknown, or the value not of its kind."""
    if name in known:
        return {name: _read(known[name], text)}
    table, _, inner = name.rpartition(".")
    if table in known and known[table].kind is dict:
        return {table: {inner: text if known[table].texts else _toml(text)}}
    if any(each.startswith(f"{name}.") for each in known):
        raise ConfigError(name, text, "it is a table of settings, and this is a value", f"Set one of {_of(name, known)}.")
    raise unknown(name, text, known)


def _read(key: Key, text: str) -> Any:
    if key.optional and text == NONE:
        return None
    try:
        if key.kind is bool:
            return WORDS[text.lower()]
        if key.kind in (int, float):
            return _checked(key, key.kind(text))
    except (KeyError, ValueError):
        raise ConfigError(key.name, text, f"it takes {key.takes}") from None
    value = _toml(text)
    if key.kind is str:
        return value if isinstance(value, str) else text
    return _checked(key, value.split(",") if key.kind is tuple and isinstance(value, str) else value)


def _toml(text: str) -> Any:
    """The value that ``text`` has in a TOML file; ``text`` itself where it is no TOML value."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


UNITS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def seconds(text: str, name: str) -> float:
    """``15``, ``15s``, ``250ms``, ``5m``, ``2h``, ``30d`` or ``2w`` in seconds. Raises ConfigError about ``name``."""
    number = text.strip().rstrip("mshdw")
    try:
        return float(number) * UNITS_S[text.strip().removeprefix(number)]
    except (KeyError, ValueError):
        raise ConfigError(name, text, "is not a time", "Write e.g. 15s, 250ms or 5m.") from None


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Flat values, later over earlier; tables of free names are united."""
    found: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            found[name] = {**(found.get(name) or {}), **value} if isinstance(value, Mapping) else value
    return found


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """A settings class from flat values. Raises ConfigError for values that the class refuses."""
    hints, given = typing.get_type_hints(cls), dict[str, Any]()
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            given[field.name] = build(hints[field.name], values, f"{name}.")
        elif name in values:
            given[field.name] = values[name]
    return cls(**given)


def read(cls: type[T], given: Mapping[str, Any], prefix: str = "", way_out: str = ALL) -> T:
    """A settings class from nested values. Raises ConfigError: unknown name (``way_out``), or refused value."""
    known: Mapping[str, Key] = keys(cls, prefix)  # type: ignore[arg-type]  # a class is hashable
    found = build(cls, flat(known, given, prefix, way_out), prefix)
    within(found, prefix)
    return found


# ---- to values ---------------------------------------------------------------------------------------------------------------------------


def values_of(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value, of all settings of an instance."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        inner = dataclasses.is_dataclass(value)
        found |= values_of(value, f"{prefix}{field.name}.") if inner else {prefix + field.name: value}
    return found


def shown(value: Any) -> str:
    """A value as a settings file writes it."""
    match value:
        case None:
            return f'"{NONE}"'
        case bool():
            return str(value).lower()
        case str():
            return _quoted(value)
        case tuple() | list():
            return f"[{', '.join(map(shown, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{_quoted(name)} = {shown(each)}' for name, each in value.items())}}}"
        case _:
            return repr(value)


def _quoted(text: str) -> str:
    escaped = "".join(_ESCAPES.get(each, each if each.isprintable() else f"\\U{ord(each):08x}") for each in text)
    return f'"{escaped}"'


_ESCAPES = {'"': '\\"', "\\": "\\\\"}
