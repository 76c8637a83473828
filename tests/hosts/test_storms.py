"""Links that are bad, a rank, the head or the store out of reach, and what keeps a run going struck: each on a real run on hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.protocol.records import Committed, DecisionMade, FaultRecord
from tests.hosts.test_losses import lost
from tests.support.host_runs import FOLDER, ON_THE_HEAD, Seen, Shell, wait_until_clean
from tests.support.host_store import HostStore, write
from tests.support.hosts import Host
from tests.support.ray_hosts import RayHosts
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)
COLUMNS = "at_s,component,kind,slot,node,duration_s,loss,delay_s,bytes_per_s"
LEFT = "nft list tables; ip -o link; ip rule"
SLOW = ("--set", "pause_s=0.15")


@pytest.fixture
def shell(ray_hosts: RayHosts, store: HostStore, tmp_path: Path) -> Iterator[Shell]:
    yield Shell(ray_hosts, store, tmp_path)
    hosts = list(ray_hosts.hosts)
    wait_until_clean(hosts)
    for host in hosts:
        assert not traces(host)


def through(shell: Shell, name: str, faults: tuple[str, ...], *options: str, steps: int = 120) -> Seen:
    """A run through these faults; each is struck, and healed."""
    write(shell.head, f"{FOLDER}/{name}.csv", "\n".join([COLUMNS, *faults, ""]))
    done = shell.run(name, *SLOW, "--set", f"steps={steps}", "--chaos", f"trace={name}.csv", *options, world=4, spares=1)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = shell.seen(f"{ON_THE_HEAD}/{name}")
    kinds = [fault.split(",")[2] for fault in faults]
    records = [record for record in seen.records if isinstance(record, FaultRecord)]
    assert [record.fault.kind for record in records if record.phase == "executed"] == kinds, [
        (record.fault.kind, record.phase, record.detail) for record in records
    ]
    assert seen.status == "completed" and seen.report["closes"]
    assert {one["verdict"] for one in seen.report["checks"]} <= {"ok", "unknown"}, seen.report["checks"]
    return seen


def last(seen: Seen, kind: str, phase: str) -> FaultRecord:
    """What the journal says of a fault in this phase."""
    of_kind = [record for record in seen.records if isinstance(record, FaultRecord) and record.fault.kind == kind]
    return next(record for record in reversed(of_kind) if record.phase == phase)


def test_bad_links_a_rail_and_a_head_out_of_reach_cost_time_and_no_rank(shell: Shell) -> None:
    """What was applied is on record; who is cut off for less than the time-outs is waited for."""
    faults = ("4,net,lossy_link,,0,6,0.02,,", "13,net,slow_link,,1,4,,0.02,", "20,net,rail,0,,3,,,", "27,net,isolate_coordinator,,,8,,,")
    seen = through(shell, "bad-links", faults, steps=160)
    assert not lost(seen.records)
    assert "packets (" in last(seen, "lossy_link", "healed").detail and "100.00%" in last(seen, "slow_link", "healed").detail
    assert len(last(seen, "rail", "executed").members) >= 2


def test_a_rank_that_is_cut_off_is_given_up_in_the_end(shell: Shell) -> None:
    """All wait for all, and nobody can tell for whom: others may be given up before it."""
    seen = through(shell, "no-rank", ("5,net,isolate_rank,1,,60,,,",), "--config", "timeouts.progress_s=12", steps=200)
    assert lost(seen.records) >= set(last(seen, "isolate_rank", "executed").members)


def test_a_store_that_is_away_is_outlived_and_told(shell: Shell) -> None:
    options = ("--checkpoint", "1", "--config", "timeouts.store_s=3")
    faults = ("5,net,store_refuses,,,12,,,", "25,net,store_slow,,,5,,0.1,", "33,net,store_denies,,,5,,,", "41,net,store_tears,,,6,,,")
    seen = through(shell, "no-store", faults, *options, steps=330)
    assert not lost(seen.records)
    reported = [record.action for record in seen.records if isinstance(record, DecisionMade) and record.policy == "store"]
    assert reported[0] == "warn" and reported[-1] == "recovered" and set(reported) == {"warn", "recovered"}, "again as more would be lost"
    assert "recovered recovered" not in " ".join(reported)
    assert seen.report["counts"]["checkpoints"]["durable"] > 3
    assert "refused with 403" in last(seen, "store_denies", "healed").detail
    assert "cut off in the middle" in last(seen, "store_tears", "healed").detail


def test_who_keeps_the_run_going_is_struck_and_the_run_goes_on(shell: Shell) -> None:
    faults = (
        "4,host,busy_cores,,0,4,,,", "12,host,stop_coordinator,,,3,,,", "20,host,kill_coordinator,,,,,,", "30,host,stop_gcs,,,8,,,",
        "42,host,stop_raylet,,1,5,,,", "50,host,stop_controller,,,5,,,", "60,host,kill_agent,,0,,,,",
        "72,host,shm_full,,1,5,,,",
    )  # fmt: skip
    resize(shell, "700m")
    try:
        seen = through(shell, "keepers", faults, steps=520)
    finally:
        resize(shell, "8g")
    assert lost(seen.records) == set(last(seen, "kill_agent", "executed").members), "only the ranks of the agent that was killed"


def resize(shell: Shell, size: str) -> None:
    """/dev/shm of the workers."""
    for worker in shell.cluster.workers:
        worker.run(["mount", "-o", f"remount,size={size}", "/dev/shm"])


def test_a_wall_clock_that_steps_by_an_hour_costs_nothing(shell: Shell) -> None:
    """On one host, in the middle of a run; monotonic clocks go on."""
    odd = shell.cluster.workers[0]
    odd.has_calendar = True
    shell.cluster.replace(odd)
    try:
        with shell.running(*shell.run_arguments("clock", *SLOW, "--set", "steps=160")):
            until(lambda: committed(shell, "clock") > 20, "it trains", 120, tick_s=1.0)
            odd.set_calendar(3600)
            said = odd.run(["date", "+%s"]).stdout
            until(lambda: committed(shell, "clock") >= 160, "it goes on to its end", 240, tick_s=1.0)
        assert abs(int(said) - 3600 - time.time()) < 60
        end(shell, "clock", "attach")
        seen = shell.seen(f"{ON_THE_HEAD}/clock")
        assert seen.status == "completed" and seen.report["closes"] and not lost(seen.records)
    finally:
        odd.has_calendar = False
        shell.cluster.replace(odd)


def end(shell: Shell, name: str, *commands: str) -> None:
    """Whoever began the run was killed: another attaches, so that it need not be kept any longer."""
    for command in commands:
        shell.fleet(command, name, "--address", shell.cluster.head.address)


def committed(shell: Shell, name: str) -> int:
    return max((each.state.step for each in shell.records(f"{ON_THE_HEAD}/{name}") if isinstance(each, Committed)), default=0)


def test_nothing_is_left_on_a_host_when_all_but_the_watchdogs_are_killed(shell: Shell) -> None:
    """In the middle of faults of the network, and of a stopped daemon."""
    faults = ("4,net,slow_link,,0,300,,0.02,", "4.2,host,stop_raylet,,0,300,,,", "4.4,host,busy_cores,,0,300,,,")
    write(shell.head, f"{FOLDER}/killed.csv", "\n".join([COLUMNS, *faults, ""]))
    more = ("--set", "steps=100000", "--chaos", "trace=killed.csv")
    with shell.running(*shell.run_arguments("killed", *SLOW, *more, world=4, spares=1)):
        until(lambda: any(injected(worker) for worker in shell.cluster.workers), "all three have struck", 120, tick_s=1.0)
        [victim] = [worker for worker in shell.cluster.workers if injected(worker)]
        others = [line.split()[0] for line in processes(victim).splitlines()[1:] if not WATCHDOGS.search(line)]
        victim.run(
            ["sh", "-c", f"kill -KILL {' '.join(pid for pid in others if pid != '1')}"], check=False
        )  # some have ended by themselves
        try:
            begin_s = time.monotonic()
            until(lambda: not traces(victim), "nothing is left", 5)
            print(f"nothing is left after {time.monotonic() - begin_s:.1f} s")
        finally:
            end(shell, "killed", "stop", "attach")
            shell.cluster.replace(victim)


WATCHDOGS = re.compile("chaos/relay.py|chaos/signaller.py")


def processes(host: Host) -> str:
    return host.run(["ps", "-eo", "pid,args", "-ww"]).stdout


def injected(host: Host) -> bool:
    """A relay, what stops Ray's daemon, and what keeps two cores busy."""
    return len(WATCHDOGS.findall(processes(host))) >= 4


def traces(host: Host) -> list[str]:
    """What chaos has left on a host."""
    return re.findall(r"fleet_\w+|: fleet\w+|fwmark|chaos/\w+", host.run(["sh", "-c", LEFT]).stdout + processes(host))
