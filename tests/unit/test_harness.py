"""What a benchmark says on its way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import Part, PartsFailedError, in_parts, on_the_way, one_piece, run


def test_each_item_is_said_before_it_with_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    times_s = iter([100.0, 100.0, 130.4, 174.0])
    way = on_the_way("recovery", ["fleet", "torchft", "stock"], lambda name: f"{name}, kill", lambda: next(times_s))
    assert [(item, capsys.readouterr().err) for item in way] == [
        ("fleet", "recovery: 1 of 3: fleet, kill\n"),
        ("torchft", "recovery: 2 of 3: torchft, kill (30 s so far, some 61 s left)\n"),
        ("stock", "recovery: 3 of 3: stock, kill (74 s so far, some 37 s left)\n"),
    ]
    assert capsys.readouterr().out == "", "the result alone goes there"


def test_nothing_is_said_where_there_is_no_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(on_the_way("recovery", [])) == []
    assert capsys.readouterr().err == ""


def test_the_pieces_of_all_parts_are_counted_together(capsys: pytest.CaptureFixture[str]) -> None:
    def reported(found: dict[str, int]) -> dict[str, object]:
        return {"settings": {}, "figures": found, "samples": {}, "notes": [", ".join(found)]}

    parts = [
        Part({"one": lambda: 1, "two": lambda: 2}, reported),
        Part({}, reported),
        one_piece("three", lambda: reported({"three": 3})),
    ]
    found = in_parts("mesh", parts)
    assert found == {"settings": {}, "figures": {"one": 1, "two": 2, "three": 3}, "samples": {}, "notes": ["one, two", "", "three"]}
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in said] == ["mesh: 1 of 3: one", "mesh: 2 of 3: two", "mesh: 3 of 3: three"]


def test_what_was_measured_is_written_where_a_part_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reported(found: dict[str, int]) -> dict[str, object]:
        return {"settings": {}, "figures": found, "samples": {}, "notes": []}

    def fails() -> int:
        raise TimeoutError("240 s without a commit")

    parts = [Part({"killed": fails, "its twin": lambda: 1}, reported), one_piece("three", lambda: reported({"three": 3}))]
    with pytest.raises(PartsFailedError, match="'killed'.*240 s without a commit"):
        run("mesh", lambda form: in_parts("mesh", parts), ["--json", str(tmp_path / "mesh.json")])
    written = json.loads((tmp_path / "mesh.json").read_text())
    assert written["figures"] == {"three": 3}, "the rest of the part that failed was not done"
    assert "a part failed at 'killed'" in written["notes"][0]
    assert "Traceback" in capsys.readouterr().err
