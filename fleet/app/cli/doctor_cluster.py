"""``fleet doctor --cluster``: the map of a cluster's failure domains, the losses that end a run on it, and the speed of its links."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from fleet.app.cli import prints as cli_print
from fleet.errors import ConfigError
from fleet.host import tls
from fleet.ledger.report import finite
from fleet.protocol.exit_codes import Exit

if TYPE_CHECKING:
    from fleet.app.cluster.reach import ReachedNode
    from fleet.ledger.health import Link
    from fleet.settings.run import RunSettings
    from policies.links import Outlier
    from policies.survival import Risk

WORST = 12
"""So many links are shown, the slowest first; JSON has all."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterFindings:
    """All that was found out; ``pairs`` is how many links there are in all, ``measured`` or not."""

    nodes: list[ReachedNode]
    settings: RunSettings
    risks: list[Risk]
    shortage: str
    lacks: str
    links: list[Link]
    pairs: int
    outliers: list[Outlier]

    @property
    def fit(self) -> bool:
        return not self.outliers and not self.shortage


def examine(address: str, values: Mapping[str, Any], measure: bool, as_json: bool) -> int:
    """Look at the cluster, tell what was found, and return the exit code. Raises ConfigError before anything is started."""
    from fleet.app.cluster.reach import reached

    settings, given = _settings(values)
    console = cli_print.Terminal(stderr=True)
    with reached(address):
        found = _look(settings, given, measure, lambda text: None if as_json else console.print(text, style="dim"))
    if as_json:
        cli_print.write(json.dumps(as_plain(found), indent=2))
    else:
        print_found(found)
    return Exit.DONE if found.fit else Exit.FAILED


def _settings(values: Mapping[str, Any]) -> tuple[RunSettings, bool]:
    """Settings of a run on that cluster, and whether its world was given."""
    from fleet.app.configuration import configured, differing

    over = {name: values[name] for name in ("world", "spares") if values[name] is not None}
    layers = [Path(each) if Path(each).is_file() else each for each in values["config"] or []]
    found = configured(*layers, over=over)
    if found.run.tls:
        tls.identity(found.run.tls)
    return found.run, "world" in over or "world" in differing(found)


def _look(settings: RunSettings, given: bool, measure: bool, say: Callable[[str], None]) -> ClusterFindings:
    from actors.link_survey import LinkSurvey
    from fleet.app import link_preflight
    from fleet.app.cluster.reach import nodes_seen
    from fleet.protocol.decisions import Lacking
    from fleet.protocol.domains import VARIABLE, place_of
    from fleet.protocol.topology import asked, in_words
    from policies import links, survival

    nodes = nodes_seen(settings.domains)
    every = math.comb(len(nodes), 2)
    with LinkSurvey({node.name: (node.id, node.address) for node in nodes}) as survey:
        nodes = nodes_seen(settings.domains, survey.variable(VARIABLE))
        places = {node.name: place_of(node.path) for node in nodes}
        measured = link_preflight.measured(survey, list(places), places, say) if measure else []
    sites = [survival.Site(node.name, node.path, node.slots) for node in nodes if node.slots]
    if not sites:
        raise ConfigError("--address", "the cluster", "no node has a slot for a rank", "Give its nodes GPUs or CPUs.")
    run = settings if given else _filling(settings, sum(site.slots for site in sites))
    outliers, lacks = links.judge(measured, places), survival.lacks(sites, run)
    words = in_words(lacks) if lacks != Lacking() and (asked(run.domains) or run.replica_size > 1) else ""
    return ClusterFindings(nodes, run, survival.risks(sites, run), survival.shortage(sites, run), words, measured, every, outliers)


def _filling(settings: RunSettings, slots: int) -> RunSettings:
    """A run that takes all slots there are."""
    world = max(settings.min_ranks, slots - settings.spares)
    return dataclasses.replace(settings, world=world, max_world=0, shards=max(settings.shards, world))


