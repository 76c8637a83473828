"""A run that is told to stop at a random moment, as its user types it: what is kept, and when its processes are gone."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from fleet.protocol.records import Committed, Record, RunEnded, ViewPublished
from fleet.protocol.types import StateId
from tests.support.journals import NAME, durable, records
from tests.support.processes import begin
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 25.0
MARK = "FLEET_TEST_STOP"
SCRIPT = """
import random, time
from pathlib import Path

import storage.checkpoint.parts as parts
import torch
from torch import nn

from tests.support.trains import Numbers, build

right = parts.write_part


def slow(*arguments, **options):
    time.sleep(float(Path("save_s").read_text()))
    return right(*arguments, **options)


def nap(run, what, number):
    \"\"\"Now and then, on the rank that is named, or on all; never once the run is to come to its end.\"\"\"
    rng = random.Random(f"{run.options['moments']} {what} {number}")
    sleeps, slot, long_s = rng.random() < 0.15, rng.choice((0, 1, None)), rng.choice((3.0, 10.0, 40.0))
    if sleeps and slot in (None, run.slot) and not Path("rested").exists():
        print("sleeps", long_s, "s in", what, number, flush=True)
        time.sleep(long_s)


def train(run):
    parts.write_part = slow
    model, optimizer, scheduler = build(norm="batch")
    state = run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    def judge():
        nap(run, "evaluation", run.steps_taken)
        return {"val_loss": 1.0}

    for step in run.steps(state, total=3000, clip_norm=1.0):
        for x, y in step.batches(Numbers(), batch_size=64):
            if step.number not in step_of:
                step_of[step.number] = nap(run, "backward", step.number)
            step.backward(((model(x) - y) ** 2).mean())
        time.sleep(0.05)
        step.commit()
        run.evaluate(judge, every=7)


step_of = {}
"""
WAYS = ("signal", "pause", "run_s", "budget")


@dataclass(frozen=True)
class Stopped:
    """How a run has stopped: ``took_s`` from the word to the end of its last process, as far as that is one moment."""

    code: int
    took_s: float
    left: list[int]
    ended: RunEnded | None
    committed: StateId
    kept: StateId
    said: str

    @property
    def in_order(self) -> bool:
        return self.ended is not None and self.ended.status == "stopped" and self.kept >= self.committed and not self.left


def stop_once(folder: Path, way: str, seed: int) -> Stopped:
    """A run in ``folder`` that is told to stop in that ``way``, at a moment that follows from ``seed``."""
    rng = random.Random(f"{way} {seed}")
    after_s, save_s = rng.uniform(0.0, 25.0), rng.choice((0.0, 0.5, 2.0))
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "save_s").write_text(str(save_s))
    mark = uuid4().hex
    words = ["run", "script.py", "--world", "2", "--nodes", "1", "--shards", "4", "--name", "run", "--set", f"moments={seed}"]
    words += ["--checkpoint", "5", *_limit(way, after_s)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", MARK: mark}
    process = begin([sys.executable, "-m", "fleet", *words, "--config", f"timeouts.grace_s={GRACE_S!s}"], folder, environment)
    reported_s = _send(way, folder, process, after_s, environment)
    said, _ = process.communicate(timeout=300)
    over_s = time.monotonic()
    kept = _records(folder)
    states = [one.state for one in kept if isinstance(one, Committed)]
    ended = next((one for one in reversed(kept) if isinstance(one, RunEnded)), None)
    newest = max((one.state for one in durable(kept)), default=StateId(0, 0))
    return Stopped(process.returncode, over_s - reported_s, marked(mark), ended, max(states, default=StateId(0, 0)), newest, said)


def _limit(way: str, after_s: float) -> list[str]:
    match way:
        case "run_s":
            limits = ("progress_s=25", "collective_s=26", f"run_s={45 + after_s:g}")
            return [word for limit in limits for word in ("--config", f"timeouts.{limit}")]
        case "budget":
            return ["--config", "cost.usd_per_rank_hour=3600", "--config", f"cost.budget_usd={90 + 2 * after_s:.2f}"]
    return []


def _send(way: str, folder: Path, process: subprocess.Popen[str], after_s: float, environment: dict[str, str]) -> float:
    """Returns when it was told, on the monotonic clock."""
    until(lambda: process.poll() is not None or any(isinstance(one, ViewPublished) for one in _records(folder)), "it trains", 120, 0.1)
    if way in ("signal", "pause"):
        time.sleep(after_s)
    if way == "signal":
        process.terminate()
    elif way == "pause":
        command = [sys.executable, "-m", "fleet", "stop", "run"]
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120, capture_output=True)
    else:
        until(lambda: process.poll() is not None or _is_stopping(folder), "the limit is reached", 240, 0.1)
    return time.monotonic()


def _records(folder: Path) -> list[Record]:
    return records(folder / "runs" / "run") if (folder / "runs" / "run" / NAME).exists() else []


def _is_stopping(folder: Path) -> bool:
    return any(getattr(one, "policy", "") == "ending" and getattr(one, "action", "") == "stop" for one in _records(folder))


def marked(mark: str) -> list[int]:
    """Live processes whose environment began with the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            inside = f"{MARK}={mark}".encode() in (path / "environ").read_bytes()
            state = (path / "stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            continue
        found += [int(path.name)] if inside and state != "Z" else []
    return found


def main(say: Callable[[str], object] = print) -> int:
    """``python -m tests.support.stops FOLDER WAY FIRST LAST``: a line for each moment; 1 where one was not in order, or too late."""
    folder, way, first, last = sys.argv[1:]
    wrong = 0
    for seed in range(int(first), int(last)):
        found = stop_once(Path(folder) / f"{way}-{seed}", way, seed)
        good = found.in_order and found.took_s < GRACE_S
        wrong += not good
        ended = found.ended.reason if found.ended is not None else "no end"
        words = f"committed {found.committed.step} kept {found.kept.step} left {len(found.left)} code {found.code}: {ended}"
        say(f"{'ok ' if good else 'NOT'} {way} {seed}: {found.took_s:.1f} s, {words}")
        if not good:
            (Path(folder) / f"{way}-{seed}" / "said").write_text(found.said)
    say(f"{shlex.join(sys.argv[1:])}: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
