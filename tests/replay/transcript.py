"""What the decision core of this checkout says to each event, as lines that two commits can be compared by.

``python -m tests.replay.transcript draw|core|golden|runs``: each prints to the file that it is given. It stands alone, so that a commit
which is older than it can be asked with a copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet.machine.core import FleetMachine
from fleet.protocol.events import Tick
from fleet.protocol.records import ViewPublished
from fleet.settings.run import RunSettings
from fleet.simulation.plan import Plan, small
from fleet.simulation.world import World
from tests.simulation import plans
from tests.simulation.runs import FAMILIES, make_machine

try:
    from fleet.host.journal import read_journal
except ModuleNotFoundError:  # of a commit before there was that room
    from fleet.protocol.journal import read_journal

Renames = list[tuple[str, str]]
"""(pattern, what takes its place) of each line of a transcript, in order."""

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
VERSION = re.compile(r"-v\d+")
"""In the name of a golden journal: each commit has it in its own format."""
CUTS = 12
"""At so many places of a golden journal the coordinator dies, and another one goes on from there."""


TWINS = {
    "Lost": "ProcessLost",
    "Explained": "LossExplained",
    "Measured": "Measurement",
    "Used": "Usage",
    "Reads": "DataRead",
    "FilesFound": "DataFiles",
    "Built": "RunBuilt",
    "LinesRefused": "RefusedLines",
    "FaultReported": "FaultRecord",
    "EvidenceWritten": "EvidenceKept",
}
"""Events of older commits -> the record that was made of each. They are one class since journals have version 3."""
OF_THE_RECORD = ("at_s", "event", "fault", "generation")
"""Fields that such an event has since then, and nobody reads of an event."""
OF_THE_EVENT = dict.fromkeys(("Measurement", "DataRead", "DataFiles", "RunBuilt"), ("member",))
"""Fields that such a record has since then, and nobody reads of a record."""
FOR_PEOPLE = (
    "Candidates", "Survivors", "Budget", "StoodStill", "Delay", "Votes", "Cleared", "Doubtful", "Checked", "KeptOut", "NodesAsked",
)  # fmt: skip
"""Payloads of older commits that no code reads: since then each is ``Figures`` of the same names and numbers."""
FORMAT = {"RunStarted": ("version",)}
"""Fields that say in which format a journal is."""


def shown(value: Any) -> str:
    """A value with the names of its classes and fields; floats with all digits, sets in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if name in FOR_PEOPLE:
            return f"Figures(values={shown(value.figures())})"
        return _shown(value, name, OF_THE_EVENT.get(name, FORMAT.get(name, ())))
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(shown, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(key)}: {shown(item)}' for key, item in value.items())}}}"
    return str(value.value) if isinstance(value, enum.Enum) else ADDRESS.sub("", repr(value))


def _shown(value: Any, name: str, left_out: Sequence[str]) -> str:
    """Fields come by their names: in which order a class has them is no decision."""
    fields = [field.name for field in dataclasses.fields(value) if field.name not in left_out]
    said = {each: getattr(value, each) for each in sorted(fields)}
    if name in ("Received", "Heard"):
        said["what"] = TWINS.get(said["what"], said["what"])
    return f"{name}({', '.join(f'{each}={shown(what)}' for each, what in said.items())})"


def shown_event(event: Any) -> str:
    """The same for an event, as older commits had it, under the name that it has now."""
    name = type(event).__name__
    if (now := TWINS.get(name, name)) not in TWINS.values():
        return shown(event)
    own = ("fault",) if now == "FaultRecord" else ()
    return _shown(event, now, [each for each in OF_THE_RECORD if each not in own])


def recorded(machine: FleetMachine, lines: list[str]) -> FleetMachine:
    """``machine``, all of whose events and instructions are added to ``lines``."""
    handle = machine.handle

    def handled(event: Any, now_s: float) -> Any:
        out = handle(event, now_s)
        lines.append(f"{now_s:.6f} {shown_event(event)} -> {'; '.join(map(shown, out))}")
        return out

    machine.handle = handled  # type: ignore[method-assign]
    return machine


def core(plan: Plan) -> list[str]:
    """A simulated run: every event, every instruction, the end, and the journal."""
    lines: list[str] = []

    def make(settings: RunSettings, plan: Plan, now_s: float) -> FleetMachine:
        lines.append(f"{now_s:.6f} a coordinator begins")
        return recorded(make_machine(settings, plan, now_s), lines)

    outcome = World(plan, make).run()
    return [*lines, f"{outcome.status}: {outcome.reason} {outcome.broken}", *map(shown, outcome.world.journal)]


