"""Runs on a Ray cluster of several hosts, typed on one of them as a user does, what their journals say, and what they leave behind."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.host.follow import open_report
from fleet.host.journal import read_journal
from fleet.protocol.records import Record, RunEnded
from tests.support.host_store import HostStore, write
from tests.support.hosts import HOME, Host
from tests.support.ray_hosts import RayHosts
from tests.support.waiting import until

FOLDER, SCRIPT, FAST = "/srv/job", "train.py", "/srv/fast"
ON_THE_HEAD = f"{HOME}/.fleet/runs"
"""Where the cluster keeps what it has of its runs."""
RUN_S = 420.0
STEPS, SHARDS = 200, 8
TRAIN = f"""
import os, socket, time
import torch
import fleet

def train(run):
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    state, pause_s = run.track(model=model, optimizer=optimizer), float(run.options.get("pause_s", "0"))
    print("trains on", socket.gethostname(), flush=True)
    for step in run.steps(state, total=int(run.options.get("steps", "{STEPS}"))):
        for batch in step.batches(data, batch_size=16):
            if pause_s and not os.path.exists("{FAST}"):
                time.sleep(pause_s)
            step.backward(model(batch).square().mean())
        step.commit()
    run.save("model.pt")
"""
"""Steps take a while with the option ``pause_s``, until the file FAST is on the host of a rank. The bits do not depend on it."""

_RAYS_OWN = ("IDLE", "DashboardAgent", "RuntimeEnvAgent")
_OURS = re.compile(rf"\bray::(?!{'|'.join(_RAYS_OWN)})\w+|-m (?:fleet|actors)\.[\w.]+|bin/fleet \w+")


@dataclass(frozen=True)
class Seen:
    """What the journal of a run says that has ended."""

    records: list[Record]
    report: dict[str, Any]

    @property
    def status(self) -> str:
        return str(self.report["status"])

    @property
    def digest(self) -> str:
        """Of the final state."""
        return next(record.digest for record in reversed(self.records) if isinstance(record, RunEnded))


def copied(host: Host, folder: str, copies: Path) -> Path:
    """A copy below ``copies`` of the journal of the run in ``folder`` of ``host``, as it is now; empty when there is none."""
    copy = copies / f"{folder.replace('/', '-').strip('-')}.jsonl"
    copy.write_text(host.run(["sh", "-c", f"cat '{folder}/journal.jsonl' || true"]).stdout)
    return copy


def records_in(path: Path) -> list[Record]:
    """What a journal says that may still be written."""
    return list(read_journal(path, on_torn=lambda message: None)) if path.stat().st_size else []


def seen_in(path: Path) -> Seen:
    """What the journal of an ended run says; an undamaged one, as everything is read."""
    report, damage = open_report(path)
    assert not damage
    return Seen(list(read_journal(path)), report.to_dict())


class Shell:
    """A user's shell on the head of a cluster, in a folder with a script, with a store that all hosts reach."""

    def __init__(self, cluster: RayHosts, store: HostStore, copies: Path) -> None:
        self.cluster, self.store, self.head = cluster, store, cluster.head.host
        self._copies = copies
        write(self.head, f"{FOLDER}/{SCRIPT}", TRAIN)

    def fleet(self, *arguments: str, on: Host | None = None, timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
        """``fleet ARGUMENTS`` to its end, whatever that is."""
        host = on or self.head
        return host.run(["fleet", *arguments], timeout_s, check=False, cwd=FOLDER if host is self.head else HOME)

    def run_arguments(self, name: str, *options: str, script: str = SCRIPT, world: int = 4, spares: int = 1) -> list[str]:
        """A run on the cluster with its files in the store; ``options`` may say otherwise. Where they have faults, those are allowed."""
        options = (*options, "--allow-chaos") if "--chaos" in options else options
        slots = ["--world", str(world), "--spares", str(spares), "--shards", str(SHARDS)]
        return [
            "run",
            script,
            "--address",
            self.cluster.head.address,
            "--name",
            name,
            *slots,
            "--storage",
            self.store.url("runs"),
            *options,
        ]

    def run(self, name: str, *options: str, timeout_s: float = RUN_S, **settings: Any) -> subprocess.CompletedProcess[str]:
        """``fleet run``, to its end."""
        return self.fleet(*self.run_arguments(name, *options, **settings), timeout_s=timeout_s)

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """``fleet ARGUMENTS`` beside the block; killed when that ends."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.head.popen(["fleet", *arguments], cwd=FOLDER, text=True, **pipes)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def script(self, text: str, *command: str) -> dict[str, Any]:
        """A Python program in the folder, ended well; what it has printed last, as JSON."""
        write(self.head, f"{FOLDER}/program.py", text)
        said = self.head.run([*(command or [self.head.python]), "program.py"], RUN_S, cwd=FOLDER)
        found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
        return found

    def journal(self, folder: str, host: Host | None = None) -> Path:
        """A copy of the journal as it is now; empty when there is none. ``folder``: of the run, on the head unless ``host`` is given."""
        return copied(host or self.head, folder, self._copies)

    def records(self, folder: str) -> list[Record]:
        """What a run's journal says so far."""
        return records_in(self.journal(folder))

    def seen(self, folder: str) -> Seen:
        """What the journal of an ended run says; an undamaged one, as everything is read."""
        return seen_in(self.journal(folder))

    def go_fast(self) -> None:
        """Ranks pause no longer, on hosts that are up and reached by this process at least."""
        for worker in self.cluster.workers:
            worker.run(["touch", FAST])

    def go_slowly(self) -> None:
        for worker in self.cluster.workers:
            worker.run(["rm", "-f", FAST])


def processes_on(host: Host) -> list[str]:
    """Processes of runs on a host."""
    lines = host.run(["ps", "-eo", "args", "-ww"]).stdout.splitlines()
    return [found[0] for line in lines if "<defunct>" not in line and (found := _OURS.search(line))]


def ours_on(host: Host) -> list[str]:
    """What runs have on a host: processes, and folders in its memory."""
    return processes_on(host) + host.run(["find", "/dev/shm", "/tmp", "-maxdepth", "1", "-name", "fleet*"]).stdout.split()


def kept_on(host: Host) -> list[str]:
    """Names of the runs that the cluster keeps on a host."""
    return sorted(
        host.run(
            ["sh", "-c", f"mkdir -p {ON_THE_HEAD} && find {ON_THE_HEAD} -mindepth 1 -maxdepth 1 -type d -printf '%f\\n'"]
        ).stdout.split()
    )


def wait_until_clean(hosts: Sequence[Host]) -> None:
    """Until no host has anything of a run. Raises TimeoutError, with what is left."""
    left: dict[str, list[str]] = {}

    def clean() -> bool:
        left.update({host.hostname: ours_on(host) for host in hosts})
        return not any(left.values())

    try:
        until(clean, "nothing of a run is left", 90, tick_s=0.5)
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {left}") from None
