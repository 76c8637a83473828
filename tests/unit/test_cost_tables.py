"""Prices and sites by name: what a row gives, what wins over it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.app.configuration import configured, layer_of
from fleet.errors import ConfigError
from fleet.ledger.bill import tariff
from fleet.settings.fields import values_of

ROOT = Path(__file__).parents[2]
PRICES = ROOT / "examples" / "prices.toml"


def cost(*layers: str, file: Path = PRICES) -> dict[str, object]:
    found = configured(f"cost.tables={file}", *layers).run.cost
    return {name: value for name, value in values_of(found).items() if value not in (None, "", ())}


def test_rows_give_what_is_not_set() -> None:
    found = cost("cost.price=gpu-spot", "cost.site=desk", "cost.watts_per_rank=10", "cost.usd_per_kwh=0.2")
    assert found["usd_per_rank_hour"] == 1.5 and found["g_co2_per_kwh"] == 400.0
    assert found["usd_per_kwh"] == 0.2, "what is set wins"


def test_the_demo_has_a_price() -> None:
    found = configured(f"cost.tables={PRICES}", {"cost": {"price": "two-cores", "site": "desk", "watts_per_rank": 10}}).run.cost
    priced = tariff(values_of(found))
    assert priced is not None and set(priced.per_s) == {"usd", "kwh", "kg_co2"}


def test_a_run_pays_for_the_hours_that_it_took() -> None:
    """At noon less than at midnight, and over whole days the mean."""
    found = tariff(cost("cost.site=sunny", "cost.watts_per_rank=1000", "cost.embodied_g_co2_per_rank_hour=0"))
    assert found is not None
    hour_s, day_s, kwh = 3600.0, 86400.0, 1.2
    midnight = 1_800_000_000 // 86400 * 86400.0

    def of_an_hour(unix_s: float, seconds: float) -> float:
        return found.between(unix_s, seconds).of(hour_s)["kg_co2"]

    assert of_an_hour(midnight + 12 * hour_s, hour_s) == pytest.approx(0.100 * kwh)
    assert of_an_hour(midnight + 23.5 * hour_s, hour_s) == pytest.approx(0.420 * kwh)
    assert of_an_hour(midnight + 7.5 * hour_s, hour_s) == pytest.approx((0.300 + 0.220) / 2 * kwh)
    mean = found.of(hour_s)["kg_co2"]
    assert of_an_hour(midnight + 5.25 * hour_s, 3 * day_s) == pytest.approx(mean)
    assert found.between(midnight, hour_s).of(hour_s)["kwh"] == found.of(hour_s)["kwh"]


@pytest.mark.parametrize(
    ("row", "layers", "field", "reason"),
    [
        ("", ["cost.price=none-such"], "cost.price", "has no row"),
        ("[sites.x]\npue = -1", ["cost.site=x"], "sites.x.pue", "at least 0"),
        ("[sites.x]\ng_co2_per_kwh = [1, 2, 3]", ["cost.site=x"], "sites.x.g_co2_per_kwh", "it has 3 hours"),
        (f"[sites.x]\ng_co2_per_kwh = [{'1, ' * 23} -1]", ["cost.site=x"], r"sites.x.g_co2_per_kwh\[23\]", "at least 0"),
        ("[sites.x]\nwatts = 3", ["cost.site=x"], "sites.x.watts", "no such number"),
        ("[prices.x]\nusd_per_rank_hour = true", ["cost.price=x"], "prices.x.usd_per_rank_hour", "at least 0"),
        ("[prices", ["cost.price=x"], "cost.tables", "cannot be read"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(row: str, layers: list[str], field: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.toml"
    file.write_text(row)
    with pytest.raises(ConfigError, match=f"{field}.*{reason}"):
        cost(*layers, file=file)


def test_a_row_without_a_file_and_hours_without_a_mean_are_refused() -> None:
    with pytest.raises(ConfigError, match="cost.tables.*there is none"):
        configured("cost.price=x")
    with pytest.raises(ConfigError, match="24 finite numbers"):
        configured("cost.g_co2_per_kwh_by_hour=1,2")
    with pytest.raises(ConfigError, match="no mean of them"):
        configured(f"cost.g_co2_per_kwh_by_hour={','.join(['1'] * 24)}")


def test_a_value_may_be_a_path(tmp_path: Path) -> None:
    """A file of settings is one that is there, or whose name looks like no ``key=value``."""
    assert layer_of("cost.tables=some/prices.toml", tmp_path) == "cost.tables=some/prices.toml"
    assert layer_of("folder/run.toml", tmp_path) == tmp_path / "folder" / "run.toml"
    (tmp_path / "a=b").touch()
    assert layer_of("a=b", tmp_path) == tmp_path / "a=b"
