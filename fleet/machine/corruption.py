"""Ranks differ in values that should have the same bits on all ranks: testimonies, wrong ranks, and the state to go on from.

Ranks compare in their own reduction (``actors.rank.verify``), and leave their group when a value differs: no step is committed. Each rank
of the comparison reports its value in its ``Quiesced``. Once all live ranks have reported, the policy judges. A wrong rank is evicted
before a view is made, so it neither trains on nor gives its state to another rank. Of a sharded state, a rank itself finds that its chunks
have changed. Then no majority is needed. If the policy cannot name the wrong rank, all go back to a state that was the same on all. If
ranks differ there again, or in more than a flipped bit can change, the loop is wrong. Then the run ends, and no node is to blame.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from fleet.machine.end import end
from fleet.machine.leaving import LOOP, evict
from fleet.machine.roster import Rank
from fleet.machine.state import MachineState
from fleet.protocol.causes import EndWhy, Outvoted
from fleet.protocol.chunk_check import CHANGED, KEPT, REFUTED
from fleet.protocol.decisions import Decision, Figures, TakenBack, figures
from fleet.protocol.probes import probe
from fleet.protocol.records import DecisionMade
from fleet.protocol.replica_check import UNCOMPARED
from fleet.protocol.types import Coordinate, Finding, Member, StateId, Verdict

LOOK_FOR = (
    "Look in the loop for an unseeded draw, or for code that changes the tracked state by the time, the process or the rank; "
    "if there is none, check the nodes with `fleet doctor`"
)


def judge(machine: MachineState, now_s: float) -> None:
    """All live ranks have left their group. Evict ranks that the testimonies name, if any, and withdraw doubtful checkpoints; or stop."""
    suspicion = machine.doubts
    seen = _seen(machine, suspicion.said)
    said, suspicion.said = seen or _of_one_column(_of_one_thing(suspicion.said)), {}
    silent = not seen and _someone_is_silent(machine, said)
    said = {member: known for member, known in said.items() if known.digest}  # without one, a rank keeps none of what differs
    if len({known.digest for known in said.values()}) < 2 or silent:
        if len({known.digest for known in said.values()}) > 1:
            probe("ranks differ and one of them has not said so")
        return  # the next view compares again
    first = next(iter(said.values()))
    if first.what == KEPT:
        _convict(machine, said, now_s)
        return
    votes = {member: known.digest for member, known in said.items() if known.witness}
    others = {member: known.digest for member, known in said.items() if not known.witness}
    if not votes:  # copies of one donor that is gone
        votes, others = others, {}
    elif len(votes) == 1:
        votes, others = _with_earlier_words(machine, votes, others)
    policy = suspicion.policy
    if policy is None:
        _give_up(machine, first, said, now_s)
        return
    injected = machine.losses.injected(said)
    verdict = policy.judge(votes, others, again=suspicion.again(first.state.step, said) and not injected)
    if verdict.guilty and first.what.endswith(UNCOMPARED):
        probe("ranks differ in a step in which chunks are not compared")
        reason = "most ranks have a parameter from its owner, so that a majority proves nothing: no rank is accused, and all go back"
        verdict = Verdict(Decision("retry", reason, verdict.decision.payload))
    reason = f"{first.what} at step {first.state.step}: {verdict.decision.reason}"
    machine.decide("corruption", verdict.decision.action, reason, verdict.decision.payload, now_s)
    if verdict.decision.action == "stop":
        end(machine, EndWhy.LOOP_WRONG, f"{LOOP}: {reason}. {LOOK_FOR}", _table(said), now_s)
    elif verdict.decision.action == "retry":
        probe("a tie takes all ranks back")
        cleared = min(first.state, *(known.cleared for known in said.values()))  # a step is compared again where a view breaks behind that
        _take_back(machine, first, StateId(cleared.history, cleared.step - 1), now_s, counts=not injected)
        machine.losses.healed(said)
    elif verdict.guilty:
        probe("a rank is outvoted")
        honest = [known.cleared for member, known in said.items() if member not in verdict.guilty]
        _take_back(machine, first, max(honest, default=first.state), now_s, counts=not injected)
        for rank in _living(machine, verdict.guilty):
            evict(machine, rank, Outvoted(first.what, first.state.step), now_s)


def _convict(machine: MachineState, said: dict[Member, Finding], now_s: float) -> None:
    """Ranks say of their own chunks that they are wrong, or were. The step is not committed: the others go on."""
    found, guilty = next(iter(said.values())), tuple(member for member, known in said.items() if known.digest in (CHANGED, REFUTED))
    named = ", ".join(map(str, guilty))
    if any(known.digest == REFUTED for known in said.values()):
        probe("a step that is taken again says which rank was wrong in it")
        reason = f"step {found.state.step} was taken again, and says which of the ranks that differed had wrong chunks then: {named}"
    else:
        probe("a rank finds that its own chunks have changed")
        reason = f"step {found.state.step}: digests of their own say that chunks of {named} have changed since the commit"
    machine.decide("corruption", "evict", reason, Figures({"guilty": float(len(guilty))}), now_s)
    machine.doubts.judged(found.generation)
    for rank in _living(machine, guilty):
        evict(machine, rank, Outvoted("", found.state.step), now_s)


def _with_earlier_words(
    machine: MachineState, votes: dict[Member, str], others: dict[Member, str]
) -> tuple[dict[Member, str], dict[Member, str]]:  # fmt: skip
    """One rank alone may vote. A rank that got its state in an earlier view holds the state that its donor had then.

    If that differs from the voter's state, either of the two may have changed since. So each other digest counts as one vote: a tie.
    """
    view = machine.view
    receivers = {view.members[rank] for rank in view.receivers} if view is not None else set()
    known = set(votes.values())
    for member, digest in sorted(others.items()):
        if member not in receivers and digest not in known:
            probe("one voter and a rank that got its state earlier differ")
            known.add(digest)
            votes = votes | {member: digest}
    return votes, {member: digest for member, digest in others.items() if member not in votes}


def _give_up(machine: MachineState, found: Finding, said: dict[Member, Finding], now_s: float) -> None:
    """No policy can name the wrong rank. Withdraw the checkpoints of the last steps, since they may contain the wrong values."""
    probe("ranks differ and no policy can judge them")
    cleared = min(known.cleared for known in said.values())
    reason = f"{found.what} of the ranks differ at step {found.state.step}, and no policy can judge them"
    machine.say(*machine.checkpoints.withdraw(StateId(cleared.history, max(0, cleared.step - 1)), found.state, now_s, reason))
    end(machine, EndWhy.UNJUDGED, reason, _table(said), now_s)


def judge_the_end(machine: MachineState, finished: list[Rank], now_s: float) -> bool:
    """The ranks hold different states at the finish barrier. True when that is resolved: wrong ranks are evicted, and the others finish."""
    policy = machine.doubts.policy
    if policy is None or not machine.settings.replicated:  # no rank holds a whole state of its own
        return False
    held = {rank.member: rank.digest or "" for rank in finished}
    votes = {rank.member: held[rank.member] for rank in finished if not _was_given_the_end(machine, rank)}
    others = {member: digest for member, digest in held.items() if member not in votes}
    step = machine.committed.step
    verdict = policy.judge(
        votes or others, others if votes else {}, again=machine.doubts.again(step, {}) and not machine.losses.injected(held)
    )
    reason = f"the final state: {verdict.decision.reason}"
    machine.decide("corruption", verdict.decision.action, reason, verdict.decision.payload, now_s)
    if verdict.decision.action == "stop":
        detail = ", ".join(f"{member}: {digest[:12]}" for member, digest in held.items())
        end(machine, EndWhy.LOOP_WRONG, f"{LOOP}: {reason}. {LOOK_FOR}", detail, now_s)
        return True
    if not machine.losses.injected(held):
        machine.doubts.note(step, step)
    for rank in _living(machine, verdict.guilty):
        evict(machine, rank, Outvoted("the final state"), now_s)
    return bool(verdict.guilty)


def _was_given_the_end(machine: MachineState, rank: Rank) -> bool:
    """Whether the rank holds its donor's state without an own step in this view: it must not vote for its donor."""
    view = machine.view
    if view is None or view.rank_of(rank.member) not in view.receivers:
        return False
    return rank.formed is None or rank.formed[0] != view.generation or rank.formed[1] == machine.committed


