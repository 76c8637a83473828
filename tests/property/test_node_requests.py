"""What a run asks an autoscaler for, on random clusters: never more than goes, never what Ray asks for itself, and all is told once."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from policies.node_requests import IDLE_S, NodeReport, NodeRequests, NodeSeen, lacking, to_ask

COUNT = st.integers(0, 4)
SEEN = st.builds(NodeSeen, name=st.just(""), held=COUNT, kept=st.just(0), free=COUNT, goes=st.booleans(), agent=st.booleans())


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeSeen]:
    return [dataclasses.replace(node, name=f"n{index}") for index, node in enumerate(draw(st.lists(SEEN, max_size=6)))]


@given(clusters(), COUNT)
def test_what_is_asked_for_and_came_is_just_enough(nodes: list[NodeSeen], unplaced: int) -> None:
    """Then Ray has to find places for those alone that it asks for itself."""
    asked = to_ask(nodes, unplaced)
    assert 0 <= asked <= sum(node.held for node in nodes if node.goes)
    came = [*nodes, NodeSeen("new", kept=asked)]
    assert to_ask(came, unplaced) == asked, "it is kept until the ranks' own placement group takes it"
    assert lacking(came, unplaced) <= unplaced
    assert not asked or lacking(came, unplaced) == lacking(nodes, unplaced) - asked


@given(clusters(), COUNT)
def test_who_stays_is_asked_for_by_nobody(nodes: list[NodeSeen], unplaced: int) -> None:
    assert to_ask([dataclasses.replace(node, goes=False) for node in nodes], unplaced) == 0


@given(clusters(), COUNT)
def test_places_of_a_node_that_ray_has_given_up_are_left_to_ray(nodes: list[NodeSeen], unplaced: int) -> None:
    left = [node for node in nodes if not node.goes]
    lost = sum(node.held for node in nodes if node.goes)
    assert to_ask(left, unplaced + lost) == 0
    assert lacking(left, unplaced + lost) == lacking(nodes, unplaced)


@given(st.lists(st.tuples(clusters(), COUNT), max_size=12))
def test_each_ask_is_followed_by_its_end_and_names_its_time(looks: list[tuple[list[NodeSeen], int]]) -> None:
    requests, reports = NodeRequests(), list[NodeReport]()
    for now_s, (nodes, unplaced) in enumerate(looks):
        demand = requests.look(nodes, unplaced, float(now_s))
        assert demand.places == to_ask(nodes, unplaced)
        assert set(demand.avoid) <= {node.name for node in nodes if node.goes}
        reports += demand.reports
    asking = 0
    for one in reports:
        assert (one.ranks > asking and one.waited_s is None) if one.action == "ask" else (one.ranks == asking and one.waited_s is not None)
        asking = one.ranks if one.action == "ask" else 0
    assert bool(asking) == bool(looks and lacking(*looks[-1]))


@given(clusters(), COUNT)
def test_no_node_with_a_place_of_the_run_is_let_go(nodes: list[NodeSeen], unplaced: int) -> None:
    requests = NodeRequests()
    assert requests.look(nodes, unplaced, 0.0).to_release == ()
    to_release = requests.look(nodes, unplaced, IDLE_S).to_release
    by_name = {node.name: node for node in nodes}
    assert all(by_name[name].agent and not by_name[name].held and not by_name[name].goes for name in to_release)
    assert not to_release or (not lacking(nodes, unplaced) and any(node.held for node in nodes))


def test_a_node_without_places_is_let_go_after_a_while_and_not_before_ranks_are_placed() -> None:
    requests, used, idle = NodeRequests(), NodeSeen("a", held=1, agent=True), NodeSeen("b", agent=True)
    assert requests.look([dataclasses.replace(used, held=0), idle], 0, 0.0).to_release == ()
    assert requests.look([dataclasses.replace(used, held=0), idle], 0, 2 * IDLE_S).to_release == ()
    assert requests.look([used, idle], 0, 2 * IDLE_S).to_release == ()
    assert requests.look([used, idle], 0, 3 * IDLE_S).to_release == ("b",)


def test_a_lost_node_is_asked_for_and_what_came_is_kept_until_ray_gives_it_up() -> None:
    requests, a, b = NodeRequests(), NodeSeen("a", held=1, agent=True), NodeSeen("b", held=1, agent=True)
    assert requests.look([a, b], 0, 0.0).reports == ()
    lost = dataclasses.replace(b, goes=True)
    demand = requests.look([a, lost], 0, 1.0)
    assert (demand.places, demand.avoid, demand.reports) == (1, ("b",), (NodeReport("ask", 1),))
    demand = requests.look([a, lost, NodeSeen("c", kept=1)], 0, 5.0)
    assert (demand.places, demand.reports) == (1, (NodeReport("came", 1, 4.0),))
    demand = requests.look([a, NodeSeen("c", kept=1)], 1, 6.0)
    assert (demand.places, demand.reports) == (0, ())
    assert requests.look([a, NodeSeen("c", held=1)], 0, 7.0).reports == ()


def test_a_notice_that_is_withdrawn_withdraws_what_was_asked_for() -> None:
    requests, node = NodeRequests(), NodeSeen("a", held=2)
    assert requests.look([dataclasses.replace(node, goes=True)], 0, 0.0).reports == (NodeReport("ask", 2),)
    demand = requests.look([node], 0, 3.0)
    assert (demand.places, demand.reports) == (0, (NodeReport("withdraw", 2, 3.0),))
