"""Links between nodes: what is measured over real sockets, to whom an end answers, and who is named as slow."""

from __future__ import annotations

import math
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import links as ends
from actors.links import LinkEnd
from fleet.ledger.health import Link
from policies.links import MOST_PAIRS, admit, again, best, judge, pairs, rounds

HOST = "127.0.0.1"
SECRET = b"s" * 32


def mesh(nodes: str, slow: dict[str, float], width: dict[str, float] | None = None) -> list[Link]:
    """All links of nodes with names of one letter; ``slow``: how many times slower the round trip of a node's, or of one link, is."""
    found = []
    for one, other in combinations(nodes, 2):
        times = slow.get(one, 1.0) * slow.get(other, 1.0) * slow.get(one + other, 1.0)
        wide = (width or {}).get(one, 1.0) * (width or {}).get(other, 1.0)
        found.append(Link(one, other, 1e-4 * times, 1e9 * wide, 1e9 * wide))
    return found


def named(links: list[Link], **arguments: dict[str, tuple[str, ...]]) -> list[str]:
    return ["".join(outlier.nodes) for outlier in judge(links, **arguments)]


# ---- who is named ------------------------------------------------------------------------------------------------------------------------


def test_a_node_that_is_slow_to_all_others_is_named_with_how_much() -> None:
    [outlier] = judge(mesh("abcd", {"c": 5.0}))
    assert (outlier.nodes, outlier.figure, outlier.times) == (("c",), "round trip", 5.0)
    assert "node c is 5.0 times slower than the median to all others" in outlier.reason
    assert named(mesh("abc", {"b": 5.0})) == ["b"], "three nodes are enough"
    assert named(mesh("ab", {"b": 5.0})) == [], "two are not"
    assert named(mesh("abcd", {"c": 3.0})) == [], "it is not by enough"
    assert named(mesh("abcdefg", {"c": 50.0, "f": 5.0})) == ["c", "f"], "the worst first, and it hides no other"


def test_a_thin_node_is_named_by_the_slower_way() -> None:
    [outlier] = judge(mesh("abcd", {}, {"d": 0.25}))
    assert (outlier.nodes, outlier.figure) == (("d",), "bandwidth")
    one_way = [Link("a", "b", 1e-4, 1e9, 1e8), Link("a", "c", 1e-4, 1e9, 1e9), Link("b", "c", 1e-4, 1e9, 1e9)]
    assert named(one_way) == ["ab"]


def test_one_slow_link_makes_no_slow_node() -> None:
    for nodes in ("abc", "abcd", "abcdef"):
        assert named(mesh(nodes, {"ac": 40.0})) == ["ac"]


def test_links_to_another_rack_are_compared_with_such_links() -> None:
    links = mesh("abcd", {"d": 10.0})
    assert named(links) == ["d"]
    racks = {"a": ("r1",), "b": ("r1",), "c": ("r1",), "d": ("r2",)}
    assert named(links, places=racks) == []
    assert named(mesh("abcd", {"b": 10.0}), places=racks) == ["b"], "in all of its links"


def test_a_broken_link_is_named_first_and_compared_with_none() -> None:
    links = [*mesh("abc", {}), Link("a", "d", error="d did not answer")]
    assert named(links) == ["ad"]
    assert "d did not answer" in judge(links)[0].reason


@given(st.integers(4, 12), st.data())
def test_whatever_links_are_like_within_the_limits_nobody_is_named(count: int, data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(count)]
    wavers = st.floats(1.0, 1.7)
    links = [Link(a, b, 1e-4 * data.draw(wavers), 1e9 / data.draw(wavers), 1e9 / data.draw(wavers)) for a, b in combinations(names, 2)]
    assert judge(links) == []
    worst = data.draw(st.sampled_from(names))
    slowed = [Link(*link.ends, link.round_trip_s * (8 if worst in link.ends else 1), 1e9, 1e9) for link in links]
    assert [outlier.nodes for outlier in judge(slowed)] == [(worst,)]


