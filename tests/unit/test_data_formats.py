"""Parquet files, folders of images, and datasets of others become samples; what is wrong with them is said by name."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import actors.rank.data.feeds as data_module
from actors.rank.data.feeds import Feed, ShardedDataset
from actors.rank.data.groups import Cache
from actors.rank.data.parquet import TAIL_BYTES
from actors.rank.data.readers import File, Grouped, Records
from fleet.data import Images, Lines, Parquet, Whole
from fleet.errors import ConfigError

BOUND_S = 30.0
COLOURS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path) if request.param == "local" else "memory://formats"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


def parquet(columns: Mapping[str, Any], rows_a_group: int = 4, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(dict(columns)), out, row_group_size=rows_a_group, **options)
    return out.getvalue()


def rows(first: int, count: int, **options: Any) -> bytes:
    numbers = range(first, first + count)
    text = [None if number % 3 == 0 else f"row {number}" for number in numbers]
    return parquet({"number": numbers, "text": text, "pair": [[float(number), 0.5] for number in numbers]}, **options)


def png(colour: tuple[int, int, int], size: tuple[int, int] = (3, 2)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


# ---- Parquet -----------------------------------------------------------------------------------------------------------------------------


def test_each_row_is_a_sample_and_lists_of_numbers_are_tensors(root: str) -> None:
    put(f"{root}/b.parquet", rows(10, 3))
    put(f"{root}/a.parquet", rows(0, 10))
    data = ShardedDataset(root, Parquet())
    assert len(data) == 13
    assert [sample["number"] for sample in data] == [*range(13)]
    assert [sample["text"] for sample in data.__getitems__([11, 3, -1, 1])] == ["row 11", None, None, "row 1"]
    assert torch.equal(data[12]["pair"], torch.tensor([12.0, 0.5], dtype=torch.float64))
    with pytest.raises(IndexError):
        data[13]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_only_the_wanted_columns_are_read_and_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    wide = {"number": range(2000), "noise": np.random.default_rng(0).random(2000), "pair": [[number, 1] for number in range(2000)]}
    (tmp_path / "a.parquet").write_bytes(parquet(wide, rows_a_group=500, compression=compression))
    read: list[int] = []
    original = data_module._read
    monkeypatch.setattr(data_module, "_read", lambda wanted: read.extend(stop - start for _, start, stop in wanted) or original(wanted))
    data = ShardedDataset(tmp_path, Parquet(["pair", "number"], parse=lambda row: (*row, row["number"], row["pair"].tolist())))
    assert data.__getitems__([0, 700]) == [("pair", "number", 0, [0, 1]), ("pair", "number", 700, [700, 1])]
    assert len(read) == 4 and sum(read) < (tmp_path / "a.parquet").stat().st_size - 4 * 500 * 8, "four chunks, none of the noise"


def test_a_row_group_is_read_once_while_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(rows(0, 400, rows_a_group=40))
    read: list[int] = []
    original = data_module._read
    monkeypatch.setattr(data_module, "_read", lambda wanted: read.append(len(wanted)) or original(wanted))
    data = ShardedDataset(tmp_path, Parquet(["number"]))
    seen = [sample["number"] for step in range(50) for sample in data.samples_of(3, step, 0, 1, 8)]
    assert sorted(seen) == [*range(400)] and seen != [*range(400)]
    assert sum(read) == 10


def test_a_window_bounds_what_a_stretch_of_the_order_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(rows(0, 4000, rows_a_group=100))
    read: list[int] = []
    original = data_module._read
    monkeypatch.setattr(data_module, "_read", lambda wanted: read.append(len(wanted)) or original(wanted))
    data = ShardedDataset(tmp_path, Parquet(["number"], window_bytes=4 * 100 * 8))
    for epoch in range(2):
        seen = [sample["number"] for step in range(250) for sample in data.samples_of(3, 250 * epoch + step, 0, 1, 16)]
        assert sorted(seen) == [*range(4000)]
        assert len({number // 100 for number in seen[:300]}) <= 5
    assert 60 <= sum(read) <= 100, "each of 40 groups about once an epoch"


def test_a_footer_that_is_larger_than_a_first_read_is_read_whole(root: str) -> None:
    put(f"{root}/a.parquet", parquet({f"column{number}": range(600) for number in range(40)}, rows_a_group=10))
    data = ShardedDataset(f"{root}/a.parquet", Parquet(["column7"]))
    size = int.from_bytes(fsspec.open(f"{root}/a.parquet").open().read()[-8:-4], "little")
    assert size > TAIL_BYTES and data[599] == {"column7": 599}


def test_a_sample_is_the_same_whichever_come_with_it(tmp_path: Path) -> None:
    nested = [{"x": 1, "y": [1, 2]}, None, {"x": 3, "y": []}]
    lists = [[1, 2], None, [3]]
    gaps = [[1.0, None], [2.0], []]
    (tmp_path / "a").write_bytes(parquet({"nested": nested, "lists": lists, "gaps": gaps}))
    data = ShardedDataset(tmp_path, Parquet())
    together, alone = data.__getitems__([0, 1, 2]), [data[number] for number in range(3)]
    for samples in (together, alone):
        assert [sample["nested"] for sample in samples] == nested and [sample["gaps"] for sample in samples][:1] == gaps[:1]
        assert [sample["lists"] if sample["lists"] is None else sample["lists"].tolist() for sample in samples] == lists
        assert samples[1]["gaps"].tolist() == [2.0] and samples[2]["gaps"].tolist() == []


def test_marks_of_other_writers_are_no_data(tmp_path: Path) -> None:
    for name, content in {"a.parquet": rows(0, 3), "_SUCCESS": b"", "_metadata": b"x", ".part.crc": b"crc"}.items():
        (tmp_path / name).write_bytes(content)
    assert len(ShardedDataset(tmp_path, Parquet())) == 3


@pytest.mark.parametrize(
    ("files", "reader", "message"),
    [
        ({"a": b"no parquet"}, Parquet(), r"/a'.*it is no Parquet file"),
        ({"a": b"PAR1junkPAR1"}, Parquet(), r"/a'.*footer cannot be read"),
        ({"a": rows(0, 4)[:-9] + b"PAR1"}, Parquet(), r"/a'.*footer cannot be read"),
        ({"a": rows(0, 0)}, Parquet(), r"/a'.*finds no sample"),
        ({"a": rows(0, 4)}, Parquet(["number", "none", "nil"]), r"no column none, nil.*number, text, pair"),
        ({"a": rows(0, 4)}, Parquet([]), r"no column is asked for"),
        ({"a": rows(0, 4)}, Parquet("number"), r"columns = 'number'.*\['number'\]"),
        ({"a": rows(0, 4)}, Parquet(window_bytes=0), r"window_bytes = 0"),
        ({"a": rows(0, 4), "b": parquet({"number": [1]})}, Parquet(), r"/b'.*no column text"),
        ({"a": rows(0, 4), "b": parquet({"number": [1.5]})}, Parquet(["number"]), r"/b'.*number is double, and int64 in the first"),
        ({"a": parquet({"x": [1]}), "b": parquet({"x": [1], "y": [1]})}, Parquet(), r"/b'.*has the column y"),
        ({"a": parquet({"x": [1], "y": [1]}), "b": parquet({"y": [1], "x": [1]})}, Parquet(), r"/b'.*another order"),
    ],
)
def test_bad_parquet_is_refused_by_name(tmp_path: Path, files: dict[str, bytes], reader: Parquet, message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        ShardedDataset([tmp_path / name for name in files], reader)


class Either:
    """Parquet files, and whatever else there is by its lines."""

    def records(self, file: File) -> Records | Grouped:
        return Parquet().records(file) if file.path.endswith(".parquet") else Lines().records(file)


def test_a_reader_gives_groups_for_all_files_or_for_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(rows(0, 4))
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\n")
    with pytest.raises(ConfigError, match=r"reader = 'Either'.*samples of 1 files can be read only in groups, those of 1 one by one"):
        ShardedDataset(tmp_path, Either())


def test_a_row_group_that_cannot_be_decoded_names_its_file(tmp_path: Path) -> None:
    content = bytearray(rows(0, 400, rows_a_group=100, compression="zstd"))
    content[4:3000] = bytes(2996)
    (tmp_path / "a").write_bytes(content)
    data = ShardedDataset(tmp_path / "a", Parquet())
    with pytest.raises(ConfigError, match=r"/a'.*row group 0 cannot be decoded"):
        data[0]
    assert data[399]["number"] == 399, "what is whole can be read"


def test_the_order_is_part_of_what_a_resume_checks(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(rows(0, 40))
    begun = ShardedDataset(tmp_path / "a", Parquet())
    ShardedDataset(tmp_path / "a", Parquet()).load_state_dict(begun.state_dict())
    with pytest.raises(ConfigError, match="in other files"):
        ShardedDataset(tmp_path / "a", Parquet(window_bytes=1)).load_state_dict(begun.state_dict())


def test_what_reads_parquet_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(rows(0, 4))
    for library, reader in {"pyarrow.parquet": Parquet(), "PIL.Image": Images()}.items():
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ConfigError, match=r"pip install (pyarrow|pillow)"):
            ShardedDataset(tmp_path / "a", reader)


# ---- what is kept loaded -----------------------------------------------------------------------------------------------------------------


class Loads:
    """Loads of values of 10 bytes each."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.fails = False

    def __call__(self, keys: Sequence[int]) -> list[np.ndarray]:
        if self.fails:
            raise OSError("the store is away")
        self.keys += keys
        return [np.full(10, key, np.uint8) for key in keys]


