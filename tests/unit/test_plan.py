"""``fleet plan``: published runs, conservation, order, refusals, and what the command writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.app.cli import main as cli
from fleet.errors import ConfigError
from fleet.laws.checkpointing import goodput
from fleet.laws.parallelism import Mapping3d
from fleet.planning.faults import fault_plan
from fleet.planning.inputs import PlanInput, parse_pairs
from fleet.planning.plan import make_plan
from fleet.planning.step import best_step, build_step
from fleet.planning.sweep import parse_sweep, run_sweep
from fleet.simulation.rng import stream
from tests.support.doc_tables import meanings


@pytest.mark.parametrize(("gpus", "replicas", "published"), [(8192, 64, 0.43), (16_384, 128, 0.41)])
def test_published_utilisation_of_llama3_405b(gpus: int, replicas: int, published: float) -> None:
    """The Llama 3 Herd of Models, table 4. The kernels' efficiency is set by the first row; the second is a prediction."""
    asked = PlanInput(model="llama3-405b", gpus=gpus, recompute="selective")
    assert build_step(asked, Mapping3d(8, 16, replicas)).mfu == pytest.approx(published, abs=0.005)


def test_published_effective_time_of_llama3_405b() -> None:
    """More than 90% of 54 days, 419 unexpected interruptions: all ranks restarted, checkpoints in an object store."""
    asked = PlanInput(model="llama3-405b", recovery="restart", gpu_mttf_hours=50_677)
    plan = make_plan(asked, levers=False)
    assert plan.faults.goodput > 0.90
    assert 54 * 86_400 / plan.faults.mtbf_s == pytest.approx(419, abs=0.5)


@pytest.mark.parametrize("recovery", ["in-place", "restart"])
@pytest.mark.parametrize("gpus", [16, 1024, 131_072])
def test_shares_add_up_to_the_whole(recovery: str, gpus: int) -> None:
    plan = make_plan(PlanInput(gpus=gpus, recovery=recovery), levers=False)
    assert sum(plan.step.shares.values()) == pytest.approx(1.0)
    assert plan.faults.goodput + sum(plan.faults.losses.values()) == pytest.approx(1.0)
    assert min(plan.faults.losses.values()) >= 0.0
    assert plan.step.fits and plan.step.mapping.gpus == gpus
    json.dumps(plan.to_dict(), allow_nan=False)


def test_with_one_way_back_the_goodput_is_the_exact_closed_form() -> None:
    asked = PlanInput(in_place_share=0.0, durable_share=1.0, detect_s=0.0)
    step = best_step(asked)
    faults = fault_plan(asked, step)
    (tier,) = faults.tiers
    assert tier.name == "object"
    assert faults.goodput == pytest.approx(goodput(tier.interval_s, tier.blocked_s, faults.mtbf_s, tier.down_s, tier.restart_s))


def test_nested_tiers_agree_with_a_simulation() -> None:
    """Two tiers, faults drawn one by one: each takes the run back to the newest copy of its own tier."""
    asked = PlanInput(gpus=16_384, in_place_share=0.0, durable_share=0.3, detect_s=0.0, restart_s=100.0, gpu_mttf_hours=8000)
    local, durable = fault_plan(asked, best_step(asked)).tiers
    product = local.goodput * durable.goodput
    assert _simulated(local, durable, 3e7) == pytest.approx(product, abs=0.01)


def _simulated(local: Any, durable: Any, horizon_s: float) -> float:
    random = stream(9, "nested")
    tiers = (local, durable)
    due = [random.expovariate(1 / tier.mtbf_s) for tier in tiers]
    now, work, copies, next_copy = 0.0, 0.0, [0.0, 0.0], [local.interval_s, durable.interval_s]
    while now < horizon_s:
        which = 0 if next_copy[0] <= next_copy[1] else 1
        arrive_s = now + max(0.0, next_copy[which] - work) + tiers[which].blocked_s
        injected = 0 if due[0] <= due[1] else 1
        if arrive_s <= due[injected]:
            now, work = arrive_s, max(work, next_copy[which])
            copies[which], next_copy[which] = work, work + tiers[which].interval_s
            continue
        work = copies[1] if injected else max(copies)
        copies = [min(copy, work) for copy in copies]
        next_copy = [copy + tier.interval_s for copy, tier in zip(copies, tiers, strict=True)]
        now = due[injected] + tiers[injected].down_s + tiers[injected].restart_s
        due = [now + random.expovariate(1 / tier.mtbf_s) for tier in tiers]
    return work / now


