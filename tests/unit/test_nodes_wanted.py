"""What a driver makes of its cluster before it asks for nodes: whose places go, what is avoided, and which agents are let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.app import nodes_wanted
from fleet.app.nodes_wanted import NodeAsker
from fleet.protocol.events import NodesWanted
from policies.node_requests import IDLE_S

Patch = pytest.MonkeyPatch


class World:
    """Nodes a, b and c with a place each; the run has agents on a and b, which are its nodes 0 and 1."""

    def __init__(self, patch: Patch) -> None:
        self.held, self.kept, self.free = Counter(a=1, b=1), Counter[str](), {"c": {"CPU": 0.0}}
        self.there, self.going, self.cut_off, self.now_s = ["a", "b"], list[str](), set[str](), 0.0
        self.asked, self.reported, self.gone = list[tuple[int, tuple[str, ...]]](), list[NodesWanted](), list[int]()
        internals: dict[str, Any] = {
            "unplaced": lambda: self.held[""],
            "places_of_job": lambda asked=False: self.kept if asked else self.held,
            "free_by_node": lambda: self.free,
        }
        for name, instead in internals.items():
            patch.setattr(nodes_wanted.ray_internals, name, instead)
        patch.setattr(nodes_wanted, "chosen", lambda selector: [{"NodeID": name} for name in self.there])
        patch.setattr(nodes_wanted, "PlaceGroup", lambda slot, selector: SimpleNamespace(ask=self._ask))
        patch.setattr(nodes_wanted.ray, "get", lambda call, timeout: call())
        self.agents: dict[int, Any] = {0: None, 1: None}
        self.coordinator = SimpleNamespace(
            going_nodes=SimpleNamespace(remote=lambda: lambda: self.going),
            report=SimpleNamespace(remote=lambda event: lambda: self.reported.append(event)),
        )
        cluster: Any = SimpleNamespace(slot={"CPU": 1.0}, selector={"rack": "a"}, index_of={"a": 0, "b": 1, "c": 2}.get)
        self.asker = NodeAsker(self, cluster, SimpleNamespace(now_s=lambda: self.now_s))

    def _ask(self, places: int, avoid: Sequence[str] = ()) -> None:
        self.asked.append((places, tuple(avoid)))

    def is_cut_off(self, name: str) -> bool:
        return name in self.cut_off

    def release(self, index: int) -> None:
        self.gone.append(index)

    def look(self, now_s: float) -> tuple[int, tuple[str, ...]]:
        self.now_s = now_s
        self.asker.look()
        return self.asked[-1]


@pytest.fixture
def world(monkeypatch: Patch) -> World:
    return World(monkeypatch)


def test_places_of_a_node_that_goes_are_asked_for_elsewhere_and_told(world: World) -> None:
    assert world.look(0.0) == (0, ())
    world.going = ["b"]
    assert world.look(1.0) == (1, ("b",))
    world.there, world.kept = ["a", "b", "c"], Counter(c=1)
    assert world.look(4.5) == (1, ("b",))
    assert world.asker.kept() == {"c"}, "it gets an agent before its ranks come"
    world.there, world.held, world.kept = ["a", "c"], Counter(a=1, c=1), Counter()
    assert world.look(6.0) == (0, ())
    assert [(one.action, one.ranks, one.waited_s) for one in world.reported] == [("ask", 1, None), ("came", 1, 3.5)]
    assert "each takes 1 CPU, where rack=a" in world.reported[0].detail and "3.5 s after" in world.reported[1].detail
    world.asker.close()
    assert world.asked[-1] == (0, ())


def test_a_node_that_chaos_has_cut_off_comes_back_and_is_not_replaced(world: World) -> None:
    world.going, world.cut_off = ["b"], {"b"}
    assert world.look(0.0) == (0, ()) and world.reported == []


def test_an_agent_where_the_run_has_no_place_is_let_go_after_a_while(world: World) -> None:
    world.held = Counter(a=2)
    world.look(0.0)
    world.look(IDLE_S / 2)
    assert world.gone == []
    world.look(IDLE_S)
    assert world.gone == [1]
