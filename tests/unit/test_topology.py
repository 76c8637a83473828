"""What a placement lacks, which domains are lost as a whole, and how both are told: one loss, one line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.ledger.goodput import Ledger
from fleet.ledger.happenings import Narrator
from fleet.protocol.causes import AgentHungUp
from fleet.protocol.decisions import Beside, DomainLost, Lacking, Split
from fleet.protocol.domains import check_labels, locate, place_of
from fleet.protocol.events import NodeJoined, NodeLost
from fleet.protocol.records import DecisionMade, ProcessLost, RunStarted
from fleet.protocol.topology import WINDOW_S, Gone, asked, coordinate, in_words, lacking, lost_domain, shared
from fleet.protocol.types import Loss, Member
from fleet.settings.live import changed
from fleet.settings.run import Budgets, RunSettings
from policies.recovery import ReformPromoteRegrow
from tests.unit.test_machine import Bench

LEVELS = ("rack", "block=fleet.dev/block")


def places(*paths: str) -> list[Any]:
    return [place_of(path) for path in paths]


# ---- settings ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"world": 6, "replica_size": 4}, "replica_size", "does not divide world = 6"),
        ({"world": 4, "max_world": 6, "replica_size": 4}, "replica_size", "does not divide max_world = 6"),
        ({"world": 4, "replica_size": 8}, "replica_size", "does not divide world = 4"),
        ({"replica_size": 0}, "replica_size", "at least 1"),
        ({"domains": ("rack=a", "rack=b")}, "domains", "there twice"),
        ({"domains": ("rack=a", "block=a")}, "domains", "there twice"),
        ({"domains": ("rack=",)}, "domains", "empty"),
        ({"domains": ("host=a",)}, "domains", "no label"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        RunSettings(**settings)
    assert refused.value.field == field


def test_a_running_run_keeps_its_groups_whole_when_it_is_resized() -> None:
    settings = RunSettings(world=4, max_world=8, replica_size=2)
    assert changed(settings, "world", 6).world == 6
    with pytest.raises(ConfigError, match="does not divide world = 5"):
        changed(settings, "world", 5)


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_without_sharded_parameters_groups_are_placement_alone(sharding: str) -> None:
    assert RunSettings(world=4, replica_size=2, optimizer_sharding=sharding).replica_ranks == 1
    assert RunSettings(world=4, replica_size=2, optimizer_sharding="fsdp").replica_ranks == 2


def test_a_rank_is_somewhere_in_each_dimension() -> None:
    assert [tuple(coordinate(rank, True, 2).values()) for rank in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert coordinate(3, True, 1) == {"replicate": 0, "shard": 3}, "all ranks keep one replica"
    assert coordinate(3, False, 1) == {"replicate": 3, "shard": 0}, "each rank keeps one"


# ---- what a placement lacks --------------------------------------------------------------------------------------------------------------


def test_the_narrowest_domain_that_all_share() -> None:
    assert shared(places("b/r1", "b/r2")) == ("b",)
    assert shared(places("b/r1", "b/r1/h")) == ("b", "r1")
    assert shared(places("b/r1", "c/r1")) == () == shared([])


def test_a_group_that_spans_racks_is_told_with_what_holds_it() -> None:
    found = lacking(places("b/r1", "b/r1", "b/r1", "b/r2"), [], 2, LEVELS)
    assert found == Lacking((Split(1, "rack", ("b/r1", "b/r2"), "block b"),))
    assert in_words(found) == "replica 1 spans rack b/r1 and b/r2: its members exchange across them, within block b"
    assert lacking(places("b/r1", "b/r1", "b/r2", "b/r2"), [], 2, LEVELS) == Lacking()


def test_where_no_rack_holds_a_group_the_next_level_is_what_counts() -> None:
    """Nothing is lost then but what nobody could have had."""
    assert lacking(places("b/r1", "b/r2", "c/r1", "c/r2"), [], 2, LEVELS) == Lacking()
    found = lacking(places("b/r1", "c/r2"), [], 2, LEVELS)
    assert found.split == (Split(0, "block", ("b", "c"), ""),), "no domain holds it at all"
    assert in_words(found) == "replica 0 spans block b and c: its members exchange across them"


def test_groups_of_one_and_a_group_that_is_not_whole_span_nothing() -> None:
    assert lacking(places("b/r1", "c/r1"), [], 1, LEVELS) == Lacking()
    assert lacking(places("b/r1", "b/r1", "c/r1"), [], 2, LEVELS) == Lacking()


def test_copies_beside_their_rank_are_told_with_the_domain_that_takes_all() -> None:
    ranks = places("b/r1", "b/r1", "b/r2")
    copies = [places("b/r1"), places("b/r2", "b/r1"), places("c/r9")]
    found = lacking(ranks, copies, 1, LEVELS)
    assert found.beside == (Beside(0, "rack", "b/r1"), Beside(1, "block", "b"))
    words = in_words(found)
    assert "all copies of rank 0 share rack b/r1 with it: its loss leaves the durable checkpoint alone" in words
    assert found.figures() == {"split_replicas": 0.0, "ranks_beside_their_copies": 2.0}
    assert lacking(ranks, [[], [], []], 1, LEVELS) == Lacking(), "no copies are wanted: nothing is missing"


# ---- a domain that is lost ---------------------------------------------------------------------------------------------------------------

GONE = {"n0": Gone(("b", "r1"), 5.0), "n1": Gone(("b", "r1"), 6.0)}


def test_a_domain_is_lost_with_its_last_node_and_the_widest_one_counts() -> None:
    assert lost_domain("n1", GONE, places("b/r2")) == (("b", "r1"), ("n0", "n1"))
    assert lost_domain("n1", GONE, places("c/r1")) == (("b",), ("n0", "n1"))
    assert lost_domain("n1", GONE, places("b/r1", "b/r2")) == ((), ()), "one of its nodes is there"


def test_a_node_alone_and_nodes_that_are_lost_far_apart_are_no_domain() -> None:
    assert lost_domain("n0", {"n0": GONE["n0"]}, places("b/r2")) == ((), ())
    assert lost_domain("n1", GONE | {"n0": Gone(("b", "r1"), -5.0)}, places("b/r2")) == ((), ())


def test_only_who_says_what_fails_together_is_told_of_it() -> None:
    assert asked(LEVELS) and asked(["host", "rack"]) and not asked(["host"]) and not asked(("host",))


def losses(count: int, domain: str, at_s: float = 1.0) -> list[Loss]:
    return [Loss(slot, f"n{slot}", at_s, 3, -1, False, "gone", slot, domain) for slot in range(count)]


def test_a_rack_that_takes_more_ranks_than_a_run_may_lose_is_one_loss_of_the_budget() -> None:
    policy = ReformPromoteRegrow(Budgets(total=8), 10.0)
    assert policy.judge(losses(72, "b/r1"), 2.0).action == "go_on"
    assert policy.judge(losses(72, ""), 2.0).action == "give_up", "so many ranks one by one are a crash loop"
    again = [loss for time in range(8) for loss in losses(72, "b/r1", 20.0 * time)]
    spread = [replace(loss, slot=place, node=f"m{place}") for place, loss in enumerate(again)]
    assert policy.judge(spread, 150.0).action == "give_up", "the same rack again and again is one"


# ---- how it is told ----------------------------------------------------------------------------------------------------------------------


def journal(domains: list[str], **more: Any) -> list[Any]:
    config = json.dumps({"settings": {"domains": domains, **more}})
    lost = [ProcessLost(Member(slot, 0), AgentHungUp(), None, 1, 3, -1, "", at_s=5.0) for slot in range(3)]
    reported = DomainLost("rack", "b/r1", ("n0", "n1"), ((0, 0), (1, 0)), 2)
    words = "rack b/r1 is lost: 2 nodes with 2 ranks, all of them in the view"
    return [RunStarted(2, "run", 0.0, 0.0, 4, 0, 16, config), *lost, DecisionMade("domains", "lost", words, reported, 5.1)]


@pytest.mark.parametrize("config", [{"domains": ["rack"]}, {"domains": ["host"], "mesh": {"tensor": 2}}])
def test_the_loss_of_a_domain_is_one_line(config: dict[str, Any]) -> None:
    """Also that of a node with ranks that compute shards together."""
    narrator = Narrator()
    lines = [line for record in journal(**config) for line in narrator.take(record, 0.0)]
    lines += narrator.due(10.0)
    assert [line.text for line in lines] == [
        "rank 2 is lost in step 3: its agent hung up",
        "rack b/r1 is lost: 2 nodes with 2 ranks, all of them in the view",
    ]


def test_where_nobody_says_what_fails_together_no_loss_waits_for_others() -> None:
    narrator = Narrator()
    lines = [line for record in journal(["host"])[:-1] for line in narrator.take(record, 0.0)]
    assert len(lines) == 3


def folded(records: list[Any]) -> Any:
    return Ledger().apply_all(records).summary(10.0)


def test_the_loss_of_a_domain_is_one_row_of_the_report_with_its_whole_cost() -> None:
    apart, one = (folded(records) for records in (journal(["rack"])[:-1], journal(["rack"])))
    assert [len(item.members) for item in apart.incidents] == [1, 1, 1]
    assert [(len(item.members), item.domain) for item in one.incidents] == [(2, "rack b/r1: 2 nodes, 2 ranks"), (1, "")]
    assert sum(item.cost_s for item in one.incidents) == pytest.approx(sum(item.cost_s for item in apart.incidents))


# ---- labels ------------------------------------------------------------------------------------------------------------------------------


def test_a_level_has_a_name_of_its_own_where_its_label_has_a_long_one() -> None:
    found = locate({"fleet.dev/block": "b", "rack": "r1"}, "h", LEVELS)
    assert (found.path, found.missing) == ("b/r1", ())
    assert locate({"rack": "r1"}, "h", LEVELS).missing == ("fleet.dev/block",)


def test_a_label_that_nobody_has_is_refused_by_name_with_those_that_they_have() -> None:
    nodes = [{"rack": "r1", "ray.io/node-id": "x"}, {}]
    check_labels(("host", "rack"), nodes)
    with pytest.raises(ConfigError, match=r"no node has a label fleet.dev/block; they have rack") as refused:
        check_labels(LEVELS, nodes)
    assert (refused.value.field, refused.value.value) == ("domains", "block=fleet.dev/block")
    check_labels(("host",), [{}])


# ---- as the machine tells it -------------------------------------------------------------------------------------------------------------


def two_racks() -> Bench:
    """Two ranks on each of n0 and n1, which are in one rack, and another node in another rack."""
    bench = Bench(nodes=3, domains=("rack",)).start()
    bench.send(NodeJoined("n0", 0, domain="a"), NodeJoined("n1", 1, domain="a"), NodeJoined("n2", 2, domain="b"))
    return bench


def reported_lost(bench: Bench) -> list[DomainLost]:
    return [one.payload for one in bench.journal if isinstance(one, DecisionMade) and isinstance(one.payload, DomainLost)]


def test_the_last_node_of_a_rack_makes_it_a_loss_of_the_rack() -> None:
    bench = two_racks()
    bench.send(NodeLost("n0", AgentHungUp(), bench.now_s))
    assert not reported_lost(bench)
    bench.now_s += WINDOW_S - 1
    bench.send(NodeJoined("n2", 2, domain="b"), NodeLost("n1", AgentHungUp(), bench.now_s))
    (lost,) = reported_lost(bench)
    assert (lost.level, lost.domain, lost.nodes) == ("rack", "a", ("n0", "n1"))
    assert lost.members == ((0, 0), (1, 0), (2, 0), (3, 0))


def test_a_node_that_is_back_and_nodes_that_are_lost_later_are_no_loss_of_a_rack() -> None:
    bench = two_racks()
    bench.send(NodeLost("n0", AgentHungUp(), bench.now_s), NodeJoined("n0", 0, domain="a"), NodeLost("n1", AgentHungUp(), bench.now_s))
    assert not reported_lost(bench), "n0 is there"
    late = two_racks()
    late.send(NodeLost("n0", AgentHungUp(), late.now_s))
    late.now_s += WINDOW_S + 1
    late.send(NodeLost("n1", AgentHungUp(), late.now_s))
    assert not reported_lost(late), "two losses, of two nodes"


def test_a_rack_that_was_announced_to_go_is_no_loss() -> None:
    bench = two_racks()
    roster = bench.machine.state.roster
    for node in ("n0", "n1"):
        roster.leaving[node] = bench.now_s + 1.0
        roster.released.add(node)
        bench.send(NodeLost(node, AgentHungUp(), bench.now_s))
    assert not reported_lost(bench)