def test_a_node_is_kept_out_for_all_of_its_links_and_not_for_one() -> None:
    links = mesh("abcd", {"c": 5.0})
    assert admit("c", links).action == "keep_out"
    assert admit("a", links).action == "admit"
    assert admit("a", mesh("abcd", {"ac": 50.0})).action == "admit"
    alone = [*mesh("abc", {}), *(Link(node, "d", error="d hung up") for node in "abc")]
    assert admit("d", alone).action == "keep_out"
    assert admit("a", alone).action == "admit"
    assert admit("a", []).action == "admit", "a cluster of one node has no links"


def test_whoever_looks_slow_is_measured_once_more_and_the_best_counts() -> None:
    links = mesh("abcd", {"c": 5.0, "ab": 40.0})
    doubtful = again(judge(links), links)
    assert set(doubtful) == {("a", "b"), ("a", "c"), ("b", "c"), ("c", "d")}
    assert named(best([*links, *mesh("abcd", {"c": 5.0})])) == ["c"]
    healed = best([Link("a", "b", error="lost"), Link("a", "b", 1.0, 2.0, 3.0), Link("a", "b", 2.0, 4.0, 1.0), Link("a", "b", error="x")])
    assert healed == [Link("a", "b", 1.0, 4.0, 3.0)]


# ---- which links are measured ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 3))
def test_each_node_is_measured_and_large_clusters_not_in_all_pairs(count: int, seed: int) -> None:
    names = [f"n{i:02}" for i in range(count)]
    chosen = pairs(names, seed=seed)
    assert len(set(map(frozenset, chosen))) == len(chosen) and all(one != other for one, other in chosen)
    if math.comb(count, 2) <= MOST_PAIRS:
        assert len(chosen) == math.comb(count, 2)
    else:
        ends_of = Counter(name for pair in chosen for name in pair)
        assert min(ends_of[name] for name in names) >= 4 and len(chosen) <= 3 * count
    assert chosen == pairs(names, seed=seed)


@given(st.integers(0, 20), st.integers(1, 5))
def test_no_node_is_in_two_measurements_at_once(count: int, at_once: int) -> None:
    chosen = pairs([f"n{i:02}" for i in range(count)])
    found = rounds(chosen, at_once)
    assert sorted(pair for one in found for pair in one) == sorted(chosen)
    assert all(0 < len(one) <= at_once and len({name for pair in one for name in pair}) == 2 * len(one) for one in found)


# ---- over real sockets -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def end() -> Iterator[LinkEnd]:
    there = LinkEnd(HOST, SECRET)
    yield there
    there.close()


def test_two_ends_measure_what_is_between_them(end: LinkEnd) -> None:
    here = LinkEnd(HOST, SECRET)
    try:
        round_trip_s, there, back = here.measure(HOST, end.port(), trips=20, bulk_s=0.05)
    finally:
        here.close()
    assert 0 < round_trip_s < ends.LIMIT_S
    assert there > 1e6 and back > 1e6


def test_an_end_answers_nobody_without_the_secret(end: LinkEnd) -> None:
    stranger = LinkEnd(HOST, b"t" * 32)
    try:
        with pytest.raises(ConnectionError, match="does not know the secret"):
            stranger.measure(HOST, end.port(), trips=1, bulk_s=0.01)
    finally:
        stranger.close()
    with socket.create_connection((HOST, end.port()), 5) as line:
        line.sendall(b"x" * (ends.NONCE + ends.PROOF + 64))
        line.settimeout(5)
        answer = b""
        while more := _received(line):
            answer += more
    assert len(answer) == ends.NONCE + ends.PROOF, "its own proof, and then the end"


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(1024)
    except ConnectionResetError:  # it left bytes unread, and closed
        return b""


def _hang_up(listening: socket.socket) -> None:
    listening.accept()[0].close()


def test_one_that_hangs_up_is_an_error_and_no_figure() -> None:
    with socket.create_server((HOST, 0)) as listening:
        closing = threading.Thread(target=_hang_up, args=(listening,))
        closing.start()
        here = LinkEnd(HOST, SECRET)
        try:
            with pytest.raises(OSError, match="hung up|reset"):
                here.measure(HOST, listening.getsockname()[1])
        finally:
            here.close()
            closing.join()
