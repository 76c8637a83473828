"""Probes: what they note, how they are found in the source, and which of them no seed may leave out."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from fleet.protocol.probes import probe, watch
from tests.simulation import probes
from tests.simulation.runs import simulate_seed

SOURCE = """
def step(late: bool) -> None:
    if late:
        probe("a step is late")
    probe("a step is taken")
"""


def test_names_are_literal_and_each_is_there_once() -> None:
    found = probes.calls()
    assert [where for name, where in found if name is None] == []
    assert [name for name, count in Counter(name for name, _ in found).items() if count > 1] == []
    assert len(found) >= 35


def test_names_are_plain_words() -> None:
    assert [name for name in probes.named() if not name.replace(" ", "").isalpha() or name != name.lower()] == []


def test_a_probe_that_nobody_watches_calls_nothing_and_notes_nothing() -> None:
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    probe("nobody watches")
    sys.setprofile(None)
    assert events == ["call", "return", "c_call"]  # the last one is that of `setprofile`
    with watch() as reached:
        assert not reached


def test_who_watches_learns_each_name_once() -> None:
    with watch() as reached:
        for _ in range(2):
            probe("it rains")
        probe("it snows")
    probe("it is over")
    assert reached == {"it rains", "it snows"}


def test_a_watch_within_another_tells_it_what_was_reached_even_if_something_fails() -> None:
    seen: list[set[str]] = []

    def fails() -> None:
        with watch() as inner:
            seen.append(inner)
            probe("within")
            raise ValueError("on purpose")

    with watch() as outer:
        probe("before")
        with pytest.raises(ValueError, match="on purpose"):
            fails()
        probe("after")
    assert (seen, outer) == ([{"within"}], {"before", "within", "after"})


def test_probes_are_found_in_the_source(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "a.py").write_text(SOURCE)
    (tmp_path / "fleet" / "b.py").write_text('name = "x"\nprobe(name)\nprobes.probe(f"{name} is late")\nother("probe(y)")\n')
    assert probes.calls(tmp_path) == [
        ("a step is late", "fleet/a.py:4"), ("a step is taken", "fleet/a.py:5"), (None, "fleet/b.py:2"), (None, "fleet/b.py:3"),
    ]  # fmt: skip


def test_a_seed_writes_what_it_reached_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(probes.FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    probes.note("cuts-0-50", {"a step is late"})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(probes.FOLDER, str(tmp_path / "new"))
    probes.note("cuts-0-50", {"a step is taken", "a step is late"})
    probes.note("cuts-0-50", {"a step is late"})
    probes.note("cuts-50-50", {"a step is late"})
    assert len(list((tmp_path / "new").iterdir())) == 2
    assert probes.read(tmp_path / "new") == {"a step is late": 3, "a step is taken": 1}


@pytest.mark.parametrize(
    ("reached", "unreached", "status", "reported"),
    [
        (["early", "late"], {}, 0, "late · fleet/a.py:2 · reached in 1 seed"),
        (["early", "early"], {}, 1, "late · fleet/a.py:2 · NOT REACHED"),
        (["early"], {"late": "time stands still"}, 0, "late · fleet/a.py:2 · known: time stands still"),
        (["early", "late"], {"late": "time stands still"}, 1, "late · fleet/a.py:2 · reached in 1 seed, and UNREACHED says"),
        (["early", "late"], {"never": "it is gone"}, 1, "never · UNREACHED · no longer in the code"),
        ([], {}, 1, "early · fleet/a.py:1 · NOT REACHED"),
    ],
)
def test_the_command_fails_where_a_probe_is_out_of_reach_or_its_reason_is_wrong(
    reached: list[str],
    unreached: dict[str, str],
    status: int,
    reported: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(probes, "named", lambda: {"early": "fleet/a.py:1", "late": "fleet/a.py:2"})
    monkeypatch.setattr(probes, "pairs", dict)
    monkeypatch.setattr(probes, "UNREACHED", unreached)
    (tmp_path / "1-cuts").write_text("".join(f"{name}\n" for name in reached))
    assert probes.main([str(tmp_path)]) == status
    assert reported in capsys.readouterr().out


def test_what_is_known_to_be_out_of_reach_is_in_the_code_and_says_why() -> None:
    assert probes.UNREACHED.keys() | probes.SELDOM.keys() <= probes.named().keys() | probes.pairs().keys()
    assert all((probes.UNREACHED | probes.SELDOM).values())


def test_what_came_of_an_event_is_written_as_the_table_has_it() -> None:
    came = {probes.pair(*each) for each in simulate_seed("random", 11).world.watch.came}
    assert {"Joined leads to ProcessUp", "Tick leads to Committed"} <= came & probes.pairs().keys()
    assert "Joined leads to Quiesce" not in probes.pairs(), "of sets that many rows have"
