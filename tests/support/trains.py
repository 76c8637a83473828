"""Train functions for tests: a tiny model with dropout and a norm, and misfortunes that strike at an exact place, once."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fleet.errors import LoopError
from tests.support import waiting

SAMPLES, FEATURES = 512, 8


class Numbers(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample ``i`` is a pure function of ``i``."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(FEATURES, dtype=torch.float32) * (index + 1))
        return x, x.sum().reshape(1)


NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
"""With the first a forward changes buffers, so a newcomer computes in its first step; with the second it does not."""


def cut_of(run: Any) -> Callable[[nn.Sequential], None]:
    """The middle of the model is a unit, its first layer is one, and the rest is. Option ``units`` = "first": that layer alone."""

    def cut(model: nn.Sequential) -> None:
        for each in (model[0],) if run.options.get("units") == "first" else (model[0], model[1], model):
            fully_shard(each, mesh=run.mesh)

    return cut


def build(
    width: int = 32, norm: str = "batch", cut: Callable[[nn.Sequential], None] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(FEATURES, width), NORMS[norm](width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))
    if cut is not None:
        cut(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def once(run: Any, name: str) -> bool:
    """True for the first caller of this name in this run, whichever process it is."""
    try:
        os.close(os.open(Path(run.options["flags"]) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def until(flag: Path) -> None:
    """Wait until another process has made the file: longer than the test itself waits for anything."""
    waiting.until(flag.exists, flag.name, 2 * waiting.LIMIT_S, 0.001)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _loop(run: Any, in_shard: Callable[..., None] | None = None, tail: Callable[..., None] | None = None, loss: Any = None) -> None:
    cut = cut_of(run) if "units" in run.options else None
    model, optimizer, scheduler = build(int(run.options.get("width", "32")), run.options.get("norm", "batch"), cut)
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    pause_s = float(run.options.get("pause_s", "0.01"))
    for step in run.steps(state, total=int(run.options.get("steps", "40")), clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64, tokens=int(run.options.get("tokens", "0"))):
            if in_shard is not None:
                in_shard(run, step)
            error = ((model(x) - y) ** 2).mean()
            step.backward(error if loss is None else loss(run, step, error))
        time.sleep(pause_s)
        committed = step.commit()
        if tail is not None:
            tail(run, step, committed)


def plain(run: Any, tail: Callable[..., None] | None = None) -> None:
    """No misfortune."""
    _loop(run, tail=tail)


def in_halves(run: Any) -> None:
    """From step 5 on two backwards for each shard, with half of its samples each. Step 12 has a loss that is no number, the first time."""
    model, optimizer, _ = build(int(run.options["width"]), cut=cut_of(run))
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=40, clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            spoilt = step.number == 12 and run.slot == 0 and once(run, "spoilt")
            halves = (slice(0, len(x) // 2), slice(len(x) // 2, None)) if step.number >= 5 else (slice(None),)
            for half in halves:
                step.backward(((model(x[half]) - y[half]) ** 2).mean() * (float("nan") if spoilt else 0.5))
        step.commit()


def with_environment(run: Any) -> None:
    """The same with variables of the test's own: a rank has those of the fork server, which began before the test."""
    os.environ.update(word.split("=", 1) for word in run.options["environment"].split())
    _loop(run)


def talks(run: Any) -> None:
    """Every way to print, from every rank; one that is not slot 0 is killed in step 10, right after it has said so, once.

    The last step waits until the process that takes its place has printed, too.
    """
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    print(f"slot {run.slot} builds its model")
    killed, replaced = (Path(run.options["flags"]) / name for name in ("talk", "replaced"))
    if killed.exists():
        replaced.touch()

    def say(run: Any, step: Any) -> None:
        print(f"step {step.number} shard {step.shard}")
        if step.number == 5:
            logging.getLogger("mine").info("logged in step 5")
            os.write(2, b"written past Python\n")
        if run.slot != 0 and step.number == 10 and once(run, "talk"):
            print("last words")
            die()
        if step.number == 39:
            until(replaced)

    _loop(run, in_shard=say)


