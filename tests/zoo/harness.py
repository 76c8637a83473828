"""Loops on Fleet: by one rank in this process, and by ranks in processes of their own, which are killed, stopped and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from actors.rank.current import within
from actors.rank.data.sampling import seed_step
from actors.rank.home import Home
from actors.rank.loop import Run
from actors.rank.membership.client import Client
from actors.rank.membership.process_group import Group
from actors.rank.once import EvaluationFigures
from actors.rank.state.tracked import TrackedState
from actors.rank.step.flops import FlopCount
from actors.rank.step.reports import Reports
from actors.rank.step.step import Step
from actors.rank.step.train_step import TrainStep
from actors.rank.step.update import ClipNorm
from actors.rank.telemetry.recorder import Recorder
from fleet.host.clock import now_us
from fleet.protocol.moves import Apply, Repeat, StepCommitted
from fleet.protocol.records import Measurement
from fleet.protocol.types import Member, StateId, View
from fleet.protocol.vote import Doubt
from fleet.settings.run import CheckpointSettings, RunSettings, Timeouts
from storage.checkpoint.parts import Parts, newest_checkpoint
from tests.support import trains
from tests.support.plain import PlainFleet
from tests.support.waiting import until
from tests.zoo.feed import SEED, Done, Feed
from tests.zoo.loops import ALL, LOOPS

ROUNDING = 1e-9
"""Of the largest number of a tensor, or of 1."""

PATIENT = Timeouts(heartbeat_s=20.0, node_s=30.0, quiesce_s=40.0, form_s=60.0, progress_s=300.0, start_s=120.0)
"""A machine that stands still for a while loses nobody; who is killed is missed by the end of its connections."""

# ---- comparison --------------------------------------------------------------------------------------------------------------------------


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a state dict holds, and where."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from leaves(value, f"{path}.{number}")
    else:
        yield path.lstrip("."), state


def state_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """All that the objects hold, as it is now."""
    return {path: value for name, one in objects.items() for path, value in leaves(one.state_dict(), name)}


def _differ(found: Any, right: Any, exact: bool) -> bool:
    if isinstance(right, torch.Tensor):
        if found.dtype != right.dtype or found.shape != right.shape:
            return True
        found, right = found.detach(), right.detach()
        if exact or not right.is_floating_point():
            return not torch.equal(found, right)
        largest = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        return not float((found - right).abs().max()) <= ROUNDING * largest
    if isinstance(right, float) and not exact:
        return not math.isclose(found, right, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(type(found) is not type(right) or found != right)


def differences(found: Mapping[str, Any], right: Mapping[str, Any], *, exact: bool) -> list[str]:
    """Where two of what :func:`state_of` gives differ, ``exact``: in any bit; else by more than rounding."""
    missing = sorted(found.keys() ^ right.keys())
    return missing + [path for path, value in right.items() if path in found and _differ(found[path], value, exact)]


def all_of(done: Done) -> dict[str, Any]:
    """What a loop has come to: the state, the curve of its loss, and its figures."""
    curves = {"loss": done.losses, **{name: list(reported.items()) for name, reported in done.figures.items()}}
    return state_of(done.objects) | dict(leaves(curves, "curves"))


# ---- one rank in this process ------------------------------------------------------------------------------------------------------------


class Quiet(Reports):
    """A strange step is not reported: there is no view whose ranks could be named."""

    def doubted(self, train: TrainStep, why: str, doubt: Doubt | None = None) -> None:
        """See :class:`Reports`."""


class Alone(Run):
    """A run of one rank that nobody else knows of: its step and its sums are those of every rank.

    Attributes:
        losses, figures: see :class:`Done`.
        known: what is recalled, by name.
        digest: of the final state, as the ranks of a run have it.
    """

    digest = ""

    def __init__(self, shards: int, folder: Path, options: Mapping[str, str], left_out: Sequence[str] = ()) -> None:
        settings = RunSettings(world=1, shards=shards, seed=SEED, options=options, left_out=tuple(left_out))
        recorder = Recorder(folder / "ring", now_us())
        client = Client(0, "alone", "alone", str(folder / "nobody"), "nowhere:1", recorder)
        client.protocol.name(0)
        client.protocol.state = StateId(0, 0)
        super().__init__(client, recorder, Parts(f"file://{folder}"), settings, "127.0.0.1", Home(folder, work=folder))
        self.losses: list[float] = []
        self.figures: dict[str, dict[int, float]] = {}
        self.known: dict[str, Any] = {}
        self._tries, self._loop.attempt = 0, self._attempt
        self._around = self._loop, settings, self._membership, self._saver

    def steps(
        self, state: TrackedState, *, total: int, clip_norm: ClipNorm = None, together: int = 1, flops: float = 0.0
    ) -> Iterator[Step]:  # fmt: skip
        """See :class:`Run`."""
        self._loop.total, self._loop.flops = total, FlopCount(1.0)
        train = self._train_step = TrainStep(state, self._settings, self._loop.recorder, clip_norm, observer=Quiet(*self._around))
        view = View(1, (Member(0, 0),), ((0, self.shards),), 0, (), StateId(0, 0), "")
        train.join(Group(1, 0, 1, train.device), view.column_of(Member(0, 0)), 0, StateId(0, 0), False)
        protocol = self._loop.client.protocol
        try:
            while (number := self._here().step) < total and not protocol.ends_here:
                step = self._loop.step = Step(self._loop, train, number)
                yield step
        finally:  # its loop may be left by break
            seed_step(self.seed, self._here().step)
            self.digest = train.layout.digest(self._here().step)

    def _attempt(self) -> None:
        train, self._tries = self._trained, self._tries + 1
        train.body.leave()
        outcome = train.alone()
        if outcome.doubt is not None:
            assert self._tries < 3, outcome
            train.repeat(Repeat(outcome.doubt))
            return
        self._tries = 0
        train.apply(Apply(outcome))
        self._loop.client.protocol.committed()
        self.losses.append(outcome.loss)
        train.publish(StepCommitted(outcome))

    def evaluate(self, fn: Callable[[], Mapping[str, float]], *, every: int = 1) -> EvaluationFigures | None:
        """See :class:`Run`."""
        here = self._between("run.evaluate()")
        if here is None or not here.step or here.step % every:
            return None
        found = self._alone(fn)
        for name, value in found.items():
            self.figures.setdefault(name, {})[here.step] = value
        return EvaluationFigures(lambda: EvaluationFigures.judged(found, None, here.step))

    def once(self, fn: Callable[[], Any], *, name: str = "") -> Any:
        """See :class:`Run`."""
        return fn()

    def recalled(self, fn: Callable[[Any, int], Any], *, name: str) -> Any:
        """See :class:`Run`."""
        if (here := self._between(name)) is None:
            return None
        self.known[name] = fn(self.known.get(name), here.step)
        return self.known[name]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As ranks compute: another number of threads adds up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plain(name: str, shards: int, options: Mapping[str, str] | None = None) -> Done:
    """The loop in plain PyTorch."""
    with one_thread():
        return ALL[name].plain(Feed(shards, options))


def by_one_rank(
    train: Callable[[Any], None], shards: int, folder: Path, options: Mapping[str, str] | None = None, left_out: Sequence[str] = ()
) -> Alone:  # fmt: skip
    """The run of a train function; ``left_out``: see the setting."""
    run = Alone(shards, folder, options or {}, left_out)
    with one_thread(), within(run):
        train(run)
    return run


def alone(name: str, shards: int, folder: Path, options: Mapping[str, str] | None = None) -> tuple[Done, str]:
    """What the loop on Fleet comes to with one rank, and its digest."""
    run = by_one_rank(LOOPS[name].train, shards, folder, options)
    return Done(run._trained.state.objects, run.losses, run.figures), run.digest


# ---- ranks in processes of their own -----------------------------------------------------------------------------------------------------


def play(run: Run) -> None:
    """The loop of the option ``loop``, to which the options ``kill`` and ``stop`` happen; its model is saved behind it."""
    arm(run)
    ALL[run.options["loop"]].train(run)
    run.save(Path(run.options["flags"]) / "model.pt")


def arm(run: Run) -> None:
    """From now on this process is struck in the backward of its last shard of a step.

    In step ``kill`` one rank is killed, once. From three steps later on the others wait until somebody is in its place, or takes it after
    this step. From step ``stop`` on they wait until they were told to stop.
    """
    kill, stop = (int(run.options.get(name, "1000000")) for name in ("kill", "stop"))
    backward, protocol, rank_machine = Step.backward, run._loop.client.protocol, run._loop.rank_machine

    def all_there() -> bool:
        with run._loop.client.lock:
            view, ahead = protocol.view, rank_machine.ahead
            complete = view is not None and len(view.members) == run.config.world
            return complete or (ahead is not None and rank_machine.facts.formed(ahead.generation))

    def injected(step: Step, *arguments: Any, **named: Any) -> None:
        if step.shard == step.shards[-1] and not step._loop.rehearsing:
            if step.number == kill and run.slot == run.config.world - 1 and trains.once(run, f"killed-{kill}"):
                trains.die()
            if step.number >= kill + 3:
                until(all_there, "somebody in the place of the lost rank", 120.0)
            if step.number >= stop:
                until(lambda: protocol._orders.halt, "the word to stop", 120.0)
        backward(step, *arguments, **named)

    Step.backward = injected  # type: ignore[method-assign]


def settings(name: str, folder: Path, world: int, shards: int, tensor: int = 0, **options: str) -> RunSettings:
    """Gradients travel beside the backward, also where this machine is short of cores: more can go wrong then.

    No checkpoint is due before the end: nobody takes a place while one is written, and a rank that waits in its loop would write none.
    """
    flags = folder / "flags"
    flags.mkdir(parents=True, exist_ok=True)
    given = {"loop": name, "flags": str(flags), **options}
    rarely = CheckpointSettings(policy="fixed", interval_s=3600.0)
    return RunSettings(
        world=world, shards=shards, seed=SEED, nodes=2, overlap_cores=0.0, options=given, timeouts=PATIENT, checkpoint=rarely,
        mesh={"tensor": tensor} if tensor else {},
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a run of processes has come to."""

    digest: str
    records: list[Any]
    model: dict[str, Any]

    @property
    def figures(self) -> dict[str, dict[int, float]]:
        """By name, by number of steps that were taken: those that the journal has."""
        found: dict[str, dict[int, float]] = {}
        for record in self.records:
            if isinstance(record, Measurement):
                found.setdefault(record.name, {})[record.state.step] = record.value
        return found

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.records if isinstance(record, kind)]


