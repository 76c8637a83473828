"""Several optimizers: which ones a step takes, what it leaves alone, and what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.rank.loop import Run
from actors.rank.state.tracked import TrackedState
from actors.rank.step.flats import FlatLayout
from actors.rank.step.update import NAMED_WITHIN, Update
from fleet.errors import ConfigError, LoopError
from fleet.protocol.instructions import Halt, SaveCheckpoint, Welcome
from fleet.protocol.member import LAST_STEP, MemberProtocol
from fleet.protocol.types import Process, StateId
from tests.zoo.harness import Alone, by_one_rank

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


class Two:
    """A body and a head, which move by themselves once they are stepped: by momentum, and by decay."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.of_body = torch.optim.AdamW(self.body.parameters(), lr=1e-2, weight_decay=0.1)
        self.of_head = torch.optim.SGD(self.head.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)
        self.slower = torch.optim.lr_scheduler.ExponentialLR(self.of_head, 0.5)

    @property
    def objects(self) -> dict[str, Any]:
        return vars(self)

    def loss(self, x: Tensor) -> Tensor:
        return (self.head(torch.tanh(self.body(x))) - x.sum(1, keepdim=True)).square().mean()

    def update(self, **more: Any) -> Update:
        return Update(TrackedState(**self.objects), more.pop("clip_norm", None), **more)


def trained(loop: Callable[[Any, Two], None], folder: Path, shards: int = 4) -> Two:
    two = Two()
    by_one_rank(lambda run: loop(run, two), shards, folder)
    return two


