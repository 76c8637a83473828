"""What a simulated rank does in a view: it steps as the live loop does, and forms the next view beside its steps."""

from __future__ import annotations

from typing import Any

from fleet.events import PartFailed, PartWritten
from fleet.levels import PEERS, level_of
from fleet.shards import share
from fleet.simulation.clockwork import Steps
from fleet.simulation.groups import Broken, Group
from fleet.simulation.model import POISON, gradient, updated
from fleet.simulation.ranks import Contribution, SimRank
from fleet.types import Member, Part, View


class SteppingRank(SimRank):
    """A whole rank: its process and its seat are :class:`SimRank`'s."""

    def _steps(self) -> Steps:
        number, protocol = 0, self.protocol
        while protocol.state is not None and protocol.state.step < self.world.plan.steps:
            assert self.group is not None
            view = self.group.view
            self._step_aside()
            yield from self._compute(protocol.state.step)
            if not self._claim():
                return
            values = self._taken_early() or (yield from self._reduce(self.group, number))
            enter, save = protocol.agree([value[3] for value in values.values()])
            self.world.watch.agreed(self, view, number, enter, save)
            number += 1
            yield from self._update(values)
            if save is not None:
                yield from self._save(save, enter is not None)
            if enter is not None:
                yield from self._enter(enter)
                number = 0
        if self._claim():
            yield from self._finish()

    def _compute(self, step: int) -> Steps:
        """The shards that are due of this rank; it stops early when it is wanted."""
        self._own = []
        middle, number = len(self.due) // 2, 0
        while pending := [shard for shard in self.due if shard not in self.held]:  # more may be foreseen meanwhile
            if self._wanted or (self.sitting is not None and self.rng.random() < 0.2):
                break  # a live loop may act on an interrupt that its listening thread has answered since
            shard = pending[0]
            self.where = (step, shard)
            if self.at("compute"):
                yield self._pause()
            self.held[shard] = gradient(self.weights, step, shard)
            if number == middle:
                began_s = self.world.clock.now_s
                yield self.rng.uniform(*self.world.plan.jitter) * self.world.plan.shard_s * len(self.due) * self.slowness
                self._own = [float(len(self.due)), self.world.clock.now_s - began_s]
            number += 1
        self.where = (step, -1)

    def _taken_early(self) -> dict[Member, Contribution] | None:
        values, self.early = self.early, None
        if values is not None and self.group is not None:
            self.world.watch.reduced(self, self.group.view, 0, values)
        return values

    def _reduce(self, group: Group, number: int) -> Steps:
        protocol, view = self.protocol, group.view
        assert protocol.state is not None
        if self.at("reducing"):
            yield self._pause()
        self.world.watch.contribute(self, view, protocol.state, protocol.dirty)
        offer = protocol.offer()
        self.alike.enter(protocol.state, str(self.weights))
        values: dict[Member, Any] = yield group.reduce(self.member, number, (protocol.state, self.weights, dict(self.held), offer))
        took_s = self.world.clock.now_s - group.complete_s
        if self.link_slowness > 1:
            yield took_s * (self.link_slowness - 1)
        self._own.append(took_s * self.link_slowness)
        self.world.watch.reduced(self, view, number, values)
        self._compare(values)
        if self.at("reduced"):
            yield self._pause()
        return values

    def _update(self, values: dict[Member, Contribution]) -> Steps:
        assert self.group is not None
        view, merged = self.group.view, dict[int, int]()
        for _, _, contributions, _ in values.values():
            merged.update(contributions)
        before, self.weights, self.held = self.weights, POISON, {}
        self.protocol.mutating()
        if self.at("mutating"):
            yield self._pause()
        apply_s = self.rng.uniform(0.001, 0.02)
        yield apply_s
        self.weights = updated(before, merged, self.world.settings.shards)
        state = self.protocol.committed()
        self._bring(share([()] * len(view.members), view.ranges, self.world.settings.shards))
        self._note_times(state.step - 1, apply_s)
        self.progress_s = self.world.clock.now_s
        self.world.watch.commit(self, state)
        if self.at("committed"):
            yield self._pause()

    def _note_times(self, step: int, apply_s: float) -> None:
        """As the agent of a live rank has it: of whole steps alone."""
        if len(self._own) != 3 or self._own[0] != len(self._whole()):
            return
        view = self.protocol.view
        if view is not None and view.generation != self.timed_generation:
            self.timed_generation, self.times = view.generation, []
        shards, compute_s, network_s = self._own
        self.times.append((step, int(shards), round(compute_s * 1e6), 0, round(network_s * 1e6), round(apply_s * 1e6)))

    def _enter(self, view: View) -> Steps:
        """Every member has agreed to go on in ``view`` from here."""
        assert self.group is not None
        self.protocol.enter(view)
        self.world.watch.sit(self, view)
        if self.beside is None:
            raise Broken("told to leave between the agreement and the step boundary")
        self.group.leave(self.member, graceful=not self.world.plan.abrupt)
        self.group, self.beside = self.beside, None
        if self.at("entering"):
            yield self._pause()
        yield from self._take_state(self.group, graceful=True)
        self._begin_stepping(view)
        self._check_seated(view)
        self.group.tell(self.member, ())  # the newcomers ask; the members know that nothing has begun
        self._bring(share([()] * len(view.members), view.ranges, self.world.settings.shards, self._idle(view)))

    def _whole(self) -> tuple[int, ...]:
        """The shards of this rank in a step that begins."""
        assert self.group is not None
        view = self.group.view
        return tuple(range(*view.ranges[view.rank_of(self.member)]))

    def _save(self, request: int, entering: bool) -> Steps:
        assert self.group is not None and self.protocol.state is not None
        view, state, weights = self.group.view, self.protocol.state, self.weights
        self.world.watch.save(self, view, request, state)
        if self.at("saving"):
            yield self._pause()
        blocked_s = self.rng.uniform(0.001, 0.02)
        yield blocked_s
        rank = view.rank_of(self.member)
        name = f"step-{state.step}-lineage-{state.lineage}-request-{request}-g{view.generation}"
        part = Part(f"{name}/{rank}", 1, str(weights), (rank,))
        event = PartWritten(self.member, request, name, state, part, blocked_s, "meta" if rank == 0 else "")
        self.world.clock.after(self.rng.uniform(0.01, 0.4), lambda: self.gate(lambda: self._written(view, rank, weights, event)))

    def _written(self, view: View, rank: int, weights: int, event: PartWritten) -> None:
        if level_of(event.request) == PEERS:
            done = self.world.copy(view, rank, weights, event)
        else:
            done = self.world.store.put(event.checkpoint, rank, weights)
        if done:
            self.protocol.written(event)
            self.flush()
        elif self.rng.random() < 0.5:  # or the word is lost, and the request runs out of time
            self.flush(PartFailed(event.member, event.request, "nobody takes it"))

    def _finish(self) -> Steps:
        """Wait at the barrier until the run is over, or a peer's loss sends everyone back."""
        self.stepping = False
        self.protocol.finished(str(self.weights))
        self.flush()
        self.world.note("finished", self)
        if self.at("finished"):
            yield self._pause()
        while not self._over and not self.protocol.concluded:
            if self.protocol.interrupted or self.group is None or self.group.broken_for(self.member) is not None:
                raise Broken("called back from the finish")
            request = self.protocol.final_request()
            if request is not None:
                yield from self._save(request, False)
            else:
                yield self._wait()
        if not self._over:
            yield from self._behind()

    def _behind(self) -> Steps:
        """The code behind the loop: one of the ranks writes the model."""
        self.world.watch.behind(self)
        if self.at("behind"):
            yield self._pause()
        yield from self._once("end/save")
        self.protocol.left()
        self.flush()
        while not self._over:
            yield self._wait()

    def _once(self, key: str) -> Steps:
        """As the live rank does it: ask again and again, do it when told so, and tell until that is answered."""
        answer = None
        while not self._over and answer is None:
            self.protocol.ask_once(key)
            self.flush()
            yield self.world.settings.timeouts.resend_s
            answer = self.protocol.answers.get(key)
        if answer is None or answer.result is not None:
            return
        yield self.rng.uniform(0.01, 0.3)
        self.world.watch.did(self, key)
        while not self._over and (answer is None or answer.result is None):
            self.protocol.done_once(key, str(self.weights))
            self.flush()
            yield self.world.settings.timeouts.resend_s
            answer = self.protocol.answers.get(key)

    # ---- beside the steps ----------------------------------------------------------------------------------------------------------------

    def _form_beside(self) -> Steps:
        """The second thread: forms proposed views while the first one steps."""
        while True:
            view = self.protocol.proposal() if self.named and self.protocol.view is not None else None
            if view is None or self.protocol.forming or view.generation == self._failed_proposal:
                yield self._wait()
                continue
            self.beside = group = self.world.group(view)
            try:
                yield group.arrive(self.member, self.world.settings.timeouts.form_s)
                if self.beside is group:
                    self.protocol.proposal_formed(view.generation)
                    self.world.note("formed beside", self, view.generation)
            except Broken:
                self._failed_proposal = view.generation
                if self.beside is group:
                    group.leave(self.member)
                    self.beside = None
