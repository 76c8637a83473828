"""The goodput ledger: the fold of a run's journal (``fold.py``) and its summary at any moment, with the cost of faults and losses."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from fleet.errors import LedgerError
from fleet.ledger.bill import store_bill
from fleet.ledger.costs import CostBook, LossCost
from fleet.ledger.fold import LedgerFold, to_us
from fleet.ledger.samples import SampleCount, trained_on
from fleet.ledger.slots import NAMES, OTHER_INDEX, STEP_KINDS, SlotAccount
from fleet.ledger.summary import COST_NAMES, Incident, LedgerSummary
from fleet.ledger.timeline import Timeline
from fleet.protocol.levels import PEERS, STORE
from fleet.protocol.records import CheckpointRecord


class Ledger(LedgerFold):
    """Folds records, in the journal's order, into rank-seconds by category: :meth:`apply` each record, ask :meth:`summary` at any time."""

    def summary(self, now_s: float | None = None) -> LedgerSummary:
        """The ledger at ``now_s`` (default: the last record's time; an ended run's end). Rank-seconds by category, faults and their cost.

        Raises LedgerError when there is no record yet, or when ranks recorded time after the end of the run.
        """
        if self.started is None:
            raise LedgerError("no RunStarted yet: there is no record to sum up")
        if self.ended is None:
            now_us = max(self.last_us, to_us(now_s) if now_s is not None else 0)
            return summary_of(self, self, now_us)
        if self._closed is None:
            self._closed = self._close()
        return summary_of(self, self._closed, max(slot.cursor_us for slot in self._closed.slots))

    def closed_timeline(self) -> Timeline | None:
        """The category of each slot over time, up to the end of an ended run."""
        if self.ended is not None and self._closed is None:
            self._closed = self._close()
        return self._closed.timeline if self._closed is not None else self.timeline

    def _close(self) -> LedgerFold:
        """A copy that is filled up to the run's end. Late spans may still come in, so this ledger stays open."""
        assert self.ended is not None
        closed = copy.copy(self)
        for name in ("slots", "book", "undone"):
            setattr(closed, name, copy.deepcopy(getattr(self, name)))
        if self.timeline is not None:
            closed.timeline = copy.deepcopy(self.timeline)
        closed.resolve_all()
        closed.close_slots(to_us(self.ended.at_s))
        return closed


class Times(NamedTuple):
    """Microseconds. ``rows``: by category for each slot. ``pending``: of each slot, time without a category yet. ``cold``: the part of
    provision in which slots waited for their first process."""

    rows: list[tuple[int, ...]]
    pending: list[int]
    cold: int


def summary_of(ledger: LedgerFold, closed: LedgerFold, now_us: int) -> LedgerSummary:
    """``ledger`` holds the counters, ``closed`` the categories: the same ledger while the run goes on."""
    assert ledger.started is not None and ledger.said is not None
    started, said, stretches = ledger.started, ledger.said, ledger.stretches
    held_us, trained_us = now_us - stretches.start_us - stretches.down_us, stretches.trained_us(now_us, ledger.ended)
    times = _slot_times(closed, now_us)
    pending_us, rank_us = sum(times.pending), len(times.rows) * held_us
    totals, settled = _columns(times.rows), _columns([slot.us for slot in ledger.slots])
    steps, counts, checkpoints = closed.steps, closed.counts, closed.checkpoints
    median_us, stored = steps.median_us, closed.tally.stored
    charged, uncharged = closed.book.charged()
    return LedgerSummary(
        run=started.run,
        status=ledger.ended.status if ledger.ended else "running",
        reason=ledger.ended.reason if ledger.ended else "",
        digest=ledger.ended.digest if ledger.ended else "",
        started_s=started.at_s,
        started_unix_s=started.unix_time_s,
        now_s=now_us / 1e6,
        held_s=held_us / 1e6,
        down_s=stretches.down_us / 1e6,
        training_s=trained_us / 1e6,
        world=ledger.world.ranks,
        spares=len(ledger.slots) - ledger.world.ranks,
        shards=started.shards,
        categories=seconds(totals),
        slot_us=tuple(times.rows),
        pending_s=pending_us / 1e6,
        cold_provision_s=(closed.cold_us + times.cold) / 1e6,
        settled=seconds([a + b for a, b in zip(settled, ledger.undone.reclassified_us, strict=True)]),
        reclassified=seconds(ledger.undone.reclassified_us),
        stale_s=closed.stale_us / 1e6,
        **_holes(closed.slots),
        closes=sum(totals) + pending_us == rank_us,
        **_goodputs(closed, sum(totals[:STEP_KINDS]), held_us, trained_us, times.pending),
        other_ratio=_share(totals[OTHER_INDEX], rank_us - pending_us),
        steps=steps.step,
        history=steps.history,
        commits_total=steps.commits,
        rolled_back_total=steps.rolled_back,
        median_step_s=median_us / 1e6,
        rank_steps=steps.by_ranks,
        generation=closed.book.generation,
        view_size=counts.members,
        views_total=counts.views,
        losses_total=sum(not name.startswith("outage-") for name in closed.book.losses),
        in_view_losses=sum(loss.generation >= 0 for loss in closed.book.losses.values()),
        faults_by_kind_phase=dict(counts.faults),
        incidents=tuple(incidents(closed.book, charged, median_us)),
        uncharged=seconds(uncharged),
        checkpoints_by_phase=checkpoints.by_phase(STORE),
        copies_by_phase=checkpoints.by_phase(PEERS),
        copy_interval_s=checkpoints.copy_interval_s,
        checkpoint_interval_s=checkpoints.interval_s,
        **_newest(checkpoints.newest),
        measurements=dict(closed.measurements),
        tallies=closed.tally.now(),
        terms=said.terms,
        met=copy.deepcopy(ledger.met),
        ends=tuple((trained / 1e6, held / 1e6) for trained, held in stretches.ends_us(now_us, ledger.ended)),
        rollbacks=tuple(ledger.undone.rollbacks),
        queued_s=said.queued_s,
        tariff=said.tariff,
        cost=said.cost,
        store_bill=store_bill(said.cost, stored.byte_s(now_us / 1e6), stored.read_bytes),
        device=said.device,
        ranks=sum(totals[:STEP_KINDS]) / steps.productive_us if steps.productive_us > 0 else float(ledger.world.ranks),
        budget_usd=said.budget_usd,
        samples=_samples(ledger),
    )


