"""Policies by name or by import path: found, checked against their port, and made. It imports the modules that users choose."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ConfigError, FleetError
from fleet.protocol import ports
from fleet.settings.fields import Key, keys, read
from fleet.settings.run import RunSettings
from policies import placement
from policies.interval import LAWS, CheckpointInterval
from policies.recovery import RECOVERIES
from policies.straggler.mitigation import Mitigator


@dataclass(frozen=True, slots=True)
class Port:
    """The protocol that a policy has to implement, and Fleet's own policies by name."""

    protocol: type
    names: Mapping[str, Any]


PORTS = {
    "recovery": Port(ports.RecoveryPolicy, RECOVERIES),
    "placement": Port(ports.PlacementPolicy, {"blocks": placement}),
    "straggler": Port(ports.StragglerPolicy, {"least-loss": Mitigator}),
    "checkpoint": Port(ports.IntervalPolicy, dict.fromkeys(("fixed", *LAWS), CheckpointInterval)),
}
"""Table of settings -> port. ``policy`` in the table names the policy, and ``settings`` are the policy's own settings."""


def look_in(*folders: Path) -> None:
    """Look for policies in ``folders``, too, after all that is installed."""
    for folder in folders:
        if str(folder.resolve()) not in sys.path:
            sys.path.append(str(folder.resolve()))


def check(run: RunSettings, *, imported: bool = True) -> None:
    """Raises ConfigError for policies that do not exist, are no policies, or cannot be made with their settings.

    ``imported`` False: users' own policies are left out, as their code must not run here.
    """
    for table in PORTS:
        if imported or ":" not in _named(table, run):
            make(table, run)


def make(table: str, run: RunSettings) -> Any:
    """The policy that ``table`` of the settings names, for a run. Raises ConfigError."""
    found: Any = _found(table, _named(table, run))
    own = own_settings(table, run)
    if not inspect.isclass(found):
        return found
    try:
        if hasattr(found, "of"):
            return found.of(run, own)
        made: Any = found
        return made() if own is None else made(own)
    except FleetError:
        raise
    except Exception as error:
        reason = f"it cannot be made: {type(error).__name__}: {error}"
        way_out = "It is called without arguments, with its Settings where it declares them, or as of(run, own) where it has this method."
        raise ConfigError(f"{table}.policy", _named(table, run), reason, way_out) from error


def own_settings(table: str, run: RunSettings) -> Any:
    """The ``Settings`` that the policy of ``table`` declares, with the run's values; None where it declares none. Raises ConfigError."""
    given = getattr(run, table).settings
    kind = getattr(_found(table, _named(table, run)), "Settings", None)
    if kind is None:
        if given:
            reason = f"the policy {_named(table, run)} declares no settings"
            raise ConfigError(f"{table}.settings", dict(given), reason, "Leave them out, or give its class a frozen dataclass Settings.")
        return None
    try:
        return read(kind, given, f"{table}.settings.")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{table}.settings", dict(given), f"the policy refuses them: {error}") from error


def own_keys(table: str, name: str) -> Mapping[str, Key]:
    """The settings that policy ``name`` of ``table`` declares, by dotted name."""
    kind = getattr(_found(table, name), "Settings", None)
    return keys(kind, f"{table}.settings.") if kind is not None else {}


def completed(run: RunSettings) -> RunSettings:
    """The settings of a run with all settings of its policies written out, so that a record of them is whole. Raises ConfigError."""
    whole = {}
    for table in PORTS:
        own = own_settings(table, run)
        whole[table] = dataclasses.replace(getattr(run, table), settings=dataclasses.asdict(own) if own is not None else {})
    return dataclasses.replace(run, **whole)


# ---- finding -----------------------------------------------------------------------------------------------------------------------------


def _named(table: str, run: RunSettings) -> str:
    return str(getattr(run, table).policy)


def _found(table: str, name: str) -> Any:
    known = PORTS[table].names
    if name in known:
        return known[name]
    if ":" not in name:
        way_out = f"Choose {', '.join(known)}, or name your own as package.module:Class."
        raise ConfigError(f"{table}.policy", name, "there is no such policy", way_out)
    found = _imported(table, name)
    fault = _fault(found, PORTS[table].protocol)
    if fault:
        way_out = f"fleet.protocol.ports.{PORTS[table].protocol.__name__} has the methods that it must have."
        raise ConfigError(f"{table}.policy", name, f"it is no policy for {table}: {fault}", way_out)
    return found


def _imported(table: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything when it is imported
        reason = f"it cannot be imported: {type(error).__name__}: {error}"
        way_out = "It is looked for among installed modules, beside the train script, and in the working directory."
        raise ConfigError(f"{table}.policy", name, reason, way_out) from error
    return found


def _fault(found: Any, protocol: type) -> str:
    """Why ``found`` does not satisfy ``protocol``; "" when it does."""
    for name, wanted in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(wanted):
            continue
        arguments = list(inspect.signature(wanted).parameters.values())[1:]
        said = f"{name}({', '.join(str(each).partition(':')[0] for each in arguments)})"
        method = getattr(found, name, None)
        if not callable(method):
            return f"it has no method {said}"
        positional: list[None] = [None for each in arguments if each.kind is not each.KEYWORD_ONLY]
        if inspect.isclass(found) and inspect.isfunction(inspect.getattr_static(found, name)):
            positional.append(None)  # self
        try:
            inspect.signature(method).bind(*positional, **{each.name: None for each in arguments if each.kind is each.KEYWORD_ONLY})
        except TypeError as error:
            return f"its {name} cannot be called as {said}: {error}"
    return ""
