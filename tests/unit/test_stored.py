"""What the store costs: what lay there for how long, what was read back, and what a budget knows of it."""

from __future__ import annotations

import pytest

from fleet.ledger.bill import GB, MONTH_S, Stored, store_bill
from fleet.ledger.goodput import Ledger
from fleet.machine.budget import BudgetWatch
from fleet.protocol.decisions import Figures
from fleet.protocol.levels import PEERS
from fleet.protocol.records import CheckpointRecord, Record, Usage
from fleet.protocol.types import Member, StateId
from fleet.settings.cost import CostSettings
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.unit.test_bill import with_cost

ENDS_S = 7.34
"""The golden story's."""
SIZE = 2 * int(GB)
PRICED = {"usd_per_gb_month": 0.5, "usd_per_gb_read": 0.1}


def durable(step: int, at_s: float, level: str = "store") -> CheckpointRecord:
    return CheckpointRecord(f"c{step}", "durable", StateId(0, step), at_s, SIZE, level=level)


def read(slot: int, incarnation: int, size: int, at_s: float) -> Usage:
    return Usage(Member(slot, incarnation), 1, 0, 1, at_s=at_s, fetched_bytes=size)


def test_the_newest_lie_there_and_older_ones_are_gone() -> None:
    stored = Stored(2)
    for record in (durable(1, 10.0), durable(2, 20.0), durable(3, 30.0), durable(4, 31.0, PEERS)):
        stored.add(record)
    assert stored.byte_s(30.0) == SIZE * 10.0 + 2 * SIZE * 10.0
    assert stored.byte_s(40.0) == SIZE * 10.0 + 2 * SIZE * 20.0, "two are kept, and memories are no store"


def test_the_last_word_of_each_process_says_what_it_has_read() -> None:
    stored = Stored(1)
    for record in (read(0, 0, 5, 1.0), read(0, 0, 7, 2.0), read(0, 1, 7, 3.0), read(1, 0, 1, 4.0)):
        stored.add(record)
    assert stored.read_bytes == 15


def test_it_is_priced_by_month_and_by_what_is_read_and_by_nothing_else() -> None:
    assert store_bill(PRICED, 3 * GB * MONTH_S, 4 * GB) == pytest.approx({"gb_months": 3.0, "gb_read": 4.0, "usd": 1.9})
    assert store_bill({"usd_per_gb_read": 0.1}, 3 * GB * MONTH_S, 0.0) == {"gb_months": 3.0, "gb_read": 0.0, "usd": 0.0}
    assert store_bill({"usd_per_rank_hour": 1.0}, GB, GB) is None


def _journal(**cost: float) -> list[Record]:
    return [*with_cost(**cost), read(0, 0, SIZE, ENDS_S)]


def test_the_bill_has_it_and_its_parts_add_up() -> None:
    summary = Ledger().apply_all(_journal(usd_per_rank_hour=2.0, watts_per_rank=100.0, **PRICED)).summary()
    found = summary.bill
    assert found is not None and found["store"]["gb_read"] == 2.0 and found["store"]["usd"] >= 0.2
    parts = sum(each["usd"] for each in found["categories"].values()) + found["pending"]["usd"] + found["store"]["usd"]
    assert parts == pytest.approx(found["total"]["usd"])
    assert found["per_step"]["usd"] * summary.steps == pytest.approx(found["total"]["usd"])


def test_where_only_the_store_is_priced_there_is_a_bill_of_it() -> None:
    found = Ledger().apply_all(_journal(**PRICED)).summary().bill
    assert found is not None and found["total"] == {"usd": found["store"]["usd"]}


def test_a_budget_counts_the_store_also_behind_a_restart() -> None:
    cost = CostSettings(usd_per_rank_hour=0.0, budget_usd=1.0, usd_per_gb_read=0.5)
    settings = RunSettings(world=2, cost=cost, checkpoint=CheckpointSettings(keep=2))
    budget, again = BudgetWatch(2), BudgetWatch(2)
    assert budget.tick(settings, 10.0, 10.0) is None
    for each in (budget, again):
        each.note(read(0, 0, SIZE, 10.0))
        reported = each.tick(settings, 10.0, 10.0)
        assert reported is not None and reported.action == "stop" and reported.payload == Figures({"spent_usd": 1.0, "budget_usd": 1.0})
