"""Whole failure domains are lost at once: invariants hold, and what was put into another domain is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.protocol.causes import AgentHungUp
from fleet.protocol.decisions import DomainLost, Lacking
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ViewPublished
from fleet.simulation import nodes as nodes_module
from fleet.simulation.plan import Plan, Trouble, small, with_troubles
from fleet.simulation.world import Outcome
from tests.simulation import plans
from tests.simulation.families import racks_plan
from tests.simulation.runs import rollbacks, simulate

MOST = 40


def test_a_checkpoint_that_one_rank_has_loaded_outlives_the_view_that_began_with_it() -> None:
    """Of sharded state: the memory that held the other half is lost while the members tell what they have."""
    outcome = simulate(plans.read(plans.KEPT / "racks-205.json").plan)
    assert not outcome.broken, outcome.report()
    journal, gone = outcome.world.journal, AgentHungUp(missed=True)
    [lost] = [number for number, record in enumerate(journal) if isinstance(record, ProcessLost) and record.cause == gone]
    assert rollbacks(outcome) and not any(isinstance(record, HistoryBegun) for record in journal[lost:])


def test_racks_are_lost_in_these_seeds() -> None:
    """Else the test above shows little."""
    plans = [racks_plan(seed) for seed in range(MOST)]
    lost = [[trouble for trouble in plan.troubles if trouble.kind == "lose_node"] for plan in plans]
    assert (
        sum(plan.rack == 2 and len({trouble.at_s for trouble in ill[-2:]}) == 1 for plan, ill in zip(plans, lost, strict=True)) > MOST // 3
    )


def lose_a_rack(seed: int, first: int = 2, apart: int = 1, **settings: object) -> Outcome:
    """Four nodes of one rank each in two racks. One rack is lost in the middle of training, while the other lives.

    Its nodes are ``apart`` by their index, and begin with ``first`` in the second rack.
    """
    plan = Plan(seed=seed, settings=replace(small(4, nodes=4), **settings), steps=60, capacity=2, rack=2, shard_s=0.05, save_every_s=1000.0)  # type: ignore[arg-type]
    at_s = 3.0 + seed / MOST
    ill = [Trouble(kind="lose_node", at_s=at_s, node=first * (seed % 2) + apart * node) for node in range(2)]
    outcome = simulate(with_troubles(replace(plan, copy_every_s=0.2), tuple(ill)), keep_trace=True)
    assert not outcome.broken, outcome.report()
    assert outcome.status == "completed", outcome.reason
    return outcome


def test_each_chunk_of_the_optimizers_state_outlives_a_rack() -> None:
    assert not any(rollbacks(lose_a_rack(seed, optimizer_sharding="zero1")) for seed in range(MOST))


def test_chunks_are_lost_with_a_rack_where_nobody_knows_of_racks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(nodes_module.SimNode, "domain", property(lambda self: "", lambda self, path: None), raising=False)
    assert all(rollbacks(lose_a_rack(seed, optimizer_sharding="zero1")) for seed in range(4))


def test_the_members_of_every_view_send_their_copies_to_the_other_rack() -> None:
    outcome = lose_a_rack(1, peer_copies=1)
    domain_of = {f"{node.name}:0": node.domain for node in outcome.world.nodes}
    ranks = {rank.member: rank.node.domain for rank in outcome.world.train.processes if rank.named}
    first = next(record.view for record in outcome.world.journal if getattr(record, "view", None) and record.view.copies)  # type: ignore[union-attr]
    assert len(first.members) == 4
    for member, addresses in zip(first.members, first.copies, strict=True):
        assert domain_of[addresses[0]] != ranks[member]


# ---- groups, and a rack as one loss ------------------------------------------------------------------------------------------------------

GROUPS = {"replica_size": 2, "domains": ("rack",), "peer_copies": 1}


def reported(outcome: Outcome, kind: type) -> list[DecisionMade]:
    return [one for one in outcome.world.journal if isinstance(one, DecisionMade) and isinstance(one.payload, kind)]


@pytest.mark.parametrize("seed", range(8))
def test_each_group_lies_in_one_rack_and_a_rack_is_one_loss(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are in different racks, so that slots in their order are no groups."""
    alternating = property(lambda self: f"rack-{self.index % 2}", lambda self, path: None)
    monkeypatch.setattr(nodes_module.SimNode, "domain", alternating, raising=False)
    outcome = lose_a_rack(seed, first=1, apart=2, **GROUPS)
    domain_of = {rank.member: rank.node.domain for rank in outcome.world.train.processes if rank.named}
    first = next(one.view for one in outcome.world.journal if isinstance(one, ViewPublished) and len(one.view.members) == 4)
    racks = [domain_of[member] for member in first.members]
    assert racks[0] == racks[1] != racks[2] == racks[3]
    (lost,) = reported(outcome, DomainLost)
    assert isinstance(lost.payload, DomainLost) and lost.payload.domain == f"rack-{seed % 2}"
    assert len(lost.payload.members) == 2 and lost.payload.in_view == 2


def test_a_rack_that_is_not_known_is_no_loss_of_a_domain() -> None:
    assert not reported(lose_a_rack(1, peer_copies=1), DomainLost), "nobody has said what fails together"


def test_a_group_that_no_rack_can_hold_is_placed_one_level_looser_and_that_is_said() -> None:
    """Three racks of a node each, with a group on each; one is lost, and its ranks are replaced where there is room: one in each other."""
    settings = replace(small(6, nodes=3), shards=12, **GROUPS)  # type: ignore[arg-type]
    plan = Plan(seed=3, settings=settings, steps=120, capacity=3, rack=1, shard_s=0.05, save_every_s=1000.0, copy_every_s=0.2)
    outcome = simulate(with_troubles(plan, (Trouble(kind="lose_node", at_s=4.0, node=2),)), keep_trace=True)
    assert not outcome.broken and outcome.status == "completed", outcome.report()
    said = [one for one in reported(outcome, Lacking) if one.action == "loosen"]
    assert any("spans rack rack-0 and rack-1: its members exchange across them" in one.reason for one in said), said
