"""Every tracker, with the real thing behind it: what is sent is there when it is read back, and each of it once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dashboards.trackers import choice
from dashboards.trackers.fold import TrackFold
from dashboards.trackers.port import Tracker
from dashboards.trackers.session import StandingFile, TrackerSession, TrackerStanding, path_of
from fleet.app.tracking import artefacts
from fleet.host.journal import JournalWriter
from fleet.protocol import records as r
from fleet.protocol.journal import encode_line
from fleet.protocol.types import StateId
from fleet.settings.track import TRACKERS, TrackSettings
from tests.golden.journals import Story, one_loss
from tests.support.trackers import (
    ARTEFACTS,
    MlflowServer,
    OtlpReceiver,
    Reported,
    expected,
    read_mlflow,
    read_tensorboard,
    read_wandb,
    singles,
)

EVERY_S = 0.5
STATUS = {"completed": "FINISHED", "stopped": "KILLED"}


@dataclass
class Side:
    """One tracker, and what is behind it. ``away`` and ``back`` take it away, and bring it back with what it had."""

    name: str
    run: Path
    settings: TrackSettings
    read: Callable[[str], Reported]
    away: Callable[[], None]
    back: Callable[[], None]

    def made(self) -> Tracker:
        return choice.made(self.name, self.run, self.settings, {})


@pytest.fixture(params=TRACKERS)
def side(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    run, name = tmp_path / "runs" / "story", request.param
    run.mkdir(parents=True)
    project = request.node.name  # the server is the session's
    if name == "tensorboard":
        folder = tmp_path / "events"
        settings = TrackSettings(folder=str(folder), every_s=EVERY_S)
        yield Side(name, run, settings, lambda key: read_tensorboard(folder / "story"), *_in_the_way(folder))
    elif name == "wandb":
        monkeypatch.setenv("WANDB_MODE", "offline")
        folder = run / "track"
        yield Side(name, run, TrackSettings(every_s=EVERY_S), lambda key: read_wandb(folder), *_in_the_way(folder / "wandb"))
        import wandb

        wandb.teardown()  # its own process
    elif name == "mlflow":
        server: MlflowServer = request.getfixturevalue("mlflow")
        settings = TrackSettings(mlflow_url=server.url, every_s=EVERY_S, project=project)
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
        yield Side(name, run, settings, lambda key: read_mlflow(server.url, key, scratch), server.pause, server.go_on)
        server.go_on()
    else:
        receiver = OtlpReceiver()
        receiver.start()
        settings = TrackSettings(otlp_url=f"{receiver.url}/v1/traces", every_s=EVERY_S)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        yield Side(name, run, settings, lambda key: receiver.reported(), receiver.kill, receiver.start)
        receiver.kill()


def _in_the_way(folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """A folder that cannot be written to: a file has its name. What it had is put back."""
    moved = folder.with_name("aside")

    def away() -> None:
        if folder.exists():
            folder.rename(moved)
        folder.parent.mkdir(exist_ok=True)
        folder.touch()

    def back() -> None:
        folder.unlink()
        if moved.exists():
            moved.rename(folder)

    return away, back


def story(name: str) -> Story:
    """A run with a loss, a fault and figures of its own, whose name and key no other test has."""
    reported = one_loss("f1")
    first = reported.records[0]
    assert isinstance(first, r.RunStarted)
    made_of = '{"script": "train.py", "settings": {"world": 2}, "made_of": {"commit": "c0ffee", "script_sha256": "5ca1ab1e"}}'
    reported.records[0] = r.RunStarted(first.version, name, 0.0, first.unix_time_s, first.world, first.spares, first.shards, made_of)
    place = next(number for number, record in enumerate(reported.records) if isinstance(record, r.Committed))
    figures = [(StateId(0, step), name) for step in (1, 2) for name in ("loss", "my figure?")]
    measured = [r.Measurement(None, at, name, 1.0 / at.step, at_s=1.15 + at.step / 100) for at, name in figures]
    reported.records[place:place] = [r.DataRead(r.Member(0, 0), 4096, 64, "da7a", 60, at_s=1.15), *measured]
    return reported


def write(side: Side, records: Sequence[r.Record]) -> Path:
    journal = side.run / "journal.jsonl"
    with journal.open("ab") as file:
        file.writelines(map(encode_line, records))
    return journal


def send(side: Side, tracker: Tracker, wait: Callable[[float], bool] = lambda seconds: True) -> TrackerStanding:
    kept = StandingFile(side.run, side.name)
    try:
        made = lambda lines: artefacts(side.run, lines)  # noqa: E731
        return TrackerSession(side.run / "journal.jsonl", tracker, kept, EVERY_S, made, wait).run(lambda: True)
    finally:
        tracker.close()
        kept.close()


def check(side: Side, records: Sequence[r.Record]) -> Reported:
    """What came is what was to come: nothing is missing, and nothing is there twice."""
    first = records[0]
    assert isinstance(first, r.RunStarted)
    want, reported = expected(records, EVERY_S), side.read(f"{first.run}@{first.unix_time_s:.3f}")
    if side.name == "otel":
        assert reported.spans == want.spans != {}
    else:
        named = {"mlflow": lambda name: name.replace("?", "_")}.get(side.name, lambda name: name)
        figures = singles(want.figures) if side.name == "tensorboard" else want.figures
        assert reported.figures == {(named(name), step, value): count for (name, step, value), count in figures.items()}
        assert len(reported.figures) > 100
        assert reported.files.keys() == ARTEFACTS
        assert want.facts.items() <= ({**reported.facts, **_untagged(reported)} if side.name == "mlflow" else reported.facts).items()
        assert reported.marks == want.marks
    assert reported.status in (want.status, STATUS[want.status])
    return reported


def _untagged(reported: Reported) -> dict[str, str]:
    return {name.removeprefix("fleet."): value for name, value in reported.facts.items()}


def test_all_of_a_run_is_there_once(side: Side) -> None:
    records, tracker = story("whole").records, side.made()
    write(side, records)
    found = send(side, tracker)
    assert (found.done, found.away, found.refused) == (True, "", 0)
    reported = check(side, records)
    if "report.txt" in reported.files:
        assert "completed" in reported.files["report.txt"]
        assert "fault f1" in reported.files["marks.txt"]
        assert reported.facts["made_of.commit"] == "c0ffee"


def test_another_process_goes_on_where_one_has_stopped(side: Side) -> None:
    records, tracker = story("halves").records, side.made()
    middle = len(records) // 2
    write(side, records[:middle])
    assert not send(side, tracker).done
    write(side, records[middle:])
    assert send(side, side.made()).done
    check(side, records)


def test_what_is_sent_twice_is_there_once(side: Side) -> None:
    records, tracker = story("twice").records, side.made()
    write(side, records)
    assert send(side, tracker).done
    (side.run / "track" / f"{side.name}.json").unlink()  # nobody knows any more that it has arrived
    assert send(side, side.made()).done
    check(side, records)


def test_what_has_arrived_is_left_as_it_is(side: Side) -> None:
    records, tracker = story("again").records, side.made()
    write(side, records)
    assert send(side, tracker).done
    assert send(side, side.made()).done
    check(side, records)


def test_a_journal_that_was_written_anew_is_counted_anew(side: Side) -> None:
    records, tracker = story("folded").records, side.made()
    middle = len(records) // 2
    journal = write(side, records[:middle])
    assert not send(side, tracker).done
    path_of(side.run, side.name).write_text(path_of(side.run, side.name).read_text().replace('"sent": ', '"sent": 1000'))
    journal.rename(journal.with_suffix(".old"))  # so that the new one is another file
    write(side, records)
    assert send(side, side.made()).done
    check(side, records)


def test_what_is_away_gets_all_of_it_when_it_is_back(side: Side) -> None:
    records, tracker, waits = story("away").records, side.made(), []
    write(side, records)
    side.away()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 2:
            side.back()
        return len(waits) > 20

    found = send(side, tracker, wait)
    assert found.done
    assert len(waits) >= 2
    check(side, records)


def test_when_the_time_is_up_it_says_what_it_lacks_and_the_rest_is_sent_later(side: Side) -> None:
    records, tracker = story("late").records, side.made()
    write(side, records)
    side.away()
    found = send(side, tracker)
    assert not found.done
    assert found.away
    assert "not all of the run" in str(found)
    side.back()
    assert send(side, side.made()).done
    check(side, records)


def test_a_run_that_is_resumed_goes_on_in_the_same_place(side: Side) -> None:
    begun = story("resumed").records
    place = next(number for number, record in enumerate(begun) if isinstance(record, r.Committed) and record.state.step == 5)
    first = [record for record in begun[:place] if not isinstance(record, r.Spans)]
    stopped = [*first, r.RunEnded("stopped", "by its user", 1.7, "", "")]
    write(side, stopped)
    assert send(side, side.made()).done
    measured = r.Measurement(None, StateId(0, 5), "loss", 0.5, at_s=61.0)
    more = [r.Resumed(60.0, 1.7e9 + 60.0, "resume"), measured, r.RunEnded("stopped", "again", 62.0, "", "")]
    write(side, more)
    tracker = side.made()
    assert send(side, tracker).done
    check(side, [*stopped, *more])


def test_a_journal_that_grows_gives_the_same_as_one_that_is_whole() -> None:
    records = story("grows").records
    whole, grown = TrackFold(EVERY_S), TrackFold(EVERY_S)
    at_once = [each for record in records for each in whole.take(record)] + whole.finish()
    one_by_one = []
    for record in records:
        one_by_one += grown.take(record)
    assert one_by_one + grown.finish() == at_once
    assert [each.number for each in at_once] == list(range(1, len(at_once) + 1))


def test_the_writer_of_a_journal_and_who_sends_it_do_not_meet(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "story"
    side = Side("tensorboard", run, TrackSettings(every_s=EVERY_S), lambda key: read_tensorboard(run / "tensorboard"), *_in_the_way(run))
    records = story("live").records
    writer, rest = JournalWriter(run / "journal.jsonl"), list(records)
    kept, tracker = StandingFile(run, side.name), side.made()

    def wait(seconds: float) -> bool:
        for record in rest[:20]:
            writer.append(record)
        del rest[:20]
        writer.flush()
        return False

    session = TrackerSession(writer.path, tracker, kept, EVERY_S, lambda lines: artefacts(run, lines), wait)
    assert session.run(lambda: not rest).done
    tracker.close()
    kept.close()
    writer.close()
    check(side, records)