def replay(machine: MachineState, record: DecisionMade) -> None:
    """Restore the doubtful states, and the steps that were rolled back, from before the coordinator died."""
    back = record.payload
    if not isinstance(back, TakenBack):
        return
    found, first = StateId(*back.found), StateId(*back.doubted)
    machine.checkpoints.withdraw(first, found, record.at_s, record.reason)
    machine.doubts.judged(back.generation)
    if back.resumed is not None:
        machine.doubts.note(found.step, back.resumed)
    if record.action != "carry_on":
        machine.doubts.tainted = found


def _seen(machine: MachineState, said: dict[Member, Finding]) -> dict[Member, Finding]:
    """The testimonies of all keepers, from one rank that has seen them. Empty if no rank has."""
    for member, known in sorted(said.items()):
        if known.seen and machine.view is not None and known.generation == machine.view.generation:
            members = machine.view.column_of(member).members
            return {members[rank]: replace(known, digest=digest) for rank, digest in known.seen}
    return {}


def _of_one_thing(said: dict[Member, Finding]) -> dict[Member, Finding]:
    """The testimonies of one value and step, which can be compared: the largest set, when there are several."""
    keys = Counter((known.what, known.state) for known in said.values())
    if len(keys) > 1:
        probe("ranks tell of differences at several steps")
    return {member: known for member, known in said.items() if (known.what, known.state) == max(keys, key=lambda key: (keys[key], key))}


