"""What ``fleet runs data`` says is what the ranks read: for each reader, through roll-backs and changes of the data set."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.rank.data import reporting
from actors.rank.data.catalogue import Digests, FileCatalogue, catalogue_of, pieces, report_files
from actors.rank.data.feeds import Feed, ShardedDataset
from actors.rank.data.lineage import Lineage
from actors.rank.data.sampling import Shared, permuted_many, positions_many
from fleet.app.cli.main import app
from fleet.data import Fixed, Images, JsonLines, Parquet, Place, Tokens, Whole
from fleet.errors import ConfigError
from fleet.ledger.lineage import DataHistory
from fleet.machine.figures import ShardFigures
from fleet.machine.state import Trained
from fleet.machine.table import TABLE
from fleet.protocol import records as r
from fleet.protocol.facts import DataFiles, DataRead
from fleet.protocol.journal import decode_line, encode_line
from fleet.protocol.types import DataFile, Member, StateId

BOUND_S = 30.0
SEED, SHARDS, BATCH = 7, 4, 8
RANK = Member(0, 0)


def numbers(folder: Path) -> ShardedDataset:
    """Records of two bytes, in three files of 5, 6 and 7."""
    for name, count in (("a", 5), ("b", 6), ("c", 7)):
        (folder / f"{name}.bin").write_bytes(b"".join(bytes((ord(name), at)) for at in range(count)))
    return ShardedDataset(f"{folder}/*.bin", Fixed(2, bytes), workers=0)


def tokens(folder: Path) -> ShardedDataset:
    np.arange(100, dtype=np.uint16).tofile(folder / "raw.bin")
    np.save(folder / "saved.npy", np.arange(77, dtype=np.int32))
    return ShardedDataset([f"{folder}/raw.bin", f"{folder}/saved.npy"], Tokens(4), workers=0)


def lines(folder: Path) -> ShardedDataset:
    for name, count in (("a", 9), ("b", 14)):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"x": {at}}}\n\n' for at in range(count)))
    return ShardedDataset(f"{folder}/*.jsonl", JsonLines(), workers=0)


def whole(folder: Path) -> ShardedDataset:
    for at in range(11):
        (folder / f"{at:02}.txt").write_text("x" * (at + 1))
    return ShardedDataset(f"{folder}/*.txt", Whole(bytes), workers=0)


def images(folder: Path) -> ShardedDataset:
    from PIL import Image

    for at in range(9):
        (folder / "ab"[at % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (2, 2), (at, 0, 0)).save(folder / "ab"[at % 2] / f"{at}.png")
    return ShardedDataset(str(folder), Images(), workers=0)


def rows(folder: Path) -> ShardedDataset:
    for at, count in enumerate((31, 20)):
        pq.write_table(pa.table({"x": list(range(count))}), folder / f"{at}.parquet", row_group_size=6)
    return ShardedDataset(str(folder), Parquet(window_bytes=100), workers=0)


MAKERS = [numbers, tokens, lines, whole, images, rows]


class Kept:
    """What a journal would hold of what rank 0 tells."""

    def __init__(self) -> None:
        self.records: list[Any] = [r.RunStarted(r.VERSION, "story", 0.0, 1.7e9, 2, 0, SHARDS, json.dumps({"settings": {"seed": SEED}}))]
        self.machine: Any = SimpleNamespace(trained=Trained(ShardFigures(SHARDS)), current=lambda member: True, write=self.records.append)

    def say(self, event: Any) -> None:
        TABLE[type(event)].do(self.machine, event, 1.0)

    def report(self, reported: reporting.DataReporter, feed: Feed, batch_size: int, history: int, step: int) -> None:
        client: Any = SimpleNamespace(say=self.say, protocol=SimpleNamespace(member=RANK))
        if reported.is_news(feed, batch_size, history):
            reported.report(feed, step, client, 100)
            for thread in reported.reporting.values():
                thread.join(BOUND_S)
                assert not thread.is_alive()

    def begin(self, history: int, step: int) -> None:
        self.records.append(r.HistoryBegun(history, StateId(history - 1, step), 1.0, "because"))

    def commit(self, history: int, step: int) -> None:
        self.records.append(r.Committed(StateId(history, step + 1), 1.0))

    def history(self) -> DataHistory:
        return DataHistory().apply_all(decode_line(encode_line(record)) for record in self.records)


class Spied(ShardedDataset):
    """Notes which samples are read."""

    def __init__(self, data: ShardedDataset) -> None:
        self.__dict__ |= data.__dict__
        self.read: list[int] = []

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        self.read += indices
        return super().__getitems__(indices)


@pytest.mark.parametrize("make", MAKERS)
def test_the_journal_places_each_sample_where_the_data_set_has_it(make: Any, tmp_path: Path) -> None:
    data = make(tmp_path)
    catalogue = data.catalogue()
    assert isinstance(catalogue, FileCatalogue)
    assert [catalogue.where(index) for index in range(len(data))] == [data.where(index) for index in range(len(data))]
    first = data.where(0)
    assert isinstance(first, Place) and first.offset >= 0 and Path(first.path).is_file()
    with pytest.raises(IndexError):
        catalogue.where(len(data))


def test_a_place_holds_the_bytes_of_the_sample(tmp_path: Path) -> None:
    data = numbers(tmp_path)
    for index in range(len(data)):
        place = data.where(index)
        assert place is not None
        assert Path(place.path).read_bytes()[place.offset : place.offset + place.size_bytes] == data[index]
    assert str(data.where(6)) == f"{tmp_path}/b.bin  record 1, bytes 2 to 4"


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 9))
def test_positions_are_the_inverse_of_the_order(length: int, seed: int, epoch: int) -> None:
    order = permuted_many(seed, epoch, np.arange(length, dtype=np.uint64), length)
    assert positions_many(seed, epoch, order, length).tolist() == list(range(length))


@pytest.mark.parametrize(("make", "each"), [*((make, 1) for make in MAKERS), (numbers, 3), (rows, 2)])
def test_the_answers_are_what_ranks_read_through_a_roll_back(make: Any, each: int, tmp_path: Path) -> None:
    """Steps 0 to 11; 9 to 11 are rolled back and done again; the rank that tells is another then. So many steps share their samples."""
    (tmp_path / "data").mkdir()
    data, kept = make(tmp_path / "data"), Kept()
    by_rank: dict[tuple[int, int, int], list[int]] = {}
    for history, steps in ((0, range(12)), (1, range(9, 14))):
        feed = Feed(Shared(data, each) if each > 1 else data, SEED, SHARDS, BATCH, list)
        if history:
            kept.begin(history, steps[0])
        reported = reporting.DataReporter(tmp_path / "digests")
        for step in steps:
            kept.report(reported, feed, BATCH, history, step)
            for shard in range(SHARDS):
                samples = feed.get(step, shard)
                by_rank[history, step, shard] = data.indices_of(SEED, step // each, shard, SHARDS, BATCH)
                assert repr(samples) == repr([data[index] for index in by_rank[history, step, shard]])
            kept.commit(history, step)
        feed.close()
    answer = Lineage(kept.history())
    every = [one for step in range(14) for shard in range(SHARDS) for one in answer.took(step, shard)]
    assert {(one.stretch.history, one.step, one.shard): list(one.indices) for one in every} == by_rank
    assert [(one.stretch.history, one.stretch.counts) for one in answer.took(10, 0)] == [(0, False), (1, True)]
    for path in {place.path for index in range(len(data)) if (place := data.where(index))}:
        uses = {(use.history, use.step): dict(use.shards) for use in answer.uses(path)}
        expected: dict[tuple[int, int], Counter[int]] = {}
        for (history, step, shard), indices in by_rank.items():
            if count := sum(data.where(index).path == path for index in indices):
                expected.setdefault((history, step), Counter())[shard] += count
        assert uses == expected
    with pytest.raises(ConfigError, match="committed 14 steps"):
        answer.took(14, 0)


def test_a_loop_that_changes_its_data_is_told_apart_step_by_step(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = numbers(tmp_path / "one"), tokens(tmp_path / "two")
    kept, reported = Kept(), reporting.DataReporter(tmp_path / "digests")
    feeds = {id(data): Feed(data, SEED, SHARDS, BATCH, list) for data in (one, two)}
    plan = [one, one, two, one, two, two]
    for step, data in enumerate(plan):
        kept.report(reported, feeds[id(data)], BATCH, 0, step)
        kept.commit(0, step)
    kept.begin(1, 3)
    for step, data in ((3, two), (4, one)):
        kept.report(reported, feeds[id(data)], BATCH, 1, step)
        kept.commit(1, step)
    answer = Lineage(kept.history())
    for step, data in enumerate(plan):
        took = answer.took(step, 2)[0]
        assert list(took.indices) == data.indices_of(SEED, step, 2, SHARDS, BATCH)
        assert took.places == tuple(data.where(index) for index in took.indices)
    assert [answer.took(step, 2)[-1].places[0].path.split("/")[-2] for step in (3, 4)] == ["two", "one"]
    for feed in feeds.values():
        feed.close()


def test_a_map_style_dataset_is_told_by_number_and_by_its_own_places(tmp_path: Path) -> None:
    class Mine:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> int:
            return index

    class Located(Mine):
        def where(self, index: int) -> Place:
            return Place(f"file-{index % 3}", index // 3, 4 * index, 4)

    kept = Kept()
    feed = Feed(Mine(), SEED, SHARDS, BATCH, list)
    kept.report(reporting.DataReporter(tmp_path / "digests"), feed, BATCH, 0, 0)
    for step in range(5):
        kept.commit(0, step)
    blind, seeing = Lineage(kept.history()), Lineage(kept.history(), Located())
    for step in range(5):
        took, seen = blind.took(step, 1)[0], seeing.took(step, 1)[0]
        assert list(took.indices) == list(seen.indices) == feed.get(step, 1)
        assert set(took.places) == {None} and "--data" in took.unknown
        assert seen.places == tuple(Located().where(index) for index in took.indices) and not seen.unknown
    used = {use.step for use in seeing.uses("file-1")}
    assert used == {step for step in range(5) for shard in range(SHARDS) if any(index % 3 == 1 for index in feed.get(step, shard))}
    with pytest.raises(ConfigError, match="none of the 0 files"):
        list(blind.uses("file-1"))
    with pytest.raises(ConfigError, match="trained on 20"):
        Lineage(kept.history(), ShardedDataset(range(21)))
    feed.close()


def test_digests_are_those_of_the_files_and_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data, cache = numbers(tmp_path / "data"), tmp_path / "cache" / "digests"
    catalogue = data.catalogue()
    assert catalogue is not None

    def reported() -> list[DataFile]:
        said: list[tuple[DataFile, ...]] = []
        report_files(catalogue, data.files, lambda first, files: said.append(files), cache)
        assert [file.digest for file in said[0]] == [""] * 3
        return list(said[1])

    found = reported()
    assert [file.digest for file in found] == ["sha256:" + hashlib.sha256(Path(file.path).read_bytes()).hexdigest() for file in found]
    for file in found:
        Digests(cache).keep(file, "sha256:kept")
    assert [file.digest for file in reported()] == ["sha256:kept"] * 3
    with cache.open("a") as opened:
        opened.write('["half a li')
    assert [file.digest for file in reported()] == ["sha256:kept"] * 3


def test_a_file_that_changes_meanwhile_gets_no_digest(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = numbers(tmp_path / "data")
    catalogue = data.catalogue()
    assert catalogue is not None
    (tmp_path / "data" / "b.bin").write_bytes(b"another content!")
    said: list[tuple[DataFile, ...]] = []
    report_files(catalogue, data.files, lambda first, files: said.append(files), tmp_path / "digests")
    assert [bool(file.digest) for file in said[1]] == [True, False, True]


def test_of_very_many_files_there_is_no_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    catalogue = numbers(tmp_path).catalogue()
    assert catalogue is not None
    assert [first for first, _ in pieces(catalogue)] == [0]
    monkeypatch.setattr("actors.rank.data.catalogue.MOST_FILES", 2)
    assert list(pieces(catalogue)) == []
    (tmp_path / "rows").mkdir()
    data = rows(tmp_path / "rows")
    monkeypatch.setattr("actors.rank.data.catalogue.MOST_NUMBERS", 3)
    spared = catalogue_of(data.reader, data.files, data._found, "x")
    assert spared.windows() is None


def test_files_are_written_down_once_and_once_more_with_their_digests() -> None:
    kept = Kept()
    files = (DataFile("a", 1, 1), DataFile("b", 1, 1))
    digested = tuple(DataFile(file.path, 1, 1, 0.0, "sha256:x") for file in files)
    for said in (files, files, digested, files, digested):
        kept.say(DataFiles(RANK, "aa", "Whole", r.STRIDED, 0, 0, 2, said))
    assert [record.files for record in kept.records[1:]] == [files, digested]


def test_a_rank_tells_once_for_each_history_and_the_run_notes_what_is_news() -> None:
    kept = Kept()
    for sha256, history, step in (("aa", 0, 0), ("aa", 0, 3), ("bb", 0, 5), ("bb", 1, 4), ("bb", 1, 6)):
        kept.say(DataRead(RANK, 10, 8, sha256, 9, history, step, r.PERMUTED))
    assert [(read.data_sha256, read.history, read.step) for read in kept.records[1:]] == [("aa", 0, 0), ("bb", 0, 5), ("bb", 1, 4)]


def call(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "runs" / "one").mkdir(parents=True)
    data, kept = numbers(tmp_path / "data"), Kept()
    feed = Feed(data, SEED, SHARDS, BATCH, list)
    kept.report(reporting.DataReporter(tmp_path / "digests"), feed, BATCH, 0, 0)
    for step in range(6):
        kept.commit(0, step)
    feed.close()
    (tmp_path / "runs" / "one" / "journal.jsonl").write_bytes(b"".join(map(encode_line, kept.records)))
    return tmp_path


def test_the_command_says_what_went_into_a_step(run: Path) -> None:
    asked = ("runs", "data", "one", "--storage", str(run / "runs"))
    data = numbers(run / "data")
    lines = call(*asked, "--step", "4", "--shard", "3").splitlines()
    assert [line.strip() for line in lines[1:]] == [f"{index}  {data.where(index)}" for index in data.indices_of(SEED, 4, 3, SHARDS, BATCH)]
    found = json.loads(call(*asked, "--step", "4", "--json"))
    assert [one["shard"] for one in found] == [0, 1, 2, 3] and len(found[0]["samples"]) == BATCH // SHARDS
    uses = json.loads(call(*asked, "--file", "b.bin", "--json"))["uses"]
    assert sum(sum(use["samples_by_shard"].values()) for use in uses) == sum(
        data.where(index).path.endswith("b.bin") for step in range(6) for shard in range(SHARDS)  # type: ignore[union-attr]
        for index in data.indices_of(SEED, step, shard, SHARDS, BATCH)
    )  # fmt: skip
    assert f"samples of it in {len(uses)} steps" in call(*asked, "--file", "b.bin")
    reported = call(*asked)
    assert "0 to 5" in reported and "3 of 3 files, 36 bytes, 3 with a digest" in reported
    assert json.loads(call(*asked, "--json"))["seed"] == SEED


def test_the_command_takes_the_users_own_data_set(run: Path) -> None:
    script = run / "mine.py"
    made = f"ShardedDataset({str(run / 'data')!r} + '/*.bin', Fixed(2, bytes))"
    script.write_text(f"from fleet.data import Fixed, ShardedDataset\n\n\ndef data():\n    return {made}\n")
    asked = ("runs", "data", "one", "--storage", str(run / "runs"), "--step", "1", "--shard", "0")
    assert call(*asked, "--data", f"{script}:data") == call(*asked)
    for wrong, reason in ((f"{script}:other", "nothing that is called other"), (f"{run}/none.py:data", "no such file")):
        done = CliRunner().invoke(app, [*asked, "--data", wrong])
        assert isinstance(done.exception, ConfigError) and reason in str(done.exception)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("--step", "9"), "committed 6 steps"),
        (("--step", "1", "--shard", "4"), "the run has 4 shards"),
        (("--shard", "1"), "Give --step"),
        (("--file", "nothing"), "none of the 3 files"),
        (("--file", "b.bin", "--step", "1"), "two questions"),
    ],
)
def test_what_cannot_be_answered_is_refused(run: Path, asked: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(app, ["runs", "data", "one", "--storage", str(run / "runs"), *asked])
    assert isinstance(done.exception, ConfigError) and reason in str(done.exception)
