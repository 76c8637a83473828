"""Links are cut one way, come and go, are late, or one rank is cut off alone: every invariant holds, and nothing is lost for good."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from fleet.machine.roster import Roster
from fleet.protocol.records import HistoryBegun, ProcessLost
from fleet.simulation.clockwork import Clockwork
from fleet.simulation.links import HEAD, Links, Pipe
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.rng import stream
from fleet.simulation.world import Outcome
from tests.simulation.families import cut_plan, links_plan
from tests.simulation.runs import simulate

MOST = 40


def test_these_seeds_have_all_that_may_be_wrong_with_links() -> None:
    """Else the test above shows little."""
    outcomes = [simulate(links_plan(seed), keep_trace=True) for seed in range(MOST)]
    fired = Counter(line.split()[2] for outcome in outcomes for line in outcome.trace if " TROUBLE " in line)
    assert all(fired[kind] > MOST // 10 for kind in ("one_way", "flap", "isolate_rank", "bad_link")), fired
    given_up = sum("line given up" in line for outcome in outcomes for line in outcome.trace)
    assert given_up > MOST // 4, "lines that outlive a cut, and lines that do not"


# ---- what passes -------------------------------------------------------------------------------------------------------------------------


def links() -> tuple[Clockwork, Links]:
    clock = Clockwork()
    return clock, Links(clock, stream(1, "links"))


def test_a_link_that_is_cut_one_way_passes_the_other_way_until_it_closes() -> None:
    clock, cut = links()
    cut.cut(["a"], 5.0, ways=(True, False), closes_s=1.0)
    assert (cut.passes("a", "b"), cut.passes("b", "a"), cut.answers("a", "b"), cut.answers("b", "c")) == (False, True, False, True)
    seen: list[tuple[bool, ...]] = []

    def look() -> None:
        seen.append((cut.passes("a", "b"), cut.passes("b", "a"), cut.was_cut("a", "b", 2.0), cut.was_cut("a", "b", 0.5)))

    for at_s in (2.0, 6.0):
        clock.after(at_s, look)
    clock.run(7.0, lambda: False)
    assert seen == [(False, False, True, True), (True, True, True, False)]


def test_a_rank_that_is_cut_off_reaches_its_own_host_and_its_host_reaches_all() -> None:
    _, cut = links()
    cut.cut(["a/rank"], 5.0, spares_store=False)
    assert cut.answers("a/rank", "a") and cut.answers("a/rank", "a/other") and cut.answers("a", HEAD)
    assert not cut.answers("a/rank", "b/other") and not cut.answers("a/rank", HEAD) and not cut.answers("a/rank", "store")


@pytest.mark.parametrize("held", ["cut", "late"])
def test_one_connection_loses_nothing_and_keeps_its_order(held: str) -> None:
    """Others overtake it."""
    clock, bad = links()
    pipes, came = [Pipe(clock, bad, "a", HEAD), Pipe(clock, bad, "b", HEAD)], list[tuple[int, int]]()
    if held == "cut":
        bad.cut(["a"], 3.0, ways=(True, False))
    else:
        bad.spoil(["a", "b"], 3.0, delay_s=0.5, loss=0.3)
    for number in range(40):
        for which, pipe in enumerate(pipes):
            clock.after(0.1 * number, lambda pipe=pipe, one=(which, number): pipe.put(lambda: came.append(one)))  # type: ignore[misc]
    clock.run(20.0, lambda: False)
    assert [[number for which, number in came if which == each] for each in (0, 1)] == [list(range(40))] * 2
    assert came != sorted(came, key=lambda one: (one[1], one[0])), "nothing was held up"


# ---- what it costs -----------------------------------------------------------------------------------------------------------------------


def run(seed: int, kind: str, on_partition: str = "go-on", duration_s: float = 9.0, **more: object) -> Outcome:
    """Two ranks on two hosts, in the middle of a long run."""
    settings = replace(small(2, nodes=2), on_partition=on_partition)
    plan = Plan(seed=seed, settings=settings, steps=400, capacity=2, shard_s=0.02, save_every_s=2.0)
    trouble = Trouble(kind=kind, at_s=4.0, duration_s=duration_s, **more)  # type: ignore[arg-type]
    return simulate(with_troubles(plan, (trouble,)))


def lost(outcome: Outcome) -> int:
    assert not outcome.broken, outcome.report()
    assert outcome.status == "completed", outcome.reason
    return sum(isinstance(record, ProcessLost) for record in outcome.world.journal)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("closes_s", [0.3, None])
def test_a_one_way_cut_costs_a_rank_or_time_as_the_run_was_told(into: bool, closes_s: float | None) -> None:
    if into and closes_s is None:
        return  # the kernel of who is not acknowledged sends nothing new
    for seed in range(2):
        assert lost(run(seed, "one_way", nodes=(1,), into=into, closes_s=closes_s)) == 1
        assert lost(run(seed, "one_way", "stall", nodes=(1,), into=into, closes_s=closes_s)) == 0


def test_a_link_that_comes_and_goes_costs_no_rank_where_all_wait() -> None:
    """It is cut for as long as `heartbeat_s` of these runs, so that others may give a rank up each time."""
    for seed in range(2):
        assert lost(run(seed, "flap", "stall", nodes=(1,))) == 0
        assert lost(run(seed, "flap", nodes=(1,))) <= 5


@pytest.mark.parametrize("more", [{"delay_s": 0.3}, {"loss": 0.05}], ids=["late", "lossy"])
def test_a_link_that_is_late_costs_time_alone(more: dict[str, float]) -> None:
    quiet = run(0, "bad_link", nodes=(1,), duration_s=0.0)
    for seed in range(2):
        outcome = run(seed, "bad_link", nodes=(1,), **more)
        assert lost(outcome) == 0 and outcome.world.clock.now_s > quiet.world.clock.now_s
        assert not any(isinstance(record, HistoryBegun) for record in outcome.world.journal)


def test_a_rank_that_is_cut_off_alone_costs_no_history() -> None:
    for seed in range(2):
        outcome = run(seed, "isolate_rank", slot=1)
        assert lost(outcome) <= 2 and not any(isinstance(record, HistoryBegun) for record in outcome.world.journal)


# ---- each invariant can fail -------------------------------------------------------------------------------------------------------------


def test_all_wait_is_broken_by_a_machine_that_gives_up_who_cannot_be_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Roster.silent_ranks
    monkeypatch.setattr(Roster, "silent_ranks", lambda self, limits, now_s, by_its_agent=False: right(self, limits, now_s))
    assert {run(seed, "one_way", "stall", nodes=(1,)).broken for seed in range(4)} == {"all wait"}


def test_all_wait_is_broken_by_a_machine_that_counts_the_silence_of_an_agent_that_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the machine did once. Its first word was taken for a word about its ranks."""
    seeds = (2, 19, 26, 92)
    assert not any(simulate(cut_plan(seed, sharded=seed % 2 == 1)).broken for seed in seeds)

    def back(self: Roster, node: str, now_s: float) -> None:
        self.nodes[node] = now_s
        self.silent.pop(node, None)
        self.late.discard(node)

    monkeypatch.setattr(Roster, "back", back)
    assert "all wait" in {simulate(cut_plan(seed, sharded=seed % 2 == 1)).broken for seed in seeds}


def test_one_history_is_broken_by_ranks_that_do_not_mind_a_head_that_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.protocol.reach.Reach.lapses", lambda self, now_s: False)
    monkeypatch.setattr("fleet.machine.partitions.look_around", lambda machine, now_s: None)
    broken = {run(seed, "one_way", with_head=True, into=True, closes_s=0.3, duration_s=14.0).broken for seed in range(4)}
    assert broken == {"one history"}