def test_the_least_recently_used_goes_first() -> None:
    loads = Loads()
    cache = Cache(loads, 30)
    for keys in ([1, 2, 3], [1], [4], [1, 3], [2]):
        assert {key: int(value[0]) for key, value in cache.get(keys).items()} == {key: key for key in keys}
    assert loads.keys == [1, 2, 3, 4, 2]


def test_more_than_fits_is_given_all_the_same() -> None:
    assert [*Cache(Loads(), 5).get([1, 2, 3])] == [1, 2, 3]


def test_a_load_that_failed_is_tried_again() -> None:
    loads = Loads()
    cache = Cache(loads, 30)
    loads.fails = True
    with pytest.raises(OSError, match="away"):
        cache.get([1])
    loads.fails = False
    assert [*cache.get([1])] == [1]


def test_what_another_thread_loads_is_waited_for() -> None:
    go, loading = threading.Event(), threading.Event()
    loads = Loads()

    def load(keys: Sequence[int]) -> list[np.ndarray]:
        loading.set()
        assert go.wait(BOUND_S)
        return loads(keys)

    cache = Cache(load, 30)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.get, [1, 2])
        assert loading.wait(BOUND_S)
        second = threads.submit(cache.get, [2])
        go.set()
        assert second.result(BOUND_S)[2] is first.result(BOUND_S)[2]
    assert loads.keys == [1, 2]