def test_better_parts_never_give_less() -> None:
    base = PlanInput(recovery="restart")
    kept = make_plan(base, levers=False).kept_tokens_per_s
    for change in ({"gpu_mttf_hours": 1e5}, {"detect_s": 1.0}, {"restart_s": 30.0}, {"object_bytes_per_s": 1e12}, {"overlap": 1.0},
                   {"kernel_efficiency": 0.6}, {"recovery": "in-place"}, {"fabric": "ib-xdr"}, {"slowest_speed": 1.0}):  # fmt: skip
        assert make_plan(replace(base, **change), levers=False).kept_tokens_per_s >= kept
    assert make_plan(replace(base, slowest_speed=0.8), levers=False).kept_tokens_per_s < kept


def test_levers_are_ranked_and_do_what_they_say() -> None:
    plan = make_plan(PlanInput(recovery="restart", gpus=65_536))
    ratios = [lever.throughput_ratio for lever in plan.levers]
    assert len(ratios) >= 5 and ratios == sorted(ratios, reverse=True) and ratios[-1] > 1
    by_name = {lever.sentence.split(" would be")[0]: lever for lever in plan.levers}
    in_place = by_name["Recovering in place instead of restarting all ranks"]
    assert in_place.goodput_points == max(lever.goodput_points for lever in plan.levers) > 5
    assert re.search(r"worth \d+\.\d points of goodput \(\d+\.\d% more tokens a day\)\.", in_place.sentence)


def test_an_interval_is_never_shorter_than_a_copy_takes() -> None:
    tier = make_plan(PlanInput(object_bytes_per_s=1e9, gpus=131_072, recovery="restart"), levers=False).faults.tiers[-1]
    assert tier.interval_s == tier.durable_s and "durable" in tier.limit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 0}, ("gpus", "0", "nearest valid value is 1")),
        ({"gpus": 8}, ("gpus", "8", "does not fit", "142.5 GB", "gpus = 16")),
        ({"gpus": 1000, "tp": 8, "pp": 16}, ("gpus", "1000", "nearest valid value is 1024")),
        ({"gpus": 1024, "tp": 8, "pp": 16, "dp": 7}, ("dp", "7", "896", "dp = 8 with gpus = 1024")),
        ({"gpus": 1024, "pp": 200}, ("pp", "80 layers", "nearest valid value is 80")),
        ({"gpus": 1024, "tp": 7}, ("tp", "64 heads", "nearest valid value is 8")),
        ({"gpus": 16_384, "tp": 1, "pp": 1, "dp": 16_384}, ("dp", "2048", "batch_tokens = 134217728")),
        ({"batch_tokens": 100}, ("batch_tokens", "100", "nearest valid value is 8192")),
        ({"zero": 4}, ("zero", "nearest valid value is 3")),
        ({"gpu_mttf_hours": 0.0}, ("gpu_mttf_hours", "greater than 0 will do, such as 1")),
        ({"kernel_efficiency": 0.0}, ("kernel_efficiency", "greater than 0 will do, such as 1")),
        ({"gpu_mttf_hours": float("nan")}, ("gpu_mttf_hours", "nan")),
        ({"gpu_mttf_hours": 0.01}, ("gpu_mttf_hours = 0.01", "can finish")),
        ({"hardware": "h1000"}, ("hardware", "h1000", "Did you mean h100")),
        ({"model": "llama9"}, ("model", "llama9", "Known:")),
        ({"fabric": "token-ring"}, ("fabric", "Known:")),
        ({"recovery": "hope"}, ("recovery", "in-place")),
        ({"durable_share": 0.5}, ("durable_share", "0.5", "nearest valid value is 0.165")),
        ({"spares": -2}, ("spares", "-2")),
        ({"risk": 0.0}, ("risk", "0")),
    ],
)
def test_the_impossible_is_refused_with_a_way_out(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan(PlanInput(**changes))
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"gpus": 1024, "tp": 1, "pp": 1}, {"gpus": 1024, "tp": 1, "pp": 1, "dp": 1024}, {"gpus": 1024, "pp": 1, "model": "llama3-405b"},
        {"gpus": 8}, {"gpus": 16, "tp": 8, "model": "llama3-405b"}, {"gpus": 8, "tp": 8, "pp": 1, "dp": 1, "model": "llama3-405b"},
        {"gpus": 100, "tp": 2, "pp": 2, "zero": 3, "model": "llama3-405b"}, {"gpus": 96, "tp": 1, "pp": 1, "zero": 0},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_what_does(asked: dict[str, Any]) -> None:
    """Following each piece of advice gives a plan; another mapping of the same GPUs comes before more GPUs."""
    with pytest.raises(ConfigError, match="does not fit") as refused:
        make_plan(PlanInput(**asked), levers=False)
    nearest, _, sharded = refused.value.way_out.removesuffix(".").partition("; or ")
    advised = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", nearest)}
    assert advised and make_plan(PlanInput(**(asked | advised)), levers=False).step.fits
    if sharded:
        assert make_plan(PlanInput(**(asked | {"zero": int(sharded.removeprefix("zero = "))})), levers=False).step.fits


