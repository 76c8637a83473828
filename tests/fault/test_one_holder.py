"""One run, one record, as users type it: shells race for a run, one takes it away, and a holder's host is killed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet.app.plans import final_digest
from fleet.host.processes import calling
from fleet.protocol.causes import EndWhy
from fleet.protocol.exit_codes import Exit
from fleet.protocol.records import RunEnded
from storage.backends.files import open_files
from storage.checkpoint.store import CheckpointStore
from tests.fault.test_bad_luck import STEPS, fault_free
from tests.support.journals import NAME, records
from tests.support.processes import begin
from tests.support.seaweed import SeaweedServer
from tests.support.waiting import until

__all__ = ["fault_free"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280.0
SCRIPT = """
from tests.support.trains import plain

def train(run):
    plain(run)
"""
ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
"""A host of its own, as far as others can see its processes."""


class Shells:
    """Several folders, as on several hosts, with one store."""

    def __init__(self, folder: Path, storage: str, environment: Mapping[str, str]) -> None:
        self.folder, self.storage, self.url = folder, storage, f"{storage}/job"
        self._environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        self._begun: list[subprocess.Popen[str]] = []

    def type(self, shell: str, *words: str, alone: bool = False) -> subprocess.Popen[str]:
        cwd = self.folder / shell
        cwd.mkdir(exist_ok=True)
        (cwd / "job.py").write_text(SCRIPT)
        command = calling("fleet.app.cli.main", "main", "run", *words, "--storage", self.storage, "--json", "report.json")
        process = begin([*(ALONE if alone else ()), *command], cwd, self._environment)
        self._begun.append(process)
        return process

    def first(self, alone: bool = False, pause_s: float = 0.3) -> subprocess.Popen[str]:
        options = ("--set", f"steps={STEPS}", "--set", f"pause_s={pause_s}", "--set", "norm=layer", "--set", f"flags={self.folder}")
        sizes = ("--world", "2", "--nodes", "1", "--shards", "8", "--checkpoint", "1s")
        process = self.type("first", "job.py", *sizes, *options, "--name", "job", alone=alone)
        until(lambda: len(CheckpointStore(self.url).list()) > 0 or process.poll() is not None, "a checkpoint is durable", LIMIT_S)
        assert process.poll() is None, process.communicate()
        return process

    def journal(self, shell: str) -> Path:
        return self.folder / shell / "runs" / "job" if "://" in self.storage else Path(self.url)

    def close(self) -> None:
        for process in self._begun:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=LIMIT_S)


@contextmanager
def shells(folder: Path, storage: str, environment: Mapping[str, str]) -> Iterator[Shells]:
    those = Shells(folder, storage, environment)
    try:
        yield those
    finally:
        those.close()


def on_s3(s3: SeaweedServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for variable, value in s3.environment.items():
        monkeypatch.setenv(variable, value)
    return s3.url(folder.name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["file", "s3"])
def test_of_three_resumes_of_a_run_whose_host_was_killed_one_goes_on(
    s3: SeaweedServer, tmp_path: Path, fault_free: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """No option tells them to take it over: they see that the holder's stamp stands still."""
    storage = on_s3(s3, tmp_path, monkeypatch) if place == "s3" else str(tmp_path / "runs")
    with shells(tmp_path, storage, {}) as those:
        those.first(alone=True).kill()
        three = {shell: those.type(shell, "--resume-or-start", "job") for shell in ("a", "b", "c")}
        said = {shell: process.communicate(timeout=LIMIT_S)[0] for shell, process in three.items()}
        codes = {shell: process.returncode for shell, process in three.items()}
        assert sorted(codes.values()) == [Exit.DONE, Exit.REFUSED, Exit.REFUSED], said
        for shell, words in said.items():
            flat = " ".join(words.split())
            assert "does it still live?" in flat, words
            assert (codes[shell] == Exit.REFUSED) == ("--resume = 'job': it goes on:" in flat), words
        [winner] = [shell for shell, code in codes.items() if code == Exit.DONE]
        assert final_digest(those.journal(winner)) == fault_free


@pytest.mark.timeout(600)
def test_a_run_that_goes_on_is_refused_and_one_that_is_taken_over_writes_nothing_more(
    s3: SeaweedServer, tmp_path: Path, fault_free: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shells(tmp_path, on_s3(s3, tmp_path, monkeypatch), {}) as those:
        first = those.first(pause_s=2.0)
        said, _ = (second := those.type("second", "--resume", "job")).communicate(timeout=LIMIT_S)
        flat = " ".join(said.split())
        assert second.returncode == Exit.REFUSED and f"it goes on: process {first.pid} of " in flat and "add --take-over" in flat, said
        third = those.type("third", "--resume", "job", "--take-over")
        said, _ = first.communicate(timeout=LIMIT_S)
        assert first.returncode == Exit.STOPPED and f"taken over by process {third.pid} of " in " ".join(said.split()), said
        [ended] = [record for record in records(those.journal("first")) if isinstance(record, RunEnded)]
        assert ended.why is EndWhy.TAKEN_OVER
        said, _ = third.communicate(timeout=LIMIT_S)
        assert third.returncode == Exit.DONE, said
        assert final_digest(those.journal("third")) == fault_free
        assert open_files(those.url).read(NAME) == (those.journal("third") / NAME).read_bytes(), "the record is that of the third"
        store = CheckpointStore(those.url)
        assert store.manifest(store.list()[-1]).epoch == 1
        report = json.loads((tmp_path / "third" / "report.json").read_text())
        assert report["closes"] and report["steps"] == STEPS
