"""All settings of a run, from files, from ``key=value`` and from Python: later over earlier, checked, and written out."""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.settings import ChaosSettings, parse_chaos
from fleet.app.policy_choice import PORTS, completed, own_keys
from fleet.errors import ConfigError
from fleet.settings.fields import Key, build, flat, from_text, keys, merged, shown, values_of
from fleet.settings.run import RunSettings

NAMED = re.compile(r"[a-z_][\w.]*=")
"""How ``key=value`` begins; the value may be a path."""
VERSION = 1
"""Version of files of settings. A file of a newer version is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """All settings of a run, but for its train function and its name. ``given`` are the names of those that were given."""

    run: RunSettings = field(default_factory=RunSettings)
    chaos: ChaosSettings = field(default_factory=ChaosSettings)
    given: tuple[str, ...] = field(default=(), compare=False)


@functools.cache
def known() -> Mapping[str, Key]:
    """All settings by dotted name, but for those that policies declare themselves."""
    return {**keys(RunSettings), **keys(ChaosSettings, "chaos.")}


def configured(*layers: Mapping[str, Any] | Path | str, over: Mapping[str, Any] | None = None) -> Configuration:
    """Settings from layers, later over earlier: nested mappings, files, and ``key=value``. ``over`` is flat, and over all of them.

    Raises ConfigError: a name is unknown, a value is not of its kind or impossible, two contradict each other, or a file cannot be read.
    """
    every_layer = [*map(_layer, layers), over or {}]
    names, first = merged(*every_layer), known()
    chosen = {table: names.get(f"{table}.policy", first[f"{table}.policy"].default) for table in PORTS}
    values = merged(*(_less_foreign(layer, chosen) for layer in every_layer))
    found = Configuration(run=build(RunSettings, values), chaos=build(ChaosSettings, values, "chaos."), given=tuple(names))
    wanted = next((name for name, value in values_of(found.chaos, "chaos.").items() if value != known()[name].default), None)
    if wanted and not found.chaos.on:
        reason = "it says which faults, and nothing says how many"
        raise ConfigError(wanted, values[wanted], reason, "Set chaos.mtbf_s, chaos.compression or chaos.trace; or leave chaos out.")
    return found


def _less_foreign(layer: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, Any]:
    """``layer`` without the settings of a policy that it names, where another policy was ``chosen``."""
    kept = dict(layer)
    for table, policy in chosen.items():
        if layer.get(f"{table}.policy", policy) != policy:
            kept.pop(f"{table}.settings", None)
    return kept


def _layer(given: Mapping[str, Any] | Path | str) -> dict[str, Any]:
    match given:
        case Path():
            return _file(given)
        case str():
            name, sign, text = given.partition("=")
            if not sign:
                raise ConfigError(
                    "--config", given, "it is no file, and not of the form key=value", "fleet init fleet.toml writes all settings."
                )
            return chaos_of(text) if name == "chaos" else from_text(known(), name.strip(), text.strip())
    content = dict(given)
    chaos = content.pop("chaos", {})
    _check_version(content.pop("version", VERSION))
    if isinstance(track := content.get("track"), str | list | tuple):
        content["track"] = {"to": [track] if isinstance(track, str) else list(track)}
    return (chaos_of(chaos) if isinstance(chaos, str) else flat(known(), {"chaos": chaos})) | flat(known(), content)


def layer_of(named: str, directory: Path) -> Path | str:
    """The layer that a user's text stands for: a file, named from ``directory``, or ``key=value``."""
    file = directory / named
    try:
        there = file.is_file()
    except OSError:  # too long for a name
        there = False
    return named if NAMED.match(named) and not there else file


def _file(path: Path) -> dict[str, Any]:
    try:
        return _layer(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError("--config", str(path), f"it cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, nested without end, or no text at all
        raise ConfigError(
            "--config", str(path), f"it is no TOML: {error}", "fleet init fleet.toml writes a file that can be used."
        ) from error
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"{error.reason} (in {path})", error.way_out) from error


def _check_version(version: object) -> None:
    if isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= VERSION:
        return
    newer = isinstance(version, int) and version > VERSION
    reason = f"the file is newer than this Fleet, which reads version {VERSION}" if newer else f"must be {VERSION}"
    raise ConfigError("version", version, reason, "Use a newer Fleet, or write the file anew with fleet init." if newer else "")


def chaos_of(text: str) -> dict[str, Any]:
    """All settings of chaos from their text form: ``off``, ``storm``, or ``mtbf=15s,...``. They replace all earlier ones."""
    return values_of(parse_chaos(text), "chaos.")


# ---- written out -------------------------------------------------------------------------------------------------------------------------


def every(run: RunSettings | None = None) -> dict[str, Key]:
    """All settings, with those that the policies of ``run`` declare in the place of their table."""
    chosen, found = run or RunSettings(), dict[str, Key]()
    for name, key in known().items():
        table = name.removesuffix(".settings")
        found |= own_keys(table, getattr(chosen, table).policy) if table in PORTS and table != name else {name: key}
    return found


def differing(found: Configuration) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (value, default), of each setting that differs from its default."""
    values = values_of(completed(found.run)) | values_of(found.chaos, "chaos.")
    for table in PORTS:
        values |= {f"{table}.settings.{name}": value for name, value in values.pop(f"{table}.settings").items()}
    usual = {name: key.default for name, key in every(found.run).items()}
    return {name: (value, usual[name]) for name, value in values.items() if value != usual[name]}


def as_toml() -> str:
    """All settings with their defaults and meanings, as a file that can be used as it is."""
    about = "# All settings of a run, with their defaults: fleet run train.py --config FILE. A file may leave out what it does not change."
    return "\n".join([about, f"version = {VERSION}", *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    tables: dict[str, list[Key]] = {}
    for key in every().values():
        table = key.name if key.kind is dict else key.name.rpartition(".")[0]
        tables.setdefault(table, []).append(key)
    for table, inside in tables.items():
        if table:
            yield from ("", *(f"# {line}" for line in _about(table, inside)), f"[{table}]")
        for key in inside if inside[0].kind is not dict else ():
            yield from ("", f"# {key.meaning}") if not table else (f"# {key.meaning}",)
            yield f"{key.name.rpartition('.')[2]} = {shown(key.default)}"


def _about(table: str, inside: list[Key]) -> list[str]:
    if inside[0].kind is dict:
        return [inside[0].meaning]
    if table.endswith(".settings"):
        return [f"Settings of the policy {getattr(RunSettings(), table.removesuffix('.settings')).policy} itself."]
    owner = ChaosSettings if table == "chaos" else type(getattr(RunSettings(), table))
    return [(inspect.getdoc(owner) or "").partition("\n")[0]]