# ---- images ------------------------------------------------------------------------------------------------------------------------------


def test_the_folder_of_an_image_is_its_class(root: str) -> None:
    for name, colour in COLOURS.items():
        put(f"{root}/{name}/1.png", png(colour))
        put(f"{root}/{name}/thumbs.db", b"no image")
    data = ShardedDataset(root, Images())
    assert [label for _, label in data] == [0, 1] and data.reader.classes == ("blue", "red")
    image, _ = data[1]
    assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 2, 3)) and image[:, 0, 0].tolist() == [255, 0, 0]


def test_images_are_converted_and_transformed(tmp_path: Path) -> None:
    put(f"{tmp_path}/red/1.png", png(COLOURS["red"]))
    grey, _ = ShardedDataset(tmp_path, Images(mode="L"))[0]
    assert tuple(grey.shape) == (1, 2, 3)
    assert ShardedDataset(tmp_path, Images(lambda image: image.resize((8, 4)).size, classes=("blue", "red")))[0] == ((8, 4), 1)


@pytest.mark.parametrize("damage", [lambda good: good[:40], lambda good: b"none", lambda good: good[:30] + b"\xff" * 20 + good[50:]])
def test_a_damaged_image_is_named(tmp_path: Path, damage: Any) -> None:
    put(f"{tmp_path}/red/1.png", damage(png(COLOURS["red"], (300, 200))))
    with pytest.raises(ConfigError, match=r"/red/1.png'.*Pillow cannot read it"):
        ShardedDataset(tmp_path, Images())[0]


