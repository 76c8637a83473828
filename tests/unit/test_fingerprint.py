"""A data set's fingerprint: the same for the same samples, another for others, read from three of them, and no trace of it in a run."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.rank.data.feeds import Feed, ShardedDataset, _generators
from actors.rank.data.fingerprint import fingerprint, samples_fingerprint
from actors.rank.data.reporting import DataReporter
from actors.rank.step.representations import Representations
from actors.rank.step.shard_state import ShardStates
from actors.rank.step.step import Step
from actors.rank.telemetry import recorder as rank_recorder
from fleet.data import Fixed, Lines
from fleet.machine import notes
from fleet.machine import replay as machine_replay
from fleet.machine.figures import ShardFigures
from fleet.machine.state import Trained
from fleet.protocol.journal import decode_line, encode_line
from fleet.protocol.records import COMPUTE, PERMUTED, DataRead
from fleet.protocol.types import Member, StateId

MEMBER = Member(0, 0)


@dataclass
class Source:
    """A map-style data set that counts what is read of it."""

    item: Callable[[int], Any] = float
    length: int = 9
    read: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.item(index)


class Other(Source):
    """The same samples from another class."""


SAMPLES: list[Callable[[int], Any]] = [
    lambda i: torch.full((2, 3), float(i)),
    lambda i: torch.full((3, 2), float(i)),
    lambda i: torch.full((2, 3), float(i), dtype=torch.bfloat16),
    lambda i: torch.tensor(float(i)),
    lambda i: np.full((2, 3), i, np.int64),
    lambda i: np.full((2, 3), i, np.int32),
    lambda i: (torch.tensor([i]), {"label": i, "names": ["a", "b"]}),
    lambda i: (torch.tensor([i]), {"label": i, "names": ["a", "c"]}),
    lambda i: [[i], i],
    lambda i: [[i, i]],
    lambda i: {"x", "y", str(i)},
    lambda i: f"line {i}",
    lambda i: np.array([f"line {i}", None], dtype=object),
]


def test_same_samples_same_fingerprint_others_another() -> None:
    found = [fingerprint(Source(item)) for item in SAMPLES]
    assert all(len(each) == 64 for each in found)
    assert len(set(found)) == len(SAMPLES)
    assert found == [fingerprint(Source(item)) for item in SAMPLES]


def test_type_length_and_each_of_three_samples_count() -> None:
    plain = fingerprint(Source())
    assert fingerprint(Other()) != plain
    assert fingerprint(Source(length=10)) != plain
    for changed in (0, 4, 8):
        assert fingerprint(Source(lambda i, changed=changed: i + 0.5 * (i == changed))) != plain  # type: ignore[misc]


@pytest.mark.parametrize(("length", "read"), [(1, [0]), (2, [0, 1]), (9, [0, 4, 8])])
def test_three_samples_are_read_whatever_the_length(length: int, read: list[int]) -> None:
    source = Source(length=length)
    assert fingerprint(source)
    assert source.read == read


def test_samples_that_are_others_each_time_have_none() -> None:
    count = itertools.count()
    assert samples_fingerprint(Source(lambda i: i + next(count))) == ""
    assert samples_fingerprint(Source()) == samples_fingerprint(Other()) != ""


def test_it_is_the_same_in_every_process() -> None:
    code = (
        "from actors.rank.data.fingerprint import fingerprint\n"
        "class Words:\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, i): return {'some', 'words', 'in', 'no', 'order', str(i)}\n"
        "print(fingerprint(Words()))"
    )
    folder = Path(__file__).parents[2]
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, cwd=folder, capture_output=True, check=True
        )
        for seed in ("1", "2")
    ]
    assert found[0].stdout == found[1].stdout
    assert len(found[0].stdout.strip()) == 64


def draw(index: int) -> Any:
    return torch.rand(2), np.random.rand(), random.random(), index


def fail(index: int) -> Any:
    draw(index)
    raise OSError("the store does not answer")


@pytest.mark.parametrize("item", [draw, fail])
def test_the_random_generators_are_as_before(item: Callable[[int], Any]) -> None:
    torch.manual_seed(5)
    before = _generators()
    first = fingerprint(Source(item))
    assert _generators() == before
    torch.rand(1)
    assert fingerprint(Source(item)) == first  # samples that draw are the same samples
    assert bool(first) == (item is draw)


@pytest.mark.parametrize("item", [fail, lambda i: lambda: i, lambda i: torch.ones(2).to_sparse()])
def test_what_cannot_be_digested_has_none_and_raises_nothing(item: Callable[[int], Any]) -> None:
    assert fingerprint(Source(item)) == ""


def test_files_are_told_by_format_names_and_sizes_without_being_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    made = ShardedDataset(tmp_path / "a.txt", Fixed(4, bytes))
    first = made.data_sha256()
    assert len(first) == 64
    (tmp_path / "a.txt").unlink()
    assert made.data_sha256() == first
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert ShardedDataset(tmp_path / "a.txt", Lines()).data_sha256() != first
    (tmp_path / "a.txt").write_text("one\ntwo\nsix\n")
    assert ShardedDataset(tmp_path / "a.txt", Fixed(4, bytes)).data_sha256() != first
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    assert ShardedDataset(tmp_path / "b.txt", Fixed(4, bytes)).data_sha256() != first


def test_a_wrapped_data_set_is_told_by_what_it_wraps() -> None:
    assert ShardedDataset(Source()).data_sha256() == fingerprint(Source())


# ---- on its way to the journal -----------------------------------------------------------------------------------------------------------


class Recorder:
    """Notes what it was switched to."""

    def __init__(self) -> None:
        self.code = COMPUTE

    during = rank_recorder.Recorder.during

    def switch(self, code: str) -> None:
        self.code = code

    def worked(self) -> None:
        assert self.code == COMPUTE


def test_rank_0_tells_once_on_what_it_trains() -> None:
    source, said = Source(length=8), list[DataRead]()
    feed = Feed(source, 7, 4, 8)
    client = SimpleNamespace(say=said.append, protocol=SimpleNamespace(member=MEMBER, state=StateId(0, 0)))
    run: Any = SimpleNamespace(
        seed=7,
        rank=0,
        reporter=DataReporter(),
        rehearsing=False,
        flops=SimpleNamespace(step_begins=lambda: None, shard_begins=lambda: None),
        total=3,
        client=client,
        recorder=Recorder(),
        feeds=SimpleNamespace(of=lambda *what: feed),
    )
    body, duties = SimpleNamespace(enter=lambda step: None), SimpleNamespace(next_assigned=[])
    contributions = SimpleNamespace(gathered=Representations(1), carried=ShardStates({}))
    train: Any = SimpleNamespace(assigned=[], checks=[], duties=duties, body=body, contributions=contributions)
    for number in range(3):
        assert list(Step(run, train, number).batches(source, 8)) == []
    assert said == [DataRead(MEMBER, 8, 8, fingerprint(Source(length=8)), 3, 0, 0, PERMUTED)]
    assert source.read == [0, 4, 7]
    feed.close()


def test_what_is_told_is_written_when_it_is_news() -> None:
    written: list[Any] = []
    machine: Any = SimpleNamespace(trained=Trained(ShardFigures(1)), write=written.append)
    for sha256 in ("aa", "aa", "bb"):
        notes.data_read(machine, DataRead(MEMBER, 100, 10, sha256), 1.0)
    assert written == [DataRead(MEMBER, 100, 10, "aa", at_s=1.0), DataRead(MEMBER, 100, 10, "bb", at_s=1.0)]

    again: Any = SimpleNamespace(trained=Trained(ShardFigures(1)), note=lambda record: None)
    machine_replay._apply(again, written[-1])
    assert again.trained.data == machine.trained.data  # a coordinator that starts again writes it no second time


def test_a_record_with_another_number_of_fields_is_refused() -> None:
    read = DataRead(MEMBER, 100, 10, "aa", 60, at_s=1.5)
    assert decode_line(encode_line(read)) == read
    for line in (b'["DataRead",[0,0],100]', b'["DataRead",[0,0],100,10,"aa",0,0,0,1.5]', b'["Committed",[0,7]]'):
        with pytest.raises(Exception, match="fields, the message has"):
            decode_line(line)