def test_a_mapping_that_does_not_fit_keeps_its_gpus() -> None:
    with pytest.raises(ConfigError) as refused:
        make_plan(PlanInput(gpus=1024, tp=1, pp=1), levers=False)
    assert "gpus = " not in refused.value.way_out and re.search(r"pp = \d+", refused.value.way_out)


def test_sweeps_multiply_add_and_keep_what_is_refused() -> None:
    assert parse_sweep("gpus=8:131072:x2").values == tuple(8 * 2**n for n in range(15))
    assert parse_sweep("detect_s=0:30:+10").values == (0.0, 10.0, 20.0, 30.0)
    points = [*run_sweep(PlanInput(), parse_sweep("gpus=8:64:x2"))]
    assert [point.plan is None for point in points] == [True, False, False, False]
    assert "does not fit" in points[0].refusal


@pytest.mark.parametrize("text", ["gpus", "gpus=8:64", "gpus=8:64:x1", "gpus=64:8:x2", "gpus=8:64:xx", "nonsense=1:2:x2", "model=1:2:x2",
                                  "detect_s=0:10:x2", "gpus=1:1e9:+1"])  # fmt: skip
def test_a_sweep_that_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_sweep(text)


def test_fields_are_read_by_type() -> None:
    assert parse_pairs(["gpus=64", "detect_s=2", "model=llama3-8b"]) == {"gpus": 64, "detect_s": 2.0, "model": "llama3-8b"}
    assert set(meanings()) == set(PlanInput.__slots__)
    for bad in ("gpus", "gpus=1.5", "gpus=many", "gpu=8"):
        with pytest.raises(ConfigError):
            parse_pairs([bad])


# ---- the command -------------------------------------------------------------------------------------------------------------------------


def _fleet(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fleet", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_writes_a_table_json_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    assert _fleet(monkeypatch, "--gpus", "1024", "--html", str(page), "--json", str(data)) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("goodput", "spare nodes", "MWh", "t CO2", "What would help most", "object store"))
    assert json.loads(data.read_text())["asked"]["gpus"] == 1024
    text = page.read_text()
    assert text.count("<svg") >= 3 and text.count("<polyline") == text.count("<svg")
    assert not re.search(r"<script|<link|src=|https?://", text)


def test_json_alone_on_the_standard_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fleet(monkeypatch, "--gpus", "1024", "--json", "-", "--set", "detect_s=1") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["asked"]["detect_s"] == 1 and data["levers"] and 0 < data["faults"]["goodput"] < 1


def test_a_sweep_as_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "sweep.json"
    assert _fleet(monkeypatch, "--sweep", "gpus=8:64:x2", "--json", str(data), "--html", str(tmp_path / "sweep.html")) == 0
    assert "does not fit" in " ".join(capsys.readouterr().out.split())
    points = json.loads(data.read_text())["points"]
    assert [point["value"] for point in points] == [8, 16, 32, 64] and points[0]["plan"] is None
    assert "does not fit" in (tmp_path / "sweep.html").read_text()


def test_an_interrupted_sweep_keeps_its_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet.planning import sweep

    real, seen = sweep.make_plan, []

    def interrupted(asked: PlanInput, levers: bool) -> Any:
        seen.append(asked)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(asked, levers)

    monkeypatch.setattr(sweep, "make_plan", interrupted)
    assert _fleet(monkeypatch, "--sweep", "gpus=64:1024:x2", "--json", str(tmp_path / "sweep.json")) == 130
    data = json.loads((tmp_path / "sweep.json").read_text())
    assert len(data["points"]) == 2 and data["complete"] is False


def test_the_impossible_ends_with_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fleet(monkeypatch, "--gpus", "8") == 2
    assert "does not fit" in " ".join(capsys.readouterr().err.split())


def test_planning_loads_neither_torch_nor_ray_nor_scipy() -> None:
    code = "import sys, fleet.app.cli.main; from fleet.planning import inputs, plan; plan.make_plan(inputs.PlanInput());"
    code += "print({'torch', 'ray', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
    light = "import sys, fleet.app.cli.main; print({'numpy', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
