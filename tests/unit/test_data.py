"""Files become samples, bad ones are refused by name, and batches that were fetched ahead are those that would be fetched when asked."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import default_collate

import actors.rank.data.feeds as data_module
from actors.rank.data.feeds import Feed, ShardedDataset
from actors.rank.data.readers import SCAN_BYTES, File, shown
from actors.rank.data.sampling import samples_of
from fleet.data import Fixed, JsonLines, Lines, Reader, Tokens, Whole
from fleet.errors import ConfigError

BOUND_S = 30.0
SHARDS = 4


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path) if request.param == "local" else "memory://data"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def write(root: str, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(content)


def tokens(first: int, count: int, dtype: str = "uint16") -> bytes:
    return np.arange(first, first + count).astype(dtype).tobytes()


def npy(path: Path, array: np.ndarray) -> None:
    np.save(path, array)


# ---- formats -----------------------------------------------------------------------------------------------------------------------------


def test_lines_of_all_files_in_order_of_their_names(root: str) -> None:
    write(root, {"b.txt": b"three\r\n\nfour", "a.txt": "eins\nzwö\n".encode()})
    data = ShardedDataset(f"{root}/*.txt", Lines())
    assert list(data) == ["eins", "zwö", "three", "four"]
    assert data[-1] == "four"
    with pytest.raises(IndexError):
        data[4]


def test_lines_are_found_across_stretches(tmp_path: Path) -> None:
    lines = [f"{number:07d}" * 1000 for number in range(SCAN_BYTES // 7000 + 10)]
    write(str(tmp_path), {"long.txt": "\n".join(lines).encode()})
    data = ShardedDataset(tmp_path / "long.txt", Lines())
    assert len(data) == len(lines)
    assert data.__getitems__([0, len(lines) // 2, len(lines) - 1]) == [lines[0], lines[len(lines) // 2], lines[-1]]


def test_json_lines(root: str) -> None:
    write(root, {"part/x.jsonl": b'{"a": 1}\n{"a": 2}\n', "part/y.jsonl": b'{"a": 3}\n'})
    assert [record["a"] for record in ShardedDataset(f"{root}/part", JsonLines())] == [1, 2, 3]


def test_tokens_are_cut_into_sequences_that_share_one(root: str) -> None:
    write(root, {"a.bin": tokens(0, 10), "b.bin": tokens(100, 7)})
    data = ShardedDataset([f"{root}/a.bin", f"{root}/b.bin"], Tokens(3))
    assert [sample.tolist() for sample in data] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [100, 101, 102, 103], [103, 104, 105, 106]]
    assert data[0].dtype == torch.int64


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint8"])
def test_tokens_of_numpy_files(tmp_path: Path, dtype: str) -> None:
    npy(tmp_path / "a.npy", np.arange(9).astype(dtype))
    assert [sample.tolist() for sample in ShardedDataset(tmp_path, Tokens(4))] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


def test_fixed_records_and_whole_files(root: str) -> None:
    write(root, {"a.rec": b"abcdef", "images/1": b"one", "images/2": b"two"})
    assert list(ShardedDataset(f"{root}/a.rec", Fixed(2, bytes.decode))) == ["ab", "cd", "ef"]
    assert list(ShardedDataset(f"{root}/images", Whole(len))) == [3, 3]


def test_a_reader_of_ones_own() -> None:
    class Halves:
        def records(self, file: File) -> Any:
            return HalfRecords(file.size // 2)

    class HalfRecords:
        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return 2

        def span(self, index: int) -> tuple[int, int]:
            return index * self.size, (index + 1) * self.size

        def decode(self, data: bytes) -> str:
            return data.decode()

    write("memory://own", {"x": b"leftrigh"})
    assert list(ShardedDataset("memory://own/x", Halves())) == ["left", "righ"]


def test_a_map_style_dataset_stays_what_it_is() -> None:
    data = ShardedDataset([10, 20, 30])
    assert (len(data), data[1], data.__getitems__([2, 0])) == (3, 20, [30, 10])


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "reader", "message"),
    [
        ({}, Lines(), "no file matches"),
        ({"a": b""}, Lines(), "the file is empty"),
        ({"a": b"\n\n"}, Lines(), "Lines finds no sample"),
        ({"a": b"abc"}, Fixed(2, bytes), "3 bytes are no whole number of records of 2 bytes"),
        ({"a": b"abc"}, Fixed(0, bytes), "record_bytes = 0"),
        ({"a": b"abc"}, Tokens(1), "no whole number of tokens of uint16"),
        ({"a": b"abcd"}, Tokens(2), "Tokens finds no sample"),
        ({"a": b"abcd"}, Tokens(0), "length = 0"),
        ({"a": b"abcd"}, Tokens(1, "float32"), "tokens are integers"),
        ({"a.npy": b"abcd"}, Tokens(1), "it is no .npy file"),
        ({"a": b"x"}, None, "reader = None"),
    ],
)
def test_bad_files_are_refused(root: str, files: dict[str, bytes], reader: Reader | None, message: str) -> None:
    write(root, files)
    with pytest.raises(ConfigError, match=message):
        ShardedDataset(f"{root}/*", reader)


def test_numpy_files_that_are_cut_off_or_no_list_are_refused(tmp_path: Path) -> None:
    npy(tmp_path / "a.npy", np.zeros((2, 3), dtype=np.int64))
    with pytest.raises(ConfigError, match=r"no list of tokens"):
        ShardedDataset(tmp_path / "a.npy", Tokens(1))
    npy(tmp_path / "b.npy", np.zeros(6, dtype=np.int64))
    (tmp_path / "b.npy").write_bytes((tmp_path / "b.npy").read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"no list of tokens"):
        ShardedDataset(tmp_path / "b.npy", Tokens(1))


@pytest.mark.parametrize("source", [iter([1]), object(), []])
def test_what_is_no_map_style_dataset_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="source = "):
        ShardedDataset(source)


def test_threads_are_counted() -> None:
    with pytest.raises(ConfigError, match="workers = -1"):
        ShardedDataset([1], workers=-1)


def test_a_batch_that_does_not_divide_is_refused(root: str) -> None:
    write(root, {"a": b"1\n2\n3\n"})
    with pytest.raises(ConfigError, match="batch_size = 6"):
        Feed(ShardedDataset(f"{root}/a", Lines()), 0, SHARDS, 6)


@pytest.mark.parametrize("content", [b"1\n2\n3\n4\n5", b"1\n2"])
def test_a_local_file_that_changes_during_the_run_is_named(tmp_path: Path, content: bytes) -> None:
    write(str(tmp_path), {"a": b"1\n2\n3\n"})
    data = ShardedDataset(tmp_path / "a", Lines())
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ConfigError, match=r"/a'.*it had 6 bytes when the run began"):
        data[0]


def test_a_remote_file_that_shrinks_is_named() -> None:
    write("memory://shrinks", {"a": b"1\n2\n3\n"})
    data = ShardedDataset("memory://shrinks/a", Lines())
    write("memory://shrinks", {"a": b"1\n"})
    with pytest.raises(ConfigError, match=r"/shrinks/a.*it has changed"):
        data[2]


def test_credentials_are_not_shown() -> None:
    assert shown("https://user:secret@host/path?token=secret") == "https://host/path"
    with pytest.raises(ConfigError) as caught:
        ShardedDataset("memory://user:secret@host/none?token=secret", Lines())
    assert "secret" not in str(caught.value)


# ---- the cursor --------------------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_samples_or_says_so(tmp_path: Path) -> None:
    write(str(tmp_path), {"a": b"1\n2\n", "b": b"3\n4\n"})
    data = ShardedDataset(tmp_path, Lines())
    data.begin(4, 1)
    again = ShardedDataset(tmp_path, Lines())
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert again.batch_size == 4
    with pytest.raises(ConfigError, match="batch_size = 8: the run began with 4"):
        again.begin(8, 1)
    for files in ({"c": b"5\n"}, {"a": b"1\n2\n3\n"}):
        write(str(tmp_path), files)
        with pytest.raises(ConfigError, match="in other files"):
            ShardedDataset(tmp_path, Lines()).load_state_dict(data.state_dict())
        (tmp_path / next(iter(files))).unlink()


def test_a_batch_size_that_was_begun_with_stays() -> None:
    fresh, begun = ShardedDataset([1, 2]), ShardedDataset([1, 2])
    begun.begin(2, 1)
    begun.load_state_dict(fresh.state_dict())
    assert begun.state_dict()["batch_size"] == 2
    fresh.begin(4, 1)
    with pytest.raises(ConfigError, match="batch_size = 4: the run began with 2"):
        fresh.load_state_dict(begun.state_dict())


# ---- fetched ahead -----------------------------------------------------------------------------------------------------------------------


class Source:
    """A map-style dataset whose items can be held up, or fail, or draw random numbers."""

    def __init__(self, length: int = 64, item: Callable[[int], Any] = float) -> None:
        self.length, self.item = length, item
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread().name.partition("_")[0])
        return self.item(index)


def sample_batch(*of: Any) -> Any:
    return default_collate(samples_of(*of))


def keys(step: int, *shards: int) -> list[tuple[int, int]]:
    return [(step, shard) for shard in shards]


@pytest.fixture
def feed() -> Iterator[Callable[..., Feed]]:
    made: list[Feed] = []

    def make(source: Any, workers: int = 2) -> Feed:
        made.append(Feed(ShardedDataset(source, workers=workers), 7, SHARDS, 8))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(feed: Feed, steps: int) -> list[Any]:
    found = []
    for step in range(steps):
        feed.expect(keys(step, 1, 2) + keys(step + 1, 1, 2))
        found += [feed.get(step, shard) for shard in (1, 2)]
    return found


def test_batches_fetched_ahead_are_the_same(feed: Callable[..., Feed]) -> None:
    source, plain = Source(), Source()
    ahead, when_asked = run(feed(source), 20), run(feed(plain, workers=0), 20)
    expected = [sample_batch(Source(), 7, step, shard, SHARDS, 8) for step in range(20) for shard in (1, 2)]
    assert all(map(torch.equal, ahead, expected)) and all(map(torch.equal, when_asked, expected))
    assert source.threads == {"MainThread", "data"} and plain.threads == {"MainThread"}


def test_samples_that_draw_random_numbers_stay_with_the_loop_and_follow_from_the_shard(feed: Callable[..., Feed]) -> None:
    def draw(index: int) -> Any:
        return torch.rand(3), random.random(), np.random.rand(), index

    source = Source(item=draw)
    found = feed(source)
    batches = run(found, 5)
    assert found._ahead is False and source.threads == {"MainThread"}
    torch.rand(5)
    other = feed(Source(item=draw), workers=0)
    assert all(
        torch.equal(one, two)
        for number, (step, shard) in enumerate((step, shard) for step in range(5) for shard in (1, 2))
        for one, two in zip(batches[number], other.get(step, shard), strict=True)
    )


def test_the_global_generators_are_the_loops_own(feed: Callable[..., Feed]) -> None:
    found = feed(Source())
    found.get(0, 0)
    before = data_module._generators()
    found.expect(keys(1, 0, 1, 2))
    found.get(1, 2)
    assert before == data_module._generators()


def test_an_error_surfaces_where_its_shard_is_asked_for(feed: Callable[..., Feed]) -> None:
    bad = sample_batch(Source(), 7, 2, 3, SHARDS, 8).tolist()

    def item(index: int) -> float:
        if index in bad:
            raise OSError(f"sample {index} cannot be read")
        return float(index)

    found = feed(Source(item=item))
    found.get(0, 0)
    found.expect(keys(2, 0, 3))
    assert found.get(2, 0) is not None
    with pytest.raises(OSError, match="cannot be read") as caught:
        found.get(2, 3)
    assert caught.value.__notes__ == ["while the samples of step 2, shard 3 were fetched"]


def test_what_another_view_does_not_need_is_dropped(feed: Callable[..., Feed]) -> None:
    go, held = threading.Event(), threading.Event()
    fetched: list[int] = []

    def item(index: int) -> float:
        if threading.current_thread() is not threading.main_thread():
            fetched.append(index)
            held.set()
            assert go.wait(BOUND_S)
        return float(index)

    found = feed(Source(item=item), workers=1)
    found.get(0, 0)
    found.expect(keys(1, 0, 1, 2) + keys(2, 0, 1, 2))
    assert held.wait(BOUND_S)
    found.expect(keys(1, 3))
    assert list(found._coming) == keys(1, 3)
    go.set()
    assert torch.equal(found.get(1, 3), sample_batch(Source(), 7, 1, 3, SHARDS, 8))
    expected = [*sample_batch(Source(), 7, 1, 0, SHARDS, 8).tolist(), *sample_batch(Source(), 7, 1, 3, SHARDS, 8).tolist()]
    assert fetched == expected, "what had begun, and what the new view needs"


def test_no_more_is_fetched_than_was_asked_for(feed: Callable[..., Feed]) -> None:
    source = Source()
    found = feed(source)
    run(found, 3)
    assert set(found._coming) == set(keys(3, 1, 2))


def test_a_plain_dataset_is_fetched_when_asked() -> None:
    source = Source()
    found = Feed(source, 7, SHARDS, 8)
    run(found, 3)
    assert source.threads == {"MainThread"} and found._ahead is False
    found.close()