def with_a_last_step_that_waits(run: Any) -> None:
    """The last step ends when the test says so, and so does the third before it."""
    last, flags = int(run.options["steps"]) - 1, Path(run.options["flags"])

    def wait(run: Any, step: Any) -> None:
        if step.number in (last - 3, last):
            until(flags / ("end" if step.number == last else "almost"))

    _loop(run, in_shard=wait)


def dies_in_optimizer(run: Any) -> None:
    """Slot 1 is killed in the middle of the optimizer's step 10, once."""
    original = torch.optim.AdamW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if run.slot == 1 and self.state[self.param_groups[0]["params"][0]]["step"] == 10 and once(run, "optimizer"):
            die()
        return out

    torch.optim.AdamW.step = step  # type: ignore[method-assign]
    _loop(run)


def dies_before_commit(run: Any) -> None:
    """Slot 1 is killed after the reduction of step 10, before it applies it, once: its peers may have applied it already."""
    from actors.rank.step.train_step import TrainStep

    original = TrainStep.apply

    def apply(self: Any, move: Any) -> None:
        if run.slot == 1 and run._here().step == 10 and once(run, "apply"):
            die()
        original(self, move)

    TrainStep.apply = apply  # type: ignore[method-assign]
    _loop(run)


def dies_between_sums_and_commit(run: Any) -> None:
    """Slot 1 is killed at step 10, when one of its peers knows that all have the sums, and another one does not. Who advances says so."""
    from actors.rank.membership.process_group import Group
    from actors.rank.step.train_step import TrainStep
    from actors.rank.tags import Tag
    from fleet.protocol.moves import Advance

    original, apply = Group.all_gather, TrainStep.apply

    def all_gather(self: Any, out: Tensor, inp: Tensor, tag: int = 0) -> None:
        at_the_point = tag == Tag.READY and run._here().step == 10
        if at_the_point and run.slot == 1 and once(run, "ready"):
            peers = [(self.rank + i) % self.size for i in range(1, self.size)]
            self.start([(inp, peers[0])], [(out[peer], peer) for peer in peers], tag).wait()
            until(Path(run.options["flags"]) / "decided")
            die()
        original(self, out, inp, tag)
        if at_the_point:
            once(run, "decided")

    def applies(self: Any, move: Any) -> None:
        apply(self, move)
        if isinstance(move, Advance):
            once(run, "advanced")

    Group.all_gather = all_gather  # type: ignore[method-assign]
    TrainStep.apply = applies  # type: ignore[method-assign]
    _loop(run)


def dies_in_forward(run: Any) -> None:
    """Slot 1 is killed in step 10 as it has gathered its first unit, once: its peers are about to gather the next from it."""
    from actors.rank.fsdp.gathered import Gathered

    original = Gathered.gather

    def gather(self: Any) -> None:
        original(self)
        if run.slot == 1 and run._loop.step.number == 10 and run._loop.step.shard >= 0 and once(run, "forward"):
            die()

    Gathered.gather = gather  # type: ignore[method-assign]
    _loop(run)


def dies_in_backward(run: Any) -> None:
    """Slot 1 is killed in the middle of a backward of step 10, once."""
    from actors.rank.fsdp.gathered import Gathered

    original = Gathered._before_backward

    def before(self: Any, gradient: Tensor) -> None:
        original(self, gradient)
        if run.slot == 1 and run._loop.step.number == 10 and once(run, "backward"):
            die()

    Gathered._before_backward = before  # type: ignore[method-assign]
    _loop(run)


def dies_after_its_first_buckets(run: Any) -> None:
    """Slot 1 is killed in the backward of its last shard of step 10, once, when it has sent the first of several buckets."""
    from actors.rank.step.ahead import Ahead

    original = Ahead._give

    def give(self: Any) -> None:
        original(self)
        if run.slot == 1 and run._loop.step.number == 10 and 0 < self._given < len(self._order.portions) and once(run, "first buckets"):
            die()

    Ahead._give = give  # type: ignore[method-assign]
    _loop(run)


