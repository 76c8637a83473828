"""Carries out the troubles of a plan."""

from __future__ import annotations

import dataclasses
import math
import zlib

from fleet.errors import ConfigError
from fleet.protocol.events import NodeLeaves, NodeSilent, NodeStays, SettingChanged, StopRequested
from fleet.protocol.facts import FaultRecord
from fleet.protocol.types import Fault, StateId
from fleet.settings.live import WORLD, changed
from fleet.simulation.links import HEAD, STORE
from fleet.simulation.model import POISON
from fleet.simulation.nodes import BEAT_S, CALLS_AGAIN_S, SimNode
from fleet.simulation.plan import Trouble
from fleet.simulation.ranks import SimRank, UserError
from fleet.simulation.stage import Stage

DISMISSED_S = 4.5
"""Seconds after which a lost node is taken out of Ray: `node_s` of the simulated runs, and the wait of `fleet.app.foreign` after it."""
FLIPPED = 29
"""Stands for a flipped bit in the value of a rank's weights."""
FLAP_S = 1.0
"""A flapping link is cut for so many seconds, and then works for so many."""
REBOOT_S = 5.0
"""Seconds until another node replaces a lost one."""


class Faults:
    """Fires each trouble ``times`` times, and counts them (``fired``). ``asked_s``: when the run was first told to stop."""

    def __init__(self, world: Stage, troubles: tuple[Trouble, ...]) -> None:
        self.world = world
        self.fired = 0
        self.asked_s = math.inf
        self._rng = world.stream("faults")
        self._aimed: list[Trouble] = [trouble for trouble in troubles if trouble.point]
        for trouble in troubles:
            if not trouble.point and trouble.at_s is not None:
                self._schedule(trouble, trouble.at_s)

    def _schedule(self, trouble: Trouble, at_s: float) -> None:
        self.world.clock.after(at_s - self.world.clock.now_s, lambda: self._fire(trouble, None))

    def at(self, rank: SimRank, point: str) -> bool:
        """``rank`` has come to ``point``. True when a trouble was fired."""
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
            case "slow" | "slow_link" | "busy":
                self._slow(trouble, self._victims(trouble, rank))
            case "flip":
                for victim in self._victims(trouble, rank):
                    self._flip(victim, trouble.point)
                if trouble.point == "finished":  # its last digest is reported: no rank compares the state that it writes after that
                    world.excused = True
            case "overflow":
                for victim in self._victims(trouble, rank):
                    victim.spoils = True
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
            case "notice":
                self._announce(trouble, world.clock.now_s + trouble.duration_s)
            case "resize":
                self._resize(trouble.world)
            case "cut":
                self._cut(trouble)
            case "one_way" | "flap" | "isolate_rank" | "bad_link":
                self._link(trouble, rank)
            case "store_gone" | "store_refuses" | "store_slow":
                self._store(trouble)
            case "raise" | "nan":
                world.note("raised", trouble.step)
            case _:
                self._keeper(trouble, rank)

    def _victims(self, trouble: Trouble, rank: SimRank | None) -> list[SimRank]:
        if rank is not None and not trouble.slots:
            return [rank]
        slots = [*([trouble.slot] if trouble.slot is not None else []), *trouble.slots]
        return [self.world.train.current[slot] for slot in dict.fromkeys(slots) if slot in self.world.train.current]

    def _flip(self, victim: SimRank, point: str) -> None:
        """Flip a bit in the victim's state. A half-written state gets no flip, since it is not used."""
        held = victim.layout
        chunks = held.kept if held.kept is not None and held.kept.value != POISON else None
        if victim.alive and held.weights != POISON:
            wrong = hash((held.weights, zlib.crc32(victim.protocol.token.encode()), FLIPPED))
            if chunks is not None and victim.rng.random() < 0.5:
                chunks.value = wrong
            else:
                held.weights = wrong
            held.corrupt = True
            if held.kept is not None and held.kept.at is not None and held.kept.digested_at == held.kept.at:
                self.world.unseen.add(StateId(held.kept.at.history, held.kept.at.step + 1))  # found in the next step only
                self.world.excused |= any(len(keepers) == 1 for keepers in held.kept.cut.keepers)  # or by no rank
            elif held.kept is not None and (point == "donating" or held.kept.settled_at != held.kept.at):  # it knows no digest of this view
                view, keepers = victim.rank_machine.view, held.kept.cut.keepers
                self.world.excused |= len(view.receivers) == len(view.members) - 1 or any(len(each) == 1 for each in keepers)
            self.world.flipped = True
            self.world.note("flipped", victim, victim.protocol.state)

    def _kill(self, trouble: Trouble, rank: SimRank | None) -> None:
        victims = self._victims(trouble, rank)
        if trouble.noticed:
            members = tuple(victim.member for victim in victims if victim.named)
            now_s = self.world.clock.now_s
            fault = Fault(f"fault-{self.fired}", now_s, "gpu", "kill_rank", trouble.slot)
            self.world.submit(FaultRecord(fault, "executed", members, at_s=now_s))
        for victim in victims:
            victim.die("killed")

    def _slow(self, trouble: Trouble, victims: list[SimRank]) -> None:
        """The process is slow, and its replacement will not be. For ``busy`` its machine runs other programs, and the process is well."""
        name = "machine" if trouble.kind == "busy" else "own" if trouble.kind == "slow" else "link"
        for victim in victims:
            setattr(victim.pace, name, trouble.severity)
            victim.pace.slow = victim.pace.slow or trouble.kind != "busy"
            self.world.clock.after(trouble.duration_s, lambda victim=victim: setattr(victim.pace, name, 1.0))  # type: ignore[misc]

    def _stop(self) -> None:
        """The driver repeats its request to stop, since a coordinator may have died with it."""
        if not self.world.over:
            self.asked_s = min(self.asked_s, self.world.clock.now_s)
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
            node.away += 1
            world.clock.after(trouble.duration_s, node.come_back)
        if trouble.noticed:
            world.submit(NodeSilent(node.name, world.clock.now_s))

    def _announce(self, trouble: Trouble, until_s: float) -> None:
        """Announce that a node will be taken away, and repeat that. The notice may be withdrawn later."""
        world, node = self.world, self.world.nodes[trouble.node]
        if not node.alive or world.over:
            return
        if world.clock.now_s < until_s:
            world.submit(NodeLeaves(node.name, until_s, "maintenance"))
            world.clock.after(min(1.0, until_s - world.clock.now_s), lambda: self._announce(trouble, until_s))
        elif trouble.withdrawn:
            world.submit(NodeStays(node.name))
        else:
            node.lose(0.0)
            world.submit(NodeSilent(node.name, world.clock.now_s))
            world.clock.after(REBOOT_S, world.add_node)

    def _resize(self, size: int) -> None:
        """Set the world size, like a user. The coordinator refuses a size that is not allowed; without a coordinator nothing happens."""
        coordinator = self.world.coordinator
        if coordinator is None:
            return
        try:
            changed(coordinator.machine.state.settings, WORLD, size)
        except ConfigError as error:
            self.world.note("refused", error.reason)
        else:
            self.world.submit(SettingChanged(WORLD, float(size)))

    def _cut(self, trouble: Trouble) -> None:
        """Cut the links between the trouble's nodes and the other nodes, and between the coordinator and nodes of the other side."""
        world = self.world
        inside = [node for node in world.nodes if node.index in trouble.nodes]
        side = [node.name for node in inside]
        world.note("cut", *side, "with the coordinator" if trouble.with_head else "")
        world.links.cut([*side, HEAD] if trouble.with_head else side, trouble.duration_s)
        for node in [node for node in world.nodes if node not in inside] if trouble.with_head else inside:
            node.away += 1
            world.clock.after(trouble.duration_s + self._rng.uniform(*CALLS_AGAIN_S), node.come_back)
            self._dismiss_later(node, DISMISSED_S)

    def _link(self, trouble: Trouble, rank: SimRank | None) -> None:
        """Agents keep their connections, and messages on their way arrive when the link is mended: see ``SimNode``."""
        links, duration_s = self.world.links, trouble.duration_s
        if trouble.kind == "isolate_rank":
            for victim in self._victims(trouble, rank):
                links.cut([victim.end], duration_s, spares_store=False)
            return
        side = [node.name for node in self.world.nodes if node.index in trouble.nodes] + ([HEAD] if trouble.with_head else [])
        self.world.note(trouble.kind, *side, "into" if trouble.into else "")
        if trouble.kind == "bad_link":
            links.spoil(side, duration_s, delay_s=trouble.delay_s, loss=trouble.loss)
            return
        if trouble.kind == "one_way":
            links.cut(side, duration_s, ways=(not trouble.into, trouble.into), closes_s=trouble.closes_s)
        else:
            self._flap(side, self.world.clock.now_s + duration_s)
        for node in self.world.nodes:
            if (node.index in trouble.nodes) != trouble.with_head:
                self._dismiss_later(node, DISMISSED_S)

    def _flap(self, side: list[str], until_s: float) -> None:
        clock = self.world.clock
        if clock.now_s < until_s:
            self.world.links.cut(side, min(FLAP_S, until_s - clock.now_s))
            clock.after(2 * FLAP_S, lambda: self._flap(side, until_s))

    def _store(self, trouble: Trouble) -> None:
        store, until_s = self.world.store, self.world.clock.now_s + trouble.duration_s
        match trouble.kind:
            case "store_gone":
                self.world.links.cut([STORE], trouble.duration_s, spares_store=False)
            case "store_refuses":
                store.refusing_until_s = max(until_s, store.refusing_until_s)
            case _:
                store.slow_until_s, store.slow_s = max(until_s, store.slow_until_s), trouble.delay_s

    def _keeper(self, trouble: Trouble, rank: SimRank | None) -> None:
        """Troubles of the coordinator and of agents: the agent of the rank that came to the point, or of the trouble's node."""
        node: SimNode = self.world.nodes[trouble.node if rank is None else int(rank.node.name.removeprefix("node-"))]
        match trouble.kind:
            case "stop_coordinator":
                if self.world.coordinator is not None:
                    self.world.coordinator.stop(trouble.duration_s)
            case "stop_agent":
                node.stop(trouble.duration_s)
            case "kill_agent":
                if node.alive:
                    node.kill_agent(trouble.duration_s)
            case kind:
                raise ValueError(f"unknown kind of trouble: {kind}")

    def _dismiss_later(self, node: SimNode, delay_s: float) -> None:
        self.world.clock.after(delay_s, lambda: self._dismiss(node) if node.alive and not node.reachable else None)

    def _dismiss(self, node: SimNode) -> None:
        """Take a lost node out of Ray, which starts its ranks elsewhere. When the agent is back, it ends the ranks that are left."""
        coordinator = self.world.coordinator
        if coordinator is None or node.name in coordinator.machine.state.roster.nodes:
            self._dismiss_later(node, BEAT_S)
            return
        self.world.note("dismissed", node)
        node.dismissed = True
        for rank in list(node.ranks.values()):
            self.world.train.forget(rank.protocol.slot, rank)
        self.world.clock.after(REBOOT_S, self.world.add_node)
