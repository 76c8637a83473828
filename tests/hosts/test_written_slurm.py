"""The batch script for Slurm, carried out on hosts: the run ends, and all ends with the script. Of Slurm there is a stand-in."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.records import Committed, HistoryBegun, Record
from tests.support.deploy import write_files
from tests.support.host_runs import FAST, ON_THE_HEAD, TRAIN, copied, records_in, seen_in
from tests.support.host_store import HostStore, write
from tests.support.hosts import ROOT, Host, Hosts
from tests.support.journals import durable
from tests.support.slurm_stand_in import REQUEUED
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(1200)
CODE, PROGRAMS = "/srv/job", "/srv/slurm"
WAIT_S = 300.0
STAND_IN = str(ROOT / "tests" / "support" / "slurm_stand_in.py")


class Allocation:
    """Hosts that a job has to itself, with Slurm's variables, and one with the store that is none of them."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        outside, *self.hosts = hosts
        self.first, self.store = self.hosts[0], HostStore(outside)
        written = write_files(folder, self.spec(), "slurm")
        self.script = (written / "job.sbatch").read_text()
        for host in self.hosts:
            self.store.admit(host)
            self._prepare(host)

    def spec(self) -> dict[str, Any]:
        return {
            "name": "gpt", "script": "train.py", "store": self.store.url("runs"), "world": 2, "spares": 1,
            "arguments": ["--shards", "8", "--set", "pause_s=0.2", "--checkpoint", "2"], "activate": ". ~/environment.sh",
            "env": {"GREETING": "two words"},
            "nodes": {"count": len(self.hosts), "cpus": 2, "labels": {"pool": "train"}},
        }  # fmt: skip

    def _prepare(self, host: Host) -> None:
        write(host, "environment.sh", f"export PATH={sys.prefix}/bin:$PATH\n")
        write(host, f"{CODE}/train.py", TRAIN)
        for name in ("srun", "scontrol"):
            write(host, f"{PROGRAMS}/{name}", f'#!/bin/sh\nexec {sys.prefix}/bin/python {STAND_IN} {name} "$@"\n')
            host.run(["chmod", "755", f"{PROGRAMS}/{name}"])
        daemon = host.popen([host.python, STAND_IN, "slurmd"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        with daemon.stdout as said:
            assert said.readline() == "ready\n"

    def sbatch(self) -> subprocess.Popen[str]:
        """The script on the first host, as Slurm starts it; its output is that of its log."""
        write(self.first, f"{CODE}/job.sbatch", self.script)
        directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", self.script, re.MULTILINE))
        self.first.run(["rm", "-f", f"{CODE}/{REQUEUED}"])
        assert directives["nodes"] == str(len(self.hosts)) and directives["ntasks-per-node"] == "1"
        env = {
            "PATH": f"{PROGRAMS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_SUBMIT_DIR": CODE,
            "SLURM_JOB_ID": "42", "SLURM_JOBID": "42", "SLURM_JOB_NAME": directives["job-name"], "SLURM_JOB_NUM_NODES": directives["nodes"],
            "SLURM_NNODES": directives["nodes"], "SLURM_CPUS_PER_TASK": directives["cpus-per-task"], "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_JOB_NODELIST": self.listed(), "SLURM_NODELIST": self.listed(), "SLURMD_NODENAME": self.first.hostname,
            "SLURM_CPUS_ON_NODE": directives["cpus-per-task"], "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        }  # fmt: skip
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started: subprocess.Popen[str] = self.first.popen(["bash", f"{CODE}/job.sbatch"], env=env, cwd=CODE, **pipes)
        return started

    def scancel(self) -> None:
        """What ``scancel`` has Slurm do to the tasks of a job; see :mod:`tests.support.slurm_stand_in`."""
        self.first.run([self.first.python, STAND_IN, "scancel", *(host.hostname for host in self.hosts)], WAIT_S)

    def listed(self) -> str:
        numbers = [int(host.hostname.removeprefix("host")) for host in self.hosts]
        return f"host[{numbers[0]}-{numbers[-1]}]"

    def pids(self) -> dict[str, set[int]]:
        return {host.hostname: set(host.pids()) for host in self.hosts}


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    with Hosts(4, with_tree=range(4)) as hosts:
        yield Allocation(hosts, tmp_path)


def test_the_script_trains_to_the_end_and_all_ends_with_it(allocation: Allocation, tmp_path: Path) -> None:
    before = allocation.pids()
    script = allocation.sbatch()
    said, _ = script.communicate(timeout=WAIT_S)
    assert script.returncode == 0, said[-4000:]
    seen = seen_in(copied(allocation.first, f"{ON_THE_HEAD}/gpt", tmp_path))
    assert seen.status == "completed" and seen.report["closes"]
    assert allocation.pids() == before


def test_all_ends_when_the_job_is_cancelled_and_the_run_goes_on_when_it_is_handed_in_again(allocation: Allocation, tmp_path: Path) -> None:
    before, folder = allocation.pids(), f"{ON_THE_HEAD}/gpt"

    def records() -> list[Record]:
        return records_in(copied(allocation.first, folder, tmp_path))

    def kept() -> bool:
        return bool(durable(records()))

    script = allocation.sbatch()
    until(lambda: script.poll() is not None or kept(), "a checkpoint is in the store", WAIT_S, tick_s=1.0)
    assert script.poll() is None, script.communicate()[0][-4000:]
    allocation.scancel()
    said, _ = script.communicate(timeout=WAIT_S)
    assert script.returncode != 0, said[-4000:]
    assert allocation.pids() == before
    saved = durable(records())[-1].state.step
    for host in allocation.hosts:
        host.run(["touch", FAST])
    said, _ = (again := allocation.sbatch()).communicate(timeout=WAIT_S)
    assert again.returncode == 0, said[-4000:]
    seen, [begun] = seen_in(copied(allocation.first, folder, tmp_path)), [one for one in records() if isinstance(one, HistoryBegun)]
    assert seen.status == "completed" and seen.report["closes"]
    assert begun.from_state.step >= saved > 0
    assert allocation.pids() == before


def test_before_its_time_is_over_the_job_stops_the_run_which_keeps_its_last_step_and_is_queued_again(
    allocation: Allocation, tmp_path: Path
) -> None:
    before, folder = allocation.pids(), f"{ON_THE_HEAD}/gpt"

    def records() -> list[Record]:
        return records_in(copied(allocation.first, folder, tmp_path))

    script = allocation.sbatch()
    until(lambda: script.poll() is not None or bool(durable(records())), "a checkpoint is in the store", WAIT_S, tick_s=1.0)
    assert script.poll() is None, script.communicate()[0][-4000:]
    allocation.first.run(["pkill", "-USR1", "--full", f"^bash {CODE}/job.sbatch"])  # as Slurm does to the batch shell alone: --signal=B
    said, _ = script.communicate(timeout=WAIT_S)
    assert script.returncode != 0, said[-4000:]
    assert allocation.first.run(["cat", f"{CODE}/{REQUEUED}"]).stdout.strip() == "42"
    last = max(record.state for record in records() if isinstance(record, Committed))
    assert durable(records())[-1].state == last, said[-4000:]
    assert allocation.pids() == before