def grows_late(run: Any) -> None:
    """In the last shard of step 10 gradients grow once more after they were sent."""

    def loss(run: Any, step: Any, error: Tensor) -> Tensor:
        if step.number == 10 and step.shard == 7:
            (error * 0.5).backward(retain_graph=True)
            return error * 0.5
        return error

    _loop(run, loss=loss)


def dies_beside_parameters(run: Any) -> None:
    """Slot 1 is killed after it has applied step 10, before it has sent its part of the parameters."""
    from actors.rank.zero1.layout import Zero1Layout

    original = Zero1Layout.gather

    def gather(self: Any, *arguments: Any) -> None:
        if run.slot == 1 and run._here().step == 11 and once(run, "gather"):
            die()
        original(self, *arguments)

    Zero1Layout.gather = gather  # type: ignore[method-assign]
    _loop(run)


def poisoned_shard(run: Any) -> None:
    """Whoever computes shard 5 of step 10 dies."""

    def inject(run: Any, step: Any) -> None:
        if step.number == 10 and step.shard == 5:
            die()

    _loop(run, in_shard=inject)


def nan_once(run: Any) -> None:
    """Shard 3 of step 10 has a NaN loss, the first time."""

    def loss(run: Any, step: Any, error: Tensor) -> Tensor:
        return error * float("nan") if step.number == 10 and step.shard == 3 and once(run, "nan") else error

    _loop(run, loss=loss)


def nan_always(run: Any) -> None:
    """Shard 3 of step 10 has a NaN loss, every time."""

    def loss(run: Any, step: Any, error: Tensor) -> Tensor:
        return error * float("nan") if step.number == 10 and step.shard == 3 else error

    _loop(run, loss=loss)


def raises(run: Any) -> None:
    """A user's bug at step 10."""

    def inject(run: Any, step: Any) -> None:
        if step.number == 10:
            raise ValueError("a bug of the user's, at step 10")

    _loop(run, in_shard=inject)


def note_commit(run: Any, step: Any, committed: bool) -> None:
    with open(Path(run.options["flags"]) / f"tail-{run.slot}-{os.getpid()}", "a") as file:
        file.write(f"{step.number} {committed}\n")


def with_tail(run: Any) -> None:
    """Notes every commit's outcome in a file, after ``commit``."""
    _loop(run, tail=note_commit)


def dies_while_others_compute(run: Any) -> None:
    """Slot 1 is killed in its first shard of step 10, once; those of the others last far longer than a view change. Notes every commit."""

    def inject(run: Any, step: Any) -> None:
        if step.number == 10 and run.slot == 1 and once(run, "strike"):
            die()
        if step.number == 10:
            time.sleep(0.3)

    _loop(run, in_shard=inject, tail=note_commit)


def note_shard(run: Any, step: Any) -> None:
    with open(Path(run.options["flags"]) / f"shards-{run.slot}-{os.getpid()}", "a") as file:
        file.write(f"{step.number} {step.shard}\n")


def with_shards_noted(run: Any) -> None:
    """Each rank notes every shard that it computes."""
    _loop(run, in_shard=note_shard)


def with_loader(run: Any) -> None:
    """The rank has DataLoader workers: forked children that hold its sockets open after it was killed."""
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
    with torch.random.fork_rng():
        batches = iter(loader)

    def inject(run: Any, step: Any) -> None:
        nonlocal batches
        if step.shard % 4 == 0:
            with torch.random.fork_rng():  # a loader draws its workers' seeds from the global generator
                try:
                    next(batches)
                except StopIteration:
                    batches = iter(loader)

    _loop(run, in_shard=inject)


