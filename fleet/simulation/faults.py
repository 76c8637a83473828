"""Carries out the troubles of a plan."""

from __future__ import annotations

import dataclasses

from fleet.protocol.events import FaultReported, NodeSilent, StopRequested
from fleet.protocol.types import Fault
from fleet.simulation.model import POISON
from fleet.simulation.plan import Trouble
from fleet.simulation.ranks import SimRank, UserError
from fleet.simulation.stage import Stage


class Faults:
    """Fires each trouble as often as it says (``times``), and counts what was fired."""

    def __init__(self, world: Stage, troubles: tuple[Trouble, ...]) -> None:
        self.world = world
        self.fired = 0
        self._aimed: list[Trouble] = [trouble for trouble in troubles if trouble.point]
        for trouble in troubles:
            if not trouble.point and trouble.at_s is not None:
                self._schedule(trouble, trouble.at_s)

    def _schedule(self, trouble: Trouble, at_s: float) -> None:
        self.world.clock.after(at_s - self.world.clock.now_s, lambda: self._fire(trouble, None))

    def at(self, rank: SimRank, point: str) -> bool:
        """``rank`` has come to ``point``. True when something was done to somebody."""
        if not self._aimed:
            return False
        hit = next((trouble for trouble in self._aimed if self._hits(trouble, rank, point)), None)
        if hit is None:
            return False
        self._aimed.remove(hit)
        if hit.times > 1:
            self._aimed.append(dataclasses.replace(hit, times=hit.times - 1))
        self._fire(hit, rank)
        if hit.kind in ("raise", "nan"):
            raise UserError("the loss is not finite" if hit.kind == "nan" else "the user's program is wrong")
        return True

    def _hits(self, trouble: Trouble, rank: SimRank, point: str) -> bool:
        if trouble.point != point or (trouble.slot is not None and rank.protocol.slot != trouble.slot):
            return False
        if trouble.at_s is not None and self.world.clock.now_s < trouble.at_s:
            return False
        if trouble.kind in ("shard", "nan") and rank.where[0] != trouble.step:
            return False
        if trouble.shard >= 0 and rank.where[1] != trouble.shard:
            return False
        state = rank.protocol.state
        return trouble.step <= 0 or (state is not None and state.step >= trouble.step)

    def _fire(self, trouble: Trouble, rank: SimRank | None) -> None:
        world = self.world
        if world.over:
            return
        self.fired += 1
        world.note("TROUBLE", trouble.kind, trouble.point, *([rank] if rank else []))
        match trouble.kind:
            case "kill" | "shard":
                self._kill(trouble, rank)
            case "freeze":
                for victim in self._victims(trouble, rank):
                    victim.freeze()
                    world.clock.after(trouble.duration_s, victim.thaw)
            case "hang":
                for victim in self._victims(trouble, rank):
                    victim.hung = True
            case "slow" | "slow_link":
                self._slow(trouble, self._victims(trouble, rank))
            case "flip":
                for victim in self._victims(trouble, rank):
                    self._flip(victim)
            case "forget":
                world.train.forget(trouble.slot or 0)
            case "coordinator":
                world.kill_coordinator(trouble.after, trouble.stale, max(trouble.duration_s, 0.05))
            case "store":
                world.store.failing_until_s = world.clock.now_s + trouble.duration_s
            case "stop":
                self._stop()
            case "join":
                world.add_node()
            case "amnesia":
                world.nodes[trouble.node].begin_anew()
            case "lose_node" | "partition":
                self._node(trouble)
            case "raise" | "nan":
                world.note("raised", trouble.step)
            case kind:
                raise ValueError(f"unknown kind of trouble: {kind}")

    def _victims(self, trouble: Trouble, rank: SimRank | None) -> list[SimRank]:
        if rank is not None and not trouble.slots:
            return [rank]
        slots = [*([trouble.slot] if trouble.slot is not None else []), *trouble.slots]
        return [self.world.train.current[slot] for slot in dict.fromkeys(slots) if slot in self.world.train.current]

    def _flip(self, victim: SimRank) -> None:
        """A bit of what it holds. Nothing flips in what is half written: that is not used."""
        if victim.alive and victim.weights != POISON:
            victim.weights, victim.corrupt = hash((victim.weights, victim.protocol.token, "flipped")), True
            self.world.flipped = True
            self.world.note("flipped", victim, victim.protocol.state)

    def _kill(self, trouble: Trouble, rank: SimRank | None) -> None:
        victims = self._victims(trouble, rank)
        if trouble.heard:
            members = tuple(victim.member for victim in victims if victim.named)
            now_s = self.world.clock.now_s
            fault = Fault(f"fault-{self.fired}", now_s, "gpu", "kill_rank", trouble.slot)
            self.world.submit(FaultReported(fault, "executed", now_s, members))
        for victim in victims:
            victim.die("killed")

    def _slow(self, trouble: Trouble, victims: list[SimRank]) -> None:
        """The process is slow, and what replaces it is not."""
        name = "slowness" if trouble.kind == "slow" else "link_slowness"
        for victim in victims:
            setattr(victim, name, trouble.severity)
            victim.was_slow = True
            self.world.clock.after(trouble.duration_s, lambda victim=victim: setattr(victim, name, 1.0))  # type: ignore[misc]

    def _stop(self) -> None:
        """The driver asks until it is heard: a coordinator may have died with the word."""
        if not self.world.over:
            self.world.submit(StopRequested("the user wants to stop"))
            self.world.clock.after(1.0, self._stop)

    def _node(self, trouble: Trouble) -> None:
        world = self.world
        node = world.nodes[trouble.node]
        if not node.alive:
            return
        if trouble.kind == "lose_node":
            node.lose(trouble.duration_s)
        else:
            node.reachable = False
            world.clock.after(trouble.duration_s, node.come_back)
        if trouble.heard:
            world.submit(NodeSilent(node.name, world.clock.now_s))