def test_many_files_keep_their_order(tmp_path: Path) -> None:
    for number in range(3 * data_module.OPENERS + 1):
        put(f"{tmp_path}/class{number:02}/1.png", png((number, 0, 0)))
    data = ShardedDataset(tmp_path, Images())
    assert [(int(image[0, 0, 0]), label) for image, label in data] == [(number, number) for number in range(len(data))]


def test_a_folder_that_is_no_class_is_named(tmp_path: Path) -> None:
    put(f"{tmp_path}/green/1.png", png((0, 255, 0)))
    with pytest.raises(ConfigError, match=r"green/1.png'.*'green', which is none of the classes blue, red"):
        ShardedDataset(tmp_path, Images(classes=("blue", "red")))


def test_a_random_transform_follows_from_the_shard(tmp_path: Path) -> None:
    for number in range(8):
        put(f"{tmp_path}/red/{number}.png", png((number, 0, 0)))

    def turned(image: Any) -> torch.Tensor:
        return torch.tensor([image.getpixel((0, 0))[0], int(torch.randint(360, ()))])

    found = []
    for workers in (0, 2):
        feed = Feed(ShardedDataset(tmp_path, Images(turned), workers=workers), 7, 2, 4)
        feed.expect([(step, shard) for step in range(3) for shard in range(2)])
        found.append([feed.get(step, shard)[0] for step in range(3) for shard in range(2)])
        assert feed._ahead is False
        feed.close()
        torch.rand(3)
    assert all(map(torch.equal, *found))


def test_an_error_of_a_parser_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(rows(0, 10))
    with pytest.raises(ZeroDivisionError) as of_rows:
        ShardedDataset(tmp_path / "rows", Parquet(parse=lambda row: 1 / 0))[9]
    assert any("row group 2 of" in note and "/rows" in note for note in of_rows.value.__notes__)
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(ValueError, match="invalid literal") as caught:
        ShardedDataset(tmp_path / "a", Whole(int))[0]
    assert any("/a" in note and "record 0" in note for note in caught.value.__notes__)


# ---- Hugging Face datasets ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_dict({"x": [[float(number), 1.0] for number in range(64)], "y": [*range(64)]})
    made.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_a_dataset_on_disk_is_read_by_number(saved: Path, workers: int | None) -> None:
    data = datasets.load_from_disk(saved).with_format("torch")
    feed = Feed(data if workers is None else ShardedDataset(data, workers=workers), 7, 4, 16)
    seen = []
    for step in range(4):
        feed.expect([(step, shard) for shard in range(4)])
        batches = [feed.get(step, shard) for shard in range(4)]
        assert all(torch.equal(batch["x"][:, 0], batch["y"].float()) for batch in batches)
        seen += [int(number) for batch in batches for number in batch["y"]]
    assert sorted(seen) == [*range(64)] and feed._ahead == bool(workers)
    feed.close()


def test_its_own_fingerprint_tells_it_from_others(saved: Path) -> None:
    first, again = (ShardedDataset(datasets.load_from_disk(saved)) for _ in range(2))
    changed = ShardedDataset(datasets.load_from_disk(saved).map(lambda row: {"y": -1 if row["y"] == 7 else row["y"]}))
    assert first.data_sha256() == again.data_sha256() != changed.data_sha256() != ""
    assert first[0] == changed[0] and first[32] == changed[32] and first[63] == changed[63], "none of the three samples that are looked at"


def test_a_dict_of_splits_is_refused(saved: Path) -> None:
    splits = datasets.DatasetDict({"train": datasets.load_from_disk(saved)})
    with pytest.raises(ConfigError, match=r"dataset = 'DatasetDict'.*\['train'\]"):
        Feed(splits, 7, 4, 16)
