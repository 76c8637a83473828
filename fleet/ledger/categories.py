"""The meaning of each category of the ledger, a sentence each, for pages and documents."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.ledger.timeline import STEP

PENDING = "pending"

MEANINGS: Mapping[str, str] = {
    "compute": "A rank computes its shards of a step that was committed: forward, backward and update.",
    "exposed_comm": "A rank exchanges gradients, and the exchange is not hidden behind computing.",
    "straggler_wait": "A rank is ready to exchange gradients and waits for a slower rank.",
    "data_wait": "A rank waits for the next samples of its shards.",
    "garbage_collection": "Python collects garbage in the thread of the loop, which stands still meanwhile.",
    "rework": "Steps that did not count: they were abandoned after a loss, or rolled back after they were committed.",
    "checkpoint_stall": "The loop stands still while its state is copied for a checkpoint.",
    "restore": "A rank receives the state, from a peer, a disk or the store.",
    "detect": "A process is lost and not known as lost yet: from its last sign of life until the coordinator declares it lost.",
    "reform": "Ranks leave one view and meet in the next one.",
    "provision": "The slot is empty: no process fills it yet, at the start or after a loss.",
    "maintenance": "The slot is empty: its node was taken away after a notice, and no other process fills it yet.",
    "group_wait": "A rank of a broken group waits until the group is whole again, while other groups train.",
    "init": "A process starts: imports, model and first connection, until it is ready for its first view.",
    "verify": "Ranks compare their states, or compute a shard again, to find corruption.",
    "idle_spare": "A spare is up and waits until a rank is lost.",
    "finish": "The rank is done with its last step and waits for the end of the run.",
    "other": "The process ran, and no record says how it spent the time.",
    STEP: "A step that was committed: compute, exposed_comm, straggler_wait, data_wait and garbage_collection together. This is goodput.",
    PENDING: "Not decided yet: steps in flight, and time that ranks have not reported so far. It is neither goodput nor lost.",
}
"""Meanings of all categories of ``fleet.protocol.records.CATEGORIES``, of a step as a whole, and of time without a category yet."""
