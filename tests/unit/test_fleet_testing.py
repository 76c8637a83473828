"""``fleet.testing``: what a writer of policies is given to find out whether one is right, and whether it pays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.host.journal import JournalWriter
from fleet.protocol.records import VERSION, Record, RunStarted, Spans, ViewPublished
from fleet.protocol.types import Member, StateId, View
from fleet.settings.run import RunSettings, StragglerSettings
from fleet.testing import (
    Circumstances,
    Decision,
    Plan,
    Remedy,
    Timings,
    Trouble,
    check_straggler_policy,
    made_up,
    recorded,
    show,
    simulate,
    small,
)
from policies.straggler.mitigation import Mitigator

Answer = Callable[[Circumstances], Remedy]


class Says:
    """A straggler policy with one answer to everything."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def configure(self, settings: StragglerSettings) -> None: ...

    def look(self, timings: Timings | None, circumstances: Circumstances, now_s: float) -> Remedy:
        return self._answer(circumstances)


def saying(answer: Answer) -> Callable[[RunSettings], Says]:
    return lambda run: Says(answer)


def decided(action: Any, **answer: object) -> Remedy:
    return dataclasses.replace(Remedy(decision=Decision(action, "because", valid_until_s=1e9)), **answer)  # type: ignore[arg-type]


def test_fleets_own_policies_violate_nothing() -> None:
    results = simulate(seeds=range(8))
    assert len(results) == 8 and not results.violated
    assert results.report() == "8 runs, no invariant violated"
    assert all(0 < run.goodput < 1.2 for run in results if run.status == "completed")


def test_a_seed_is_the_same_run_again_and_troubles_cost_goodput() -> None:
    plan = Plan(settings=small(), steps=20)
    killed = Trouble(kind="kill", at_s=1.0, slot=1)
    [one], [other] = simulate(world=plan, seeds=[3], faults=[killed]), simulate(world=plan, seeds=[3], faults=[killed])
    assert one.journal == other.journal and one.plan.troubles == (killed,)
    [quiet] = simulate(world=plan, seeds=[3], faults=())
    assert one.goodput < quiet.goodput == 1.0
    assert one.decisions("interval", "save") == one.decisions("interval") != one.decisions("interval", "wait") == []


def test_a_policy_that_breaks_an_invariant_is_told_with_the_seed() -> None:
    slow = Trouble(kind="slow", point="compute", step=50, slots=(2,), severity=3.0, duration_s=60.0)
    plan = Plan(settings=small(spares=1), steps=150, capacity=4, jitter=(0.97, 1.03), shard_s=0.02, save_every_s=1000.0)

    class Neighbour(Mitigator):
        """Blames the rank beside the one that is slow."""

        def look(self, timings: Timings | None, circumstances: Circumstances, now_s: float) -> Remedy:
            remedy, members = super().look(timings, circumstances, now_s), circumstances.view.members
            wrong = tuple(members[(members.index(member) + 1) % len(members)] for member in remedy.members)
            return dataclasses.replace(remedy, members=wrong)

    results = simulate(world=plan, faults=[slow], seeds=[1], straggler=lambda run: Neighbour(run.straggler))
    [run] = results.violated
    assert run.violated == "healthy stay" and run.goodput == 0.0
    assert results.report().startswith("seed 1: healthy stay: ")


def test_a_world_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="world"):
        simulate(world="flat")


def test_fleets_own_straggler_policy_does_what_one_must() -> None:
    assert check_straggler_policy(lambda run: Mitigator(run.straggler), seeds=range(2)) == []


COUNT = itertools.count()

WRONG: dict[str, tuple[Answer, str]] = {
    "raises": (lambda seen: Remedy(ranges=((0, 1 // (seen.shards - seen.shards)),)), "it raised ZeroDivisionError"),
    "a word of its own": (lambda seen: decided("shout"), "it answered 'shout'"),
    "loses a shard": (lambda seen: decided("rebalance", ranges=((0, seen.shards - 1),)), "it shared 16 shards among 4 ranks"),
    "everybody goes": (lambda seen: decided("evict", members=seen.view.members), "some must go, and some must stay"),
    "nobody goes": (lambda seen: decided("evict"), "some must go, and some must stay"),
    "replaced by nobody": (lambda seen: decided("replace", members=seen.view.members[:1]), "1 replaced, and 0 stand by"),
    "chance": (lambda seen: decided("tolerate", ranges=((0, next(COUNT)),)), "two answers to the same times"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_straggler_policy_that_is_wrong_is_told_so(name: str) -> None:
    answer, complaint = WRONG[name]
    faults = check_straggler_policy(saying(answer), seeds=())
    assert faults and all(complaint in fault or name in ("raises", "loses a shard", "replaced by nobody") for fault in faults)
    assert complaint in faults[0] and faults[0].startswith("all are well: ")


def test_a_slow_rank_is_found_in_times_that_were_made_up_and_nobody_where_all_are_well() -> None:
    well, slow = (show(Mitigator(), made_up(slow=ranks, seed=5)) for ranks in ({}, {2: 3.0}))
    assert [finding.action for remedy in slow for finding in remedy.findings][:1] == ["accuse"]
    assert not [finding for remedy in well for finding in remedy.findings]


def test_a_policy_is_shown_what_a_run_has_measured(tmp_path: Path) -> None:
    """Two ranks, four steps, of which the first of each process tells nothing; the second rank has not finished the last one."""
    members = (Member(0, 0), Member(1, 0))
    view = View(4, members, ((0, 1), (1, 3)), 0, (), StateId(0, 6), "")
    us, step = (100, 1000, 300, 50, 0), "dcxcK"
    records: list[Record] = [
        RunStarted(VERSION, "run", 0.0, 0.0, 2, 0, 3, ""),
        ViewPublished(view, 2.0, "", False, ()),
        Spans(members[0], 4, 0, 6, 0, us * 4, step * 4),
        Spans(members[1], 4, 0, 6, 0, (200, 4000, 200, 4000, 300, 60, 0) * 3, "dcdcxcK" * 3),
    ]
    writer = JournalWriter(tmp_path / "journal")
    for record in records:
        writer.append(record)
    writer.close()
    [shown] = recorded(tmp_path / "journal")
    assert shown.timings is not None and shown.timings.steps == (7, 8) and shown.timings.members == members
    first, second = (row[0] for row in shown.timings.rows)
    assert first is not None and second is not None
    assert (first.shards, first.data_s, first.compute_s, first.network_s, first.fixed_s) == (1, 100e-6, 1000e-6, 300e-6, 50e-6)
    assert (second.shards, second.compute_s) == (2, 8000e-6)
    assert shown.circumstances.view == view and shown.now_s == pytest.approx(2.0 + 2 * second.own_s), "of steps that tell something"
    assert [moment.timings for moment in recorded(records, batch=1) if moment.timings and moment.timings.steps == (8,)]
