"""Two racks of two nodes: groups lie in a rack each; one is lost at once, as one loss, and its replacements lie where there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.app.cluster.local import LocalCluster
from fleet.app.plans import RunPlan, final_digest
from fleet.app.recipes import LiveRun
from fleet.app.report import build_report, render_table
from fleet.errors import ConfigError
from fleet.ledger.happenings import Narrator
from fleet.protocol.decisions import DomainLost, Lacking
from fleet.protocol.records import DecisionMade, HistoryBegun, ProcessLost, ProcessUp, Record, ViewPublished
from fleet.protocol.types import View
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import FAST, settings
from tests.fault.test_drain import Going
from tests.support import trains
from tests.support.undisturbed import Undisturbed

OPTIONS = {"steps": "60", "norm": "layer"}
RACKS = ["a", "b", "a", "b"]
"""Of the nodes by index: neighbours are in different racks, so that slots in their order are no groups."""


@pytest.fixture
def racks(unconnected: None) -> Iterator[LocalCluster]:
    with LocalCluster(4, slots_per_node=2, labels=[{"fleet.dev/rack": rack} for rack in RACKS]) as there:
        there.connect()
        yield there


def plan(folder: Path, domains: tuple[str, ...]) -> RunPlan:
    chosen = RunSettings(
        world=4, nodes=4, shards=8, replica_size=2, domains=domains, timeouts=FAST,
        options=OPTIONS | {"flags": str(folder), "pause_s": "0.4"}, checkpoint=CheckpointSettings(policy="fixed", interval_s=60.0),
    )  # fmt: skip
    return RunPlan(name="run", folder=folder / "run", settings=chosen, train=trains.plain)


def homes(kept: list[Record], live: LiveRun, view: View) -> list[str]:
    """The rack of each view rank."""
    rack_of = {place.id: RACKS[index] for index, place in live.places.items()}
    node_of = {one.member: one.process.node for one in kept if isinstance(one, ProcessUp)}
    return [rack_of[node_of[member]] for member in view.members]


def views(kept: list[Record]) -> list[View]:
    return [one.view for one in kept if isinstance(one, ViewPublished)]


def payloads(kept: list[Record], kind: type) -> list[DecisionMade]:
    return [one for one in kept if isinstance(one, DecisionMade) and isinstance(one.payload, kind)]


def test_a_rack_is_lost_as_one_and_what_the_new_placement_lacks_is_said(
    racks: LocalCluster, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    from tests.support.journals import records

    truth = undisturbed(lambda folder: settings(folder, world=1, options=OPTIONS))
    going = Going(plan(tmp_path, ("rack=fleet.dev/rack",)), racks)
    full = next(view for view in views(records(going.folder)) if len(view.members) == 4)
    first = homes(records(going.folder), going.live, full)
    assert sorted((first[:2], first[2:])) == [["a", "a"], ["b", "b"]], "each group is in one rack"
    assert racks.lose(0) is None
    assert racks.lose(2) is None
    going.wait(lambda kept: bool(payloads(kept, DomainLost)), "the rack is missed")
    going.wait(lambda kept: len(views(kept)[-1].members) == 4 and views(kept)[-1].generation > full.generation, "all are replaced")
    result = going.end()
    assert result.status == "completed", result
    assert final_digest(going.folder) == truth
    check_reported(records(going.folder))


def check_reported(kept: list[Record]) -> None:
    (lost,) = payloads(kept, DomainLost)
    assert lost.reason == "rack a is lost: 2 nodes with 2 ranks, all of them in the view"
    assert sum(isinstance(one, ProcessLost) for one in kept) == 2 and not any(isinstance(one, HistoryBegun) for one in kept)
    narrator = Narrator()
    lines = [line.text for place, record in enumerate(kept) for line in narrator.take(record, place / 1e3)] + [
        one.text for one in narrator.rest()
    ]
    assert [line for line in lines if "is lost" in line] == [lost.reason], "one line, and none for each rank"
    last = payloads(kept, Lacking)[-1]
    assert last.action == "loosen"
    assert last.reason == "all copies of ranks 0, 1, 2, 3 share rack b with it: its loss leaves the durable checkpoint alone"
    report = build_report(kept)
    (incident,) = [item for item in report.summary.incidents if item.members]
    assert (len(incident.members), incident.domain) == (2, "rack a: 2 nodes, 2 ranks") and incident.cost_s > 0
    assert "rack a: 2 nodes, 2 ranks" in render_table(report)
    assert report.summary.closes


def test_a_label_that_no_node_has_is_refused_before_any_process_of_the_run(racks: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"domains = 'block': no node has a label block; they have fleet.dev/rack"):
        LiveRun(plan(tmp_path, ("rack=fleet.dev/rack", "block")), racks)
    assert not (tmp_path / "run").exists()
