"""The table of the decision core is whole, and a run in which an event leads to something else is caught."""

from __future__ import annotations

import dataclasses

import pytest

from fleet.machine.state import Phase
from fleet.machine.table import RECONCILES, STOPS, TABLE, Of, allowed
from fleet.protocol.events import Event, Formed, Heartbeat, Joined, Tick
from fleet.protocol.instructions import Conclude, Evict, Fence, Instruction, Keep, Publish, Welcome, Write
from fleet.protocol.records import ProcessUp, Received, Record
from tests.simulation.runs import simulate_seed


def test_each_event_has_a_row_and_each_phase_a_comparison() -> None:
    assert set(TABLE) == set(Event.__args__)
    assert set(RECONCILES) == set(Phase)


def test_rows_name_records_and_instructions_and_members_have_names() -> None:
    known = {*Record.__args__, *Instruction.__args__} - {Write, Received}
    for kinds in (*(row.emits for row in TABLE.values()), *RECONCILES.values(), STOPS):
        assert set(kinds) <= known
    for kind, row in TABLE.items():
        assert row.of is Of.ANYBODY or "member" in {field.name for field in dataclasses.fields(kind)}, kind


def test_what_may_come_of_an_event_follows_its_row_and_the_phases() -> None:
    assert Welcome in allowed(Joined, Phase.RUN, Phase.RUN, stops=False)
    assert Fence not in allowed(Tick, Phase.RUN, Phase.RUN, stops=False)
    assert {Conclude, Publish} <= allowed(Formed, Phase.RUN, Phase.FORM, stops=False)
    assert Conclude not in allowed(Formed, Phase.GATHER, Phase.GATHER, stops=False)
    assert allowed(Heartbeat, Phase.RUN, Phase.RUN, stops=True) == {Evict}
    assert Keep in allowed(Tick, Phase.GATHER, Phase.GATHER, stops=True) - allowed(Tick, Phase.GATHER, Phase.GATHER, stops=False)
    assert ProcessUp not in allowed(Joined, Phase.END, Phase.END, stops=False)


def test_a_run_in_which_an_event_leads_to_what_its_row_does_not_name_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate_seed("random", 11).broken == ""
    monkeypatch.setitem(TABLE, Joined, TABLE[Joined]._replace(emits=(Welcome,)))
    outcome = simulate_seed("random", 11)
    assert outcome.broken == "emits" and outcome.complaint.startswith("ProcessUp comes of Joined(")
