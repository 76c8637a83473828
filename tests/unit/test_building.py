"""What resumes is compared with what ran, before a view is made; what is another thing is refused, or told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actors.rank.data.feeds import Feed
from actors.rank.data.fingerprint import fingerprint
from actors.rank.rehearsing import build_of
from actors.rank.state.tracked import TrackedState
from fleet.machine.core import FleetMachine
from fleet.protocol.causes import EndWhy
from fleet.protocol.events import Ready
from fleet.protocol.instructions import Publish, Write
from fleet.protocol.records import VERSION, DecisionMade, Resumed, RunBuilt, RunEnded, RunStarted
from fleet.protocol.types import Build, StateId
from tests.unit.test_machine import Bench, member

SGD = Build(("SGD",), "D", 1000, 16, "ab" * 32, (), 100)
COSINE = replace(SGD, schedules=(("CosineAnnealingLR.T_max", 100),))


def resumed(was: Build | None, world: int = 1) -> Bench:
    """A run whose sessions before were built so; its ranks are there, and at their first step."""
    bench = Bench(world=world, checkpoint=("c50", StateId(0, 50)))
    built = [RunBuilt(member(0), was, at_s=0.5)] if was is not None else []
    records = [RunStarted(VERSION, "run", 0.0, 0.0, world, 0, 16, "{}"), *built]
    bench.machine.resume([*records, Resumed(1.0, 0.0, "resumed in a new cluster", "c2")], 1.0)
    bench.now_s = 1.0
    for slot in range(world):
        bench.join(slot, f"new-{slot}")
    return bench


def warned(bench: Bench) -> list[str]:
    return [record.reason for record in bench.of(DecisionMade) if record.policy == "resume"]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(SGD, samples=500, data_sha256="cd" * 32), "the data set had 1000 samples and has 500"),
        (replace(SGD, data_sha256="cd" * 32), "the data set of 1000 samples has other samples, a D (abababababab, cdcdcdcdcdcd)"),
        (replace(SGD, data="E", data_sha256="cd" * 32), "it was a D and is a E"),
        (replace(SGD, optimizers=("AdamW",)), "the optimizer was SGD and is AdamW"),
        (replace(SGD, batch_size=32), "batch_size was 16 and is 32: the next step would skip or repeat samples"),
    ],
)
def test_what_would_train_wrongly_is_refused_by_name_before_the_first_view(now: Build, words: str) -> None:
    """With 500 samples in the place of 1,000 it trained on without a word; with another optimizer it raised KeyError."""
    bench = resumed(SGD)
    bench.send(RunBuilt(member(0), now), Ready(member(0)))
    [ended] = bench.of(RunEnded)
    assert ended.why is EndWhy.REFUSED and words in ended.reason and "run.track(weights=...)" in ended.reason
    assert "\n" not in ended.reason and not [one for one in bench.said if isinstance(one, Publish)]
    assert not bench.of(RunBuilt), "what the run was built of stays what a resume is compared with"


def test_what_is_as_it_was_goes_on_and_writes_nothing() -> None:
    bench = resumed(COSINE)
    bench.send(RunBuilt(member(0), COSINE), Ready(member(0)))
    bench.after(0.1)
    assert not bench.of(RunEnded) and not bench.of(RunBuilt) and not warned(bench)
    assert bench.machine.state.view is not None


def test_a_schedule_that_ends_before_the_run_does_is_told_before_the_first_step() -> None:
    """Behind a cosine of 100 steps the rate rises again, and nothing was said."""
    bench = resumed(COSINE)
    bench.send(RunBuilt(member(0), replace(COSINE, total_steps=150)))
    assert warned(bench) == [
        "CosineAnnealingLR.T_max is 100 and the run has 150 steps: behind step 100 the learning rate is not the intended one"
    ]
    assert bench.of(RunBuilt)[-1].build.total_steps == 150 and not bench.of(RunEnded)


def test_a_schedule_of_another_length_goes_on_as_it_was_saved_and_that_is_told() -> None:
    bench = resumed(COSINE)
    bench.send(RunBuilt(member(0), replace(COSINE, schedules=(("CosineAnnealingLR.T_max", 300),))))
    assert warned(bench) == ["CosineAnnealingLR.T_max was 100 and is 300 in the script: the schedule goes on as it was saved, with 100"]


def test_a_run_that_goes_on_beyond_another_ones_end_is_compared_with_that() -> None:
    bench = Bench(world=1)
    settings = bench.settings
    state = bench.machine.state
    policies = state.policies.recovery, state.policies.placement, state.checkpoints.store.interval
    machine = FleetMachine(settings, *policies, checkpoint=("file:///runs/one/c50", StateId(0, 50)), build=SGD)
    bench.machine = machine
    bench.join(0)
    bench.send(RunBuilt(member(0), replace(SGD, optimizers=("AdamW",))))
    assert bench.of(RunEnded)[0].why is EndWhy.REFUSED


def test_samples_that_are_others_in_each_process_tell_nothing_from_then_on() -> None:
    """An object that is pickled with its address, say: a resume must not be refused for it."""
    bench = resumed(None, world=2)
    bench.send(RunBuilt(member(0), SGD), RunBuilt(member(1), replace(SGD, data_sha256="cd" * 32)))
    assert [record.build.data_sha256 for record in bench.of(RunBuilt)] == [SGD.data_sha256, ""]
    again = resumed(bench.of(RunBuilt)[-1].build)
    again.send(RunBuilt(member(0), replace(SGD, data_sha256="ef" * 32)))
    assert not again.of(RunEnded)


def test_a_rank_says_what_it_has_built() -> None:
    """Of a schedule that others are within, such as SequentialLR, nobody knows when it ends."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
    inner = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9), torch.optim.lr_scheduler.ConstantLR(optimizer)]
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[5])
    state = TrackedState(model=model, optimizer=optimizer, cycle=cycle, both=both)
    data = [torch.ones(4)] * 12
    feed = Feed(data, 0, 4, 8)
    loop = SimpleNamespace(total=50, rehearsed=(feed, 8))
    schedules = (("OneCycleLR.total_steps", 60),)
    assert build_of(state, loop) == Build(("AdamW",), "list", 12, 8, fingerprint(data, named=False), schedules, 50)  # type: ignore[arg-type]
    loop.rehearsed = None
    assert build_of(state, loop) == Build(("AdamW",), schedules=schedules, total_steps=50)  # type: ignore[arg-type]
    feed.close()


def test_samples_are_the_same_wherever_their_class_is_defined() -> None:
    """A script that goes on under another name was told that its data had changed."""
    here, there = type("D", (list,), {"__module__": "train"})([1, 2, 3]), type("D", (list,), {"__module__": "train2"})([1, 2, 3])
    assert fingerprint(here) != fingerprint(there) and fingerprint(here, named=False) == fingerprint(there, named=False) != ""
    assert fingerprint([1, 2, 4], named=False) != fingerprint(here, named=False)


def test_a_coordinator_that_restarts_knows_what_the_run_was_built_of() -> None:
    bench = Bench(world=1)
    bench.join(0)
    written = [one.record for one in bench.machine.handle(RunBuilt(member(0), SGD), 0.0) if isinstance(one, Write)]
    again = bench.new_machine()
    again.replay([RunStarted(VERSION, "run", 0.0, 0.0, 1, 0, 16, "{}"), *written], 1.0)
    assert (again.state.trained.build, again.state.trained.compared) == (SGD, True)
