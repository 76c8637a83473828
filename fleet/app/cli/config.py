"""``fleet config``, and those options of ``fleet run`` that are settings: what they mean, and their defaults, comes from the settings."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet.app.cli import prints as cli_print
from fleet.errors import ConfigError
from fleet.settings.fields import keys, seconds, shown
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from fleet.app.configuration import Configuration

KEYS = keys(RunSettings)
RUNS = RunSettings().storage
"""Where runs lie, unless somebody says otherwise."""
Storage = Annotated[str, typer.Option(help="Folder that holds the runs.")]
FLAGS = {
    "world": "world", "spares": "spares", "nodes": "nodes", "shards": "shards", "min_ranks": "min_ranks", "steps": "steps",
    "peer_copies": "peer_copies", "seed": "seed", "reduction": "reduction", "optimizer_sharding": "optimizer_sharding",
    "optimizer_copies": "optimizer_copies", "verify": "verify.compute", "preflight": "preflight",
    "on_store_failure": "checkpoint.on_store_failure", "storage": "storage",
    "on_partition": "on_partition", "ask_for_nodes": "ask_for_nodes", "grace": "timeouts.grace_s",
    "max_world": "max_world", "gpus_per_rank": "per_rank.gpus", "cpus_per_rank": "per_rank.cpus",
    "recovery": "recovery.policy", "placement": "placement.policy", "straggler": "straggler.policy", "corruption": "corruption.policy",
}  # fmt: skip
"""Option of ``fleet run`` -> setting. ``--set``, ``--checkpoint`` and ``--chaos`` stand for several."""
LISTS = {"track": "track.to", "resources": "per_rank.resources", "labels": "per_rank.labels"}
"""Options that may be given several times."""


def option(key: str, *names: str, words: str = "") -> Any:
    """An option for setting ``key``. Its value is None where it is not given, so that it wins over a file only where it is."""
    said, default = KEYS[key].meaning, KEYS[key].default
    return typer.Option(*names, help=words or said, show_default=str(default) if not isinstance(default, bool) else False)


class Default:
    """The default of a dataclass's field, looked up when a command needs it: to import the class takes long.

    Args:
        owner: ``package.module:Class``.
        name: of the field.
    """

    def __init__(self, owner: str, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self) -> Any:
        module, _, kind = self._owner.partition(":")
        fields = dataclasses.fields(getattr(importlib.import_module(module), kind))
        return next(field.default for field in fields if field.name == self._name)

    def __str__(self) -> str:
        return str(self())


def option_of(owner: str, name: str, words: str) -> Any:
    """An option whose default is that of field ``name`` of ``owner``."""
    return typer.Option(help=words, default_factory=Default(owner, name))


def config(
    check: Annotated[Path | None, typer.Option(help="Check this file, and say what in it differs from the defaults.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a file of settings.")] = False,
) -> None:
    """Print all settings of a run with their defaults and meanings, as a file for `fleet run --config`."""
    from fleet.app import configuration

    if check is None:
        cli_print.write(json.dumps(configuration.as_plain(), indent=2) if json_ else configuration.as_toml().rstrip("\n"))
        return
    found = configuration.differing(_checked(check))
    if json_:
        cli_print.write(json.dumps({name: {"value": value, "default": usual} for name, (value, usual) in found.items()}, indent=2))
    else:
        lines = [f"{name} = {shown(value)}  # {shown(usual)}" for name, (value, usual) in found.items()]
        cli_print.write(*(lines or ["all is as by default"]))


def _checked(path: Path) -> Configuration:
    from fleet.app import plans, policy_choice
    from fleet.app.configuration import configured

    found = configured(path)
    policy_choice.look_in(path.absolute().parent, Path.cwd())
    policy_choice.check(found.run)
    plans.check(found.run, found.chaos)
    return found


def settings_of(values: Mapping[str, Any], directory: Path) -> Configuration:
    """What the options of ``fleet run`` come to: ``--config`` in order, and over it what other options say. Raises ConfigError.

    Files are named from ``directory``.
    """
    from fleet.app.configuration import configured, layer_of

    return configured(*(layer_of(each, directory) for each in values["config"] or []), over=flags(values))


def flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> value, of the options that are given. Raises ConfigError."""
    found = {key: values[name] for name, key in FLAGS.items() if values[name] is not None}
    found |= {key: tuple(values[name]) for name, key in LISTS.items() if values[name]}
    if values["set_"]:
        found["options"] = pairs_of(values["set_"], "--set")
    if values["checkpoint"] is not None:
        found |= _checkpoint(values["checkpoint"])
    if values["chaos"] is not None:
        from fleet.app.configuration import chaos_of

        found |= chaos_of(values["chaos"])
    return found


def pairs_of(pairs: Sequence[str], option: str) -> dict[str, str]:
    """Key -> text. Raises ConfigError."""
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(option, pair, "not of the form key=value")
    return dict(pair.split("=", 1) for pair in pairs)


def _checkpoint(text: str) -> dict[str, Any]:
    try:
        return {"checkpoint.policy": "fixed", "checkpoint.interval_s": seconds(text, "--checkpoint")}
    except ConfigError:
        return {"checkpoint.policy": text, "checkpoint.interval_s": None}
