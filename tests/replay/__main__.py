"""``make replay BASE=COMMIT``: does this checkout decide as that commit does?

Both are given the same plans of simulated runs and the golden journals. Every event that reaches the decision core, every instruction that
comes of it, and the journals are compared. Then short runs of real processes, in which a rank is killed, must end with the same digests:
whole replicas, ``zero1``, ``fsdp``, groups of ranks, with a gradient scaler. Exit status: 0 equal, 1 different, 2 it cannot be compared.

A deliberate rename is a line ``pattern => new`` of ``tests/replay/renames.txt``: the pattern is a regular expression, and is
replaced in the transcripts of both sides. The base draws the plans; in those that this checkout is given, it is replaced, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.pace_sides import NoSuchCommit, checkout
from tests.replay.transcript import renamed

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs/replay"
RENAMES = Path(__file__).with_name("renames.txt")
CARRIED = ("tests/replay/__init__.py", "tests/replay/transcript.py")
"""What a commit is always asked with, so that both are written down in the same way."""
CARRIED_IF_OLD = ("tests/simulation/plans.py", "tests/simulation/runs.py")
COMMAND = (sys.executable, "-m", "tests.replay.transcript")
SIDE = "<side>"
"""In an argument: the number of the side that is asked."""
BEFORE, AROUND = 3, 160
"""Lines before the first difference, and characters on both sides of it."""


class NotAsked(RuntimeError):
    """A side could not be asked; the message is what it printed."""


def renames_of(text: str) -> list[tuple[str, str]]:
    """``pattern => new`` of each line that is neither empty nor a comment."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(pattern.strip(), new.strip()) for pattern, _, new in (line.partition("=>") for line in lines)]


def environment(place: Path) -> dict[str, str]:
    """Older commits had simulated bits flip by Python's hash of text, which differs from process to process."""
    return os.environ | {"PYTHONPATH": str(place), "PYTHONHASHSEED": "0"}


def ask(place: Path, *arguments: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], cwd=place, env=environment(place), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAsked(f"{place}: {' '.join(arguments[:1])}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def prepare(place: Path) -> None:
    """Give an older commit what writes the transcripts."""
    (place / "tests/replay").mkdir(parents=True, exist_ok=True)
    old = not (place / CARRIED_IF_OLD[0]).exists()
    for name in (*CARRIED, *(CARRIED_IF_OLD if old else ())):
        shutil.copy(ROOT / name, place / name)


def both(sides: Sequence[Path], folder: Path, what: str, *arguments: str) -> list[Path]:
    """The files of both sides, which are asked at the same time where they only compute."""
    files = [folder / f"{what}-{number}.txt" for number in range(len(sides))]
    if what == "runs":
        for side, file in zip(sides, files, strict=True):
            ask(side, what, str(file), *arguments)
        return files
    commands = [
        [*COMMAND, what, str(file), *(argument.replace(SIDE, str(number)) for argument in arguments)] for number, file in enumerate(files)
    ]
    asked = [
        subprocess.Popen(command, cwd=side, env=environment(side), stderr=subprocess.PIPE, text=True)
        for side, command in zip(sides, commands, strict=True)
    ]
    said = [process.communicate()[1] for process in asked]
    if wrong := [text for process, text in zip(asked, said, strict=True) if process.returncode]:
        raise NotAsked(f"{what}: {wrong[0][-4000:]}")
    return files


def different(files: Sequence[Path]) -> Iterator[str]:
    """Names of the transcripts that are not the same on both sides."""
    base, ours = ({line.split()[0]: line for line in file.read_text().splitlines()} for file in files)
    yield from (name for name in {**base, **ours} if base.get(name) != ours.get(name))


def first_difference(base: Sequence[str], ours: Sequence[str]) -> str:
    """Where two transcripts part: the events before it, and the place in the line."""
    at = next((number for number, (one, other) in enumerate(zip(base, ours, strict=False)) if one != other), min(len(base), len(ours)))
    before = [f"    {line[:AROUND]}" for line in base[max(0, at - BEFORE) : at]]
    left, right = (lines[at] if at < len(lines) else "(nothing)" for lines in (base, ours))
    place = next((number for number, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), min(len(left), len(right)))
    around = slice(max(0, place - AROUND), place + AROUND)
    return "\n".join([f"  line {at + 1}, character {place + 1}", *before, f"  - {left[around]}", f"  + {right[around]}"])


def compared(sides: Sequence[Path], folder: Path, what: str, renames: str, *arguments: str) -> bool:
    began_s = time.monotonic()
    files = both(sides, folder, what, "--renames", renames, *arguments)
    names, count = list(different(files)), len(files[0].read_text().splitlines())
    print(f"{what}: {count} transcripts, {len(names)} differ ({time.monotonic() - began_s:.0f} s)", flush=True)
    for name in names[:2] if what != "runs" else ():
        base, ours = (file.read_text().splitlines() for file in both(sides, folder, what, "--renames", renames, "--only", name, *arguments))
        print(f"{what} {name}\n{first_difference(base, ours)}")
    if what == "runs" and names:
        print(*(f"  {side} {line}" for side, file in zip("-+", files, strict=True) for line in file.read_text().splitlines()), sep="\n")
    return not names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.replay")
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--seeds", type=int, default=1000, help="simulated runs, of all families in turn")
    parser.add_argument("--only", nargs="*", choices=("core", "golden", "runs"), default=("golden", "core", "runs"))
    parser.add_argument("--renames", type=Path, default=RENAMES)
    chosen = parser.parse_args()
    try:
        base = checkout(chosen.base, FOLDER)
        prepare(base)
        names = renames_of(chosen.renames.read_text())
        renames = json.dumps(names)
        with tempfile.TemporaryDirectory() as folder:
            drawn, ours = (Path(folder) / f"plans-{number}.jsonl" for number in range(2))
            ask(base, "draw", str(drawn), "--seeds", str(chosen.seeds))
            ours.write_text("".join(renamed(line, names) for line in drawn.read_text().splitlines(keepends=True)))
            more = {"core": ("--plans", f"{folder}/plans-{SIDE}.jsonl")}
            equal = [compared((base, ROOT), Path(folder), what, renames, *more.get(what, ())) for what in chosen.only]
    except (NoSuchCommit, NotAsked) as error:
        print(error, file=sys.stderr)
        return 2
    print("equal" if all(equal) else "different")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
