"""What a run cannot survive, domain by domain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.protocol.decisions import Lacking
from fleet.settings.run import RunSettings
from policies.survival import Risk, Site, lacks, place_slots, risks, sentences, shortage

RACKS = [Site(f"n{i}", f"rack-{i // 2}/h{i}", 2) for i in range(4)]
RUN = RunSettings(world=4, spares=0, domains=("host", "rack"))


def by_domain(sites: list[Site], settings: RunSettings) -> dict[str, Risk]:
    return {risk.domain: risk for risk in risks(sites, settings)}


def test_slots_are_seated_where_fewest_are() -> None:
    assert place_slots(RACKS, 6) == ("n0", "n1", "n2", "n3", "n0", "n1")
    assert place_slots([Site("a", "", 3), Site("b", "", 1)], 9) == ("a", "b", "a", "a")


def test_each_domain_is_told_from_wide_to_narrow() -> None:
    found = risks(RACKS, RUN)
    assert [(risk.level, risk.domain) for risk in found] == [
        ("rack", "rack-0"), ("rack", "rack-1"), ("host", "rack-0/h0"), ("host", "rack-0/h1"), ("host", "rack-1/h2"), ("host", "rack-1/h3"),
    ]  # fmt: skip
    first = found[0]
    assert (first.nodes, first.slots, first.ranks, first.spares, first.left, first.enough) == (("n0", "n1"), 4, 2, 0, 2, True)
    alone = [Site("n0", "rack-0/h0", 2), Site("n1", "rack-1/h1", 2)]
    assert [risk.domain for risk in risks(alone, RUN)] == ["rack-0", "rack-1"], "hosts that are all of their racks are not told again"


@pytest.mark.parametrize(("least", "enough"), [(1, True), (2, True), (3, False)])
def test_whether_training_goes_on_is_a_matter_of_min_ranks(least: int, enough: bool) -> None:
    risk = by_domain(RACKS, replace(RUN, min_ranks=least))["rack-0"]
    assert (risk.enough, risk.survives) == (enough, enough)


def test_chunks_survive_where_guards_lie_elsewhere() -> None:
    sharded = replace(RUN, optimizer_sharding="zero1")
    assert [risk.chunks for risk in risks(RACKS, sharded)] == [0] * 6
    bare = by_domain(RACKS, replace(sharded, optimizer_copies=0))
    assert (bare["rack-0"].chunks, bare["rack-0"].survives, bare["rack-0/h0"].chunks) == (2, False, 1)
    one_rack = [replace(site, path=f"rack-0/{site.node}") for site in RACKS]
    risk = by_domain(one_rack, sharded)["rack-0"]
    assert (risk.chunks, risk.left, risk.room) == (4, 0, 0)
    assert "4 of 4 parts of the optimizer's state lie there alone" in " ".join(sentences(risk, sharded))


def test_groups_in_different_racks_are_each_others_copies() -> None:
    grouped = replace(RUN, optimizer_sharding="fsdp", optimizer_copies=0, replica_size=2)
    found = by_domain(RACKS, grouped)
    assert [risk.chunks for risk in found.values()] == [0] * 6, "a group is in each rack, and holds all"
    one_group = by_domain(RACKS, replace(grouped, replica_size=4))
    assert one_group["rack-0"].chunks == 2


def test_copies_in_memory_survive_by_themselves_from_two_on() -> None:
    one, two = by_domain(RACKS, RUN)["rack-0"], by_domain(RACKS, replace(RUN, peer_copies=2))["rack-0"]
    assert (one.copies, two.copies) == (2, 0), "one copy lies in the other rack than its rank: two ranks' are here"
    assert "if all other ranks were lost as well" in " ".join(sentences(one, RUN))
    assert "has a copy elsewhere" in " ".join(sentences(two, RUN))
    none = replace(RUN, peer_copies=0)
    assert "peer_copies is 0" in " ".join(sentences(by_domain(RACKS, none)["rack-0"], none))


def test_room_is_what_is_free_elsewhere() -> None:
    roomy = by_domain(RACKS, RUN)["rack-0"]
    assert roomy.room == 2
    full = replace(RUN, world=8, shards=16)
    risk = by_domain(RACKS, full)["rack-0"]
    assert (risk.ranks, risk.room) == (4, 0)
    assert sentences(risk, full)[-1] == "There is room elsewhere for 0 of the 4 that it holds: the others wait until a node comes."
    spared = replace(RUN, world=6, spares=2)
    assert (by_domain(RACKS, spared)["rack-1"].ranks, by_domain(RACKS, spared)["rack-1"].spares) == (2, 2)


def test_the_words_have_the_figures() -> None:
    reported = sentences(by_domain(RACKS, RUN)["rack-1"], RUN)
    assert reported[0] == "Domain (rack) rack-1 holds 2 of 4 ranks and 0 of 0 spares."
    assert reported[1] == "Its loss leaves 2 ranks, and min_ranks is 1: training goes on with them."
    assert reported[-1] == "There is room elsewhere for all 2 that it holds."
    idle = by_domain([*RACKS, Site("n9", "rack-9/h9", 1)], replace(RUN, world=1))["rack-9"]
    assert sentences(idle, replace(RUN, world=1)) == ["Domain (rack) rack-9 holds 0 of 1 ranks and 0 of 0 spares."]


def test_what_does_not_fit_is_said_with_figures() -> None:
    assert shortage(RACKS, RUN) == ""
    assert shortage(RACKS, replace(RUN, world=8, spares=1)) == "world 8 and 1 spares take 9 slots, and the cluster has 8"


def test_what_a_placement_would_lack_is_known_before_a_run() -> None:
    grouped = replace(RUN, replica_size=2)
    assert lacks(RACKS, grouped) == Lacking(), "each rack holds two of four ranks: a group"
    uneven = [Site("n0", "rack-0/h0", 2), Site("n1", "rack-0/h1", 1), Site("n2", "rack-1/h2", 1)]
    found = lacks(uneven, grouped)
    assert [(each.replica, each.level, each.domains) for each in found.split] == [(1, "host", ("rack-0/h1", "rack-1/h2"))]
    one_rack = [replace(site, path=f"rack-0/{site.node}") for site in RACKS]
    assert {(each.level, each.domain) for each in lacks(one_rack, RUN).beside} == {("rack", "rack-0")}
