"""Every fact has its sentence, and goes over the wire as itself."""

from __future__ import annotations

import typing

import pytest

from fleet.errors import ProtocolError
from fleet.protocol import causes as c
from fleet.protocol.codec import Codec, Tagged, plain
from fleet.protocol.events import EVENTS, NodeLost, Quiesced
from fleet.protocol.facts import ProcessLost
from fleet.protocol.types import Member, StateId

RULES: dict[type[c.Fact], c.Fact] = {
    type(fact): fact
    for fact in (
        c.NoHeartbeat(3.25), c.NoProgress(9.0, 7), c.DidNotLeave(), c.Superseded(), c.TooSlow("evict", "evict costs 3"),
        c.Outvoted("weights", 9), c.StartsAgain("all start again"), c.FreshWanted(), c.GivenUp(), c.TrainRaised("ValueError"),
    )
}  # fmt: skip
CAUSES: dict[type[c.Fact], c.Fact] = {
    type(fact): fact
    for fact in (
        c.ProcessEnded(-9), c.TrainRaised("ValueError"), c.ClusterEnded(), c.NotReported(), c.AgentHungUp(), c.AgentSilent(12.0),
        c.Evicted(c.DidNotLeave()), c.TakenAway(),
    )
}  # fmt: skip


def test_these_are_all() -> None:
    assert set(typing.get_args(c.Cause)) == set(CAUSES)
    assert set(typing.get_args(c.Rule)) == set(RULES)


@pytest.mark.parametrize("fact", [*CAUSES.values(), *map(c.Evicted, RULES.values())], ids=str)
def test_each_has_a_sentence_and_survives_the_wire(fact: typing.Any) -> None:
    assert str(fact) == c.sentence(fact) and not str(fact).endswith(".")
    lost = ProcessLost(Member(1, 0), fact, step=7, shard=3, at_s=2.0)
    assert EVENTS.decode(EVENTS.encode(lost)) == lost


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (c.ProcessEnded(), "its process ended"),
        (c.ProcessEnded(0), "ended with status 0"),
        (c.ProcessEnded(3), "ended with status 3"),
        (c.ProcessEnded(-9), "killed by SIGKILL"),
        (c.ProcessEnded(-9, out_of_memory=True), "killed by the kernel, as memory ran out"),
        (c.ProcessEnded(-11), "killed by SIGSEGV"),
        (c.ProcessEnded(-63), "killed by signal 63"),
    ],
)
def test_how_a_process_ended(ended: c.ProcessEnded, words: str) -> None:
    assert str(ended) == words
    assert c.incident(ended) == "lost"


def test_what_a_node_is_to_blame_for() -> None:
    kinds = {str(cause): c.incident(cause) for cause in map(c.Evicted, RULES.values())}  # type: ignore[arg-type]
    blamed = {text: kind for text, kind in kinds.items() if kind}
    assert blamed == {
        "evicted: no heartbeat for 3.2 s": "hang",
        "evicted: no progress for 9.0 s at step 7": "hang",
        "evicted: did not leave its process group when told to": "hang",
        "evicted: silent corruption: weights at step 9 differ from the majority's": "corruption",
    }
    assert c.incident(c.TrainRaised("ValueError: no heartbeat")) == ""


def test_a_fact_without_a_sentence_is_an_error() -> None:
    class Rumour(c.Fact):
        pass

    with pytest.raises(TypeError, match="Rumour has no sentence"):
        c.sentence(Rumour())


def test_only_what_a_field_may_hold_is_taken() -> None:
    assert issubclass(c.Fact, Tagged)
    assert plain(c.Evicted(c.NoHeartbeat(3.0))) == ["Evicted", ["NoHeartbeat", 3.0]]
    line = Codec([NodeLost]).to_json(NodeLost("n1", c.AgentHungUp(), 2.0))
    line[2] = ["ProcessEnded", None, False]
    with pytest.raises(ProtocolError, match="unknown kind 'ProcessEnded', not one of AgentHungUp, AgentSilent"):
        EVENTS.from_json(line)
    left = EVENTS.to_json(Quiesced(Member(0, 0), 1, StateId(0, 1), dirty=False, why=c.Departure.BROKEN))
    assert "broken" in left
    with pytest.raises(ProtocolError, match="'bored' is not a valid Departure"):
        EVENTS.from_json(["bored" if value == "broken" else value for value in left])
