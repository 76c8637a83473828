"""The journal: what is written comes back; one torn tail is tolerated, all other damage is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleet.errors import JournalError, ProtocolError
from fleet.host.journal import JournalTail, JournalWriter, read_journal
from fleet.protocol import records as r
from fleet.protocol.causes import Evicted, NoHeartbeat, ProcessEnded
from fleet.protocol.decisions import Interval
from fleet.protocol.journal import decode_line, encode_line
from fleet.protocol.types import Build, DataFile, Fault, Member, Process, StateId, View

MEMBER = Member(2, 1)
STATE = StateId(1, 7)
VIEW = View(3, (Member(0, 0), MEMBER), ((0, 8), (8, 16)), 0, (1,), STATE, "127.0.0.1:1", None)
FAULT = Fault("f1", 1.5, "gpu", "kill_rank", slot=2)
EVERY_KIND: list[r.Record] = [
    r.RunStarted(r.VERSION, "run", 0.0, 1.0e9, 2, 1, 16, "{}"),
    r.Resumed(1.0, 1.0e9, "resume", "cluster", True, "aa"),
    r.ProcessUp(MEMBER, Process("node", 12, 34), "token", 0.1),
    r.ProcessLost(MEMBER, Evicted(NoHeartbeat(3.5)), "f1", 3, 7, -1, "line\nbreak \u2028 and \u00e9", at_s=2.0),
    r.LossExplained(MEMBER, ProcessEnded(-9), at_s=2.5, event=9),
    r.Received(8, "Quiesced", 2.1, MEMBER, "node", 3, 7, "broken"),
    r.ViewPublished(VIEW, 0.5, "start", False, ("2.0",)),
    r.Committed(STATE, 0.75),
    r.HistoryBegun(2, STATE, 3.0, "corruption"),
    r.Spans(MEMBER, 3, 1, 7, 500_000, (10, 20, 0), "cxK"),
    r.Unobserved(MEMBER, 5, 9),
    r.FaultRecord(FAULT, "executed", (MEMBER,), "", at_s=1.5),
    r.DecisionMade("interval", "wait", "not due", Interval(3.5, 0.1, 0.2, 1e-4), 0.2),
    r.CheckpointRecord("c1", "durable", STATE, 4.0, 100, 0.1, 0.2, ""),
    r.Measurement(None, STATE, "loss", 0.5, at_s=1.0),
    r.DataRead(Member(0, 0), 50_000, 256, "aa", 60, 1, 7, r.PERMUTED, at_s=4.4),
    r.RunBuilt(Member(0, 0), Build(("SGD",), "D", 50_000, 256, "aa", (("OneCycleLR.total_steps", 60),), 60), at_s=4.42),
    r.DataFiles(Member(0, 0), "aa", "Fixed", r.STRIDED, 0, 0, 1, (DataFile("a.bin", 8, 4, 1.5, "sha256:00", (0, 2, 2)),), at_s=4.45),
    r.Usage(MEMBER, 500_000_000, 0, 12_000_000, at_s=4.45),
    r.EvidenceKept("hang-1", "evidence/hang-1.txt", (MEMBER,), "no progress", "2.0: step 7", at_s=4.5),
    r.RefusedLines("node", "agent", "secret", "10.0.0.9:4711", 3, at_s=4.7),
    r.OnceRecord("done", "0.50/evaluate#1", MEMBER, 4.6, "{}"),
    r.RunEnded("completed", "all steps", 5.0, "00", ""),
]


def write(path: Path, records: list[r.Record]) -> None:
    writer = JournalWriter(path)
    for record in records:
        writer.append(record)
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "journal.jsonl"


def test_every_kind_of_record_comes_back_as_it_was(path: Path) -> None:
    assert {type(record) for record in EVERY_KIND} == set(r.Record.__args__)
    write(path, EVERY_KIND)
    assert list(read_journal(path)) == EVERY_KIND
    assert len(path.read_bytes().splitlines()) == len(EVERY_KIND)


def test_spans_take_the_same_form_as_the_codec_gives() -> None:
    spans = EVERY_KIND[9]
    assert encode_line(spans) == r.RECORDS.encode(spans) + b"\n"
    assert decode_line(encode_line(spans)) == r.RECORDS.decode(encode_line(spans)) == spans


def test_skipping_spans_leaves_all_else(path: Path) -> None:
    write(path, EVERY_KIND)
    assert list(read_journal(path, spans=False)) == [record for record in EVERY_KIND if not isinstance(record, r.Spans)]


def test_records_reach_the_file_when_flushed_and_not_before(path: Path) -> None:
    writer = JournalWriter(path, flush_interval_s=3600.0)
    writer.append(EVERY_KIND[0])
    assert path.stat().st_size == 0
    writer.flush()
    assert list(read_journal(path)) == EVERY_KIND[:1]
    writer.close()


class StepClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


def test_flush_interval_and_size_bound_what_is_gathered(path: Path) -> None:
    clock = StepClock()
    writer = JournalWriter(path, flush_interval_s=1.0, flush_bytes=500, clock=clock)
    writer.append(EVERY_KIND[0])
    assert path.stat().st_size == 0
    clock.time_s = 1.0
    writer.append(EVERY_KIND[7])
    assert len(list(read_journal(path))) == 2
    for _ in range(20):
        writer.append(EVERY_KIND[7])
    assert len(list(read_journal(path))) > 2
    writer.close()


@pytest.mark.parametrize("torn", [b'["Comm', b'["Committed",[1,7],0.75]', b"\0\0\0", b"\xff"])
def test_a_torn_last_line_is_reported_and_cut_off_on_append(path: Path, torn: bytes) -> None:
    write(path, EVERY_KIND[:3])
    with path.open("ab") as file:
        file.write(torn)
    said: list[str] = []
    assert list(read_journal(path, on_torn=said.append)) == EVERY_KIND[:3]
    assert [f"{path}:4" in sentence for sentence in said] == [True]
    writer = JournalWriter(path)
    assert writer.torn_bytes == len(torn)
    writer.append(EVERY_KIND[3])
    writer.close()
    assert list(read_journal(path, on_torn=said.append)) == EVERY_KIND[:4]
    assert len(said) == 1


def test_a_long_torn_tail_is_cut_at_the_last_complete_line(path: Path) -> None:
    write(path, EVERY_KIND[:2])
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    writer = JournalWriter(path)
    assert writer.torn_bytes == 200_000
    writer.close()
    assert list(read_journal(path)) == EVERY_KIND[:2]


def test_a_journal_that_is_only_a_torn_line_starts_anew(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'["RunSta')
    write(path, EVERY_KIND[:1])
    assert list(read_journal(path)) == EVERY_KIND[:1]


@pytest.mark.parametrize(
    "damage", [b"garbage\n", b"\n", b'{"a":1}\n', b'["Committed",[1,7]]\n', b'["Nonsense",1]\n', b'["Spans",[1,0],1]\n', b"[]\n"]
)
def test_damage_before_the_last_line_names_file_and_line(path: Path, damage: bytes) -> None:
    write(path, EVERY_KIND[:3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + b"".join(lines[1:]))
    with pytest.raises(JournalError, match=f"{path}:2"):
        list(read_journal(path))


def test_another_version_is_refused_by_reader_and_writer(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'["RunStarted",99,"fields","of","another","version"]\n')
    with pytest.raises(JournalError, match=r":1: .*version \[99\]"):
        list(read_journal(path))
    with pytest.raises(JournalError, match="version"):
        JournalWriter(path)


def test_a_journal_starts_with_run_started(path: Path) -> None:
    write(path, EVERY_KIND[1:3])
    with pytest.raises(JournalError, match="starts with RunStarted, this one with Resumed"):
        list(read_journal(path))


def test_a_second_writer_is_refused_until_the_first_lets_go(path: Path) -> None:
    writer = JournalWriter(path)
    with pytest.raises(JournalError, match="another process is writing"):
        JournalWriter(path)
    writer.close()
    writer.close()
    JournalWriter(path).close()
    with pytest.raises(ValueError, match="closed"):
        writer.append(EVERY_KIND[0])


def test_only_records_can_be_appended(path: Path) -> None:
    writer = JournalWriter(path)
    with pytest.raises(ProtocolError, match="View is not one"):
        writer.append(VIEW)  # type: ignore[arg-type]
    writer.close()


def test_tail_gives_each_record_once_and_waits_for_the_end_of_a_line(path: Path) -> None:
    tail = JournalTail(path)
    assert tail.poll() == []
    write(path, EVERY_KIND[:2])
    assert tail.poll() == EVERY_KIND[:2]
    line = encode_line(EVERY_KIND[7])
    with path.open("ab", buffering=0) as file:
        file.write(line[:9])
        assert tail.poll() == []
        file.write(line[9:])
        assert tail.poll() == [EVERY_KIND[7]]
    assert tail.poll() == []


def test_tail_outlives_a_torn_tail_that_was_cut_off(path: Path) -> None:
    write(path, EVERY_KIND[:2])
    with path.open("ab") as file:
        file.write(b'["Committed",[1')
    tail = JournalTail(path)
    assert tail.poll() == EVERY_KIND[:2]
    write(path, EVERY_KIND[6:8])
    assert tail.poll() == EVERY_KIND[6:8]


def test_tail_names_file_and_line_of_damage(path: Path) -> None:
    write(path, EVERY_KIND[:2])
    tail = JournalTail(path)
    tail.poll()
    with path.open("ab") as file:
        file.write(b"garbage\n")
    with pytest.raises(JournalError, match=f"{path}:3"):
        tail.poll()


KILLED = """
import os, signal, sys
from fleet.host.journal import JournalWriter
from fleet.protocol.records import RunStarted, Committed, VERSION
from fleet.protocol.types import StateId
writer = JournalWriter(sys.argv[1], flush_interval_s=3600.0)
writer.append(RunStarted(VERSION, "run", 0.0, 0.0, 1, 0, 1, "{}"))
for step in range(100):
    writer.append(Committed(StateId(1, step), float(step)))
writer.flush()
writer.append(Committed(StateId(1, 1000), 1000.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_flushed_survives_sigkill(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60, check=False)
    assert done.returncode == -9
    assert [record.state.step for record in read_journal(path) if isinstance(record, r.Committed)] == list(range(100))


def test_nothing_is_lost_when_a_write_stops_half_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JournalWriter(path, flush_interval_s=3600.0)
    file, calls = writer._file, [0]

    class Full:
        """Writes five bytes, then reports a full disk once, then works."""

        def write(self, data: bytearray) -> int | None:
            calls[0] += 1
            if calls[0] == 2:
                raise OSError(28, "No space left on device")
            return file.write(data[:5]) if calls[0] == 1 else file.write(data)

        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

    monkeypatch.setattr(writer, "_file", Full())
    writer.append(EVERY_KIND[0])
    with pytest.raises(OSError, match="No space"):
        writer.flush()
    writer.flush()
    assert list(read_journal(path)) == EVERY_KIND[:1]
    file.close()
