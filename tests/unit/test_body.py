"""What a loop body may not do is refused where it is done, and what it may do is not."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from actors.rank.membership.process_group import GroupBroken
from actors.rank.state.tracked import TrackedState
from actors.rank.step.update import Update
from actors.rank.verify.body import COUNTED, Body
from fleet.errors import LoopError
from tests.support import trains


class Bench:
    """A body of a small model, which holds gradients and optimizer state."""

    def __init__(self, samples: bool = True) -> None:
        self.model, self.optimizer, self.scheduler = trains.build(16, "layer")
        self.backward()
        self.optimizer.step()
        self.scaler = torch.amp.GradScaler("cpu")
        state = TrackedState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler)
        self.body = Body({"model": self.model}, Update(state, None), samples)

    def backward(self) -> None:
        self.model(torch.ones(4, trains.FEATURES)).sum().backward()

    def over(self, body: Callable[[], object], step: int = 0, ranks: int = 1) -> None:
        """One loop body; ``ranks`` of them do the same."""
        self.body.enter(step)
        body()
        self.body.check()
        self.body.compare(self.body.said() * ranks, 1)


@pytest.mark.parametrize(
    "call", ["optimizer.step()", "scheduler.step()", "scaler.step(optimizer)", "scaler.update()", "scaler.unscale_(optimizer)"]
)
def test_what_only_commit_may_call_is_refused_at_its_line(call: str) -> None:
    bench = Bench()
    bench.body.enter(0)
    with pytest.raises(LoopError, match=r"was called in the loop body, at test_body\.py:\d+: step\.commit\(\) does that"):
        _call(bench, call)
    bench.body.leave()
    bench.backward()
    if not call.startswith("scaler"):
        _call(bench, call)


def _call(bench: Bench, call: str) -> None:
    name, _, rest = call.partition(".")
    arguments = [bench.optimizer] if "(optimizer)" in rest else []
    getattr(getattr(bench, name), rest.partition("(")[0])(*arguments)


def test_a_scheduler_that_a_figure_steps_is_refused_with_where_that_figure_goes() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    body = Body({"model": model}, Update(TrackedState(model=model, optimizer=optimizer, plateau=plateau), None), samples=False)
    body.enter(0)
    with pytest.raises(LoopError, match=r"scheduler\.step\(\) was called in the loop body, at test_body\.py:\d+: .*step\.plateau\(value\)"):
        plateau.step(1.0)
    body.leave()
    plateau.step(1.0)


def test_no_group_of_parameters_comes_behind_the_beginning_of_the_loop() -> None:
    """A process that takes the place of a lost one builds the groups that the script builds before its loop."""
    bench = Bench()
    late = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(LoopError, match=r"was called after run\.steps, at test_body\.py:\d+: .*Make all groups before run\.track"):
        bench.optimizer.add_param_group({"params": [late]})
    bench.optimizer.load_state_dict(bench.optimizer.state_dict())
    assert len(bench.optimizer.param_groups) == 1


def test_guarded_objects_keep_their_state_and_kind() -> None:
    bench, (_, optimizer, scheduler) = Bench(), trains.build(16, "layer")
    assert bench.scheduler.state_dict().keys() == scheduler.state_dict().keys()
    assert bench.optimizer.state_dict().keys() == optimizer.state_dict().keys()
    assert isinstance(bench.scheduler, type(scheduler)) and type(bench.optimizer) is type(optimizer)
    copy.deepcopy(bench.model), copy.deepcopy(bench.optimizer.state_dict())


def test_gradients_may_be_cleared_before_they_are_there_and_not_after() -> None:
    bench = Bench()
    bench.optimizer.zero_grad()
    bench.body.enter(0)
    bench.optimizer.zero_grad()
    bench.backward()
    bench.body.computed()
    with pytest.raises(LoopError, match=r"zero_grad\(\) was called after step\.backward\(loss\), at test_body\.py:"):
        bench.optimizer.zero_grad()
    bench.model.zero_grad()
    with pytest.raises(LoopError, match=r"zero_grad\(\) was called after step\.backward"):
        bench.body.collected()
    bench.optimizer.zero_grad()


@pytest.mark.parametrize("written", ["0.weight", "4.bias"])
def test_a_write_that_autograd_counts_is_named_at_once(written: str) -> None:
    bench = Bench(samples=False)

    def write() -> None:
        with torch.no_grad():
            bench.model.get_parameter(written).mul_(0.5)

    with pytest.raises(LoopError, match=f"step 7: the loop body wrote to model.{written}"):
        bench.over(write, step=7)


def test_each_of_many_parameters_has_its_turn() -> None:
    model = torch.nn.ParameterList([torch.zeros(1) for _ in range(3 * COUNTED - 5)])
    state = TrackedState(model=model, optimizer=torch.optim.SGD(model.parameters()))
    body = Body({"model": model}, Update(state, None), samples=False)

    def seen() -> bool:
        body.enter(0)
        with torch.no_grad():
            model[-1].add_(1)
        try:
            body.check()
        except LoopError:
            return True
        return False

    assert sum(seen() for _ in range(20)) in (5, 6, 7)


def test_what_bypasses_the_count_shows_in_digests_when_it_shows_again() -> None:
    bench = Bench()
    decay = lambda: bench.model[0].weight.data.mul_(0.5)  # noqa: E731
    bench.over(decay, step=0)
    with pytest.raises(LoopError, match=r"step 1: the loop body changed model\.0\.weight, on 1 of 1 ranks"):
        bench.over(decay, step=1)


def test_two_ranks_that_change_it_in_one_body_are_no_flipped_bits() -> None:
    bench = Bench()
    moments = bench.optimizer.state[bench.model[0].weight]["exp_avg"]
    with pytest.raises(LoopError, match=r"the optimizer's exp_avg of model\.0\.weight, on 2 of 2 ranks"):
        bench.over(lambda: moments.data.mul_(0.5), ranks=2)


def test_one_rank_of_several_that_changes_it_may_be_hit_by_a_flipped_bit() -> None:
    bench = Bench()
    for step in (0, 1):
        bench.body.enter(step)
        bench.model[0].weight.data.mul_(0.5)
        bench.body.check()
        bench.body.compare([*bench.body.said(), 0.0, 0.0], 1)


def test_who_changed_nothing_leaves_it_to_those_who_did() -> None:
    bench = Bench()
    bench.body.enter(0)
    bench.body.check()
    with pytest.raises(GroupBroken, match="other ranks"):
        bench.body.compare([0.0, 1.0, 1.0], 1)


def test_what_a_body_may_do() -> None:
    bench = Bench()

    def body() -> None:
        bench.backward()
        bench.optimizer.param_groups[0]["lr"] = 0.5
        bench.model.eval(), bench.model.train(), bench.model.to("cpu")
        torch.nn.utils.clip_grad_norm_(bench.model.parameters(), 1.0)

    for step in range(3):
        bench.over(body, step)


def test_an_evaluation_may_swap_weights_if_it_puts_them_back() -> None:
    bench = Bench()
    weight = bench.model[0].weight

    def swap(back: bool) -> dict[str, float]:
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
            if back:
                weight.copy_(kept)
        return {"loss": 1.0}

    bench.body.enter(0)
    assert bench.body.during(lambda: swap(True)) == {"loss": 1.0}
    bench.body.check()
    with pytest.raises(LoopError, match=r"run\.once changed model\.0\.weight"):
        bench.body.during(lambda: swap(False))


def test_without_comparing_replicas_nothing_is_digested_or_said() -> None:
    bench = Bench(samples=False)
    bench.over(lambda: bench.model[0].weight.data.mul_(0.5))
    assert bench.body.width == 0 and bench.body.said() == []
