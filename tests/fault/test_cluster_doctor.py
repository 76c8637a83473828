"""``fleet doctor --cluster`` on a real cluster: its map by labels, what it cannot survive, and links that were measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import domains
from actors.link_survey import LinkSurvey
from fleet.app.cluster.local import LocalCluster, node_resource
from fleet.app.cluster.reach import nodes_seen, reached
from fleet.protocol.domains import VARIABLE
from policies.links import admit, pairs, rounds

LIMIT_S = 120.0
LABELS = [{"rack": "r1"}, {"rack": "r1"}, {"rack": "r2"}]


pytestmark = pytest.mark.usefixtures("unconnected")


@pytest.fixture(scope="module")
def cluster(unconnected: None) -> Iterator[LocalCluster]:
    with LocalCluster(3, slots_per_node=2, labels=LABELS) as there:
        yield there


def doctor(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleet", "doctor", "--cluster", "--address", cluster.address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_map_and_what_cannot_be_survived(cluster: LocalCluster) -> None:
    answer = doctor(cluster, "--json", "--no-gather", "--world", "4", "--spares", "1", "--config", "domains=rack")
    assert answer.returncode == 0, answer.stderr
    reported: dict[str, Any] = json.loads(answer.stdout)
    paths = [node["path"] for node in reported["nodes"] if node["slots"]]
    assert sorted(paths) == ["r1", "r1", "r2"]
    [head] = [node for node in reported["nodes"] if not node["slots"]]
    assert head["missing"] == ["rack"]
    risks = {risk["domain"]: risk for risk in reported["risks"]}
    assert {name: risk["slots"] for name, risk in risks.items()} == {"r1": 4, "r2": 2}
    # Five slots on three nodes: the sixth, which stays free, is on the last node that Ray names, in either rack.
    assert sorted(risk["room"] for risk in risks.values()) == [0, 1]
    assert all(risk["survives"] and risk["chunks"] == 0 for risk in risks.values())
    assert reported["links"] == {"there": 6, "measured": []}


def test_too_few_slots_are_said_and_are_a_failed_check(cluster: LocalCluster) -> None:
    answer = doctor(cluster, "--no-gather", "--world", "7", "--config", "domains=rack")
    assert answer.returncode == 1
    assert "world 7 and 0 spares take 7 slots, and the cluster has 6" in answer.stdout
    assert "r1" in answer.stdout and "without label rack" in answer.stdout


def test_links_are_measured_between_all_nodes(cluster: LocalCluster) -> None:
    answer = doctor(cluster, "--json")
    reported: dict[str, Any] = json.loads(answer.stdout)
    assert answer.returncode == (1 if reported["outliers"] else 0), answer.stderr
    assert len(reported["links"]["measured"]) == reported["links"]["there"] == 6
    for link in reported["links"]["measured"]:
        assert not link["error"], link
        assert link["round_trip_s"] > 0 and link["there_bytes_per_s"] > 1e6 and link["back_bytes_per_s"] > 1e6


def test_the_processes_of_a_node_learn_its_domains_from_its_labels(cluster: LocalCluster) -> None:
    def asked(given: str) -> str:
        os.environ[VARIABLE] = given
        domains.settle(("host", "rack"))
        return os.environ[VARIABLE]

    with reached(cluster.address):
        nodes = [node for node in nodes_seen(("host", "rack")) if node.slots]
        pinned = [
            ray.remote(asked).options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(n.id, soft=False)) for n in nodes
        ]
        assert ray.get([task.remote("") for task in pinned], timeout=LIMIT_S) == [node.path for node in nodes]
        assert ray.get(pinned[0].remote("feed-1"), timeout=LIMIT_S) == "feed-1", "whoever has said it is believed"
    assert {node.path.split("/")[0] for node in nodes} == {"r1", "r2"}


def test_a_node_that_is_lost_while_links_are_measured_is_kept_out_for_it(cluster: LocalCluster) -> None:
    """The last test of this module: its node does not come back."""
    with reached(cluster.address):
        nodes = nodes_seen(("host",))
        names = [node.name for node in nodes]
        lost = next(node.name for node in nodes if node.id == node_id_of(0))
        with LinkSurvey({node.name: (node.id, node.address) for node in nodes}) as survey:
            assert set(survey.variable(VARIABLE).values()) == {""}
            assert cluster.lose(0) is None
            links = survey.measure(rounds(pairs(names), 2), trips=5, bulk_s=0.01)
    assert {link.ends for link in links if link.error} == {link.ends for link in links if lost in link.ends}
    assert admit(lost, links).action == "keep_out"


def node_id_of(index: int) -> str:
    return next(str(node["NodeID"]) for node in ray.nodes() if node_resource(index) in node["Resources"])
