"""The queue's policy, live, through thousands of random queues: gangs, room, quotas, order, preemption, and how long anybody waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.protocol.queueing import TOP, Asked, Node, Preempt, Rules, Start
from fleet.settings.per_rank import room
from policies import admission
from tests.support.queue_twin import Broken, Comes, Twin

SHAPES: list[Mapping[str, float]] = [{"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 0.5}]
TEAMS = ["", "a", "b", "c"]
Patch = pytest.MonkeyPatch


@st.composite
def queues(draw: st.DrawFn, most: int = 14) -> Twin:
    """Up to ``most`` runs on up to four nodes; priorities from -100 to 100, and short ageing, so that all of it happens."""
    nodes = [
        Node(f"n{i}", {"CPU": float(draw(st.integers(1, 6))), "GPU": float(draw(st.integers(0, 2)))}, {"rack": str(i % 2)})
        for i in range(draw(st.integers(1, 4)))
    ]
    quotas = draw(st.dictionaries(st.sampled_from(["a", "b", "*"]), st.integers(1, 8), max_size=2))
    rules = Rules(quotas=quotas, preempts=draw(st.booleans()), ageing_s=float(draw(st.sampled_from([1, 2]))))
    runs = [draw(comes(f"r{i}")) for i in range(draw(st.integers(1, most)))]
    return Twin(runs, nodes, rules)


@st.composite
def comes(draw: st.DrawFn, name: str) -> Comes:
    asked = Asked(
        name=name, slots=draw(st.integers(1, 8)), priority=draw(st.sampled_from([-100, 0, 40, 90, 99, 100])),
        since_s=float(draw(st.integers(0, 60))), team=draw(st.sampled_from(TEAMS)), shape=draw(st.sampled_from(SHAPES)),
        selector=draw(st.sampled_from([{}, {}, {"rack": "1"}, {"rack": "!1"}])),
    )  # fmt: skip
    return Comes(asked, draw(st.integers(1, 40)), draw(st.integers(1, 5)))


@settings(max_examples=400)
@given(queues())
def test_no_queue_breaks_a_promise(twin: Twin) -> None:
    """The twin checks each of them after every decision, and all that can ever start ends."""
    twin.play()


@settings(max_examples=60)
@given(queues(most=8), st.integers(1, 3))
def test_a_stream_of_urgent_runs_starves_nobody(twin: Twin, every: int) -> None:
    """An urgent run of the size of the whole cluster comes every few ticks, for ever, as far as the others can see."""
    nodes = twin.nodes
    most = sum(room(node.resources, SHAPES[0]) for node in nodes)
    urgent = [Comes(Asked(name=f"u{i}", slots=most, priority=100, since_s=float(every * i), shape=SHAPES[0]), 2) for i in range(150)]
    Twin([*twin.runs, *urgent], nodes, twin.rules, limit=50_000).play()


# ---- one by one --------------------------------------------------------------------------------------------------------------------------


def one(name: str, slots: int, priority: int = 0, since_s: float = 0.0, **more: Any) -> Asked:
    return Asked(name=name, slots=slots, priority=priority, since_s=since_s, **more)


def here(slots: int) -> list[Node]:
    return [Node("here", {"slot": float(slots)})]


def reported(runs: Sequence[Comes], slots: int, rules: Rules) -> dict[str, Any]:
    return {name: dataclasses.asdict(each) for name, each in Twin(runs, here(slots), rules).play().items()}


def test_a_run_gives_way_keeps_its_place_and_goes_on() -> None:
    runs = [
        Comes(one("low", 4, 0), 10, leaves_in=3),
        Comes(one("later", 4, 0, since_s=1.0), 1),
        Comes(one("high", 2, 5, since_s=2.0), 4),
    ]
    kept = reported(runs, 4, Rules(preempts=True))
    assert kept["low"]["began"] == [0, 9] and kept["low"]["gave_way"] == [2]
    assert kept["high"]["began"] == [5]
    assert kept["later"]["began"] == [17], "low was there before it"
    assert reported(runs, 4, Rules())["high"]["began"] == [10], "without preemption it waits"


def test_the_fewest_give_way_the_lowest_and_youngest_first() -> None:
    nodes, rules = here(8), Rules(preempts=True)
    line = admission.decide([one("a", 2, 1), one("b", 2, 0), one("c", 2, 0, 1.0), one("d", 2, 0, 2.0)], [], nodes, rules)
    assert [each.name for each in line] == ["a", "b", "c", "d"]
    running = [
        twin_running(one(name, 2, priority), began) for began, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 0), ("d", 0)])
    ]
    assert names(admission.decide([one("x", 4, 9)], running, nodes, rules)) == {"c", "d"}
    assert names(admission.decide([one("x", 4, 1)], running, nodes, rules)) == {"c", "d"}
    assert names(admission.decide([one("x", 8, 1)], running, nodes, rules)) == set(), "a has its priority, and without a it has no room"
    assert names(admission.decide([one("x", 4, 0)], running, nodes, rules)) == set()


def twin_running(asked: Asked, began: float, leaving: bool = False) -> Any:
    from fleet.protocol.queueing import Running

    return Running(asked=asked, placed={"here": asked.slots}, began_s=began, leaving=leaving)


def names(decisions: Sequence[object]) -> set[str]:
    return {each.name for each in decisions if isinstance(each, Preempt)}


def test_nobody_else_is_asked_while_those_leave_who_were() -> None:
    running = [twin_running(one("a", 2), 0, leaving=True), twin_running(one("b", 2), 1)]
    assert admission.decide([one("x", 2, 5), one("y", 1, 0, 9.0)], running, here(4), Rules(preempts=True)) == []


def test_a_quota_holds_up_its_own_team_alone() -> None:
    rules = Rules(quotas={"a": 2})
    running = [twin_running(one("a1", 2, team="a"), 0)]
    line = [one("a2", 1, 9, team="a"), one("a3", 1, 8, team="a"), one("b1", 1, 0, team="b")]
    assert [each.name for each in admission.decide(line, running, here(8), rules)] == ["b1"]
    within = admission.decide([one("a2", 1, 9, team="a")], running, here(8), dataclasses.replace(rules, preempts=True))
    assert names(within) == {"a1"}, "within its own team one may give way"
    assert names(admission.decide([one("a2", 1, 9, team="a")], [twin_running(one("b", 1), 0), *running], here(8), rules)) == set()


def test_a_quota_of_all_other_teams() -> None:
    rules = Rules(quotas={"a": 2, "*": 1})
    assert [rules.quota(team) for team in ("a", "b", "")] == [2, 1, float("inf")]


def test_what_no_longer_fits_at_all_holds_up_nobody() -> None:
    started = admission.decide([one("large", 9, 5), one("small", 1)], [], here(4), Rules())
    assert [each.name for each in started] == ["small"]


def test_gangs_are_placed_against_each_nodes_room_and_not_the_sum() -> None:
    nodes = [Node("a", {"CPU": 3.0}), Node("b", {"CPU": 3.0})]
    pairs = one("pairs", 3, shape={"CPU": 2.0})
    assert admission.decide([pairs], [], nodes, Rules()) == []
    [start] = admission.decide([dataclasses.replace(pairs, slots=2)], [], nodes, Rules())
    assert isinstance(start, Start) and start.placed == {"a": 1, "b": 1}
    assert "more than the 2" in admission.never(pairs, nodes, Rules())[0]


def test_what_can_never_start_is_said() -> None:
    reason, way_out = admission.never(one("a", 3, team="a"), here(8), Rules(quotas={"a": 2}))
    assert "team a may have 2 slots at once, and this run needs 3" in reason and "--quota" in way_out
    assert admission.never(one("a", 3, team="b"), here(8), Rules(quotas={"a": 2})) == ("", "")


def test_whoever_has_waited_long_enough_is_at_the_top_and_stays_where_it_is() -> None:
    rules = Rules(preempts=True, ageing_s=10.0)
    old = one("old", 4, 0, waited_s=10.0 * TOP)
    assert admission.rank(old, 10.0) == TOP
    line = [old, one("urgent", 4, 100, since_s=5.0)]
    assert [each.name for each in admission.decide(line, [], here(4), rules)] == ["old"]
    assert admission.decide(line[1:], [twin_running(old, 0)], here(4), rules) == []


# ---- each promise can be broken ----------------------------------------------------------------------------------------------------------


def part_of_a_gang(patch: Patch) -> None:
    right = admission._Line._placed

    def wrong(self: Any, asked: Asked, running: Any) -> dict[str, int] | None:
        return right(self, asked, running) or (right(self, dataclasses.replace(asked, slots=1), running) if asked.slots > 1 else None)

    patch.setattr(admission._Line, "_placed", wrong)


def room_as_one_sum(patch: Patch) -> None:
    def wrong(self: Any, asked: Asked, running: Any) -> dict[str, int] | None:
        free = self._free(running)
        total = {name: sum(each[name] for each in free.values()) for name in asked.shape}
        return {self._nodes[0].name: asked.slots} if room(total, asked.shape) >= asked.slots else None

    patch.setattr(admission._Line, "_placed", wrong)


def leavers_count_for_nothing(patch: Patch) -> None:
    right = admission._Line.__init__

    def wrong(self: Any, running: Any, nodes: Any, rules: Any) -> None:
        right(self, [each for each in running if not each.leaving], nodes, rules)

    patch.setattr(admission._Line, "__init__", wrong)


def each_run_has_the_whole_quota(patch: Patch) -> None:
    patch.setattr(admission._Line, "_over", lambda self, asked, running: asked.slots > self._rules.quota(asked.team))


def small_ones_overtake(patch: Patch) -> None:
    def wrong(waiting: Any, running: Any, nodes: Any, rules: Any) -> list[Any]:
        line, found = admission._Line(running, nodes, rules), []
        for each in admission.in_turn(waiting, rules.ageing_s):
            if (placed := line.place(each)) is not None:
                line.start(each, placed)
                found.append(Start(each.name, placed, ""))
        return found

    patch.setattr(admission, "decide", wrong)


def equals_give_way(patch: Patch) -> None:
    def wrong(self: Any, asked: Asked, staying: Any) -> list[Any]:
        return [each for each in staying if each.asked.priority <= asked.priority] if self._rules.preempts else []

    patch.setattr(admission._Line, "_may_leave", wrong)


def somebody_gives_way_although_it_does_not_help(patch: Patch) -> None:
    right = admission._Line.who_leaves

    def wrong(self: Any, asked: Asked) -> list[Any] | None:
        return right(self, asked) or self._may_leave(asked, [each for each in self._running if not each.leaving])[:1] or None

    patch.setattr(admission._Line, "who_leaves", wrong)


def nobody_rises(patch: Patch) -> None:
    right = admission.in_turn
    patch.setattr(admission, "in_turn", lambda waiting, ageing_s=0.0: right(waiting, 0.0))


def the_top_gives_way(patch: Patch) -> None:
    def wrong(self: Any, asked: Asked, staying: Any) -> list[Any]:
        return [each for each in staying if each.asked.priority < asked.priority] if self._rules.preempts else []

    patch.setattr(admission._Line, "_may_leave", wrong)


def labels_do_not_matter(patch: Patch) -> None:
    patch.setattr(admission, "meets", lambda labels, selector: True)


MUTATIONS: list[tuple[Callable[[Patch], None], str]] = [
    (part_of_a_gang, "gang"),
    (room_as_one_sum, "capacity"),
    (leavers_count_for_nothing, "capacity"),
    (labels_do_not_matter, "labels"),
    (each_run_has_the_whole_quota, "quota"),
    (small_ones_overtake, "order"),
    (equals_give_way, "preemption"),
    (somebody_gives_way_although_it_does_not_help, "purpose"),
    (nobody_rises, "starvation"),
    (the_top_gives_way, "starvation"),
]


def directed() -> list[Twin]:
    """Queues in which each promise is at stake."""
    two = [Node("a", {"CPU": 3.0}), Node("b", {"CPU": 3.0})]
    eager, cpu = Rules(preempts=True, ageing_s=1.0), {"CPU": 2.0}
    crowd = [Comes(one(f"c{i}", 3, 0, since_s=float(i), shape={"CPU": 1.0}), 5, 4) for i in range(6)]
    pairs = [Comes(one("p", 2, 0, shape=cpu), 3), Comes(one("q", 1, 0, shape=cpu), 3), Comes(one("s", 1, 0, 1.0, shape={"CPU": 1.0}), 9)]
    high = [Comes(one("h", 6, 9, since_s=3.0, shape={"CPU": 1.0}), 3), Comes(one("e", 6, 0, since_s=4.0, shape={"CPU": 1.0}), 3)]
    half = [Comes(one("x", 4, 9, shape={"CPU": 1.0}), 30), Comes(one("y", 2, 0, shape={"CPU": 1.0}), 30)]
    half += [Comes(one("z", 5, 5, since_s=2.0, shape={"CPU": 1.0}), 3)]
    teams = [Comes(one(f"t{i}", 2, 0, since_s=float(i), team="a", shape={"CPU": 1.0}), 5) for i in range(3)]
    stream = [Comes(one(f"u{i}", 6, 100, since_s=float(2 * i), shape={"CPU": 1.0}), 2) for i in range(300)]
    poor = [Comes(one("poor", 6, 0, since_s=1.0, shape={"CPU": 1.0}), 9)]
    small = [Comes(one(f"o{i}", 1, 0, since_s=float(i), shape={"CPU": 1.0}), 4) for i in range(60)]
    racks = [Node("a", {"CPU": 3.0}, {"rack": "1"}), Node("b", {"CPU": 3.0}, {"rack": "2"})]
    picky = [Comes(one("l", 3, shape={"CPU": 1.0}, selector={"rack": "!1"}), 3)]
    return [
        Twin(picky, racks, eager),
        Twin(crowd + high, two, eager), Twin(pairs, two, eager), Twin(half, two, eager), Twin(teams, two, Rules(quotas={"a": 3})),
        Twin(stream + poor, two, eager), Twin(small + poor, two, eager),
    ]  # fmt: skip


def test_the_directed_queues_hold_with_the_live_policy() -> None:
    for twin in directed():
        twin.play()


@pytest.mark.parametrize(("mutation", "promise"), MUTATIONS, ids=[each.__name__ for each, _ in MUTATIONS])
def test_a_wrong_policy_is_caught_by_the_promise_that_it_breaks(
    mutation: Callable[[Patch], None], promise: str, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    broken = set()
    for twin in directed():
        try:
            twin.play()
        except Broken as error:
            broken.add(error.promise)
    assert promise in broken
