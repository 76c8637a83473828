"""Whatever takes an s3:// URL beside checkpoints, on a real server: data through s3fs, and the copy of the journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import s3fs
import torch

from actors.rank.data.feeds import ShardedDataset
from fleet.data import Fixed, JsonLines, Lines, Reader, Tokens, Whole
from fleet.errors import ConfigError
from storage.mirror import JournalMirror, fetch_journal
from tests.support.seaweed import SeaweedServer

FILES = {
    "words/b.txt": b"three\nfour\n", "words/a.txt": b"one\ntwo\n", "json/a.jsonl": b'{"n": 1}\n{"n": 2}\n',
    "tokens/a.bin": np.arange(9, dtype="uint16").tobytes(), "fixed/a.bin": b"abcdef", "whole/a.raw": b"all of it",
}  # fmt: skip


@pytest.fixture
def server(s3: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    for variable, value in s3.environment.items():
        monkeypatch.setenv(variable, value)
    s3fs.S3FileSystem.clear_instance_cache()  # an earlier test's environment is in what is cached
    yield s3
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def root(server: SeaweedServer, tmp_path: Path) -> str:
    url = server.url(tmp_path.name)
    for name, content in FILES.items():
        with fsspec.open(f"{url}/{name}", "wb") as file:
            file.write(content)
    return url


@pytest.mark.parametrize(
    ("where", "reader", "samples"),
    [
        ("words/*.txt", Lines(), ["one", "two", "three", "four"]),
        ("words", Lines(), ["one", "two", "three", "four"]),
        ("json/a.jsonl", JsonLines(), [{"n": 1}, {"n": 2}]),
        ("fixed/a.bin", Fixed(2, bytes.decode), ["ab", "cd", "ef"]),
        ("whole/*", Whole(bytes), [b"all of it"]),
    ],
)
def test_data_of_every_format_is_read(root: str, where: str, reader: Reader, samples: list[Any]) -> None:
    assert list(ShardedDataset(f"{root}/{where}", reader)) == samples


def test_tokens_that_are_asked_for_together_are_those_of_a_local_file(root: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(FILES["tokens/a.bin"])
    far, near = ShardedDataset(f"{root}/tokens/a.bin", Tokens(2)), ShardedDataset(tmp_path / "a.bin", Tokens(2))
    assert far.data_sha256() == near.data_sha256()
    assert len(far) == len(near) > 1
    assert torch.equal(torch.stack(far.__getitems__(range(len(far)))), torch.stack(list(near)))


def test_options_are_those_of_s3fs(root: str, server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in server.environment:
        monkeypatch.delenv(variable)
    s3fs.S3FileSystem.clear_instance_cache()
    options = {"key": server.key, "secret": server.secret, "endpoint_url": server.endpoint}
    assert list(ShardedDataset(f"{root}/words/a.txt", Lines(), storage_options=options)) == ["one", "two"]


def test_data_that_is_not_there_or_changes_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match=r"no file matches"):
        ShardedDataset(f"{root}/none/*.txt", Lines())
    data = ShardedDataset(f"{root}/words/b.txt", Lines())
    with fsspec.open(f"{root}/words/b.txt", "wb") as file:
        file.write(b"th\n")
    for index in (0, 1):  # the end of what is asked for is behind the end of the file, and its beginning, too
        with pytest.raises(ConfigError, match=r"words/b.txt'.*it has changed since the run began"):
            data[index]


def test_the_journal_is_copied_and_comes_back(server: SeaweedServer, tmp_path: Path) -> None:
    url, journal, back = server.url(f"{tmp_path.name}-journal"), tmp_path / "journal.jsonl", tmp_path / "elsewhere" / "journal.jsonl"
    mirror = JournalMirror(url)
    for content in ("one\n", "one\ntwo\n"):
        journal.write_text(content)
        assert mirror.copy(journal) and not mirror.copy(journal)
    assert fetch_journal(url, back)
    assert back.read_text() == "one\ntwo\n"
    assert not fetch_journal(url, back)
