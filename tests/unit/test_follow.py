"""Following a journal: live and afterwards alike, in bounded pieces, as far as it is good."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from fleet.errors import JournalError
from fleet.host import snapshots
from fleet.host.follow import Follower, last_words, open_report
from fleet.host.journal import JournalTail, JournalWriter
from fleet.ledger.goodput import Ledger
from fleet.ledger.report import History, build_report
from fleet.ledger.tallies import LOST, STANDS_BY, STARTS, TRAINS
from fleet.protocol import records as r
from fleet.protocol.journal import encode_line
from fleet.protocol.types import Fault, Member, Process, StateId
from tests.golden.journals import Story, one_loss


def write(path: Path, story: Story, tail: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(encode_line, story.records)) + tail)
    return path


def test_in_pieces_it_comes_to_what_the_ledger_comes_to(tmp_path: Path) -> None:
    story = one_loss("f1")
    follower, polls = Follower(write(tmp_path / "journal.jsonl", story)), 0
    while follower.poll(limit_bytes=200):
        polls += 1
    assert polls > 5
    assert follower.summary() == Ledger().apply_all(story.records).summary()
    assert follower.look(lambda report: len(report.history["views"])) == 3


def test_it_goes_on_where_the_writer_goes_on(tmp_path: Path) -> None:
    story, path = one_loss(), tmp_path / "journal.jsonl"
    writer, follower = JournalWriter(path), Follower(path)
    assert follower.summary() is None
    for record in story.records:
        writer.append(record)
        writer.flush()
        assert follower.poll() == [record]
    writer.close()
    assert follower.ended
    assert follower.poll() == []


@pytest.mark.parametrize("damage", [b'["Committed",[0,99],"soon"\n', b"\x00\x00\x00\n", b'["Meteor",1]\n', b'["Spans",[0,7]]\n'])
def test_a_damaged_journal_opens_as_far_as_it_is_good(damage: bytes, tmp_path: Path) -> None:
    story = one_loss()
    path = write(tmp_path / "journal.jsonl", story, damage + encode_line(r.Committed(StateId(0, 100), 9.0)))
    follower = Follower(path).read()
    assert f"{path}:{len(story.records) + 1}:" in follower.damage
    assert follower.summary() == Ledger().apply_all(story.records).summary()
    assert follower.poll() == []


def test_a_journal_whose_time_overlaps_opens_up_to_there(tmp_path: Path) -> None:
    story = one_loss()
    good = Ledger().apply_all(story.records[:5]).summary()
    story.records[5:] = [r.Spans(Member(0, 0), 1, 0, 10, 5, (100,), "c")]
    follower = Follower(write(tmp_path / "journal.jsonl", story)).read()
    assert "overlap" in follower.damage
    assert f"journal.jsonl:{follower.good_lines + 1}:" in follower.damage
    assert follower.good_lines == 5
    summary = follower.summary()
    assert summary is not None
    assert summary.steps == good.steps


def test_a_torn_last_line_is_waited_for_and_named_once_nobody_writes(tmp_path: Path) -> None:
    whole = encode_line(r.Committed(StateId(0, 1), 1.0))
    path = write(tmp_path / "journal.jsonl", Story(world=1), whole[:-5])
    good_bytes = path.stat().st_size - len(whole) + 5
    follower = Follower(path).read()
    assert follower.damage == ""
    assert follower.summary() is not None
    os.utime(path, (1e9, 1e9))
    seen = follower.version
    assert follower.poll() == []
    assert follower.damage.startswith(f"{path}:2: the last line is incomplete, {len(whole) - 5} bytes from byte {good_bytes} on")
    assert follower.version == seen + 1  # pages are drawn anew
    assert follower.poll() == []
    assert follower.version == seen + 1
    writer = JournalWriter(path)
    writer.append(r.Committed(StateId(0, 1), 1.0))
    writer.close()
    assert follower.poll() == [r.Committed(StateId(0, 1), 1.0)]
    assert follower.damage == ""


def test_a_report_is_of_what_is_good(tmp_path: Path) -> None:
    story = one_loss("f1")
    good = build_report(story.records[:20]).to_dict()
    path = write(tmp_path / "journal.jsonl", story)
    assert open_report(path)[1] == ""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:20], b"nonsense\n", *lines[20:]]))
    report, damage = open_report(path)
    assert f"{path}:21:" in damage
    assert report.to_dict() == good
    path.write_bytes(b"".join(lines[:20]) + lines[20][:-4])
    assert open_report(path)[1] == ""
    os.utime(path, (1e9, 1e9))
    report, damage = open_report(path)
    assert f"{path}:21:" in damage
    assert report.to_dict() == good


def test_a_report_ends_before_time_that_overlaps(tmp_path: Path) -> None:
    story = one_loss()
    story.records[5:] = [r.Spans(Member(0, 0), 1, 0, 10, 5, (100,), "c"), *story.records[5:]]
    report, damage = open_report(write(tmp_path / "journal.jsonl", story))
    assert "journal.jsonl:6:" in damage
    assert report.to_dict() == build_report(story.records[:5]).to_dict()


def test_a_journal_without_a_good_line_has_no_report(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("no journal\n")
    with pytest.raises(JournalError, match=r"journal\.jsonl:1"):
        open_report(tmp_path / "journal.jsonl")


def test_the_tail_gives_what_is_good_before_it_complains(tmp_path: Path) -> None:
    tail = JournalTail(write(tmp_path / "journal.jsonl", Story(world=1), b"nonsense\n"))
    assert len(tail.poll()) == 1
    with pytest.raises(Exception, match=r"journal\.jsonl:2"):
        tail.poll()


def test_who_is_where(tmp_path: Path) -> None:
    story = Story(world=2, spares=1)
    for slot in range(3):
        story.records.append(r.ProcessUp(Member(slot, 0), Process(f"node-{slot}", 100 + slot, 1), "t", 0.1))
    follower = Follower(write(tmp_path / "journal.jsonl", story)).read()
    assert [member.state for member in follower.slots()] == [STARTS] * 3
    story.spans(2, 0, "i100 s50", generation=-1)
    story.view(1, [(0, 0), (1, 0)], 200)
    follower = Follower(write(tmp_path / "journal.jsonl", story)).read()
    assert [member.state for member in follower.slots()] == [TRAINS, TRAINS, STANDS_BY]
    story.lost(1, 0, 300)
    story.view(2, [(0, 0), (2, 0)], 310, causes=("1.0",))
    story.view(3, [(2, 0)], 400)
    follower = Follower(write(tmp_path / "journal.jsonl", story)).read()
    assert [(member.state, member.shards) for member in follower.slots()] == [(STANDS_BY, None), (LOST, None), (TRAINS, (0, 16))]
    assert follower.slots()[1].cause == "killed by SIGKILL"
    assert follower.slots()[2].pid == 102


def test_what_is_kept_of_a_long_run_is_bounded() -> None:
    history = History(most=50)
    for step in range(10_000):
        history.add(r.Measurement(None, StateId(0, step), "loss", 1.0, at_s=step))
        history.add(r.DecisionMade("interval", "save", "because", None, step))
    for name in range(1_000):
        history.add(r.Measurement(None, StateId(0, 1), f"name-{name}", 1.0, at_s=1.0))
    kept = history.as_dict()
    points = kept["measurements"]["loss"]
    assert len(points) <= 50
    assert points[0] == [0, 1.0]
    assert points[-1] == [9_999, 1.0]
    assert len(kept["decisions"]) == 50
    assert len(kept["measurements"]) <= 64


def test_a_snapshot_spares_what_was_folded_and_shows_nowhere(tmp_path: Path) -> None:
    for story in (one_loss("f1"), without_end(one_loss("f1"))):
        half, path = len(story.records) // 2, tmp_path / f"{len(story.records)}" / "journal.jsonl"
        whole = write(path, story).read_bytes()
        path.write_bytes(b"".join(map(encode_line, story.records[:half])))
        first = Follower(path).read()
        assert first.keep(1)
        assert not first.keep(1)
        path.write_bytes(whole)
        os.utime(path, (1e9, 1e9))  # nobody writes it any more: its last record's time counts
        seen = list[r.Record]()
        again = Follower(path)
        while new := again.poll(100):
            seen += new
        assert seen == story.records[half:]
        assert again.summary() == Ledger().apply_all(story.records).summary()
        (path.parent / snapshots.NAME).unlink()
        anew = Follower(path).read()
        assert again.look(lambda report: report.history) == anew.look(lambda report: report.history)
        assert again.slots() == anew.slots()


def without_end(story: Story) -> Story:
    story.records.pop()
    return story


def test_a_snapshot_that_does_not_fit_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, story = tmp_path / "journal.jsonl", one_loss()
    good = Follower(write(path, story)).read().summary()
    Follower(path).read().keep(1)
    kept = (tmp_path / snapshots.NAME).read_bytes()
    evil = pickle.dumps(Evil())
    header = kept.split(b"\n", 2)[:2]
    for damaged in (b"", b"nonsense", kept[:-50], kept.replace(b'"code": "', b'"code": "0'), b"\n".join([*header, evil])):
        (tmp_path / snapshots.NAME).write_bytes(damaged)
        assert Follower(path).read().summary() == good
    assert "is no part of a fold" in caplog.text
    (tmp_path / snapshots.NAME).write_bytes(kept)
    write(path, one_loss("other"))
    assert Follower(path).read().summary() == Ledger().apply_all(one_loss("other").records).summary()


class Evil:
    """Would run a program when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo unpickled",)


