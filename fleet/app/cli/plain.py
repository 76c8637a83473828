"""``fleet run --plain``: the options that a script for ``torchrun`` may have, and its plan."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fleet.app.cli import config as cli_config
from fleet.app.cli.config import RUNS
from fleet.errors import ConfigError
from fleet.machine.plain.nodes import INJECTABLE

if TYPE_CHECKING:
    from fleet.app.configuration import Configuration
    from fleet.app.plans import RunPlan
    from fleet.settings.run import RunSettings

TAKEN = {
    "plain", "script", "arguments", "world", "nodes", "min_ranks", "seed", "chaos", "storage", "name", "json_", "html", "port",
    "expect", "track",
}  # fmt: skip
"""Parameters of ``fleet run`` that mean something with ``--plain``."""
HAS_NOT = {"recovery.policy": "restart", "peer_copies": 0, "verify.replicas": 0.0, "verify.jumps": 0.0}
"""Settings that turn all of Fleet's protection off, which such a job does not have."""


def plan_of(context: typer.Context) -> RunPlan:
    """The plan of ``fleet run --plain``. Raises ConfigError, before any process starts."""
    from fleet.app import plans

    values = context.params
    found = checked(values, [name for name in values if str(context.get_parameter_source(name)).endswith("COMMANDLINE")])
    script, settings = _checked_script(values["script"]), found.run
    root = Path(settings.storage).resolve()
    name = plans.checked_name(values["name"], root) if values["name"] else plans.new_name(script)
    return plans.RunPlan(
        name=name, folder=root / name, settings=settings, train=plans.elsewhere, script=script, chaos=found.chaos,
        plain=tuple(values["arguments"] or ()),
    )  # fmt: skip


def checked(values: Mapping[str, Any], given: Collection[str]) -> Configuration:
    """The settings of ``fleet run --plain``, whose options in ``given`` were given; the script is not looked at.

    Raises ConfigError.
    """
    from fleet.app.configuration import configured

    _check_options(values, given)
    over = cli_config.flags(values) | HAS_NOT
    world = values["world"] if values["world"] is not None else cli_config.KEYS["world"].default
    nodes = values["nodes"] if values["nodes"] is not None else min(world, cli_config.KEYS["nodes"].default)
    found = configured(over=over | {"shards": max(1, world), "nodes": max(1, nodes)})
    _check_place(found.run, nodes)
    foreign = [kind for kind in found.chaos.kinds or () if kind not in INJECTABLE]
    if foreign:
        reason = "it needs Fleet's agents or Ray, and a job that is not Fleet's has neither"
        raise ConfigError("chaos.kinds", "+".join(foreign), reason, f"Choose of {'+'.join(INJECTABLE)}, or --chaos storm.")
    found.chaos.plan(seed=found.run.seed, world=world, nodes=nodes)
    return found


def _check_place(run: RunSettings, nodes: int) -> None:
    if "://" in run.storage:
        reason = "a job that is not Fleet's saves where its script says, and its journal needs a folder"
        raise ConfigError("--storage", run.storage, reason, f"Name a folder, or leave it out: {RUNS}.")
    if not 1 <= nodes <= run.world:
        reason = f"nodes are groups of ranks here, of which there are {run.world}"
        raise ConfigError("--nodes", nodes, reason, f"Say 1 to {run.world}.")


def _check_options(values: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse options that mean nothing here."""
    for name in given:
        if name in TAKEN:
            continue
        option, reason = "--" + name.rstrip("_").replace("_", "-"), "a script that is not Fleet's does not know it"
        way_out = "Leave it out. What the script itself is given stands after --: fleet run --plain train.py -- --steps 300."
        raise ConfigError(option, values[name], reason, way_out)


def _checked_script(script: str) -> str:
    if not script:
        way_out = "Name a Python file that torchrun could run, such as the one of `fleet init --plain plain.py`."
        raise ConfigError("SCRIPT", script, "missing", way_out)
    if not Path(script).is_file():
        raise ConfigError("SCRIPT", script, "no such file", "Name a Python file that torchrun could run.")
    try:
        compile(Path(script).read_bytes(), script, "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError("SCRIPT", script, f"it is no Python: {error}", f"See python {shlex.quote(script)}.") from error
    return script
