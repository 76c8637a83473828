"""The ledger's sums at one moment, as a :class:`fleet.ledger.summary.LedgerSummary`. Used by ``fleet.ledger.goodput``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from fleet.ledger.fold import LedgerFold
from fleet.ledger.incidents import incidents, seconds
from fleet.ledger.samples import SampleCount, trained_on
from fleet.ledger.slots import NAMES, OTHER_INDEX, STEP_KINDS, SlotAccount
from fleet.ledger.stored import store_bill
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.levels import PEERS, STORE
from fleet.protocol.records import CheckpointRecord


class Times(NamedTuple):
    """Microseconds. ``rows`` are by category for each slot, ``pending`` those of each slot that are not decided yet, ``cold`` the part of
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
    """Time that nobody recorded, before a loss."""
    return {"holes": sum(slot.holes for slot in slots), "hole_s": sum(slot.hole_us for slot in slots) / 1e6}


def _samples(ledger: LedgerFold) -> SampleCount | None:
    samples, steps = ledger.samples, ledger.steps
    return trained_on(samples.reads, samples.cover, samples.histories, steps.step, steps.rolled_back)


def _goodputs(ledger: LedgerFold, step_us: int, held_us: int, trained_us: int, pending: list[int]) -> dict[str, Any]:
    """Shares of the time of which it is known where it went: of the world's slots, of all, while training, and of the wall time."""
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
    """From 0 to 1: while a run goes on, times that are not decided yet are known by slot and not by view rank."""
    return min(1.0, max(0.0, part_us / whole_us)) if whole_us > 0 else 0.0


def _columns(rows: Sequence[Sequence[int]]) -> list[int]:
    """Sums over all slots, without an object for each: there may be 100,000."""
    return [sum(map(itemgetter(index), rows)) for index in range(len(NAMES))]


def _slot_times(ledger: LedgerFold, now_us: int) -> Times:
    """Where each slot's time went, up to ``now_us``."""
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
    """Time pending in the places of the world: in the view's slots, and in as many others as are missing there, the latest to report."""
    assert ledger.started is not None
    joined = {member.slot for member in ledger.book.in_view}
    others = sorted((each for slot, each in enumerate(pending) if slot not in joined), reverse=True)
    return [pending[slot] for slot in joined] + others[: max(0, ledger.world.ranks - len(joined))]
