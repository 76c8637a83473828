"""Ranks without a place: what is free where is told to the run's user, and that all have one again."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.app import recipes
from fleet.app.cluster import joined
from fleet.app.plans import check_asks
from fleet.errors import ConfigError
from fleet.ledger.happenings import Narrator
from fleet.protocol.decisions import Figures
from fleet.protocol.events import NodesWanted, RoomMissing
from fleet.protocol.records import DecisionMade
from fleet.settings.per_rank import room
from fleet.settings.run import RunSettings
from tests.golden.journals import Story
from tests.unit.test_live_settings import machine, written

FREE = {"a": {"CPU": 1.0}, "b": {}}
NODES = [
    {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 2.0}, "Labels": {"rack": "r1"}},
    {"NodeID": "b", "Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 3.5, "GPU": 2.0}, "Labels": {"rack": "r2"}},
    {"NodeID": "h", "Alive": True, "NodeManagerAddress": "10.0.0.9", "Resources": {"memory": 1.0}, "Labels": {}},
]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "nodes", lambda: NODES)
    monkeypatch.setattr(joined, "free_by_node", lambda: FREE)
    monkeypatch.setattr(joined, "run_names", lambda: ["run-first", "run-second"])


@pytest.mark.parametrize(
    ("resources", "slot", "ranks"),
    [({"CPU": 3.5}, {"CPU": 1.0}, 3), ({"CPU": 0.3}, {"CPU": 0.1}, 3), ({"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0}, 0), ({}, {"CPU": 1.0}, 0)],
)
def test_there_is_room_for_as_many_ranks_as_the_scarcest_resource_allows(resources: Any, slot: Any, ranks: int) -> None:
    assert room(resources, slot) == ranks


def test_too_few_slots_are_refused_with_what_is_there_and_who_has_the_rest(cluster: None) -> None:
    joined.check_room(1, {"CPU": 1.0}, {}, "second")
    with pytest.raises(ConfigError) as refused:
        joined.check_room(2, {"CPU": 1.0}, {}, "second")
    assert "room for 1 ranks, each takes 1 CPU (10.0.0.1: 1 of 2 free; 10.0.0.2: 0 of 3 free)" in str(refused.value)
    assert "held by first, or by others" in str(refused.value)


def test_nodes_whose_labels_are_others_have_no_room(cluster: None) -> None:
    joined.check_room(1, {"CPU": 1.0}, {"rack": "r1"}, "second")
    with pytest.raises(ConfigError, match=r"room for 0 ranks, each takes 1 CPU, where rack=!r1 \(10.0.0.2: 0 of 3 free\)"):
        joined.check_room(1, {"CPU": 1.0}, {"rack": "!r1"}, "second")


@pytest.mark.parametrize(
    ("key", "condition", "reason"), [("rack", "r9", "their values of rack are r1, r2"), ("rail", "in(a,b)", "none has a label rail")]
)
def test_a_label_that_nobody_has_is_refused_by_name(cluster: None, key: str, condition: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        joined.check_room(1, {"CPU": 1.0}, {"rack": "!none", key: condition} if key != "rack" else {key: condition}, "second")
    assert refused.value.field == "per_rank.labels" and refused.value.value == f"{key}={condition}"
    assert reason in refused.value.reason


def test_a_group_that_no_node_has_room_for_is_refused(cluster: None) -> None:
    """Nodes have room for two and three ranks."""
    joined.check_room(1, {"CPU": 1.0}, {}, "second", 3)
    with pytest.raises(ConfigError, match="no node has room for the 4 ranks that compute a shard together: a node has room for 3"):
        joined.check_room(1, {"CPU": 1.0}, {}, "second", 4)
    run = RunSettings(world=4, nodes=3, mesh={"tensor": 4})
    with pytest.raises(ConfigError, match="a node has room for 2"), recipes.local_cluster(run):
        pass


def test_too_few_gpus_are_told_by_node(cluster: None) -> None:
    with pytest.raises(ConfigError, match=r"each takes 1 CPU, 1 GPU \(10.0.0.2: 0 of 2 free\)"):
        joined.check_room(1, {"CPU": 1.0, "GPU": 1.0}, {}, "second")


def test_missing_room_is_journalled_and_told_and_so_is_its_end() -> None:
    run = machine()
    records = [
        record
        for event in (RoomMissing(2, "2 ranks have no place: each takes 1 CPU"), RoomMissing(0, "all ranks have a place again"))
        for record in written(list(run.handle(event, 1.0)))
        if isinstance(record, DecisionMade)
    ]
    assert [(record.policy, record.action) for record in records] == [("room", "warn"), ("room", "recovered")]
    narrator = Narrator()
    reported = [str(line) for record in [*Story(world=3).records, *records] for line in narrator.take(record, 0.0)]
    assert [line.partition("* ")[2] for line in reported[-2:]] == [
        "room: warn: 2 ranks have no place: each takes 1 CPU",
        "room: recovered: all ranks have a place again",
    ]


def test_nodes_that_are_asked_for_are_journalled_with_the_time_that_they_took() -> None:
    run = machine()
    events = (NodesWanted("ask", 2, "nodes are asked for"), NodesWanted("came", 2, "nodes came", 4.5))
    records = [one for event in events for one in written(list(run.handle(event, 1.0))) if isinstance(one, DecisionMade)]
    assert [(one.policy, one.action, one.payload) for one in records] == [
        ("nodes", "ask", Figures({"ranks": 2.0})), ("nodes", "came", Figures({"ranks": 2.0, "waited_s": 4.5}))
    ]  # fmt: skip
    narrator = Narrator()
    reported = [str(line) for record in [*Story(world=3).records, *records] for line in narrator.take(record, 0.0)]
    assert any("nodes are asked for" in line for line in reported) and any("nodes came" in line for line in reported)


def test_a_local_cluster_is_asked_for_nothing() -> None:
    check_asks("auto", True)
    check_asks(None, False)
    with pytest.raises(ConfigError, match="ask_for_nodes = True: a local cluster has the nodes"):
        check_asks("", True)
