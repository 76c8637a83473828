"""When a relay lets packets go."""

from __future__ import annotations

import pytest

from chaos.relay import SLOTS, DelayLine


def test_each_packet_leaves_so_much_later_and_in_order() -> None:
    line = DelayLine(0.02, 0.0)
    line.add(b"a", 1.0)
    line.add(b"b", 1.005)
    assert line.wait_s(1.0) == pytest.approx(0.02)
    assert line.due(1.019) == [] and line.due(1.0201) == [b"a"] and line.due(1.03) == [b"b"] and line.wait_s(1.03) is None


def test_a_rate_spreads_what_comes_at_once() -> None:
    line = DelayLine(0.0, 1000.0)
    for _ in range(4):
        line.add(b"x" * 100, 5.0)
    assert [len(line.due(5.0 + at_s)) for at_s in (0.09, 0.11, 0.21, 0.5)] == [0, 1, 1, 2]
    line.add(b"x" * 100, 9.0)
    assert line.wait_s(9.0) == pytest.approx(0.1), "what was idle is not made up for"


def test_jitter_changes_places_evenly_and_without_it_nothing_does() -> None:
    line = DelayLine(0.1, 0.0, jitter_s=0.05, seed=3)
    for number in range(1000):
        line.add(number.to_bytes(2), number * 0.001)
    assert line.due(0.1) == [] and line.wait_s(0.0) is not None
    left = [[int.from_bytes(packet) for packet in line.due(0.1 + tick * 0.001)] for tick in range(1200)]
    late_s = [tick * 0.001 - number * 0.001 for tick, numbers in enumerate(left) for number in numbers]
    order = [number for numbers in left for number in numbers]
    assert sorted(order) == list(range(1000)) and order != sorted(order)
    assert 0.0 <= min(late_s) and max(late_s) < 0.052 and sum(late_s) / 1000 == pytest.approx(0.0255, abs=0.003)


def test_what_comes_to_a_full_line_is_lost() -> None:
    line = DelayLine(1.0, 0.0)
    for number in range(SLOTS + 5):
        line.add(number.to_bytes(4), 1.0)
    assert [int.from_bytes(packet) for packet in line.due(3.0)] == list(range(SLOTS))