def held(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((module.state_dict(), optimizer.state_dict()))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("shards", [1, 4])
def test_what_a_step_does_not_take_does_not_move(shards: int, tmp_path: Path) -> None:
    """Neither weights nor moments nor rates, though gradients have come to all, and all had moved before."""
    moved: list[tuple[str, bool, bool]] = []

    def loop(run: Any, two: Two) -> None:
        state = run.track(**two.objects)
        for step in run.steps(state, total=9):
            taken = ("both", "body", "head")[step.number % 3]
            before = held(two.body, two.of_body), held(two.head, two.of_head), two.slower.state_dict()
            for x in step.batches(DATA, batch_size=16):
                step.backward(two.loss(x))
            step.commit(*{"both": (), "body": (two.of_body,), "head": (two.of_head,)}[taken])
            now = held(two.body, two.of_body), held(two.head, two.of_head), two.slower.state_dict()
            assert same(before[1], now[1]) == same(before[2], now[2])
            moved.append((taken, not same(before[0], now[0]), not same(before[1], now[1])))

    trained(loop, tmp_path, shards)
    assert moved == [("both", True, True), ("body", True, False), ("head", False, True)] * 3


def test_both_in_one_step_are_each_in_its_own(tmp_path: Path) -> None:
    """With plain SGD, whose steps do not depend on each other's moments: both from the same gradients."""

    def as_one(run: Any, two: Two) -> None:
        for step in run.steps(run.track(**two.objects), total=5):
            for x in step.batches(DATA, batch_size=16):
                step.backward(two.loss(x))
            step.commit(two.of_head, two.of_body)

    def unnamed(run: Any, two: Two) -> None:
        for step in run.steps(run.track(**two.objects), total=5):
            for x in step.batches(DATA, batch_size=16):
                step.backward(two.loss(x))
            step.commit()

    one, other = trained(as_one, tmp_path), trained(unnamed, tmp_path)
    assert same(held(one.body, one.of_body), held(other.body, other.of_body))
    assert same(held(one.head, one.of_head), held(other.head, other.of_head))


@pytest.mark.parametrize("clip", ["all", "each"])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_norm_is_that_of_what_the_step_takes(shards: int, clip: str, tmp_path: Path) -> None:
    """Gradients that are dropped count in no norm."""
    norms: dict[str, list[float]] = {"body": [], "head": [], "both": []}

    def loop(run: Any, two: Two) -> None:
        limit = 0.1 if clip == "all" else {two.of_body: 0.1}
        for group in (*two.of_body.param_groups, *two.of_head.param_groups):
            group.update(weight_decay=0.0, momentum=0.0)
        state = run.track(**two.objects)
        for step in run.steps(state, total=6, clip_norm=limit):
            taken = ("both", "body", "head")[step.number % 3]
            for x in step.batches(100 * DATA, batch_size=16):
                step.backward(two.loss(x))
            before = nn.utils.parameters_to_vector(two.head.parameters()).detach().clone()
            rate = two.of_head.param_groups[0]["lr"]
            step.commit(*{"both": (), "body": (two.of_body,), "head": (two.of_head,)}[taken])
            after = nn.utils.parameters_to_vector(two.head.parameters()).detach()
            norms[taken].append(float((after - before).norm()) / rate)

    trained(loop, tmp_path, shards)
    assert norms["body"] == [0.0, 0.0]
    if clip == "all":
        assert norms["head"] == pytest.approx([0.1, 0.1], rel=1e-3)
        assert max(norms["both"]) < 0.1
    else:
        assert min(norms["head"] + norms["both"]) > 1.0


def test_a_scaler_skips_the_optimizer_whose_gradient_overflows_and_no_other(tmp_path: Path) -> None:
    moved: list[tuple[bool, bool]] = []

    def loop(run: Any, two: Two) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        state = run.track(**two.objects, scaler=scaler)
        for step in run.steps(state, total=3):
            before = held(two.body, two.of_body)[0], held(two.head, two.of_head)[0]
            for x in step.batches(DATA, batch_size=16):
                step.backward(two.loss(x) + (1e38 * two.body.weight.sum() if step.number == 1 else 0.0))
            step.commit()
            moved.append((not same(before[0], two.body.state_dict()), not same(before[1], two.head.state_dict())))

    trained(loop, tmp_path)
    assert moved == [(True, True), (False, True), (True, True)]


def test_what_is_usual_is_asked_of_steps_of_one_kind(tmp_path: Path) -> None:
    """Losses of a thousand between losses of one are no jump where other optimizers take those steps."""
    bodies: list[int] = []

    def loop(run: Any, two: Two) -> None:
        two.of_head.param_groups[0]["lr"] = 0.0  # what it does is not to be seen in the other steps
        state = run.track(**two.objects)
        for step in run.steps(state, total=3 * 40):
            bodies.append(step.number)
            heads = step.number % 3 == 2 and step.number > 90
            for x in step.batches(DATA, batch_size=16):
                step.backward((1e3 if heads else 1.0) * two.loss(x) + (1e6 if heads else 0.0))
            step.commit(two.of_head if heads or step.number == 0 else two.of_body)

    trained(loop, tmp_path)
    assert bodies == list(range(120))


# ---- what is refused ---------------------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_no_step_takes_is_refused_by_name(tmp_path: Path) -> None:
    def loop(run: Any, two: Two) -> None:
        state = run.track(**two.objects)
        for step in run.steps(state, total=1000):
            for x in step.batches(DATA, batch_size=16):
                step.backward(two.loss(x))
            step.commit(two.of_body)

    with pytest.raises(ConfigError, match=f"none of the first {NAMED_WITHIN} steps has taken this optimizer") as refused:
        trained(loop, tmp_path)
    assert (refused.value.field, refused.value.value) == ("track", "of_head")
    assert "step.commit(OPTIMIZER, OTHER)" in refused.value.way_out
    assert "requires_grad_(False)" in refused.value.way_out


def test_an_optimizer_of_what_no_tracked_module_has_is_refused(tmp_path: Path) -> None:
    """Modules in a plain list are none of their module's: their gradients would stay on each rank, and add up over its steps."""
    two = Two()
    two.body.heads = [two.head]  # type: ignore[assignment]
    optimizer = torch.optim.SGD([*two.body.parameters(), *two.head.parameters()], lr=0.1)
    refused = r"optimizer = 'SGD': its parameter \d+, of shape \(1, 8\), belongs to no tracked module.*nn.ModuleList"
    with pytest.raises(ConfigError, match=refused):
        by_one_rank(lambda run: run.steps(run.track(model=two.body, optimizer=optimizer), total=2), 2, tmp_path)


@pytest.mark.parametrize("shards", [1, 4])
def test_an_optimizer_whose_turn_comes_late_is_not_refused_while_it_is_frozen(shards: int, tmp_path: Path) -> None:
    """One layer after the other: the head's turn comes behind the first steps, in which an optimizer has to be named."""
    moved = []

    def loop(run: Any, two: Two) -> None:
        state = run.track(**two.objects)
        first = [one.detach().clone() for one in two.head.parameters()]
        for step in run.steps(state, total=NAMED_WITHIN + 20):
            late = step.number >= NAMED_WITHIN + 10
            two.head.requires_grad_(late)
            for x in step.batches(DATA, batch_size=16):
                step.backward(two.loss(x))
            step.commit(two.of_head if late else two.of_body)
            if step.number in (NAMED_WITHIN, NAMED_WITHIN + 19):
                moved.append(not all(torch.equal(one, was) for one, was in zip(two.head.parameters(), first, strict=True)))

    trained(loop, tmp_path, shards)
    assert moved == [False, True]


def test_a_rank_that_has_not_seen_the_first_steps_blames_nobody() -> None:
    late, early = Two().update(), Two().update()
    late.taken = early.taken = 1
    late.note(7)
    late.check_named(NAMED_WITHIN, 1000)
    early.note(0)
    early.check_named(NAMED_WITHIN - 1, 1000)
    with pytest.raises(ConfigError, match="of_head"):
        early.check_named(5, 5)


@pytest.mark.parametrize("shards", [1, 4])
def test_what_is_not_tracked_cannot_take_a_step(shards: int, tmp_path: Path) -> None:
    def loop(run: Any, two: Two) -> None:
        state = run.track(**two.objects)
        for step in run.steps(state, total=2):
            for x in step.batches(DATA, batch_size=16):
                step.backward(two.loss(x))
            step.commit(torch.optim.SGD(two.head.parameters()))

    with pytest.raises(LoopError, match=r"step.commit\(SGD\): that is no tracked optimizer. Name one of run.track's: of_body, of_head."):
        trained(loop, tmp_path, shards)


def test_ranks_that_take_different_steps_are_told_so() -> None:
    update = Two().update()
    update.agree([[2.0], [0.0], [2.0]])
    assert update.taken == 2
    with pytest.raises(LoopError, match="rank 1 takes of_body and rank 2 of_body with of_head. .* choose by step.number"):
        update.agree([[0.0], [1.0], [3.0]])


def refused(make: Callable[[], Any]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        make()
    return error.value


def test_what_cannot_be_tracked_or_clipped_is_refused_by_name(tmp_path: Path) -> None:
    two = Two()
    again = torch.optim.SGD(two.head.parameters())
    assert refused(lambda: Update(TrackedState(**two.objects, again=again), None)).field == "again"
    alone = {name: one for name, one in two.objects.items() if name != "of_head"}
    assert refused(lambda: Update(TrackedState(**alone, second=torch.optim.SGD([two.head.weight])), None)).field == "slower"
    assert refused(lambda: two.update(clip_norm={again: 1.0})).field == "clip_norm"
    assert refused(lambda: Update(TrackedState(body=two.body), None)).reason == "none of its objects is an optimizer"
    assert refused(lambda: next(_steps(two, tmp_path, total=7, together=2))).field == "together"


def _steps(two: Two, folder: Path, **asked: Any) -> Any:
    run = Alone(4, folder, {})
    return Run.steps(run, run.track(**two.objects), **asked)


def test_what_cannot_be_had_of_a_spread_state_is_refused_by_name() -> None:
    two = Two()
    each = two.update(clip_norm={two.of_body: 1.0, two.of_head: 2.0}, spread=True)
    assert [each.of([two.of_body]), each.of([two.of_head])] == [1, 2]
    assert refused(lambda: each.of([])).field == "clip_norm"
    assert two.update(clip_norm=1.0, spread=True).of([]) == 3
    scaled = TrackedState(**two.objects, scaler=torch.amp.GradScaler("cpu"))
    assert "scaler" in refused(lambda: Update(scaled, None, spread=True)).way_out


# ---- what several cost, and one does not ------------------------------------------------------------------------------------------------


def test_one_optimizer_sends_no_choice_and_shares_all_buffers() -> None:
    one = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    update = Update(TrackedState(model=one, optimizer=torch.optim.SGD(one.parameters())), None)
    assert (update.width, update.said(early=True), update.owners) == (0, [], {})
    assert len(FlatLayout(list(one.parameters()), [], {}, leave=False, owners=update.owners).lengths) == 1
    two = Two().update()
    assert (two.width, two.said(early=True), two.said(early=False)) == (1, [0.0], [3.0])


# ---- steps that belong together ---------------------------------------------------------------------------------------------------------


def test_between_steps_that_belong_together_nothing_is_kept_and_nobody_halts() -> None:
    protocol = MemberProtocol(0, "token", Process("node", 1, 0), "store")
    protocol.receive(Welcome(0, "token", 0))
    protocol.state = StateId(0, 4)
    me = (protocol.member,)
    protocol.receive(SaveCheckpoint(me, protocol.generation, 1))
    assert protocol.offer(between=True) == (-1, 0, 0)
    assert protocol.offer()[1:] != (0, 0)
    protocol.receive(Halt(me, protocol.generation))
    assert protocol.offer(between=True)[0] != LAST_STEP
    assert protocol.offer()[0] == LAST_STEP