# ---- what is told ------------------------------------------------------------------------------------------------------------------------


def as_plain(found: ClusterFindings) -> dict[str, Any]:
    """All of it as data for JSON; a figure that is not there is null."""
    from policies.survival import sentences

    run = found.settings
    plain: dict[str, Any] = finite({
        "verdict": "fit" if found.fit else "unfit",
        "run": {"world": run.world, "spares": run.spares, "min_ranks": run.min_ranks, "domains": list(run.domains)},
        "nodes": [dataclasses.asdict(node) for node in found.nodes],
        "shortage": found.shortage,
        "lacks": found.lacks,
        "risks": [
            {**dataclasses.asdict(risk), "survives": risk.survives, "sentences": sentences(risk, run)} for risk in found.risks
        ],
        "links": {"there": found.pairs, "measured": [dataclasses.asdict(link) for link in found.links]},
        "outliers": [dataclasses.asdict(outlier) for outlier in found.outliers],
    })  # fmt: skip
    return plain


def print_found(found: ClusterFindings) -> None:
    """The map, then what cannot be survived, then the links."""
    from policies.survival import sentences

    console = cli_print.Terminal()
    console.print(draw(found.nodes))
    for label in sorted({label for node in found.nodes for label in node.missing}):
        without = [node.name for node in found.nodes if label in node.missing]
        console.print(f"without label {label}, so that the host stands for it: {', '.join(without)}", style="yellow", markup=False)
    console.print(Text(f"\nA run of {found.settings.world} ranks and {found.settings.spares} spares here:", style="bold"))
    if found.shortage:
        console.print(found.shortage, style="red", markup=False)
    if found.lacks:
        console.print(found.lacks, style="yellow", markup=False)
    for risk in found.risks:
        style = "" if risk.survives else "yellow"
        console.print("- " + " ".join(sentences(risk, found.settings)), style=style, markup=False)
    if found.links:
        _report_links(console, found)


def draw(nodes: Sequence[ReachedNode]) -> Tree:
    """Domains, from wide to narrow, then nodes with their slots."""
    from fleet.protocol.domains import place_of

    root = Tree(Text(f"{len(nodes)} nodes, {sum(node.slots for node in nodes)} slots", style="bold"))
    branches: dict[tuple[str, ...], Tree] = {(): root}
    for node in sorted(nodes, key=lambda node: (node.path, node.name)):
        place = place_of(node.path)
        for depth in range(1, len(place) + 1):
            if place[:depth] not in branches:
                branches[place[:depth]] = branches[place[: depth - 1]].add(Text(place[depth - 1]))
        branches[place].add(Text(f"{node.name}  {node.address}  {node.slots} slots", style="" if node.slots else "dim"))
    return root


def _report_links(console: cli_print.Terminal, found: ClusterFindings) -> None:
    whole = [link for link in found.links if not link.error]
    console.print(Text(f"\n{len(found.links)} of {found.pairs} links were measured:", style="bold"))
    rows = [
        (
            link.one,
            link.other,
            f"{link.round_trip_s * 1e6:.0f} us",
            f"{link.there_bytes_per_s / 1e9:.2f}",
            f"{link.back_bytes_per_s / 1e9:.2f}",
        )
        for link in sorted(whole, key=lambda link: -link.round_trip_s)[:WORST]
    ]
    if whole:
        trip_s = statistics.median(link.round_trip_s for link in whole)
        wide = statistics.median(min(link.there_bytes_per_s, link.back_bytes_per_s) for link in whole)
        console.print(f"median round trip {trip_s * 1e6:.0f} us, median bandwidth {wide / 1e9:.2f} GB/s; the slowest round trips:")
        for line in cli_print.table(("from", "to", "round trip", "there GB/s", "back GB/s"), rows):
            console.print(line, markup=False)
    for outlier in found.outliers:
        console.print(outlier.reason, style="red", markup=False)
    if not found.outliers:
        console.print("none stands out")
