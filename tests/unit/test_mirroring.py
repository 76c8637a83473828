"""Copies of growing files follow their originals."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.host.mirroring import FilePiece, MirroredFiles, pieces

ALL = ("*.log", "journal.jsonl")


def _pull(source: Path, copies: MirroredFiles, limit: int = 1 << 20) -> None:
    while copies.take(pieces(source, ALL, copies.known, limit)):
        continue


def _same(source: Path, target: Path) -> bool:
    names = {path.name for path in source.glob("*") if path.suffix != ".1"}
    return all((target / name).read_bytes() == (source / name).read_bytes() for name in names)


@given(st.lists(st.tuples(st.sampled_from(["a.log", "b.log"]), st.binary(max_size=40), st.booleans()), max_size=20), st.integers(1, 50))
def test_what_is_appended_arrives_whole(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bytes, bool]], limit: int) -> None:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    copies = MirroredFiles(target)
    for name, data, pulls in steps:
        with (source / name).open("ab") as file:
            file.write(data)
        if pulls:
            copies.take(pieces(source, ALL, copies.known, limit))
    _pull(source, copies, limit)
    assert _same(source, target)


def test_a_file_that_became_another_keeps_what_it_had(tmp_path: Path) -> None:
    source, copies = tmp_path / "source", MirroredFiles(tmp_path / "target")
    source.mkdir()
    (source / "a.log").write_bytes(b"first ")
    _pull(source, copies)
    with (source / "a.log").open("ab") as file:
        file.write(b"more")
    (source / "a.log").rename(source / "a.log.1")
    (source / "a.log").write_bytes(b"second")
    _pull(source, copies)
    assert (tmp_path / "target" / "a.log").read_bytes() == b"second"
    assert (tmp_path / "target" / "a.log.1").read_bytes() == b"first more"


def test_what_the_writer_cuts_off_goes_from_the_copy_too(tmp_path: Path) -> None:
    source, copies = tmp_path / "source", MirroredFiles(tmp_path / "target")
    source.mkdir()
    (source / "journal.jsonl").write_bytes(b"whole\ntor")
    _pull(source, copies)
    (source / "journal.jsonl").write_bytes(b"whole\n")
    copies.take(pieces(source, ALL, copies.known))
    assert _same(source, tmp_path / "target")
    with (source / "journal.jsonl").open("ab") as file:
        file.write(b"next\n")
    _pull(source, copies)
    assert _same(source, tmp_path / "target")


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leads out"):
        MirroredFiles(tmp_path / "target").take([FilePiece("../evil", 1, 0, b"x")])
