"""The tracer of a kill's way counts each layer that a word goes through, and nothing else."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.protocol.causes import ProcessEnded
from fleet.protocol.facts import ProcessLost, noted
from fleet.protocol.instructions import INSTRUCTIONS, Quiesce
from fleet.protocol.member import MemberProtocol
from fleet.protocol.types import Member, Process
from tests.support import kill_way
from tests.unit.test_recovery import POLICY, candidate, situation

SPARE = Member(3, 0)
QUIESCE = Quiesce((SPARE,), 1)
LAYERS = {
    "holds": "def call(go, *words): return go(*words)",
    "holds_many": "def call(go, *words):\n    whole = list(words)\n    del words\n    return go(*whole)",
    "holds_none": "def call(go): return go()",
    "calls_first": "def call(first, word, go):\n    first(word)\n    del word\n    return go()",
}


def layer(name: str, path: str) -> Callable[..., Any]:
    """A function that stands in a file of ours, it seems."""
    found: dict[str, Any] = {}
    exec(compile(LAYERS[name], str(kill_way.ROOT / path), "exec"), found)
    return found["call"]  # type: ignore[no-any-return]


def member() -> MemberProtocol:
    protocol = MemberProtocol(SPARE.slot, "token", Process("node0", 1, 1), "")
    protocol.name(SPARE.incarnation)
    return protocol


def traced(folder: Path, work: Callable[[], object]) -> list[kill_way.Crossing]:
    """What happens in a thread of its own."""

    def run() -> None:
        kill_way.trace(folder, "rank3")
        work()
        sys.setprofile(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return kill_way.crossings(folder)


def files(found: list[kill_way.Crossing], what: str, word: str) -> list[tuple[str, ...]]:
    return [crossing.files for crossing in found if (crossing.what, crossing.word) == (what, word)]


MEMBER = "fleet/protocol/member.py"


@pytest.mark.parametrize("name", ["holds", "holds_many"])
def test_a_layer_that_a_word_goes_through_is_counted_and_so_is_one_below_it_that_does_not_see_it(tmp_path: Path, name: str) -> None:
    outer, between = layer(name, "fleet/outer.py"), layer("holds_none", "actors/between.py")
    protocol = member()
    found = traced(tmp_path, lambda: outer(lambda word: between(functools.partial(protocol.receive, word)), QUIESCE))
    ways = [(MEMBER, "actors/between.py", "fleet/outer.py")]
    assert files(found, kill_way.HANDLED, "Quiesce") == ways
    assert files(found, kill_way.MADE, "Quiesced") == ways


def test_a_thread_is_not_counted_where_it_was_before_nor_a_helper_that_has_returned(tmp_path: Path) -> None:
    above, helper = layer("holds_none", "actors/above.py"), layer("holds", "actors/helper.py")
    beside = layer("calls_first", "actors/beside.py")
    protocol = member()

    def work() -> None:
        above(lambda: helper(INSTRUCTIONS.encode, QUIESCE) and protocol.receive(QUIESCE))
        beside(INSTRUCTIONS.encode, QUIESCE, lambda: protocol.receive(QUIESCE))

    assert set(files(traced(tmp_path, work), kill_way.HANDLED, "Quiesce")) == {(MEMBER,)}


def test_a_copy_of_a_word_is_no_other_word(tmp_path: Path) -> None:
    makes = layer("holds_none", "actors/makes.py")

    def work() -> None:
        first = makes(lambda: ProcessLost(SPARE, ProcessEnded()))
        noted(first, 1.0)
        makes(lambda: Quiesce((SPARE,), 1))
        INSTRUCTIONS.decode(INSTRUCTIONS.encode(QUIESCE))

    found = traced(tmp_path, work)
    assert [(crossing.word, crossing.files) for crossing in found] == [
        ("ProcessLost", ("actors/makes.py",)),
        ("Quiesce", ("actors/makes.py",)),
    ]


def test_an_answer_of_a_policy_counts_where_something_follows_from_it(tmp_path: Path) -> None:
    asks = layer("holds_none", "fleet/asks.py")

    def work() -> None:
        asks(lambda: POLICY.form(situation(candidate(0)), 0.0))
        asks(lambda: POLICY.form(situation(candidate(0), min_ranks=2), 0.0))

    found = traced(tmp_path, work)
    assert [crossing.about.partition(" ")[0] for crossing in found] == ["form"]
    assert files(found, kill_way.MADE, "Formation") == [("policies/recovery.py",)]


def test_the_page_names_few_files_and_each_once() -> None:
    named = kill_way.documented()
    assert 0 < len(named) <= kill_way.MOST_FILES
    assert len(named) == len(set(named))
    assert [path for path in named if not (kill_way.ROOT / path).is_file()] == []