def _holes(slots: Sequence[SlotAccount]) -> dict[str, Any]:
    """Time without a record, before a loss."""
    return {"holes": sum(slot.holes for slot in slots), "hole_s": sum(slot.hole_us for slot in slots) / 1e6}


def _samples(ledger: LedgerFold) -> SampleCount | None:
    samples, steps = ledger.samples, ledger.steps
    return trained_on(samples.reads, samples.cover, samples.histories, steps.step, steps.rolled_back)


def _goodputs(ledger: LedgerFold, step_us: int, held_us: int, trained_us: int, pending: list[int]) -> dict[str, Any]:
    """Shares of the time that has a category: of the world's slots, of all, while training, and of the wall time."""
    assert ledger.started is not None
    waits_us = _of_the_world(ledger, pending)
    world = ledger.world
    world_held_us = world.ranks * held_us - sum(more * until_us for more, until_us, _ in world.changes)
    world_trained_us = world.ranks * trained_us - sum(more * until_us for more, _, until_us in world.changes)
    return {
        "goodput": _share(step_us, world_held_us - sum(waits_us)),
        "scheduling_goodput": _share(step_us, len(pending) * held_us - sum(pending)),
        "training_goodput": _share(step_us, world_trained_us - sum(min(each, trained_us) for each in waits_us)),
        "ettr": _share(ledger.steps.productive_us, held_us - sum(waits_us) / world.ranks),
    }


def _newest(durable: CheckpointRecord | None) -> dict[str, Any]:
    """Fields on the newest durable checkpoint."""
    return {
        "checkpoint_step": durable.state.step if durable else 0,
        "checkpoint_blocked_s": durable.blocked_s if durable else 0.0,
        "checkpoint_latency_s": durable.latency_s if durable else 0.0,
    }


def _share(part_us: float, whole_us: float) -> float:
    """From 0 to 1. While a run goes on, time without a category yet is known by slot and not by view rank."""
    return min(1.0, max(0.0, part_us / whole_us)) if whole_us > 0 else 0.0


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    """Sums over all slots, without an object for each: there may be 100,000."""
    return [sum(map(itemgetter(index), rows)) for index in range(len(NAMES))]