def with_waits(run: Any) -> None:
    """Each shard is many short waits: a process that is stopped half of the time takes twice as long, whoever else computes."""
    each_s = float(run.options.get("shard_s", "0")) / 8

    def wait(run: Any, step: Any) -> None:
        for _ in range(8 if each_s else 0):
            time.sleep(each_s)

    _loop(run, in_shard=wait)


def _model_state(run: Any) -> tuple[nn.Module, Any]:
    model, optimizer, scheduler = build(int(run.options.get("width", "32")), "layer")
    return model, run.track(model=model, optimizer=optimizer, scheduler=scheduler)


def _few_steps(run: Any, state: Any, model: nn.Module) -> Any:
    for step in run.steps(state, total=int(run.options.get("steps", "12")), clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            step.backward(((model(x) - y) ** 2).mean())
        step.commit()
        yield step


def saves_behind_the_loop(run: Any) -> None:
    """What a user writes: an own ``torch.save`` behind the loop, by every rank that comes there, and ``run.save``, which happens once."""
    model, state = _model_state(run)
    for _ in _few_steps(run, state, model):
        pass
    torch.save(model.state_dict(), Path(run.options["flags"]) / f"own-{run.slot}.pt")
    for name in ("model.pt", "model.safetensors"):
        run.save(Path(run.options["flags"]) / name)


def dies_while_it_saves(run: Any) -> None:
    """Who comes first to what is done once behind the loop is killed in the middle of it, as often as the option ``times`` says."""
    model, state = _model_state(run)
    flags, times = Path(run.options["flags"]), int(run.options["times"])
    for _ in _few_steps(run, state, model):
        pass

    def write() -> str:
        if any(once(run, f"killed-{number}") for number in range(times)):
            die()
        torch.save(model.state_dict(), flags / "model.pt")
        return f"by slot {run.slot}"

    reported = run.once(write)
    (flags / f"told-{run.slot}-{os.getpid()}").write_text(reported)


def all_die_behind_the_loop(run: Any) -> None:
    """All ranks are killed together behind the loop, once: the run goes back to its final checkpoint, and comes there again."""
    model, state = _model_state(run)
    flags = Path(run.options["flags"])
    for _ in _few_steps(run, state, model):
        pass
    if not (flags / "again").exists():
        once(run, f"there-{run.slot}")
        for slot in range(run.config.world):
            until(flags / f"there-{slot}")
        once(run, "again")
        die()
    run.save(flags / "model.pt")


def does_things_once(run: Any) -> None:
    """Before the loop, after each fourth step, and behind the loop; notes who did what, and what each was told."""
    flags = Path(run.options["flags"])

    def note(what: str) -> str:
        with (flags / "done").open("a") as file:
            file.write(f"{what}\n")
        return what

    reported = [run.once(lambda: note("before"))]
    model, state = _model_state(run)
    for step in _few_steps(run, state, model):
        if step.number % 4 == 3:
            reported.append(run.once(lambda number=step.number: note(f"step {number}")))
        if step.number == 5 and run.slot == 1 and once(run, "die"):
            die()
    reported.append(run.once(lambda: note("behind")))
    (flags / f"told-{run.slot}").write_text(repr(reported))


def evaluates(run: Any) -> None:
    """The figure falls, rises and falls; the model is saved when it is lower than ever, and each rank notes what it saw."""
    model, state = _model_state(run)
    flags, curve = Path(run.options["flags"]), (5.0, 3.0, 4.0, 2.0)
    for step in _few_steps(run, state, model):
        figures = run.evaluate(lambda third=step.number // 3: {"val_loss": curve[third]}, every=3)
        if figures and figures.lowest("val_loss"):
            run.save(flags / "best.pt")
        if figures:
            with (flags / f"seen-{run.slot}").open("a") as file:
                file.write(f"{step.number} {figures['val_loss']} {figures.lowest('val_loss')} {figures.highest('val_loss')}\n")


def evaluates_in_another_mode(run: Any) -> None:
    """The mode of the model is set once, before the loop. The evaluation changes it, and draws numbers that show in its figure."""
    model, state = _model_state(run)
    model.train()
    for _ in _few_steps(run, state, model):
        run.evaluate(lambda: {"drawn": model.eval() and float(torch.rand(()))}, every=3)
        torch.rand(())  # after it, as after a step without one


def evaluates_before_the_commit(run: Any) -> None:
    """Where the step is not done yet."""
    model, state = _model_state(run)
    for step in run.steps(state, total=4):
        for x, y in step.batches(Numbers(), batch_size=64):
            step.backward(((model(x) - y) ** 2).mean())
        run.evaluate(lambda: {"val_loss": 1.0})
        step.commit()


def takes_no_step(run: Any) -> None:
    """Forgets the loop."""
    _model_state(run)


def breaks_off(run: Any) -> None:
    """Leaves the loop after the fourth step."""
    model, state = _model_state(run)
    for step in _few_steps(run, state, model):
        if step.number == 3:
            break


def _mistaken(run: Any, mistake: Callable[..., None]) -> None:
    """A loop with a mistake, which is made in each step, right before ``commit``."""
    model, optimizer, scheduler = build(norm="layer")
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(state, total=int(run.options["steps"])):
        for x, y in step.batches(Numbers(), batch_size=64):
            step.backward(((model(x) - y) ** 2).mean())
        mistake(run, step, model, optimizer)
        time.sleep(0.02)
        step.commit()


def steps_the_optimizer(run: Any) -> None:
    """The line of the plain loop that everyone forgets to remove."""
    _mistaken(run, lambda run, step, model, optimizer: optimizer.step())


def writes_weights(run: Any) -> None:
    """Weight decay by hand, past autograd: the same on all ranks."""

    def decay(run: Any, step: Any, model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.999)

    _mistaken(run, decay)


def writes_weights_in_slot_1(run: Any) -> None:
    """As before, but one rank alone does it, in step 5 and all that follow."""

    def decay(run: Any, step: Any, model: nn.Module, optimizer: Any) -> None:
        if run.slot == 1 and step.number >= 5:
            for parameter in model.parameters():
                parameter.data.mul_(0.999)

    _mistaken(run, decay)


def draws_unseeded(run: Any) -> None:
    """A learning rate that no seed decides: another one on each rank."""

    def draw(run: Any, step: Any, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 * random.SystemRandom().random()

    _mistaken(run, draw)


def sets_the_learning_rate(run: Any) -> None:
    """Warm-up by hand, as many loops do it: allowed."""

    def warm_up(run: Any, step: Any, model: nn.Module, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step.number + 1) / 10)

    _mistaken(run, warm_up)


def reports_to_ray(run: Any) -> None:
    """As a loop for Ray Train does, after each step."""
    import ray.train

    _loop(run, tail=lambda run, step, committed: ray.train.report({"loss": step.loss}))


def linear() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(5)
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def with_figures_of_its_own(run: Any) -> None:
    """Each step has all samples, and is so long that it is noted."""
    model, optimizer, scheduler = linear()
    state, data = run.track(model=model, optimizer=optimizer, scheduler=scheduler), Numbers()
    for step in run.steps(state, total=4):
        for x, y in step.batches(data, batch_size=SAMPLES, tokens=FEATURES):
            step.backward(nn.functional.mse_loss(model(x), y))
            step.log(number=step.shard)
        step.log(half=step.number / 2, width=torch.tensor(8.0))
        if step.shards:  # a rank that has just come has none
            step.log(middle=sum(step.shards) / len(step.shards))
            step.log(first=step.shards[0], local=True)
        time.sleep(0.6)
        step.commit()
        try:
            step.log(late=1.0)
        except LoopError as error:
            refused = str(error)
        assert "before step.commit()" in refused


def names_a_figure_that_fleet_has(run: Any) -> None:
    model, optimizer, _ = linear()
    for step in run.steps(run.track(model=model, optimizer=optimizer), total=1):
        step.log(grad_norm=1.0)
