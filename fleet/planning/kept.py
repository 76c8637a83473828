"""The state of a model in Fleet's ranks (``optimizer_sharding``): its memory on a GPU, and the exchange that no compute hides."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.laws.exchange import Exposed, exposed_exchange, gathered_bytes, summed_bytes
from fleet.laws.law import REGISTRY
from fleet.laws.memory import RankMemory, chunked_state, replicated_state
from fleet.planning.inputs import AUTO, FSDP, PlanInput
from fleet.protocol.chunks import AT_ONCE

LINK_LATENCY_S = 1e-6
"""Latency within a node."""


@dataclass(frozen=True, slots=True)
class Units:
    """Parameters of the units that ranks gather: of each of ``layers``, and those ``around`` them (embeddings), which a rank keeps from
    forward to backward."""

    layer: float
    layers: int
    around: float

    @property
    def at_once(self) -> float:
        """The most parameters gathered on a rank at once: the largest units, as :mod:`actors.rank.fsdp.room` reserves room for them."""
        return sum(sorted((self.around, *[self.layer] * min(self.layers, AT_ONCE)))[-AT_ONCE:])


def units_of(plan: PlanInput) -> Units:
    """The units of a model that ``fully_shard`` has cut layer by layer."""
    model = plan.what
    around = min(model.parameters / 2.0, model.vocabulary * model.width * (1.0 if model.tied else 2.0))
    return Units((model.parameters - around) / model.layers, model.layers, around)


def copies_of(plan: PlanInput, ranks: int) -> int:
    """Copies of each chunk, beside its owner's: each other group has one."""
    groups = ranks // plan.replica_size if plan.replica_size > 1 else 1
    return min(max(plan.optimizer_copies, groups - 1), ranks - 1)


def survives(plan: PlanInput, ranks: int) -> bool:
    """Whether some other rank has the state of a lost one."""
    if plan.optimizer_sharding in (AUTO, "none"):
        return ranks > 1
    return copies_of(plan, ranks) > 0


def in_words(plan: PlanInput, ranks: int) -> str:
    """Words on the way the state is kept."""
    if not plan.whole:
        return f"ZeRO stage {plan.zero}"
    if plan.optimizer_sharding == "none":
        return "whole replicas"
    copies = copies_of(plan, ranks)
    parts = [plan.optimizer_sharding, f"{copies} {'copy' if copies == 1 else 'copies'} of each part"]
    if plan.replica_size > 1:
        parts.insert(1, f"groups of {plan.replica_size}")
    return ", ".join(parts)


def laws_of(plan: PlanInput) -> dict[str, str]:
    """Name of a law -> its source: the first law is for memory, the last one for the exchange."""
    if not plan.whole:
        names = ["memory.model_state"]
    else:
        chunks = plan.optimizer_sharding == FSDP
        gathers = ["exchange.gathered_bytes"] if plan.optimizer_sharding != "none" else []
        held = "memory.chunked_state" if chunks else "memory.replicated_state"
        names = [held, *gathers, "exchange.summed_bytes", "exchange.exposed_exchange"]
    return {name: REGISTRY[name].source for name in names}


def state_of(plan: PlanInput, ranks: int) -> RankMemory:
    """The memory of the state, without activations."""
    whole, copies = plan.what.parameters * plan.parameter_bytes, copies_of(plan, ranks)
    if plan.optimizer_sharding != FSDP:
        return replicated_state(whole, ranks, copies, plan.moments, spread=plan.optimizer_sharding == "zero1")
    units = units_of(plan)
    leaving = max(units.layer, units.around) * plan.parameter_bytes
    gathered = units.at_once * plan.compute_bytes
    return chunked_state(whole, ranks, copies, plan.moments, gathered, leaving)


def exchange_of(plan: PlanInput, ranks: int, shards: int, forward_s: float, backward_s: float) -> Exposed:
    """The exchange of one step. ``shards``: shards that a rank computes, in these seconds, all together."""
    if ranks == 1:
        return Exposed(0.0, 0.0, 0.0)
    if plan.optimizer_sharding == FSDP:
        return _of_chunks(plan, ranks, shards, forward_s, backward_s)
    whole, link, spread = plan.what.parameters * plan.parameter_bytes, _link(plan, ranks), plan.optimizer_sharding == "zero1"
    copies = copies_of(plan, ranks) if spread else ranks - 1
    sums = exposed_exchange(0.0, 0.0, summed_bytes(whole, ranks, copies), *link)
    back = exposed_exchange(gathered_bytes(whole, ranks, copies, 1), 0.0, 0.0, *link)
    hidden_s = min(plan.overlap * sums.sums_s, backward_s / shards)  # beside the last shard's backward
    return Exposed(back.gathers_s, sums.sums_s - hidden_s, hidden_s)


def _of_chunks(plan: PlanInput, ranks: int, shards: int, forward_s: float, backward_s: float) -> Exposed:
    """Where there are groups, gathers stay within a group, and on its link. Else they share the link with sums."""
    units, copies = units_of(plan), copies_of(plan, ranks)
    blocks = units.layer * units.layers
    near, far = _link(plan, plan.replica_size if plan.replica_size > 1 else ranks), _link(plan, ranks)
    forward = gathered_bytes((blocks + units.around) * plan.compute_bytes, ranks, copies, shards)
    backward = gathered_bytes(blocks * plan.compute_bytes, ranks, copies, shards)
    whole = plan.what.parameters * plan.parameter_bytes
    adders, around = 1 + (shards > 1), units.around * plan.parameter_bytes
    sums, last = summed_bytes(whole, ranks, copies, shards, adders), summed_bytes(around, ranks, copies, 1, adders)
    computes = (forward_s, backward_s, units.layers * shards, shards)
    if near == far:
        found: Exposed = exposed_exchange(forward, backward, sums, *near, *computes, last_bytes=last, leave=True)
        return found
    gathers = exposed_exchange(forward, backward, 0.0, *near, *computes)
    summed = exposed_exchange(0.0, 0.0, sums, *far, *computes, last_bytes=last, leave=True)
    return Exposed(gathers.gathers_s, summed.sums_s, gathers.hidden_s + summed.hidden_s)


def _link(plan: PlanInput, ranks: int) -> tuple[float, float]:
    """(bytes a second, latency) of an exchange among so many successive ranks."""
    inside = ranks <= plan.chip.per_node
    rate, latency_s = (plan.chip.link_bytes_per_s, LINK_LATENCY_S) if inside else (plan.net.bytes_per_s, plan.net.latency_s)
    return plan.exchange_bytes_per_s or rate, latency_s