def _of_one_column(said: dict[Member, Finding]) -> dict[Member, Finding]:
    """The testimonies of the first column whose ranks differ: other columns hold other parts of the state. Empty if none differ."""
    by_column = defaultdict[Coordinate, dict[Member, Finding]](dict)
    for member, known in said.items():
        by_column[member.coordinate][member] = known
    differ = (column for column in by_column.values() if len({known.digest for known in column.values() if known.digest}) > 1)
    return next(differ, {})


def _someone_is_silent(machine: MachineState, said: dict[Member, Finding]) -> bool:
    """Whether a live member of the column has a state and has not given its testimony. A receiver without a state has none to give."""
    members, column = machine.view.members if machine.view is not None else (), {member.coordinate for member in said}
    ranks = [machine.current(member) for member in members if member not in said and member.coordinate in column]
    return any(rank is not None and rank.state is not None and not rank.dirty for rank in ranks)


def _living(machine: MachineState, members: tuple[Member, ...]) -> list[Rank]:
    found = [machine.current(member) for member in members]
    return [rank for rank in found if rank is not None]


def _take_back(machine: MachineState, found: Finding, cleared: StateId, now_s: float, counts: bool) -> None:
    """Go on from the state ``cleared``. ``counts``: the difference was not injected."""
    policy = machine.doubts.policy
    assert policy is not None
    reason = f"a rank is wrong in {found.what} at step {found.state.step}"
    machine.say(*machine.checkpoints.withdraw(min(cleared, found.state), found.state, now_s, reason))
    decision, state = policy.go_back(found.state, cleared, machine.checkpoints.kept)
    first = min(cleared, found.state)
    if decision.action != "carry_on":
        if state is None:
            probe("no kept state is cleared of doubt")
        machine.doubts.tainted = found.state
        first = StateId(0, 0) if state is None else StateId(state.history, state.step + 1)
        machine.say(*machine.checkpoints.withdraw(first, found.state, now_s, reason))
    machine.doubts.judged(found.generation)
    resumed = None
    if counts:
        back_to = found.state if decision.action == "carry_on" else state
        resumed = back_to.step if back_to is not None else 0
        machine.doubts.note(found.state.step, resumed)
    where, suspected = (found.state.history, found.state.step), (first.history, first.step)
    payload = TakenBack(found.generation, where, suspected, resumed, figures(decision.payload))
    machine.decide("corruption", decision.action, decision.reason, payload, now_s)


def _table(said: dict[Member, Finding]) -> str:
    return ", ".join(f"{member}: {known.digest}" + ("" if known.witness else " (given)") for member, known in sorted(said.items()))
