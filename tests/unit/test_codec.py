"""Every message and record survives the wire, and what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ProtocolError
from fleet.protocol.codec import Codec
from fleet.protocol.events import EVENTS, Event, Heartbeat, Ready
from fleet.protocol.facts import RunBuilt
from fleet.protocol.instructions import INSTRUCTIONS, Instruction, Write
from fleet.protocol.records import RECORDS, Record
from fleet.protocol.types import Build, Member, Pulse, StateId, View, apply_delta, view_delta

LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
    dict[str, float]: st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
}
UNIONS = {Event: EVENTS, Instruction: INSTRUCTIONS, Record: RECORDS}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation that messages use."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    if hint in LEAVES:
        return LEAVES[hint]
    if isinstance(hint, types.UnionType):
        return st.one_of(*(st.none() if each is type(None) else values(each) for each in arguments))
    if typing.get_origin(hint) is tuple:
        each = [values(argument) for argument in arguments if argument is not Ellipsis]
        return st.lists(each[0], max_size=3).map(tuple) if arguments[-1] is Ellipsis else st.tuples(*each)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint)})


KINDS = [(kind, codec) for union, codec in UNIONS.items() for kind in typing.get_args(union) if kind is not Write]


@pytest.mark.parametrize(("kind", "codec"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_round_trip(kind: type, codec: Codec) -> None:
    @settings(max_examples=20)
    @given(values(kind))
    def check(value: Any) -> None:
        assert codec.decode(codec.encode(value)) == value

    check()


def test_a_message_that_is_not_of_the_set_is_refused() -> None:
    with pytest.raises(ProtocolError, match="View is not one of the messages"):
        EVENTS.encode(View(1, (), (), 0, (), StateId(0, 0), ""))


def test_an_unknown_message_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="unknown message 'Rumour'"):
        EVENTS.decode(b'["Rumour", 1]')


def test_a_message_of_another_version_is_refused_by_its_number_of_fields() -> None:
    with pytest.raises(ProtocolError, match="Ready has 2 fields, the message has 3"):
        EVENTS.decode(b'["Ready", [0, 0], "", 6]')
    with pytest.raises(ProtocolError, match="Member has 3 fields, the message has 4"):
        EVENTS.decode(b'["Ready", [0, 0, [], 0], ""]')
    with pytest.raises(ProtocolError, match="Member has 3 fields, the message has 1"):
        EVENTS.decode(b'["Ready", [0], ""]')


def test_nested_values_come_back_as_what_they_were() -> None:
    beat = Heartbeat("n0", (Pulse(Member(1, 2), 3, StateId(0, 4), 0.5, 0.25, stepping=False),))
    again = EVENTS.decode(EVENTS.encode(beat))
    assert again == beat
    assert isinstance(again.pulses, tuple)
    assert EVENTS.decode(EVENTS.encode(Ready(Member(0, 1)))) == Ready(Member(0, 1))


def test_what_is_said_and_kept_is_written_with_what_the_coordinator_finds_at_its_end() -> None:
    built = RunBuilt(Member(0, 1), Build((), "D", 8, 4, "", (), 60), at_s=1.5, event=7)
    assert EVENTS.to_json(built) == ["RunBuilt", [0, 1], [[], "D", 8, 4, "", [], 60], 1.5, 7]
    assert dataclasses.astuple(RECORDS.decode(RECORDS.encode(built))) == dataclasses.astuple(built)


MEMBERS = st.lists(st.builds(Member, st.integers(0, 20), st.integers(0, 3)), unique_by=lambda member: member.slot, max_size=8)


@given(MEMBERS, MEMBERS)
def test_a_delta_turns_one_view_into_the_next(old: list[Member], new: list[Member]) -> None:
    """Members are in order of their slots, as policies give them."""
    base = View(1, tuple(sorted(old)), ((0, 1),), 0, (), StateId(0, 1), "a")
    view = View(2, tuple(sorted(new)), ((0, 2),), 0, (1,), StateId(0, 2), "b", "c")
    assert apply_delta(base, view_delta(base, view)) == view


def test_a_delta_to_another_view_is_refused() -> None:
    base = View(1, (Member(0, 0),), ((0, 1),), 0, (), StateId(0, 1), "a")
    delta = view_delta(base, dataclasses.replace(base, generation=2))
    with pytest.raises(ValueError, match="relative to generation 1, this is generation 5"):
        apply_delta(dataclasses.replace(base, generation=5), delta)
