"""The part of `price` about sums in two levels: two hosts with a slow link between them, two ranks on each, all of them Fleet's.

One fleet sums in one level, the other in two; they take blocks of steps in turn. The link's interfaces count the bytes that cross it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import price_ranks, turns
from benchmarks.harness import Form, left_out
from benchmarks.mesh import parameters_of
from benchmarks.mesh_ranks import Shape
from benchmarks.placed import Fleet, Places
from benchmarks.turns import LIMIT_S, Turn, ratio_of
from fleet.settings.run import RunSettings
from tests.support.plain import FORKED, PRELOADED
from tests.support.programs import namespaces, program

HOSTS, RANKS = 2, 2
"""Hosts, and ranks on each."""
RATE = "1gbit"
SIDES = ("two_level", "one_level")
SHAPES = {Form.FULL: Shape(192, 4, 8), Form.QUICK: Shape(192, 4, 2), Form.SMOKE: Shape(64, 2, 1)}


class Neighbours(Fleet):
    """Ranks that are neighbours are on one host."""

    def spawn(self, slot: int) -> None:
        self.spawn_on(slot, f"node{slot // RANKS}")


def sent_bytes(places: Places) -> int:
    """Bytes that the link has carried so far, in both directions, with headers, as the kernel counts them."""
    total = 0
    for place in places:
        lines = Path(f"/proc/{place.holder}/net/dev").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines if ":" in line)
        counts = next(counts for name, counts in found.items() if name.strip() == place.link)
        total += int(counts.split()[8])
    return total


def settings_of(given: RunSettings, side: str) -> RunSettings:
    options = {**given.options, "side": side}
    world = HOSTS * RANKS
    return dataclasses.replace(
        given, options=options, world=world, nodes=HOSTS, shards=world, overlap_cores=math.inf, two_level_sums=side == "two_level"
    )


@contextmanager
def both(given: RunSettings, folder: Path, places: Places, crossed: dict[str, list[int]]) -> Iterator[Turn]:
    """Start both fleets. ``crossed`` gets the bytes that the link carries in each block."""
    kinds = {side: settings_of(given, side) for side in SIDES}
    for side in SIDES:
        (folder / f"own-{side}").mkdir()
    fleets = {side: Neighbours(kinds[side], folder / f"own-{side}", places) for side in SIDES}
    with turns.both(fleets["one_level"], (), ("one_level",), kinds["one_level"], folder) as one, fleets["two_level"] as two:
        last = (int(given.options["steps"]) - 1) // int(given.options["block"])

        def turn(side: str, block: int) -> float:
            before = sent_bytes(places)
            took_s = one(side, block)
            crossed[side].append(sent_bytes(places) - before)
            return took_s

        yield turn
        (folder / f"two_level-{last}").touch()
        two.wait(LIMIT_S)


def levels(form: Form, folder: Path, given: RunSettings, pairs: int, block: int) -> dict[str, Any]:
    """Steps and bytes of both. ``given``: settings that both have."""
    shape, crossed = SHAPES[form], {side: list[int]() for side in SIDES}
    FORKED.set_forkserver_preload([*PRELOADED, price_ranks.__name__])
    with price_ranks.slow_link(RATE) as places:
        sides = turns.in_turns(both(given, folder, places, crossed), SIDES, pairs, block, folder)
    step_bytes = {side: [count / block for count in counts[1:]] for side, counts in crossed.items()}
    figures = ratio_of("fleet_two_level_step_over_one_level_ratio", sides["two_level"].step_ms, sides["one_level"].step_ms)
    for side in SIDES:
        figures[f"fleet_{side}_step_ms_median"] = statistics.median(sides[side].step_ms)
        figures[f"fleet_{side}_crossed_bytes_per_step_median"] = statistics.median(step_bytes[side])
    medians = [figures[f"fleet_{side}_crossed_bytes_per_step_median"] for side in SIDES]
    figures["fleet_two_level_crossed_over_one_level_ratio"] = medians[0] / medians[1]
    samples = {f"fleet_{side}_step_ms": sides[side].step_ms for side in SIDES}
    samples |= {f"fleet_{side}_crossed_bytes_per_step": counts for side, counts in step_bytes.items()}
    notes = [
        f"two levels are of {parameters_of(shape)[0]:,} bytes of parameters, {RANKS} ranks on each of {HOSTS} hosts, {RATE} between them"
    ]
    if len(sides["one_level"].step_ms) == 1:
        notes += [left_out(f"fleet_two_level_step_over_one_level_ratio_{end}", "one pair") for end in ("low", "high")]
    return {"settings": {}, "figures": figures, "samples": samples, "notes": notes}


def can(name: str) -> list[str]:
    """Why this machine can have no hosts, as a note for figures of that name; empty when it can."""
    try:
        namespaces()
        program("tc")
    except pytest.skip.Exception as reason:
        return [left_out(name, str(reason))]
    return []
