"""Loops as people write them, through kills, stops and resumes: what they come to is what plain PyTorch comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.protocol.records import ProcessLost, ViewPublished
from tests.support.programs import program
from tests.zoo import harness
from tests.zoo.feed import Done
from tests.zoo.harness import Ran, all_of, alone, differences, loaded, plain
from tests.zoo.loops import LOOPS, TOGETHER


def right(name: str, shards: int, ran: Ran, folder: Path, options: dict[str, str] | None = None) -> None:
    """The run has the bits of one rank alone. That one, and what the run has saved and told, are the plain loop's but for rounding."""
    done, digest = alone(name, shards, folder, options)
    assert ran.digest == digest
    expected = plain(name, shards, options)
    assert not differences(all_of(done), all_of(expected), exact=shards == 1)
    as_plain(name, shards, ran, expected, options)


def as_plain(name: str, shards: int, ran: Ran, expected: Done, options: dict[str, str] | None = None) -> None:
    """What the run has saved and said is what the plain loop has come to."""
    model = loaded(name, ran, options)
    assert not differences(model, {path: value for path, value in all_of(expected).items() if path in model}, exact=shards == 1)
    curves = {"loss": dict(enumerate(expected.losses, 1)), **expected.figures, **expected.logged}
    for figure, values in curves.items():
        reported = ran.figures[figure]
        assert max(reported) == max(values)
        assert not differences(by_step(reported), by_step({step: values[step] for step in reported}), exact=False)


def by_step(values: dict[int, float]) -> dict[str, float]:
    return {f"step {step}": value for step, value in values.items()}


def joined(ran: Ran, world: int) -> None:
    """Somebody was lost, and whoever took its place has trained."""
    assert ran.of(ProcessLost)
    last = ran.of(ViewPublished)[-1].view
    assert len(last.members) == world and any(member.incarnation for member in last.members)


@pytest.mark.parametrize("name", LOOPS)
def test_a_kill_changes_no_bit(name: str, tmp_path: Path) -> None:
    ran = harness.completed(harness.settings(name, tmp_path, 2, 16, kill="5"), tmp_path)
    joined(ran, 2)
    right(name, 16, ran, tmp_path)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_kill_in_a_group_changes_no_bit(name: str, tmp_path: Path) -> None:
    """The bits are those of one group, and the plain loop's but for rounding: it adds up in another order."""
    one, two = tmp_path / "one", tmp_path / "two"
    undisturbed = harness.completed(harness.settings(name, one, 2, 4, tensor=2), one)
    ran = harness.completed(harness.settings(name, two, 4, 4, tensor=2, kill="5"), two)
    joined(ran, 4)
    assert ran.digest == undisturbed.digest
    as_plain(name, 4, ran, plain(name, 4))


@pytest.mark.parametrize(("world", "shards"), [(1, 1), (1, 16), (2, 16), (3, 16)])
@pytest.mark.parametrize("name", LOOPS)
def test_a_kill_a_stop_and_a_resume_change_no_bit(name: str, world: int, shards: int, tmp_path: Path) -> None:
    """It is resumed with another number of ranks, where there are shards for them, and one more is killed there."""
    first, then = tmp_path / "first", tmp_path / "then"
    checkpoint = harness.stopped(harness.settings(name, first, world, shards, kill="5", stop="13"), first)
    later = world % 3 + 1 if shards > 1 else 1
    ran = harness.resumed(harness.settings(name, then, later, shards, kill="17"), first, checkpoint, then)
    joined(ran, later)
    right(name, shards, ran, tmp_path)


def test_a_compiled_loop_changes_no_bit_either_where_it_is_compiled_to_machine_code(tmp_path: Path) -> None:
    program("g++")
    backend = {"backend": "inductor"}
    ran = harness.completed(harness.settings("compiled", tmp_path, 2, 16, kill="5", **backend), tmp_path)
    joined(ran, 2)
    right("compiled", 16, ran, tmp_path, backend)
