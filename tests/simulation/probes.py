"""Which rare states the seeds of the simulator have come to, and what has come of which event, of all that the code names.

``python -m tests.simulation.probes FOLDER``. The seeds write into FOLDER when ``FLEET_PROBES`` names it: one file for each process and
test, one line for each seed and probe, or event and what came of it. The command fails on what no seed has reached and is not known to be
out of reach: nobody has tried the code behind it, or a row of the table names what does not come.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from fleet.machine.table import LOSS, OVER, TABLE
from fleet.protocol import events as e
from fleet.protocol import instructions as i

ROOT = Path(__file__).parents[2]
PACKAGES = ("fleet", "policies", "actors")
FOLDER = "FLEET_PROBES"


def pair(event: type, kind: type) -> str:
    """How it is written that ``kind`` came of ``event``."""
    return f"{event.__name__} leads to {kind.__name__}"


def own(event: type) -> list[type]:
    """What a row of the machine's table names by itself, whole sets aside."""
    emits = TABLE[event].emits
    whole = next((each for each in (LOSS, OVER) if set(each) <= set(emits)), ())
    return [kind for kind in emits if kind not in whole]


def pairs() -> dict[str, str]:
    """Each event with all of :func:`own` -> where that is."""
    return {pair(event, kind): "fleet/machine/table.py" for event in TABLE for kind in own(event)}


NOT_SIMULATED = {
    "simulated ranks have no model, no data and no output": (
        e.RunBuilt, e.Implausible, e.Measurement, e.Logged, e.DataRead, e.DataFiles, e.OutputDropped, e.Usage,
    ),
    "simulated processes have no status, no stacks and no listeners": (e.LossExplained, e.EvidenceKept, e.RefusedLines),
    "the simulated cluster has room for all, and no node that is unfit": (e.RoomMissing, e.NodesWanted, e.NodeJoined),
    "simulated chaos has no floor": (e.FloorReached,),
}  # fmt: skip
"""Why -> events that lead to nothing there."""
UNREACHED: dict[str, str] = {
    "ranks differ and no policy can judge them": "bits flip only where each rank holds the whole state, and a policy judges there",
    "a loop goes on from where another one has ended the run": "in seeds all loops end alike; tests/simulation/test_ended.py has others",
    "the final checkpoint cannot be kept": "five tries take 30 s, and no store of a seed is away for more than 12 s at a time",
}
"""Probe -> why no run of the simulator can come to it."""
UNREACHED |= {pair(event, kind): why for why, events in NOT_SIMULATED.items() for event in events for kind in own(event)}
SELDOM = {
    pair(e.Left, i.Conclude): "the word about the end is lost with the journal's last lines, and the next one is of a rank that has left",
    "no rank of a slow group is exchanged": "a seed is seldom so long that a slow group is found; tests/simulation/test_mesh.py has it",
}
"""What may come or not."""


def calls(root: Path = ROOT) -> list[tuple[str | None, str]]:
    """(name, ``path:line``) of each call of ``probe`` in what is shipped. The name is None where it is no literal text."""
    found: list[tuple[str | None, str]] = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "probe(" in source:
            inside = sorted(_of(ast.parse(source)), key=lambda call: call.lineno)
            found += [(_name(call), f"{path.relative_to(root).as_posix()}:{call.lineno}") for call in inside]
    return found


def _of(tree: ast.AST) -> list[ast.Call]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in nodes if getattr(node.func, "id", getattr(node.func, "attr", "")) == "probe"]


def _name(call: ast.Call) -> str | None:
    match call:
        case ast.Call(args=[ast.Constant(value=str() as name)], keywords=[]):
            return name
    return None


def named() -> dict[str, str]:
    """Name of each probe -> where it is."""
    return {name: where for name, where in calls() if name is not None}


def note(test: str, reached: Iterable[str]) -> None:
    """Write down what one seed has reached, where ``FLEET_PROBES`` says so. ``test``: the test and its parameters."""
    folder = os.environ.get(FOLDER)
    if folder and (lines := "".join(f"{name}\n" for name in sorted(reached))):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / f"{os.getpid()}-{test}").open("a", encoding="utf-8") as file:
            file.write(lines)


def read(folder: Path) -> Counter[str]:
    """How many seeds have reached each probe."""
    return Counter(line for path in sorted(folder.glob("*")) for line in path.read_text(encoding="utf-8").splitlines())


def judge(name: str, seeds: int) -> tuple[str, bool]:
    """(what the table says of a probe, whether that is right)."""
    if seeds:
        reported = f"reached in {seeds} seed{'' if seeds == 1 else 's'}"
        return (f"{reported}, and UNREACHED says that it cannot be", False) if name in UNREACHED else (reported, True)
    known = UNREACHED.get(name) or SELDOM.get(name)
    return (f"known: {known}", True) if known else ("NOT REACHED", False)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 when a probe was not reached that should be, or ``UNREACHED`` is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.probes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"what the seeds wrote with {FOLDER}=FOLDER")
    seeds, probes = read(parser.parse_args(arguments).folder), named() | pairs()
    judged = {name: judge(name, seeds[name]) for name in probes}
    gone = sorted(UNREACHED.keys() - probes.keys())
    for name, (words, _) in judged.items():
        print(f"{name} · {probes[name]} · {words}")
    for name in gone:
        print(f"{name} · UNREACHED · no longer in the code")
    wrong = [name for name, (_, right) in judged.items() if not right]
    print(f"{len(probes)} probes: {sum(seeds[name] > 0 for name in probes)} reached, {len(wrong) + len(gone)} wrong")
    return 1 if wrong or gone else 0


if __name__ == "__main__":
    sys.exit(main())
