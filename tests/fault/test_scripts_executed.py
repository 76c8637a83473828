"""Scripts on a real Ray cluster: each rank executes the file, a replacement too; what its top level sets is in force there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.rank.script_loading import load_train
from fleet.app.cluster.local import LocalCluster
from fleet.app.plans import RunPlan, final_digest
from fleet.app.recipes import LiveRun
from fleet.protocol.records import ProcessLost
from fleet.settings.run import CheckpointSettings, RunSettings
from tests.fault.test_bad_luck import FAST
from tests.support.journals import records

SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
import torch
import fleet
from {beside} import Rows

torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")  # what does not name its device cannot be computed with
torch.set_float32_matmul_precision("high")
LOCK, FILE, SQUARE = threading.Lock(), sys.__stderr__, lambda x: x.square()
TOP = {{"name": __name__, "main": fleet.is_main(), "arguments": sys.argv[2:]}}
FLAGS = Path(sys.argv[1])
AT = FLAGS / f"{{os.getpid()}}.json"
AT.write_text(json.dumps(TOP))


def once(name):
    try:
        os.close(os.open(FLAGS / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def train(run):
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = True
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, device="cpu"), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1, device="cpu"))
    said = {{"slot": run.slot, "device": str(torch.empty(0).device), "dtype": str(model[0].weight.dtype)}}
    said |= {{"precision": torch.get_float32_matmul_precision()}}
    AT.write_text(json.dumps(TOP | said))
    state = run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    for step in run.steps(state, total=40):
        for x in step.batches(Rows(), batch_size=64):
            if run.options.get("kill") and run.slot == 1 and step.number == 10 and once("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            with LOCK:
                step.backward(SQUARE(model(x)).mean())
        time.sleep(float(run.options.get("pause_s", "0")))
        step.commit()
"""
ROWS = """
import torch


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0, device="cpu") * (index + 1))
"""


def executed(cluster: LocalCluster, root: Path, script: str, module: bool, world: int, **options: str) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run, and what each of its processes has told, the driver's look at the script among them."""
    flags = root / f"flags-{world}"
    flags.mkdir()
    settings = RunSettings(
        world=world,
        spares=0,
        nodes=2,
        shards=4,
        timeouts=FAST,
        options=options,
        checkpoint=CheckpointSettings(policy="fixed", interval_s=1.0),
    )
    train = load_train(script, (str(flags), "--lr", "3"), module)
    plan = RunPlan(name=f"run-{world}", folder=root / f"run-{world}", settings=settings, train=train, script=train.file)
    result = LiveRun(plan, cluster).execute()
    assert result.status == "completed", result
    return plan.folder, [json.loads(path.read_text()) for path in flags.glob("*.json")]


@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
def test_each_rank_executes_the_script_and_so_does_who_replaces_it(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool
) -> None:
    import torch

    name = f"executed_as_{'module' if module else 'file'}"
    folder = tmp_path / name if module else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text("")
    (folder / "beside_fit.py").write_text(ROWS)
    (folder / f"{name}.py").write_text(SCRIPT.format(beside=".beside_fit" if module else "beside_fit"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    script = f"{name}.{name}" if module else str(folder / f"{name}.py")
    try:
        alone, _ = executed(cluster, tmp_path, script, module, 1)
        injected, reported = executed(cluster, tmp_path, script, module, 2, kill="yes", pause_s="0.1")
    finally:  # the look at the script has set them here, too
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
    assert final_digest(injected) == final_digest(alone) != ""
    assert any(isinstance(record, ProcessLost) for record in records(injected))
    ranks = [one for one in reported if "slot" in one]
    looked = [one for one in reported if "slot" not in one]
    assert [one["main"] for one in looked] == [False], "this process looks, and trains nothing"
    assert sorted(one["slot"] for one in ranks) == [0, 1, 1], "the replacement, too"
    for one in ranks:
        assert one["name"] == script if module else one["name"] == name
        assert one["main"] == (one["slot"] == 0)
        assert (one["arguments"], one["device"], one["dtype"], one["precision"]) == (["--lr", "3"], "meta", "torch.float64", "high")
