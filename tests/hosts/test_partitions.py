"""Chaos cuts hosts off on a real cluster: the run goes on with the same bits, whichever way was chosen, and the cluster keeps its nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.protocol.records import FaultRecord
from fleet.simulation.rng import stream
from tests.hosts.test_losses import check_nothing_of_the_lost, lost, waited
from tests.support.host_runs import FOLDER, ON_THE_HEAD, Seen, Shell, wait_until_clean
from tests.support.host_store import HostStore, write
from tests.support.hosts import ROOT
from tests.support.ray_hosts import RayHosts

pytestmark = pytest.mark.timeout(1200)
COLUMNS = "at_s,component,kind,slot,node,duration_s"
BLIPS = ("4,switch,partition,,0,0.9", "9,switch,flap,,1,3", "16,switch,one_way,,2,0.9")
GPT_STEPS = 500
LONG = ("5,switch,partition,,0,8", "40,switch,one_way,,1,8")


@pytest.fixture
def shell(ray_hosts: RayHosts, store: HostStore, tmp_path: Path) -> Iterator[Shell]:
    yield Shell(ray_hosts, store, tmp_path)
    wait_until_clean(list(ray_hosts.hosts))
    assert sorted(ray_hosts.head.alive()) == sorted(host.address for host in ray_hosts.hosts), "chaos takes no node out of Ray"


def through(shell: Shell, name: str, faults: tuple[str, ...], *options: str) -> Seen:
    """A run of two ranks a node through these faults, twin and all."""
    write(shell.head, f"{FOLDER}/{name}.csv", "\n".join([COLUMNS, *faults, ""]))
    slow = ("--set", "steps=120", "--set", "pause_s=0.15")
    done = shell.run(name, *slow, "--chaos", f"trace={name}.csv", *options, world=5, spares=0)
    assert done.returncode == 0, done.stderr[-3000:]
    return shell.seen(f"{ON_THE_HEAD}/{name}")


def executed(seen: Seen) -> list[str]:
    return [each.fault.kind for each in seen.records if isinstance(each, FaultRecord) and each.phase == "executed"]


def check(seen: Seen, faults: tuple[str, ...]) -> None:
    assert executed(seen) == [fault.split(",")[2] for fault in faults]
    assert seen.status == "completed" and seen.report["closes"]
    assert {one["verdict"] for one in seen.report["checks"]} <= {"ok", "unknown"}, seen.report["checks"]
    check_nothing_of_the_lost(seen.records)


def test_blips_cost_no_rank(shell: Shell) -> None:
    seen = through(shell, "blips", BLIPS)
    check(seen, BLIPS)
    assert not lost(seen.records) and not waited(seen.records)


def test_go_on_gives_up_who_is_cut_off_and_stall_does_not(shell: Shell) -> None:
    went_on, stalled = through(shell, "went-on", LONG), through(shell, "stalled", LONG, "--config", "on_partition=stall")
    for seen in (went_on, stalled):
        check(seen, LONG)
    assert len(lost(went_on.records)) >= 2 and waited(went_on.records).count("wait") == 0
    assert not lost(stalled.records) and waited(stalled.records).count("wait") == 2
    assert went_on.digest == stalled.digest


def at_random(seed: int, count: int) -> tuple[str, ...]:
    """So many cuts of one of three nodes, one after the other: short ones, and such as last longer than a node may be silent."""
    draw, at_s, faults = stream(seed, "partitions"), 6.0, list[str]()
    for _ in range(count):
        kind = draw.choice(("partition", "partition", "one_way", "flap"))
        lasts_s = round(draw.choice((draw.uniform(0.3, 2.0), draw.uniform(5.0, 7.0))), 2)
        faults.append(f"{at_s:.2f},switch,{kind},,{draw.randrange(3)},{lasts_s}")
        at_s += lasts_s + draw.uniform(5.0, 9.0)  # for the run to train again
    return tuple(faults)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("choice", ["go-on", "stall"])
def test_twenty_random_partitions_of_a_gpt_run_leave_its_bits_as_they_are(shell: Shell, choice: str) -> None:
    """They are those of its twin, and so of the other choice."""
    faults = at_random(7, 20)
    options = ("--config", f"on_partition={choice}", "--set", f"steps={GPT_STEPS}", "--twin", "--expect", "twin")
    write(shell.head, f"{FOLDER}/{choice}.csv", "\n".join([COLUMNS, *faults, ""]))
    script = str(ROOT / "examples" / "gpt.py")
    done = shell.run(f"gpt-{choice}", "--chaos", f"trace={choice}.csv", *options, script=script, timeout_s=1100.0)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = shell.seen(f"{ON_THE_HEAD}/gpt-{choice}")
    check(seen, faults)
    assert seen.report["other_ratio"] <= 0.01
    assert choice == "go-on" or not lost(seen.records)