def test_a_list_of_runs_needs_first_and_last_words_alone(tmp_path: Path) -> None:
    story = one_loss()
    first, last = last_words(write(tmp_path / "journal.jsonl", story))
    assert first is not None
    assert first.run == "story"
    assert last is not None
    assert last.status == "completed"
    story.resumed(8_000)
    assert last_words(write(tmp_path / "journal.jsonl", story))[1] is None
    (tmp_path / "journal.jsonl").write_text("no journal\n")
    assert last_words(tmp_path / "journal.jsonl") == (None, None)


def test_what_strikes_whom_now(tmp_path: Path) -> None:
    story = Story(world=2)
    for slot in range(2):
        story.records.append(r.ProcessUp(Member(slot, 0), Process(f"node-{slot}", 100 + slot, 1), "t", 0.1))
    story.view(1, [(0, 0), (1, 0)], 200)
    injected = [(Fault("p", 0.3, "t", "partition", node=1), (Member(1, 0),)), (Fault("s", 0.3, "t", "store_gone"), ())]
    injected += [(Fault("k", 0.3, "t", "kill_rank", slot=0), (Member(0, 0),)), (Fault("e", 0.3, "t", "busy_cores", node=2), ())]
    for fault, members in injected:
        story.records.append(r.FaultRecord(fault, "executed", members, "", at_s=0.3))
    follower = Follower(write(tmp_path / "journal.jsonl", story)).read()
    assert [member.injected for member in follower.slots()] == [(), ("partition",)] and follower.injected() == ("store_gone",)
    for name, kind in (("p", "partition"), ("s", "store_gone")):
        story.records.append(r.FaultRecord(Fault(name, 0.3, "test", kind), "healed", (), "", at_s=0.5))
    follower = Follower(write(tmp_path / "journal.jsonl", story)).read()
    assert [member.injected for member in follower.slots()] == [(), ()] and follower.injected() == ()
