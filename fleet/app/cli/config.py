"""The options of ``fleet run`` that are settings, with meanings and defaults from the settings; and checks of settings."""

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
"""Where runs lie by default."""
Storage = Annotated[str, typer.Option(help="Folder that holds the runs.")]
FLAGS = {
    "world": "world", "spares": "spares", "nodes": "nodes", "shards": "shards", "min_ranks": "min_ranks", "steps": "steps", "seed": "seed",
    "gpus_per_rank": "per_rank.gpus", "optimizer_sharding": "optimizer_sharding", "verify": "verify.compute", "storage": "storage",
    "tls": "tls",
}  # fmt: skip
"""Option of ``fleet run`` -> setting. ``--set``, ``--checkpoint`` and ``--chaos`` stand for several."""
LISTS = {"track": "track.to", "resources": "per_rank.resources", "labels": "per_rank.labels"}
"""Options that may be given several times."""


SCRIPT, SIZE, WHERE, FAULTS, AGAIN, SHOWN = "The script", "Size", "Where", "Faults", "Checkpoints", "What is shown"
RARE = "Rarely used"
"""Sections of ``fleet run --help``; those of the last one are in ``--help-all`` alone."""


def option(key: str, *names: str, words: str = "", section: str = "") -> Any:
    """An option for setting ``key``. Its value is None where it is not given, so that it wins over a file only where it is."""
    said, default = KEYS[key].meaning, KEYS[key].default
    return placed(section, *names, help=words or said, show_default=str(default) if not isinstance(default, bool) else False)


def placed(section: str, *names: str, **words: Any) -> Any:
    """An option in a section of ``fleet run --help``."""
    return typer.Option(*names, rich_help_panel=section or None, hidden=section == RARE, **words)


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


def check_config(values: Sequence[str], json_: bool) -> None:
    """Check settings as a run would, and say what differs from the defaults. Raises ConfigError."""
    from fleet.app import configuration, plans, policy_choice

    layers = [configuration.layer_of(each, Path()) for each in values]
    made = configuration.configured(*layers)
    policy_choice.look_in(*(each.absolute().parent for each in layers if isinstance(each, Path)), Path.cwd())
    policy_choice.check(made.run)
    plans.check(made.run, made.chaos)
    found = configuration.differing(made)
    if json_:
        cli_print.write(json.dumps({name: {"value": value, "default": usual} for name, (value, usual) in found.items()}, indent=2))
    else:
        lines = [f"{name} = {shown(value)}  # {shown(usual)}" for name, (value, usual) in found.items()]
        cli_print.write(*(lines or ["all is as by default"]))


def settings_of(values: Mapping[str, Any], directory: Path) -> Configuration:
    """The settings of ``fleet run``'s options: ``--config`` in order, and other options over it. Raises ConfigError.

    Files are named from ``directory``.
    """
    from fleet.app.configuration import configured, layer_of

    return configured(*(layer_of(each, directory) for each in values["config"] or []), over=flags(values))


def flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> value, of the options that are given. Raises ConfigError."""
    found = {key: values[name] for name, key in FLAGS.items() if values[name] is not None}
    found |= {key: tuple(values[name]) for name, key in LISTS.items() if values[name]}
    if values["mesh"]:
        axes = [axis for given in values["mesh"] for axis in given.split(",")]
        found["mesh"] = {axis: _ranks(axis, size) for axis, size in pairs_of(axes, "--mesh").items()}
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


def _ranks(axis: str, size: str) -> int:
    if not size.isdecimal():
        raise ConfigError(f"mesh.{axis}", size, "it takes a number of ranks", f"Such as --mesh {axis}=2.")
    return int(size)


def _checkpoint(text: str) -> dict[str, Any]:
    try:
        return {"checkpoint.policy": "fixed", "checkpoint.interval_s": seconds(text, "--checkpoint")}
    except ConfigError:
        return {"checkpoint.policy": text, "checkpoint.interval_s": None}
