"""A resumed run is compared with the run before, ahead of its first view. Each rank reports its build before it is ready.

With another data set or another optimizer the run would train wrongly, without any error: the coordinator refuses it. A schedule of another
length may be intended: the user gets a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fleet.machine.end import end
from fleet.machine.state import MachineState
from fleet.protocol.causes import EndWhy
from fleet.protocol.facts import RunBuilt, noted
from fleet.protocol.records import DecisionMade
from fleet.protocol.types import Build

POLICY = "resume"
WAY_OUT = "Give it the old data and optimizer; or begin a new run from its weights, with run.track(weights=...)"


def received(machine: MachineState, event: RunBuilt, now_s: float) -> None:
    """A rank reports its build. The first one of a session is compared with earlier sessions, the others with the first."""
    before, build = machine.trained.build, event.build
    if machine.trained.compared:
        if before is not None and (build.data, build.samples) == (before.data, before.samples) and build.data_sha256 != before.data_sha256:
            _write(machine, event, replace(before, data_sha256=""), now_s)  # each process has another digest: it says nothing
        return
    if before is not None and (why := "; ".join(_refused(before, build))):
        end(machine, EndWhy.REFUSED, f"refused: {why}. {WAY_OUT}", "", now_s)
        return
    for reason in [*(_changed(before, build) if before is not None else ()), *_too_short(build)]:
        machine.write(DecisionMade(POLICY, "warn", reason, None, now_s))
    _write(machine, event, build, now_s)


def _write(machine: MachineState, event: RunBuilt, build: Build, now_s: float) -> None:
    if machine.trained.note_build(build):
        machine.write(noted(event, now_s, build=build))


def _refused(was: Build, now: Build) -> Iterator[str]:
    """Differences that the coordinator refuses."""
    if was.optimizers != now.optimizers:
        yield f"the optimizer was {', '.join(was.optimizers)} and is {', '.join(now.optimizers)}"
    if was.data and now.data:
        yield from _data(was, now)


def _data(was: Build, now: Build) -> Iterator[str]:
    if was.samples != now.samples:
        yield f"the data set had {was.samples} samples and has {now.samples}"
    elif was.data_sha256 and now.data_sha256 and was.data_sha256 != now.data_sha256:
        kind = f", a {now.data}" if was.data == now.data else f": it was a {was.data} and is a {now.data}"
        yield f"the data set of {now.samples} samples has other samples{kind} ({was.data_sha256[:12]}, {now.data_sha256[:12]})"
    if was.batch_size != now.batch_size:
        yield f"batch_size was {was.batch_size} and is {now.batch_size}: the next step would skip or repeat samples"


def _changed(was: Build, now: Build) -> Iterator[str]:
    """Differences that may be intended."""
    for name in dict(was.schedules).keys() & dict(now.schedules).keys():
        before, after = dict(was.schedules)[name], dict(now.schedules)[name]
        if before != after:
            yield f"{name} was {before} and is {after} in the script: the schedule goes on as it was saved, with {before}"


def _too_short(build: Build) -> Iterator[str]:
    """Schedules that end before the run does."""
    for name, length in build.schedules:
        if length < build.total_steps:
            why = f"behind step {length} the learning rate is not the intended one"
            yield f"{name} is {length} and the run has {build.total_steps} steps: {why}"
