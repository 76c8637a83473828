"""The past of nodes in earlier runs: one line of JSON for each node and run, in a file beside the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

from fleet.errors import ConfigError
from fleet.ledger.health import NodeHistory, NodeIncident

NAME = "nodes.jsonl"


def load(path: Path) -> list[NodeHistory]:
    """One history for each node, of all its runs; empty without a file. Raises ConfigError naming a line that is no record."""
    found: dict[str, NodeHistory] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), start=1):
        try:
            one = _decoded(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError("nodes", f"{path}:{number}", f"is no record of a node: {error}", "Delete the line, or the file.") from error
        before = found.get(one.node, NodeHistory(one.node))
        found[one.node] = NodeHistory(one.node, before.stretches + one.stretches, before.incidents + one.incidents)
    return list(found.values())


def append(path: Path, histories: Iterable[NodeHistory]) -> None:
    """Add the nodes' histories of one run. It is one write, so that two runs that end together do not mix their lines."""
    lines = [
        json.dumps({"node": one.node, "stretches": one.stretches, "incidents": list(map(astuple, one.incidents))}) for one in histories
    ]
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))


def _decoded(line: dict[str, object]) -> NodeHistory:
    stretches, incidents = line["stretches"], line["incidents"]
    if not isinstance(stretches, list) or not isinstance(incidents, list):
        raise TypeError("stretches and incidents are lists")
    return NodeHistory(
        str(line["node"]),
        tuple((float(begin), float(end)) for begin, end in stretches),
        tuple(NodeIncident(float(at_h), str(kind), str(run)) for at_h, kind, run in incidents),
    )
