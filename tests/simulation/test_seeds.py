"""Simulated runs, each a different mix of size, network and troubles: every invariant holds in all of them.

Each day has seeds of its own, so that some thousand runs that nobody has seen are tried with each change.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fleet.protocol.probes import watch
from fleet.simulation.world import Outcome
from tests.simulation import plans, probes
from tests.simulation.__main__ import main
from tests.simulation.runs import FAMILIES, again, simulate, simulate_seed

SEEDS = int(os.environ.get("FLEET_SEEDS", "1000"))
"""Runs of all families together."""
A_DAY = 100_000
FIRST = int(time.time() // 86400) * A_DAY
SHARES = {"random": 6.0, "sharded": 2.0, "cuts": 2.0, "gathers": 2.0, "slow": 0.4}
"""How many runs a family has, beside the others that have one. A slow rank takes many steps to be found."""
PART = 50


def parts() -> list[tuple[str, int, int]]:
    """(family, first seed, seeds), of at most ``PART`` each, so that processes share the work."""
    whole = sum(SHARES.get(family, 1.0) for family in FAMILIES)
    found = []
    for family in FAMILIES:
        seeds = max(1, int(SEEDS * SHARES.get(family, 1.0) / whole))
        found += [(family, first, min(PART, seeds - first)) for first in range(0, seeds, PART)]
    return found


@pytest.mark.parametrize(("family", "first", "seeds"), parts())
def test_every_invariant_holds_in_every_seed_of_today(family: str, first: int, seeds: int) -> None:
    """``first`` counts from the day's own first seed: the name of the test is the same each day."""
    runs = []
    for seed in range(FIRST + first, FIRST + first + seeds):
        with watch() as reached:
            runs.append((seed, simulate_seed(family, seed)))
        probes.note(f"{family}-{first}-{seeds}", reached | {probes.pair(*came) for came in runs[-1][1].world.watch.came})
    reports = [outcome.report(again(family, seed)) for seed, outcome in runs if outcome.broken]
    assert not reports, "\n\n".join(reports[:3])


@pytest.mark.parametrize("path", sorted(plans.KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_what_once_broke_something_breaks_nothing(path: Path) -> None:
    kept = plans.read(path)
    outcome = simulate(kept.plan)
    assert not outcome.broken, f"{kept.found}, once; now: {outcome.report()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_is_read_as_it_was_written(family: str, tmp_path: Path) -> None:
    for seed in range(20):
        kept = plans.Kept("nothing", f"{family} {seed}", FAMILIES[family](seed))
        plans.write(tmp_path / "kept.json", kept)
        assert plans.read(tmp_path / "kept.json") == kept


def test_a_seed_is_repeated_exactly() -> None:
    first, second = simulate_seed("random", 11, keep_trace=True), simulate_seed("random", 11, keep_trace=True)
    assert len(first.trace) > 40
    assert first.trace == second.trace


def test_a_failure_names_seed_invariant_and_command() -> None:
    outcome = simulate_seed("cuts", 3)
    broken = Outcome(3, outcome.status, outcome.reason, "donor", "the donor is dirty", outcome.trace, outcome.world)
    report = broken.report(again("cuts", 3))
    assert report.startswith("seed 3: invariant 'donor' does not hold: the donor is dirty")
    assert report.endswith("repeat with: python -m tests.simulation --family cuts --seed 3 --trace")
    assert len(outcome.trace) == 30


def test_a_seed_that_failed_is_kept_and_repeated_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plans, "KEPT", tmp_path)
    monkeypatch.setattr("sys.argv", ["simulation", "--family", "links", "--seed", "4", "--keep", "it hung"])
    assert main() == 0
    monkeypatch.setattr("sys.argv", ["simulation", "--plan", str(tmp_path / "links-4.json"), "--trace"])
    assert main() == 0
    assert "completed" in capsys.readouterr().out.splitlines()[-1]
