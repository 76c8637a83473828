"""What a GPU has taken: one contract, for a device that is made up here and for the one of this machine, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actors.rank.telemetry import energy
from actors.rank.telemetry.energy import Device, Energy, Nvml
from fleet.ledger.bill import DATA_SHEET, DECLARED, MEASURED
from fleet.ledger.goodput import Ledger
from fleet.ledger.summary import LedgerSummary
from fleet.protocol.records import Usage
from fleet.protocol.types import Member
from tests.unit.test_bill import with_cost

ENDS_S = 7.34
"""The golden story's."""


class MadeUp:
    """A device of 700 W that ``sharing`` processes compute on, and that is lost when it is told so."""

    def __init__(self, sharing: int = 1) -> None:
        self.read, self.sharing, self.lost = 1_000, sharing, False

    def millijoules(self) -> int:
        if self.lost:
            raise OSError("NVML: GPU is lost")
        self.read += 700_000
        return self.read

    def processes(self) -> int:
        return self.sharing


def devices() -> Iterator[Device]:
    yield MadeUp()
    if torch.cuda.is_available():
        yield Nvml()


@pytest.mark.parametrize("device", list(devices()), ids=lambda device: type(device).__name__)
def test_a_device_counts_up_and_says_who_computes_on_it(device: Device) -> None:
    first, second = device.millijoules(), device.millijoules()
    assert 0 < first <= second
    assert device.processes() >= (1 if isinstance(device, MadeUp) else 0)


def test_it_is_shared_evenly_and_counted_from_the_beginning() -> None:
    meter = Energy()
    assert meter.read(3.0) == (0.0, 0.0)
    device = MadeUp(sharing=2)
    meter.begin(device, 10.0)
    assert meter.read(11.0) == (350.0, 1.0)
    device.sharing = 1
    assert meter.read(12.0) == (1050.0, 2.0)


def test_what_a_lost_device_has_said_counts(caplog: pytest.LogCaptureFixture) -> None:
    meter, device = Energy(), MadeUp()
    meter.begin(device, 0.0)
    meter.read(1.0)
    device.lost = True
    assert [meter.read(2.0), meter.read(3.0)] == [(700.0, 1.0)] * 2
    assert caplog.text.count("GPU is lost") == 1


def test_without_a_gpu_nothing_is_told() -> None:
    assert torch.cuda.is_initialized() or energy.metered() == (0.0, 0.0)


def _summary(watts: float | None, **cost: Any) -> LedgerSummary:
    metered = [Usage(Member(slot, 0), 1, 0, 1, at_s=ENDS_S, energy_j=10 * watts, metered_s=10.0) for slot in range(2)] if watts else []
    return Ledger().apply_all([*with_cost(**cost), *metered]).summary()


def test_what_is_measured_wins_over_the_data_sheet_and_what_is_declared_over_both() -> None:
    hour = 3600.0
    for watts, cost, kwh, basis in (
        (None, {"device": "h100"}, 0.7, DATA_SHEET),
        (350.0, {"device": "h100"}, 0.35, MEASURED),
        (350.0, {"usd_per_rank_hour": 2.0}, 0.35, MEASURED),
        (350.0, {"device": "h100", "watts_per_rank": 100.0}, 0.1, DECLARED),
    ):
        found = _summary(watts, **cost).tariff_now  # type: ignore[arg-type]
        assert found is not None and found.of(hour)["kwh"] == pytest.approx(kwh) and found.basis["kwh"] == basis
    assert _summary(350.0).bill is None, "who asks for no bill gets none"
