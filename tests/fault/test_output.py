"""What a user sees of a run: what its ranks print, on real processes; then all of it on a terminal of 60 columns and in pipes, on Ray."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.arrivals import save_trace
from fleet.app.cli import main as cli
from fleet.host.processes import calling
from fleet.host.rank_logs import REHEARSAL, REHEARSED, RunLogs, found, logs_of, prefix
from fleet.protocol.types import Fault
from tests.fault.test_bad_luck import settings, train_through
from tests.support import trains
from tests.support.processes import begin
from tests.support.terminal import ROOT, Screened, on_a_terminal

COLUMNS = 60
SCRIPT = """
import os, sys, time
from tests.support import trains
import torch
from torch import nn

def train(run):
    print("builds", "x" * 100)
    model = nn.Linear(8, 1)
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    for step in run.steps(state, total=100):
        for x, y in step.batches(trains.Numbers(), 64):
            step.backward(nn.functional.mse_loss(model(x), y))
            time.sleep(0.05)
        if "flags" in run.options and run.slot == 1 and step.number == 30 and trains.once(run, "left"):
            os._exit(3)
        if step.commit() and step.number == 90:
            print("nearly there", file=sys.stderr)
"""
RUN = ("run", "script.py", "--world", "2", "--shards", "4", "--checkpoint", "3")


def test_what_ranks_print_is_kept_and_told_by_rank_also_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome, _, _ = train_through(trains.talks, settings(tmp_path, world=2, spares=1), tmp_path)
    assert outcome.status == "completed"
    files = found(logs_of(tmp_path))
    assert {member.slot for member in files} == {0, 1, 2}
    texts = {member: path.read_text().splitlines() for member, path in files.items()}
    [killed] = [member for member, lines in texts.items() if lines[-1] == "last words"]
    assert texts[killed][0] == f"slot {killed.slot} builds its model"
    assert {"mine: logged in step 5", "written past Python"} <= set(texts[killed])
    assert any(lines[-1].startswith("step 39 shard ") for lines in texts.values()), "to the last step"
    stood_by, spare = next((member, lines) for member, lines in texts.items() if REHEARSED in lines)
    first, last = spare.index(REHEARSAL), spare.index(REHEARSED)
    assert "step 0 shard 0" in spare[first:last]
    live = [line for line in RunLogs(logs_of(tmp_path), stood_by.slot).poll(10_000) if line.startswith(prefix(stood_by))]
    assert live == [prefix(stood_by) + line for line in spare[:first] + spare[last + 1 :]], "all but the rehearsal"

    monkeypatch.setattr(sys, "argv", ["fleet", "logs", str(tmp_path), "--rank", str(killed.slot), "--follow"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().out.splitlines()
    assert ended.value.code in (0, None)
    assert said[0] == f"[rank {killed.slot}] slot {killed.slot} builds its model" and f"[rank {killed.slot}] last words" in said
    assert f"[rank {killed.slot}.1] slot {killed.slot} builds its model" in said


# ---- fleet run ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def screened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Screened]:
    """A run on a terminal of 60 columns, in which a rank is killed."""
    folder = tmp_path_factory.mktemp("screen")
    (folder / "script.py").write_text(SCRIPT)
    save_trace((Fault("f1", 2.0, "gpu", "kill_rank", slot=1),), folder / "trace.csv")
    command = calling(
        "fleet.app.cli.main",
        "main",
        *RUN,
        "--name",
        "shown",
        "--chaos",
        "trace=trace.csv",
        "--expect",
        "faults==1",
        "--expect",
        "steps==100",
    )
    return folder, on_a_terminal(command, folder, COLUMNS)


def test_on_a_terminal_of_60_columns_one_line_lives_and_all_else_is_whole(screened: tuple[Path, Screened]) -> None:
    _, seen = screened
    text = "\n".join(seen.lines)
    assert seen.code == 0, text
    lived = [line for line in seen.lived if "step " in line and "/100" in line]
    assert any("loss " in line and "goodput " in line and "ETA " in line for line in lived), seen.lived
    assert all("…" not in line for line in (*seen.lines, *lived))
    assert not [line for line in seen.lines if "/100" in line], "it lives, and leaves nothing behind"
    joined = "".join(line.ljust(COLUMNS) for line in seen.lines)  # what ranks print is the terminal's to wrap
    for rank in ("0", "1", "1.1"):
        assert f"[rank {rank}] builds {'x' * 100}" in joined, text
    assert "[rank 0] nearly there" in text
    injected, lost = (next(number for number, line in enumerate(seen.lines) if word in line) for word in ("! fault f1", "- rank 1 is lost"))
    assert injected < lost
    assert "killed (SIGKILL) by fault f1" in " ".join(text.split())


def test_what_ray_has_to_say_is_not_among_what_ranks_print(screened: tuple[Path, Screened]) -> None:
    files = found(logs_of(screened[0] / "runs" / "shown"))
    assert {str(member) for member in files} >= {"0.0", "1.0", "1.1"}
    printed = {line for path in files.values() for line in path.read_text().splitlines()}
    assert printed - {REHEARSAL, REHEARSED} == {f"builds {'x' * 100}", "nearly there"}


def test_the_last_lines_are_eight_at_most_and_the_last_says_how_to_load_the_model(screened: tuple[Path, Screened]) -> None:
    folder, seen = screened
    heads = [line.split()[0] for line in seen.lines if re.match(r"(run|goodput|lost|faults|saved|twin|more|next) ", line)]
    assert heads == ["run", "goodput", "lost", "faults", "saved", "more", "next"]
    said = " ".join(" ".join(seen.lines).split())
    assert 'next fleet checkpoint export shown --output model.pt, then torch.load("model.pt", weights_only=True)["model"]' in said
    command = calling("fleet.app.cli.main", "main", "checkpoint", "export", "shown", "--output", "model.pt")
    subprocess.run(command, cwd=folder, check=True, timeout=120, stdout=subprocess.DEVNULL)
    import torch

    assert set(torch.load(folder / "model.pt", weights_only=True)["model"]) == {"weight", "bias"}


def test_in_a_file_there_are_whole_lines_and_a_reader_that_leaves_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    leaves = ("--set", f"flags={tmp_path}")
    chaos = ("--chaos", "mtbf=200s,quiet_start=200s,duration=900s", "--expect", "faults>=1", "--json", "report.json")
    with (tmp_path / "err.txt").open("w") as err:
        command = calling("fleet.app.cli.main", "main", *RUN, "--name", "piped", *leaves, *chaos)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        run = begin(command, tmp_path, environment, stderr=err, text=False)
        assert run.stdout is not None
        head = subprocess.run(["head", "-n", "2"], stdin=run.stdout, capture_output=True, text=True, timeout=240, check=True)
        run.stdout.close()
        code = run.wait(60)
    said = (tmp_path / "err.txt").read_text()
    assert code == 4, said
    first, second = head.stdout.splitlines()
    assert first.startswith("run      completed; 100 steps in ") and second.startswith("goodput  ")
    lines = said.splitlines()
    assert "\x1b" not in said and "Traceback" not in said
    assert f"[rank 0] builds {'x' * 100}" in lines
    assert re.search(r"this run lasts some .*; the first fault is due after .*: no fault will strike", said)
    assert "- rank 1 is lost in step 30: ended with status 3" in said
    assert "expected faults>=1: faults is 0" in lines
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "completed"
