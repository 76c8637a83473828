"""The closed format of plain values: what is written comes back bit for bit, and nothing else is read."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rank.plain_kinds import PLAIN
from fleet.errors import ProtocolError
from fleet.protocol.plain import MARK, Format, NotPlain

FAST = settings(max_examples=150, derandomize=True)
numbers = st.integers() | st.floats() | st.booleans() | st.none() | st.complex_numbers()
texts = st.text(st.characters(), max_size=8)
leaves = numbers | texts | st.binary(max_size=8)
keys = st.recursive(leaves, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(st.tuples(keys, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), pairs.map(dict), pairs.map(collections.OrderedDict),
        pairs.map(lambda given: collections.defaultdict(list, given)), st.dictionaries(keys, st.integers()).map(collections.Counter),
        st.lists(inner, max_size=4).map(lambda given: collections.deque(given, 7)), st.sets(keys, max_size=4),
        st.dictionaries(texts, inner, max_size=4), st.binary(max_size=4).map(bytearray),
    )  # fmt: skip


values = st.recursive(leaves, containers, max_leaves=12)


def reported(value: Any) -> Any:
    """All there is to say about a value: classes, order and bits."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, dict):
        extra = (getattr(value, "default_factory", None), reported(vars(value)) if getattr(value, "__dict__", None) else None)
        return kind, extra, [(reported(key), reported(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(reported, value)))
    if isinstance(value, list | tuple | collections.deque):
        return kind, getattr(value, "maxlen", None), [reported(item) for item in value]
    return kind, value


@FAST
@given(values)
def test_what_is_written_comes_back(value: Any) -> None:
    text = PLAIN.write(value)
    assert text.isascii()
    assert reported(PLAIN.read(text)) == reported(value)
    assert PLAIN.write(PLAIN.read(text)) == text


@FAST
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_anything_else_is_refused_in_one_way(data: bytes) -> None:
    text = MARK + data.decode(errors="replace")
    try:
        value = PLAIN.read(text)
    except ProtocolError:
        return
    assert reported(PLAIN.read(PLAIN.write(value))) == reported(value)


TAGS = [
    "l",
    "t",
    "d",
    "od",
    "dd",
    "count",
    "deque",
    "set",
    "frozen",
    "b",
    "ba",
    "c",
    "i",
    "f",
    "s",
    "@",
    "size",
    "dtype",
    "device",
    "array",
    "scalar",
]
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.builds(
        lambda tag, rest: [tag, *rest],
        st.sampled_from(TAGS),
        st.lists(inner, max_size=4),
    ) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@FAST
@given(trees)
def test_a_tag_with_the_wrong_parts_is_refused_in_one_way(tree: Any) -> None:
    text = MARK + json.dumps(tree)
    with contextlib.suppress(ProtocolError):
        PLAIN.read(text, lambda number: torch.zeros(1))


SPECIAL = (
    -0.0, math.inf, -math.inf, math.nan, struct.unpack("d", struct.pack("Q", 0xFFF8_0000_0000_1234))[0], 5e-324, 1.7976931348623157e308,
    "\ud83d\ude00", "\ud800", "😀", {1: 2, "1": 3, 1.5: 4}, {True: "a"}, {(1, "x"): {frozenset({2}): None}}, 1 << 5000, -(1 << 4000),
)  # fmt: skip


@pytest.mark.parametrize("value", SPECIAL, ids=range(len(SPECIAL)))
def test_what_json_would_change_is_kept(value: Any) -> None:
    assert reported(PLAIN.read(PLAIN.write(value))) == reported(value)


ARRAYS = (
    np.arange(6, dtype="<i2").reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(3.5), np.zeros((0, 4), bool),
    np.arange(5)[::2], np.array(["a", "bc"]), np.array(["2026-01-01"], "datetime64[D]"), np.float64(-0.0), np.int8(3), np.bool_(True),
    np.str_(""), np.float16(np.nan), np.arange(3, dtype=">u4"),
)  # fmt: skip


@pytest.mark.parametrize("value", ARRAYS, ids=range(len(ARRAYS)))
def test_arrays_and_their_scalars_come_back(value: Any) -> None:
    back = PLAIN.read(PLAIN.write(value))
    assert (type(back), back.dtype, back.shape, back.tobytes("A")) == (type(value), value.dtype, value.shape, value.tobytes("A"))
    assert back.dtype.str == value.dtype.str
    if isinstance(value, np.ndarray):
        assert back.flags.writeable
        assert np.array_equal(back, value)
        assert back.flags.f_contiguous == np.array(value, order="K", copy=True).flags.f_contiguous


@pytest.mark.parametrize(
    "value", [torch.Size([2, 3]), torch.Size([]), torch.bfloat16, torch.device("cuda:1"), torch.device("cpu")], ids=str
)
def test_what_is_plain_of_torch_comes_back(value: Any) -> None:
    back = PLAIN.read(PLAIN.write([value]))
    assert back == [value]
    assert type(back[0]) is type(value)


def test_the_attributes_of_a_state_dict_come_back() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    tensors: list[torch.Tensor] = []

    def number(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    back = PLAIN.read(PLAIN.write(state, number), tensors.__getitem__)
    assert back._metadata == state._metadata  # type: ignore[attr-defined]
    assert list(back) == list(state)
    assert all(back[key] is state[key] for key in state)


def test_equal_values_are_equal_texts_whatever_they_share() -> None:
    shared = ["a" * 3]
    assert PLAIN.write([shared, shared]) == PLAIN.write([["aaa"], ["a" + "aa"]])
    assert PLAIN.write({3, "x", (1, 2)}) == PLAIN.write({(1, 2), 3, "x"})


class Colour(int):
    """A class of the user's."""


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        ({"a": [1, (2, Colour(3))]}, "Colour", ("['a']", "[1]", "[1]")),
        ({Colour(3): 1}, "Colour", ("key 3",)),
        ([np.array([{}], object)], "numpy.ndarray", ("[0]",)),
        ([np.zeros(2, [("x", "f4")])], "numpy.ndarray", ("[0]",)),
        ({"f": lambda: 0}, "function", ("['f']",)),
        (collections.defaultdict(lambda: 3), "collections.defaultdict", ()),
        ([object], "type", ("[0]",)),
        (collections.namedtuple("Pair", "a b")(1, 2), "Pair", ()),
        (LOOP, "list", ()),
        ([torch.zeros(1)], "torch.Tensor", ("[0]",)),
    ],
    ids=range(10),
)
def test_what_is_not_plain_is_named_with_the_way_to_it(value: Any, kind: str, path: tuple[str, ...]) -> None:
    with pytest.raises(NotPlain) as refused:
        PLAIN.write(value)
    assert refused.value.kind.endswith(kind)
    assert refused.value.path == path


@pytest.mark.parametrize("tree", [["f", "00"], ["c", "00", "00"], ["dd", "object"], ["i", 3], ["@", -1], ["b", "="]], ids=str)
def test_parts_that_are_damaged_are_refused(tree: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="damaged"):
        PLAIN.read(MARK + json.dumps(tree))


def test_a_format_without_kinds_reads_none_of_them() -> None:
    with pytest.raises(ProtocolError, match="size"):
        Format().read(PLAIN.write(torch.Size([1])))