def _slot_times(ledger: LedgerFold, now_us: int) -> Times:
    """The time of each slot by category, up to ``now_us``."""
    pending = [0] * len(ledger.slots)
    for held in ledger.undone.held.values():
        for item in held:
            pending[item.slot] += sum(duration for _, duration, _ in item.pieces)
    rows, cold_us = [], 0
    for slot in ledger.slots:
        us, vacant_us = tuple(slot.us), 0
        if slot.empty:
            vacant_us = max(0, now_us - max(slot.cursor_us, slot.lost_us or 0))
            us = (*us[: slot.vacant], us[slot.vacant] + vacant_us, *us[slot.vacant + 1 :])
            cold_us += vacant_us if slot.cold else 0
        pending[slot.slot] += now_us - slot.cursor_us - vacant_us + sum(duration for _, duration, _ in slot.attempt)
        rows.append(us)
    return Times(rows, pending, cold_us)


def _of_the_world(ledger: LedgerFold, pending: list[int]) -> list[int]:
    """Pending time of the world's places: that of the view's slots, and of as many others as are missing there, the latest to report."""
    assert ledger.started is not None
    joined = {member.slot for member in ledger.book.in_view}
    others = sorted((each for slot, each in enumerate(pending) if slot not in joined), reverse=True)
    return [pending[slot] for slot in joined] + others[: max(0, ledger.world.ranks - len(joined))]


Charged = dict[str, list[int]]
"""Microseconds by category, by the id of the loss that is charged with them."""


def seconds(us: Iterable[int]) -> dict[str, float]:
    """Microseconds in the order of the categories, as seconds by name."""
    return {name: value / 1e6 for name, value in zip(NAMES, us, strict=True)}


def incidents(book: CostBook, charged: Charged, median_us: float) -> list[Incident]:
    """Faults in the order of their first record, then losses that no fault explains, and outages.

    All losses of one lost domain are one incident.
    """
    explained: dict[str, list[LossCost]] = {name: [] for name in book.faults}
    alone: list[list[LossCost]] = []
    together: dict[int, list[LossCost]] = {}
    for loss in book.losses.values():
        if loss.fault in explained:
            explained[loss.fault].append(loss)
        elif loss.together in together:
            together[loss.together].append(loss)
        else:
            alone.append([loss])
            if loss.together:
                together[loss.together] = alone[-1]
    incidents = [_of_fault(book, charged, name, losses, median_us) for name, losses in explained.items()]
    return incidents + [_of_losses(book, charged, losses, median_us) for losses in alone]


def _of_fault(book: CostBook, charged: Charged, name: str, losses: list[LossCost], median_us: float) -> Incident:
    records = book.faults[name]
    fault = records[-1].fault
    phases = tuple((record.phase, record.at_s, record.detail) for record in records)
    at_s = next((at for phase, at, _ in phases if phase == "executed"), phases[-1][1])
    lost, costs = tuple(loss.id for loss in losses), _costs(book, charged, losses, median_us)
    return Incident(
        name, at_s, fault.component, fault.kind, fault.slot, fault.node, phases, lost, tuple(loss.cause for loss in losses), *costs,
        in_view=_members(losses), like=fault.kind, domain=next((loss.domain for loss in losses if loss.domain), ""),
    )  # fmt: skip


def _of_losses(book: CostBook, charged: Charged, losses: list[LossCost], median_us: float) -> Incident:
    """The incident of one loss, or of all losses of one domain."""
    loss, costs = losses[0], _costs(book, charged, losses, median_us)
    if loss.id.startswith("outage-"):
        return Incident(loss.id, loss.at_us / 1e6, "run", "outage", None, None, (), (), (loss.cause,), *costs, loss.down_us / 1e6)
    slot, lost, causes = int(loss.id.partition(".")[0]), tuple(loss.id for loss in losses), tuple(loss.cause for loss in losses)
    return Incident(
        f"loss-{loss.id}", loss.at_us / 1e6, "unknown", "loss", slot, None, (), lost, causes, *costs,
        in_view=_members(losses), like=loss.like, domain=loss.domain,
    )  # fmt: skip


def _members(losses: list[LossCost]) -> int:
    return sum(loss.generation >= 0 for loss in losses)


def _costs(
    book: CostBook, charged: Charged, losses: list[LossCost], median_us: float
) -> tuple[dict[str, float], float, float | None, float | None]:
    """Cost by category, the replacements' start-up, stall and excess, all in seconds."""
    sums = seconds([sum(column) for column in zip(*(charged[loss.id] for loss in losses), strict=True)] if losses else [0] * len(NAMES))
    stalls = [stall for loss in losses if (stall := book.stall_us(loss, median_us)) is not None]
    excesses = [excess for loss in losses if (excess := book.excess_us(loss, median_us)) is not None]
    cost = {name: sums[name] for name in COST_NAMES}
    return cost, sums["init"], max(stalls, default=0.0) / 1e6 if stalls else None, max(excesses) / 1e6 if excesses else None
