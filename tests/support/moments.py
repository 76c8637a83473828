"""Every moment of a step of a model whose parameters are spread over the ranks, and how a test kills a rank right there.

A moment is a method of what a rank runs, and what of it has happened when the process dies: nothing yet, or all of it. Each strikes once,
in slot 1, at or after step :data:`AT`. A test goes through :data:`MOMENTS`; ``dies_at`` is the train function of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from actors.rank.membership.process_group import Group, GroupBroken
from actors.rank.tags import Tag
from tests.support import trains

AT, VICTIM = 6, 1


class Moment(NamedTuple):
    """A place in the code of a rank.

    Attributes:
        what: of the step happens then.
        method: ``module:Class.method``, all of which is in :mod:`actors.rank`.
        behind: the process dies as the method returns; otherwise as it is called.
        when: of the arguments of the call, which are meant.
        second: slot 2 has died before, in a forward, and this comes in the view that follows.
    """

    what: str
    method: str
    behind: bool = False
    when: Callable[..., bool] = lambda *arguments, **named: True
    second: bool = False


def tagged(tag: int) -> Callable[..., bool]:
    return lambda group, out, inp, under=0: under == tag


def for_loop(train: Any, move: Any) -> bool:
    return not move.early


FSDP, ZERO1 = "actors.rank.fsdp", "actors.rank.zero1"
LAYOUT, EXCHANGE = f"{FSDP}.layout:FsdpLayout", f"{FSDP}.exchange:PeerExchange"
MOVING = f"{ZERO1}.moving:MovingChunks"
STEP = "actors.rank.step.train_step:TrainStep"
GROUP = "actors.rank.membership.process_group:Group"
MOMENTS = {
    "before-the-first-gather": Moment("a shard is about to begin", f"{LAYOUT}.begin_shard"),
    "asks-for-a-stretch": Moment("it has asked a server, who is about to answer", f"{FSDP}.serving:PeerFetcher._ask", behind=True),
    "serves-a-stretch": Moment("a peer has asked it for a stretch", f"{EXCHANGE}._serve"),
    "in-a-forward": Moment("a unit is gathered for its forward", f"{FSDP}.gathered:Gathered._before_forward", behind=True),
    "behind-a-forward": Moment("a unit is let go behind its forward", f"{FSDP}.gathered:Gathered._behind_forward", behind=True),
    "in-a-backward": Moment("a unit is gathered for its backward", f"{FSDP}.gathered:Gathered._before_backward", behind=True),
    "a-shard-is-done": Moment("all gradients of a shard are there", f"{LAYOUT}.end_shard", behind=True),
    "before-the-sum": Moment("all its gradients are done", f"{STEP}.reduce", when=for_loop),
    "a-gradient-leaves": Moment("a unit's gradient is about to leave it", f"{LAYOUT}._send"),
    "a-gradient-has-come": Moment("a peer's gradient is taken in, and that peer does not know", f"{EXCHANGE}.take", True),
    "means-travel": Moment("all gradients are with their owners, and means are on their way", f"{EXCHANGE}.means"),
    "before-ready": Moment("it has its sums, and tells nobody", f"{GROUP}.all_gather", False, tagged(Tag.READY)),
    "behind-ready": Moment("all know that all have their sums", f"{GROUP}.all_gather", True, tagged(Tag.READY)),
    "before-apply": Moment("the step is decided and not taken", f"{STEP}.apply"),
    "in-apply": Moment("chunks are at their gradients, and are being stepped", f"{FSDP}.chunks:ChunkedModel.point", behind=True),
    "behind-apply": Moment("the step is taken, and the coordinator does not know", f"{STEP}.apply", behind=True),
    "in-a-checkpoint": Moment("its share of the state is about to be copied", "actors.rank.state.saving:Saver.begin"),
    "writes-a-checkpoint": Moment("a part is about to be written", "actors.rank.state.saving:Saver._write"),
    "at-the-end": Moment("the digest of the whole is taken", f"{LAYOUT}.digest"),
    "asks-ahead": Moment("the next unit is on its way to it while one computes", f"{EXCHANGE}.ask", behind=True),
    "gives-the-rest": Moment("a newcomer has all but the chunks", f"{ZERO1}.resharding:Resharding._give_the_rest", True, second=True),
    "claims": Moment("the view behind a loss begins", f"{ZERO1}.resharding:Resharding.exchange", second=True),
    "introduced": Moment("servers know each other, chunks do not move yet", f"{LAYOUT}.introduce", True, second=True),
    "placed": Moment("the ranks go on with the chunks that they have", f"{LAYOUT}.place", True, second=True),
    "slices-leave": Moment("slices of chunks are about to leave it, beside a step", f"{MOVING}._carry", second=True),
    "slices-have-come": Moment("slices have come to it, and count nowhere yet", f"{FSDP}.chunks:ChunkedModel.extend", second=True),
    "slices-are-in-place": Moment("slices are in place, and their sums are about to come", f"{MOVING}._send_sums", second=True),
    "turns": Moment("a step is taken, and it is about to turn to the new chunks", f"{FSDP}.chunks:ChunkedModel.recut", second=True),
    "has-turned": Moment("it has the new chunks alone", f"{FSDP}.chunks:ChunkedModel.recut", True, second=True),
}  # fmt: skip


def dies_at(run: Any) -> None:
    """Slot 1 dies at the moment that the option ``moment`` names, once; of some moments slot 2 has died before, in the same step."""
    moment = MOMENTS[run.options["moment"]]
    if moment.second:
        _inject(run, "first", 2, MOMENTS["in-a-forward"], lambda: True)
        first = Path(run.options["flags"]) / "first"
        _inject(run, "second", VICTIM, moment, first.exists)
    else:
        _inject(run, "second", VICTIM, moment, lambda: True)
    trains.plain(run)


def dies_beside_a_spare(run: Any) -> None:
    """The slot that the option ``victim`` names, the spare or another, dies at the ``moment``, once, in a view that the spare is in."""

    def inside() -> bool:
        view = run._loop.client.protocol.view
        return view is not None and bool(view.spares)

    _inject(run, "second", int(run.options["victim"]), MOMENTS[run.options["moment"]], inside, at=-1)
    trains.plain(run)


def a_joining_rank_dies(run: Any) -> None:
    """Slot 1 is lost; the process that comes for it is killed while slices of chunks are on their way to it, once."""
    from actors.rank.fsdp.layout import FsdpLayout

    placed: list[int] = []
    place = FsdpLayout.place

    def noted(layout: Any, state: Any, *reported: Any, **named: Any) -> None:
        place(layout, state, *reported, **named)
        placed.append(state.step)

    FsdpLayout.place = noted  # type: ignore[method-assign]
    _inject(run, "first", VICTIM, MOMENTS["in-a-forward"], lambda: True)
    first = Path(run.options["flags"]) / "first"
    _inject(run, "second", None, MOMENTS["slices-leave"], lambda: first.exists() and len(placed) == 1, at=-1)
    trains.plain(run)


def dies_in_its_second_shard(run: Any) -> None:
    """Slot 1 is killed in its second shard of step 10, once. Each other rank is in its second shard, too, and stays there until then.

    Each rank notes every shard that it computes.
    """
    flags = Path(run.options["flags"])

    def inject(run: Any, step: Any) -> None:
        trains.note_shard(run, step)
        if step.number != 10 or step.shard not in step.shards[1:2] or (flags / "died").exists():
            return
        (flags / f"second-{run.slot}").touch()
        for slot in {0, 1, 2} - {run.slot}:
            trains.until(flags / f"second-{slot}")
        if run.slot == 1 and trains.once(run, "died"):
            trains.die()
        trains.until(flags / "died")

    trains._loop(run, in_shard=inject)


def first_evaluates(run: Any) -> None:
    """Slot 1 dies where all have decided on a step, and slot 2 has lost its group before it could take it. Slot 0 has, and evaluates.

    What slot 1 had slot 2 guards, one step behind: it takes that step in the next view, for which slot 0 has to come.
    """
    right = Group.all_gather
    died = Path(run.options["flags"]) / "second"

    def lost(group: Group, out: Any, inp: Any, under: int = 0) -> Any:
        found = right(group, out, inp, under)
        here = run._loop.client.protocol.state
        if under == Tag.READY and run.slot == 2 and here.step >= AT and trains.once(run, "lost"):
            trains.until(died)
            raise GroupBroken("a test has cut it off", group.generation)
        return found

    Group.all_gather = lost  # type: ignore[assignment]
    _inject(run, "second", VICTIM, MOMENTS["behind-ready"], lambda: True)

    def judge() -> dict[str, float]:
        (model,) = run._train_step.state.modules.values()
        time.sleep(0.1)  # slot 2 has left its view meanwhile
        with torch.no_grad():
            return {"first": float(model.eval()(trains.Numbers()[0][0][None])[0, 0])}

    trains.plain(run, lambda run, step, committed: run.evaluate(judge))


def _inject(run: Any, name: str, slot: int | None, moment: Moment, also: Callable[[], bool], at: int = AT) -> None:
    """Put the death into the method."""
    module, _, path = moment.method.partition(":")
    kind, method = path.split(".")
    owner = getattr(import_module(module), kind)
    right = getattr(owner, method)

    def due(*arguments: Any, **named: Any) -> bool:
        here = run._loop.client.protocol.state
        there = at < 0 or (here is not None and here.step >= at)
        return (slot is None or run.slot == slot) and there and also() and moment.when(*arguments, **named)

    @wraps(right)
    def wrong(*arguments: Any, **named: Any) -> Any:
        mine = due(*arguments, **named)
        if mine and not moment.behind and trains.once(run, name):
            trains.die()
        found = right(*arguments, **named)
        if mine and moment.behind and trains.once(run, name):
            trains.die()
        return found

    setattr(owner, method, wrong)
