"""Collections of Python are seen, and full ones come when all ranks agree on them."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.rank.telemetry.garbage import NEVER, REST, Garbage
from actors.rank.telemetry.recorder import Recorder, RingReader
from fleet.protocol.records import COMPUTE, GARBAGE, STRAGGLER


class Watched:
    """A recorder on a clock of its own, whose every look passes a millisecond."""

    def __init__(self, folder: Path) -> None:
        self.at_us = 0
        self.recorder = Recorder(folder / "ring", 0, self.clock)
        self.reader = RingReader(folder / "ring")
        self.recorder.switch(COMPUTE)

    def clock(self) -> int:
        self.at_us += 1000
        return self.at_us

    def collected_us(self) -> int:
        """In the span up to now."""
        self.recorder.switch(STRAGGLER)
        rows = self.reader.drain()
        self.recorder.switch(COMPUTE)
        return sum(after.at_us - row.at_us for row, after in itertools.pairwise(rows) if row.code == GARBAGE)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    gc.disable()  # no collection comes but those of the test
    yield Watched(tmp_path)
    gc.enable()
    gc.unfreeze()


def test_a_collection_in_the_threads_loop_is_seen_and_one_of_another_thread_is_not(watched: Watched) -> None:
    with Garbage(watched.recorder):
        assert watched.collected_us() == 0
        gc.collect()
        gc.collect(0)
        assert watched.collected_us() == 2000
        other = threading.Thread(target=gc.collect)
        other.start()
        other.join()
        assert watched.collected_us() == 0
    gc.collect()
    assert watched.collected_us() == 0


def test_a_rank_does_not_beat_and_is_not_silent_while_it_collects(watched: Watched) -> None:
    class Looks:
        def __init__(self) -> None:
            self.itself, self.seen = self, list[bool]()

        def __del__(self) -> None:
            self.seen.append(watched.reader.position().collecting)

    with Garbage(watched.recorder):
        seen = Looks().seen
        gc.collect()
        assert seen == [True] and not watched.reader.position().collecting


def test_a_full_collection_is_due_by_pythons_rule_and_takes_a_small_part_of_the_time(watched: Watched) -> None:
    before = gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 2)
    garbage = Garbage(watched.recorder)
    try:
        with garbage:
            assert not garbage.due
            garbage.settle()
            frozen = gc.get_freeze_count()
            assert gc.get_threshold() == (700, 10, NEVER) and frozen > 1000 and not garbage.due
            for number in range(4):
                assert garbage.due is (number > 2), number
                gc.collect(1)
            garbage.collect()
            assert not garbage.due and gc.get_count()[2] == 0
            for _ in range(4):
                gc.collect(1)
            assert not garbage.due, "the last one was a moment ago"
            watched.at_us += REST * 10_000
            assert garbage.due
        assert gc.get_threshold() == (700, 10, 2)
    finally:
        gc.set_threshold(*before)


def test_where_the_script_has_disabled_the_collector_it_alone_collects(watched: Watched) -> None:
    with Garbage(watched.recorder) as garbage:
        frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
        garbage.settle()
        garbage.collect()
        assert (gc.get_freeze_count(), gc.get_threshold(), garbage.due) == (frozen, threshold, False)
        assert watched.collected_us() == 0
