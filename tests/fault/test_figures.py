"""What a step says of itself, without being asked and as the train function wants it, is in the journal."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from fleet.ledger.report import build_report
from fleet.protocol.records import Measurement
from tests.fault.test_bad_luck import settings, train_through
from tests.support import trains


def test_a_step_tells_its_gradient_its_learning_rate_and_what_it_is_asked_to(tmp_path: Path) -> None:
    outcome, records, _ = train_through(trains.with_figures_of_its_own, settings(tmp_path, world=2), tmp_path)
    assert outcome.status == "completed", outcome
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for record in records:
        if isinstance(record, Measurement):
            found[record.name][record.state.step] = record.value
    assert found["learning_rate"] == {1: 0.01, 2: 0.005, 3: 0.0025, 4: 0.00125}, "of the step, and not of the next"
    assert found["half"] == {1: 0.0, 2: 0.5, 3: 1.0, 4: 1.5} and set(found["width"].values()) == {8.0}
    for name in ("number", "middle"):
        assert set(found[name].values()) == {3.5} and len(found[name]) == 4, "the mean over all eight shards, which two ranks have"
    assert set(found["local/first"].values()) == {0.0}
    assert found["grad_norm"][1] == pytest.approx(norm_of_the_first_gradient(), rel=1e-5)
    assert set(found) == {
        "loss", "grad_norm", "learning_rate", "half", "width", "number", "middle", "local/first", "tokens_per_step", "flops_per_step",
        "peak_flop_per_s",
    }  # fmt: skip
    assert set(found["tokens_per_step"].values()) == {trains.SAMPLES * trains.FEATURES}
    assert found["flops_per_step"] == {4: 4 * trains.SAMPLES * trains.FEATURES} and found["peak_flop_per_s"][4] > 1e8
    report = build_report(records).to_dict()
    assert report["tokens_per_s"] == pytest.approx(trains.SAMPLES * trains.FEATURES / report["median_step_s"])


def norm_of_the_first_gradient() -> float:
    """By torch alone, of all samples at once."""
    model, _, _ = trains.linear()
    numbers = trains.Numbers()
    x, y = (torch.stack(column) for column in zip(*(numbers[index] for index in range(len(numbers))), strict=True))
    torch.nn.functional.mse_loss(model(x), y).backward()
    return float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]))


def test_a_name_that_fleet_gives_itself_is_refused(tmp_path: Path) -> None:
    outcome, _, _ = train_through(trains.names_a_figure_that_fleet_has, settings(tmp_path, world=1), tmp_path)
    assert outcome.status == "failed" and "step.log(grad_norm=...): Fleet notes that by itself" in outcome.reason
