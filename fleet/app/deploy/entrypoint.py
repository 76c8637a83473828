"""The command that a written file runs on its cluster. Pure."""

from __future__ import annotations

import itertools
import posixpath
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from fleet.app.deploy.spec import Spec
from fleet.errors import ConfigError

Accepts = Callable[[Sequence[str]], Any]
"""Fleet's own command line: takes the words after ``fleet run``, and raises ConfigError when it refuses them."""


def words(spec: Spec, folder: str, address: str = "auto", *, detach: bool = False) -> list[str]:
    """``fleet run`` and its arguments, with the script in ``folder`` of the node on which it is typed.

    Args:
        address: of the Ray cluster.
        detach: leave the run to the cluster, where something else keeps the cluster up.
    """
    return [
        "fleet", "run", posixpath.join(folder, spec.script), "--address", address, "--world", str(spec.world), "--spares", str(spec.spares),
        *(["--gpus-per-rank", "1"] if spec.nodes.gpus else []),
        "--storage", spec.store, "--resume-or-start", spec.name, *(["--detach"] if detach else []), *spec.arguments,
    ]  # fmt: skip


def resume_words(spec: Spec, folder: str) -> list[str]:
    """The command that resumes the run on another cluster, after the loss of the head."""
    return ["fleet", "run", posixpath.join(folder, spec.script), "--resume", spec.name, "--storage", spec.store, "--address", "auto"]


def line(command: Sequence[str]) -> str:
    """As a shell reads it. A leading ``~/`` is left to the shell."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in command)


def check(text: str, field: str, accepts: Accepts, room: int | None) -> None:
    """Raises ConfigError unless ``text`` is a ``fleet run`` that Fleet takes, that fits into the cluster, and that stays with its run.

    Args:
        text: a command line.
        field: where it stands.
        accepts: the judge of the options.
        room: how many ranks the cluster holds; None: not known.
    """
    found = _split(text, field)
    if found[:2] != ["fleet", "run"]:
        raise ConfigError(field, text, "it does not run Fleet", "Begin it with fleet run.")
    accepts(found[2:])
    options = dict(itertools.pairwise(found)) | dict(each.split("=", 1) for each in found if each.startswith("--") and "=" in each)
    if "--address" not in options:
        raise ConfigError(field, text, "without --address it starts a cluster of its own on one node", "Add --address auto.")
    if "--detach" in found:
        raise ConfigError(field, text, "the cluster ends with this command, and the run with the cluster", "Leave out --detach.")
    ranks = int(options.get("--world", "4")) + int(options.get("--spares", "0"))
    if room is not None and ranks > room:
        raise ConfigError(field, text, f"it asks for {ranks} ranks with spares, and the nodes have room for {room}", "Add nodes.")


def _split(text: str, field: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(field, text, f"no shell reads it: {error}") from None
