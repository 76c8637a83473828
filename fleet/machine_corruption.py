"""When ranks differ in what should be the same bits on all of them: what they told, who is wrong, and where the run goes on.

Ranks compare in their own reduction (``actors.rank.replicas``), and leave their group when something differs: the step is not committed.
Each that was in the comparison says what it holds with its ``Parked``; once all that live have spoken, the policy judges. Who is wrong is
evicted before a view is made, so it neither trains on nor gives its state to anyone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fleet.alike import WEIGHTS
from fleet.events import Parked
from fleet.machine_state import Rank
from fleet.ports import CorruptionPolicy
from fleet.records import DecisionMade
from fleet.types import Finding, Member, StateId

if TYPE_CHECKING:
    from fleet.machine import FleetMachine


DOUBTED = ("doubted_lineage", "doubted_step")


class Doubts:
    """The testimonies of the newest view that ended in a difference, and which states are not to be used any more."""

    def __init__(self, policy: CorruptionPolicy | None) -> None:
        self.policy = policy
        self.said: dict[Member, Finding] = {}
        self.tainted: StateId | None = None

    def hear(self, event: Parked) -> None:
        if event.testimony is None:
            return
        newest = max((known.generation for known in self.said.values()), default=-1)
        if event.testimony.generation > newest:
            self.said.clear()
        if event.testimony.generation >= newest:
            self.said[event.member] = event.testimony

    def floor(self, committed: StateId) -> StateId:
        """A state below it cannot be the source of a view."""
        return committed if self.tainted is None else max(committed, StateId(self.tainted.lineage + 1, 0))


def judge(machine: FleetMachine, now_s: float) -> None:
    """All that live have left their group. Evict whom the testimonies name, and take back what is in doubt; or stop, or do nothing."""
    doubts = machine.doubts
    said, doubts.said = _of_one_thing(doubts.said), {}
    if len({known.digest for known in said.values()}) < 2 or _someone_is_silent(machine, said):
        return  # the next view compares again
    first = next(iter(said.values()))
    votes = {member: known.digest for member, known in said.items() if known.witness}
    others = {member: known.digest for member, known in said.items() if not known.witness}
    if not votes:  # copies of one donor that is gone
        votes, others = others, {}
    policy = doubts.policy
    if policy is None or (_sharded(machine) and first.what.startswith(WEIGHTS)):
        _give_up(machine, first, said, now_s)
        return
    verdict = policy.judge(votes, others)
    told = f"{first.what} at step {first.state.step}: {verdict.decision.reason}"
    machine._decide("corruption", verdict.decision.action, told, verdict.decision.fields, now_s)
    if verdict.decision.action == "stop":
        machine._end("failed", f"silent corruption: {told}", _table(said), now_s)
    elif verdict.guilty:
        honest = [known.cleared for member, known in said.items() if member not in verdict.guilty]
        _take_back(machine, first, max(honest, default=first.state), now_s)
        for rank in _living(machine, verdict.guilty):
            machine._evict(rank, f"silent corruption: {first.what} at step {first.state.step} differ from the majority's", now_s)


def _sharded(machine: FleetMachine) -> bool:
    """The owner of a chunk gives its parameters to all but its guards: most ranks repeat one word there, and a majority proves nothing."""
    return machine.settings.optimizer_sharding != "none"


def _give_up(machine: FleetMachine, found: Finding, said: dict[Member, Finding], now_s: float) -> None:
    """Nobody can say who is wrong. Checkpoints of the last steps are not to be used: what made the ranks differ may be in them."""
    cleared = min(known.cleared for known in said.values())
    why = "nothing is there to judge them"
    if machine.doubts.policy is not None:
        why = 'with optimizer_sharding = "zero1" most ranks have a parameter from its owner, so that a majority proves nothing'
    told = f"{found.what} of the ranks differ at step {found.state.step}, and {why}"
    machine._out += machine.checkpoints.withdraw(StateId(cleared.lineage, max(0, cleared.step - 1)), found.state, now_s, told)
    machine._end("failed", told, _table(said), now_s)


def judge_the_end(machine: FleetMachine, finished: list[Rank], now_s: float) -> bool:
    """The ranks hold different states at the finish barrier. True when some were evicted, so that the others finish without them."""
    policy = machine.doubts.policy
    if policy is None or _sharded(machine):
        return False
    verdict = policy.judge({rank.member: rank.digest or "" for rank in finished}, {})
    told = f"the final state: {verdict.decision.reason}"
    machine._decide("corruption", verdict.decision.action, told, verdict.decision.fields, now_s)
    for rank in _living(machine, verdict.guilty):
        machine._evict(rank, "silent corruption: the final state differs from the majority's", now_s)
    return bool(verdict.guilty)


def replay(machine: FleetMachine, record: DecisionMade) -> None:
    """What was in doubt, and what was taken back, before the coordinator died."""
    if "doubted_step" not in record.fields:
        return
    found, first = (StateId(*(int(record.fields[name]) for name in names)) for names in (("lineage", "found"), DOUBTED))
    machine.checkpoints.withdraw(first, found, record.at_s, record.reason)
    if record.action != "carry_on":
        machine.doubts.tainted = found


def _of_one_thing(said: dict[Member, Finding]) -> dict[Member, Finding]:
    """The testimonies that can be compared with each other: most of them, when they are of several steps."""
    keys = Counter((known.what, known.state) for known in said.values())
    return {member: known for member, known in said.items() if (known.what, known.state) == max(keys, key=lambda key: (keys[key], key))}


def _someone_is_silent(machine: FleetMachine, said: dict[Member, Finding]) -> bool:
    members = machine.view.members if machine.view is not None else ()
    return any(member not in said and machine.roster.current(member) is not None for member in members)


def _living(machine: FleetMachine, members: tuple[Member, ...]) -> list[Rank]:
    found = [machine.roster.current(member) for member in members]
    return [rank for rank in found if rank is not None]


def _take_back(machine: FleetMachine, found: Finding, cleared: StateId, now_s: float) -> None:
    policy = machine.doubts.policy
    assert policy is not None
    reason = f"a rank was found to be wrong in {found.what} at step {found.state.step}"
    machine._out += machine.checkpoints.withdraw(min(cleared, found.state), found.state, now_s, reason)
    decision, state = policy.go_back(found.state, cleared, machine.checkpoints.kept)
    first = min(cleared, found.state)
    if decision.action != "carry_on":
        machine.doubts.tainted = found.state
        first = StateId(0, 0) if state is None else StateId(state.lineage, state.step + 1)
        machine._out += machine.checkpoints.withdraw(first, found.state, now_s, reason)
    fields = {"lineage": found.state.lineage, "found": found.state.step, "doubted_lineage": first.lineage, "doubted_step": first.step}
    machine._decide("corruption", decision.action, decision.reason, {**decision.fields, **fields}, now_s)


def _table(said: dict[Member, Finding]) -> str:
    return ", ".join(f"{member}: {known.digest}" + ("" if known.witness else " (given)") for member, known in sorted(said.items()))