def completed(chosen: RunSettings, folder: Path, begin: tuple[str, StateId] | None = None) -> Ran:
    """The run to its end."""
    with PlainFleet(play, chosen, folder, begin=begin) as fleet:
        outcome = fleet.wait(240.0)
        assert outcome.status == "completed", outcome
        digest, records = fleet.coordinator.machine.state.ending.record.digest, fleet.records()
    return Ran(digest, records, torch.load(folder / "flags" / "model.pt", weights_only=True))


def stopped(chosen: RunSettings, folder: Path) -> tuple[str, StateId]:
    """The run up to its stop: the checkpoint that it leaves, which has all that was committed."""
    with PlainFleet(play, chosen, folder) as fleet:
        fleet.wait_for(lambda: fleet.step >= int(chosen.options["stop"]), 240.0)
        fleet.loop.call_soon_threadsafe(fleet.coordinator.stop_run, "enough")
        outcome = fleet.wait(240.0)
        assert outcome.status == "stopped", outcome
        committed = fleet.step
    found = newest_checkpoint(f"file://{folder}")
    assert found is not None and found[1].step == committed >= int(chosen.options["stop"])
    return found


def resumed(chosen: RunSettings, before: Path, checkpoint: tuple[str, StateId], folder: Path) -> Ran:
    """A run that begins with the checkpoint that another one has left in ``before``, to its end."""
    shutil.copytree(before / "checkpoints", folder / "checkpoints")
    return completed(chosen, folder, checkpoint)


def loaded(name: str, ran: Ran, options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The state of models of plain PyTorch that were given what the run has saved."""
    modules = {key: one for key, one in ALL[name].build(options or {}).items() if isinstance(one, torch.nn.Module)}
    for key, module in modules.items():
        module.load_state_dict(ran.model[key] if len(modules) > 1 else ran.model)
    return state_of(modules)
