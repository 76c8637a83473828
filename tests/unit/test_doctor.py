"""Pre-flight: what the figures mean, what the driver's words say, and a real look at this machine."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from actors import preflight
from fleet.app.cli.main import app
from fleet.ledger.health import FAIL, PASS, WARN, MeasuredFigure
from policies.preflight import FATAL_XIDS, admit, judge


def verdicts(*figures: MeasuredFigure) -> list[str]:
    return [check.verdict for check in judge(figures)]


def test_a_device_that_computes_wrongly_is_kept_out() -> None:
    checks = judge([MeasuredFigure("matmul_wrong", "a", 0), MeasuredFigure("matmul_wrong", "b", 1)])
    assert [check.verdict for check in checks] == [PASS, FAIL]
    decision = admit(checks)
    assert decision.action == "keep_out"
    assert "matmul_wrong on b" in decision.reason


def test_a_slow_device_is_judged_by_its_like_and_only_where_there_are_enough() -> None:
    speeds = [MeasuredFigure("memory", name, value, "B/s") for name, value in (("a", 10.0), ("b", 9.0), ("c", 4.0))]
    assert verdicts(*speeds) == [PASS, PASS, FAIL]
    assert verdicts(speeds[0], speeds[2]) == [PASS, PASS]


def test_a_warning_keeps_nobody_out() -> None:
    checks = judge([MeasuredFigure("temperature", "a", 93.0, "C"), MeasuredFigure("throttled", "a", 1)])
    assert [check.verdict for check in checks] == [WARN, WARN]
    assert admit(checks).action == "admit"


def test_words_of_the_driver() -> None:
    found = preflight.read_driver("0, 0, No, No, Not Active, 41\n1, 2, Yes, No, Active, [N/A]\n", "host")
    reported = {(one.where, one.name): one.value for one in found}
    assert reported["host cuda:0", "temperature"] == 41
    assert reported["host cuda:1", "ecc_uncorrected"] == 2
    assert reported["host cuda:1", "throttled"] == 1
    assert ("host cuda:1", "temperature") not in reported


def test_xids_of_the_kernels_log() -> None:
    log = "[1] NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.\n[2] NVRM: Xid (PCI:0000:17:00): 13, graphics\n"
    found = {one.name: one.value for one in preflight._xids(log, FATAL_XIDS)}
    assert found == {"xid_fatal": 1, "xid": 1}


def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__

    def wrong(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = right(self, other)
        out[0, 0] += 1 if out.is_floating_point() else 0
        return out

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    [wrongs] = [one.value for one in preflight._matmul("cpu") if one.name == "matmul_wrong"]
    assert wrongs == 1


def test_the_command_looks_at_this_machine() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    reported = json.loads(answer.stdout)
    assert answer.exit_code == 0, reported
    assert reported["verdict"] == "admit"
    values = {check["name"]: check["value"] for check in reported["checks"] if " " not in check["where"]}
    assert values["matmul"] > 1e8
    assert values["memory"] > 1e8
    assert values["gather"] > 1e6
    assert "doctor" in CliRunner().invoke(app, ["--help"]).stdout
