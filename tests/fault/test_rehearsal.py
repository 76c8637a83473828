"""A rehearsal for real: calibrated, predicted, run, and measured on a local cluster."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from fleet.app.cli.rehearse import carry_out, settings_of
from fleet.app.cluster.local import LocalCluster
from fleet.app.rehearsal import Rehearsal, reasons, rows, target_of
from fleet.protocol.records import FaultRecord, ProcessLost, RunStarted
from tests.support.journals import records

PLENTIFUL_SEED = 3
LENGTH = 44
"""So many times the time between faults: of those that are planned some find nobody while all ranks restart, and 30 are to strike."""

SHORT = {"faults": 2, "budget_s": 12.0, "losses": 1}


def rehearsed(cluster: LocalCluster, folder: Path, recovery: str, seed: int, **how: float) -> Rehearsal:
    target, settings = target_of(16_384, 54, recovery), settings_of(3, recovery, seed)
    return Rehearsal(gpus=16_384, days=54, recovery=recovery, **carry_out(cluster, target, settings, folder, **how))


def executed(folder: Path) -> list[FaultRecord]:
    return [record for record in records(folder / "run") if isinstance(record, FaultRecord) and record.phase == "executed"]


def test_a_prediction_is_frozen_and_then_measured(cluster: LocalCluster, tmp_path: Path) -> None:
    found = rehearsed(cluster, tmp_path / "r", "in-place", 0, **SHORT)
    frozen = json.loads((tmp_path / "r" / "prediction.json").read_text())
    assert frozen["seal"] == found.prediction.seal == found.prediction.sealed().seal
    kept = records(tmp_path / "r" / "run")
    assert isinstance(kept[0], RunStarted) and kept[0].unix_time_s > (tmp_path / "r" / "prediction.json").stat().st_mtime
    lost = [record for record in kept if isinstance(record, ProcessLost)]
    assert len(executed(tmp_path / "r")) == len(lost) == found.measured.losses > 0
    assert 0 < found.measured.goodput < 1 and found.prediction.constants.stall_s < found.prediction.constants.refill_s
    assert str(round(100 * found.error, 2)).lstrip("-") in reasons(found)[0]


@pytest.mark.timeout(5400)
def test_the_measurements_are_what_was_predicted(cluster: LocalCluster, tmp_path: Path) -> None:
    found, injected = {}, {}
    for recovery, mtbf_s in itertools.product(("restart", "in-place"), (6.0, 10.0)):
        folder, length = tmp_path / f"{recovery}-{mtbf_s:g}", {"faults": LENGTH, "budget_s": LENGTH * mtbf_s, "mtbf_s": mtbf_s}
        one = found[recovery, mtbf_s] = rehearsed(cluster, folder, recovery, PLENTIFUL_SEED, **length, losses=12)
        injected[recovery, mtbf_s] = count = len(executed(folder))
        print(f"{recovery}, MTBF {mtbf_s:g} s, {count} of {one.prediction.faults} faults: {reasons(one)[:2]} {rows(one)[2:]}", flush=True)
    assert min(injected.values()) >= 30
    for one in found.values():
        assert one.prediction.faults >= 30 <= one.measured.losses
        assert abs(one.error) <= 0.03 and one.inside, reasons(one)
        assert abs(one.model_error) <= 0.03, reasons(one)
    goodputs = [one.measured.goodput for one in found.values()]
    assert max(goodputs) - min(goodputs) >= 0.15
