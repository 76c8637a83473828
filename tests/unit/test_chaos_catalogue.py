from __future__ import annotations

import csv
from importlib.resources import files

import pytest

from chaos.catalogue import ASSUMPTIONS, OFF_BY_DEFAULT, Topology, load_catalogue
from fleet.errors import ConfigError
from fleet.protocol.fault_kinds import EXECUTABLE, KIND_OF_COMPONENT, KINDS

CATALOGUE = load_catalogue()


def test_every_row_has_an_operation_and_a_source() -> None:
    assert [component.name for component in CATALOGUE.components] == list(dict.fromkeys(c.name for c in CATALOGUE.components))
    assert {component.name for component in CATALOGUE.components} == set(KIND_OF_COMPONENT)
    assert all(component.kind in KINDS and component.source for component in CATALOGUE.components)


def test_every_row_says_how_often() -> None:
    for component in CATALOGUE.components:
        mttf, share = component.mttf_hours, component.prevalence
        assert (mttf is None or mttf > 0) and (share is None or 0 < share < 1)
        assert mttf or share or component.name in OFF_BY_DEFAULT


def test_interruptions_give_back_the_run_they_were_counted_in() -> None:
    """A self-check, not evidence: one interruption per 3.1 h on 16,384 GPUs, in the published shares."""
    interrupting = [c.name for c in CATALOGUE.components if c.mttf_hours]
    rates = CATALOGUE.rates(Topology(gpus=16_384), interrupting)
    assert 1 / sum(rates.values()) / 3600 == pytest.approx(3.1, abs=0.05)
    rows = csv.DictReader(files("chaos").joinpath("catalogue.csv").read_text().splitlines())
    shares = {row["component"]: float(row["share_of_llama3_pct"]) for row in rows if row["component"] in interrupting}
    assert {name: 100 * rate / sum(rates.values()) for name, rate in rates.items()} == pytest.approx(shares, abs=0.15)


def test_rates_follow_the_units_of_each_row() -> None:
    small, large = CATALOGUE.rates(Topology(gpus=8)), CATALOGUE.rates(Topology(gpus=8000))
    assert large["gpu"] == pytest.approx(1000 * small["gpu"])
    assert large["host_parts"] == pytest.approx(1000 * small["host_parts"])
    assert large["slow_network"] == small["slow_network"], "a job is one job at any size"
    assert CATALOGUE.rates(Topology(gpus=9))["host_parts"] == pytest.approx(2 * small["host_parts"]), "nine GPUs need two nodes"


def test_prevalence_becomes_onsets_by_littles_law() -> None:
    rate = CATALOGUE.rates(Topology(gpus=8000))["slow_compute"]
    assert rate * ASSUMPTIONS["slow_compute"].duration_s == pytest.approx(0.005 * 1000), "0.5% of 1,000 nodes are slow at a time"


def test_racks_fail_only_when_asked_for_with_an_mttf() -> None:
    assert "rack" not in CATALOGUE.rates(Topology())
    with pytest.raises(ConfigError, match="rack_mttf_hours"):
        CATALOGUE.rates(Topology(), ["rack"])
    assert CATALOGUE.rates(Topology(gpus=640, rack_mttf_hours=1000.0), ["rack"]) == {"rack": pytest.approx(10 / 3.6e6)}


def test_choice_by_kind() -> None:
    assert [c.name for c in CATALOGUE.chosen(kinds=["hang"])] == ["hang"]
    of_components = {"kill_rank", "lose_node", "maintenance", "hang", "slow", "silent_corruption"}
    assert {c.kind for c in CATALOGUE.chosen(kinds=EXECUTABLE)} == of_components
    with pytest.raises(ConfigError, match="no component"):
        CATALOGUE.chosen(kinds=["flip_gradient"])
    with pytest.raises(ConfigError, match="meteor"):
        CATALOGUE.chosen(kinds=["meteor"])
    with pytest.raises(ConfigError, match="toaster"):
        CATALOGUE.chosen(["toaster"])
    with pytest.raises(ConfigError, match="no component"):
        CATALOGUE.chosen(["gpu"], kinds=["hang"])