def golden(path: Path) -> Iterator[list[str]]:
    """What a new coordinator does at its first ticks, at several places of a journal that is kept: by the journal of this very run, and in
    a new cluster."""
    records = list(read_journal(path))
    world = next((len(record.view.members) for record in records if isinstance(record, ViewPublished)), 2)
    settings = small(world)
    for cut in sorted({max(1, len(records) * part // CUTS) for part in range(1, CUTS + 1)}):
        lines: list[str] = [f"{VERSION.sub('', path.name)} up to record {cut}"]
        now_s = max((getattr(record, "at_s", 0.0) for record in records[:cut]), default=0.0) + 0.5
        for how in ("replay", "resume"):
            machine = recorded(make_machine(settings, Plan(settings=settings), now_s), lines)
            lines.append(f"{how}: {'; '.join(map(shown, getattr(machine, how)(records[:cut], now_s) or ()))}")
            for later_s in (0.1, 2.0, 60.0):
                machine.handle(Tick(), now_s + later_s)
        yield lines


def runs() -> Iterator[list[str]]:
    """The final digest of short runs of real processes in which a rank is killed."""
    from tests.fault.test_bad_luck import after, settings, train_through
    from tests.fault.test_fsdp import CUT
    from tests.support import loops, trains
    from tests.support.plain import PlainFleet

    def kill(fleet: PlainFleet) -> None:
        after(8)(fleet)
        fleet.kill(1)

    kinds: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
        "whole": (trains.plain, {}),
        "zero1": (trains.plain, {"optimizer_sharding": "zero1"}),
        "fsdp": (trains.plain, {"optimizer_sharding": "fsdp", "world": 4, "options": CUT}),
        "groups": (trains.plain, {"optimizer_sharding": "fsdp", "world": 4, "replica_size": 2, "options": CUT}),
        "scaler": (loops.train, {"optimizer_sharding": "fsdp", "world": 4, "options": {"build": "scaled"}}),
    }
    for name, (train, changes) in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            outcome, _, digest = train_through(train, settings(Path(folder), **changes), Path(folder), kill)
            yield [f"{name}: {outcome.status} {digest}"]


def renamed(line: str, renames: Renames) -> str:
    for pattern, new in renames:
        line = re.sub(pattern, new, line)
    return line


def reported(named: Iterator[tuple[str, list[str]]], only: str, renames: Renames, file: Path) -> None:
    """One line a transcript, with its digest; of ``only`` one, all its lines."""
    with file.open("w") as out:
        for name, found in named:
            lines = [renamed(line, renames) for line in found]
            if only and name == only:
                out.writelines(f"{line}\n" for line in lines)
            elif not only:
                out.write(f"{name} {len(lines)} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay.transcript")
    parser.add_argument("what", choices=("draw", "core", "golden", "runs"))
    parser.add_argument("file", type=Path, help="where it is written")
    parser.add_argument("--plans", type=Path, help="one plan a line")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--only", default="", help="the name of one transcript: all its lines")
    parser.add_argument("--renames", default="[]", help="JSON: pairs of a pattern and what takes its place")
    chosen = parser.parse_args()
    renames: Renames = json.loads(chosen.renames)
    match chosen.what:
        case "draw":
            names = list(FAMILIES)
            drawn = ((names[number % len(names)], number // len(names)) for number in range(chosen.seeds))
            chosen.file.write_text("".join(json.dumps(plans.to_json(FAMILIES[family](seed))) + "\n" for family, seed in drawn))
        case "core":
            lines = chosen.plans.read_text().splitlines()
            read = ((str(number), json.loads(line)) for number, line in enumerate(lines) if chosen.only in ("", str(number)))
            reported(((name, core(plans.from_json(Plan, plan))) for name, plan in read), chosen.only, renames, chosen.file)
        case "golden":
            journals = sorted(Path("tests/golden").glob("*.jsonl"))
            reported(
                ((lines[0].replace(" ", "_"), lines) for path in journals for lines in golden(path)), chosen.only, renames, chosen.file
            )
        case "runs":
            reported(((lines[0].partition(":")[0], lines) for lines in runs()), chosen.only, renames, chosen.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
