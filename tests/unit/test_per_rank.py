"""What a rank takes of a cluster, and on which nodes: refused where it makes no sense, and labels as Ray decides them."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.settings.per_rank import PerRankSettings, meets

NODE = {"ray.io/accelerator-type": "H200", "rack": "r1"}


def test_it_takes_what_is_said_and_nothing_else() -> None:
    assert PerRankSettings().takes == {"CPU": 1.0}
    assert PerRankSettings(gpus=1.0, cpus=8.0, resources=("NIC=2", "lane=0.5")).takes == {"CPU": 8.0, "GPU": 1.0, "NIC": 2.0, "lane": 0.5}
    assert PerRankSettings(gpus=0.5, cpus=0.0).takes == {"GPU": 0.5}


@pytest.mark.parametrize(
    ("condition", "met"),
    [
        ("ray.io/accelerator-type=H200", True), ("ray.io/accelerator-type=!H200", False), ("ray.io/accelerator-type=H100", False),
        ("rack=in(r1,r2)", True), ("rack=in(r2, r3)", False), ("rack=!in(r2,r3)", True), ("rack=!in(r1)", False),
        ("rail=a", False), ("rail=!a", True), ("rail=!in(a,b)", True),
    ],
)  # fmt: skip
def test_labels_are_met_as_ray_has_it(condition: str, met: bool) -> None:
    assert meets(NODE, PerRankSettings(labels=(condition,)).selector) is met
    assert meets(NODE, PerRankSettings(labels=(condition, "zone=!x")).selector) is met, "all of them"


def test_what_ray_takes_is_taken_and_what_it_refuses_is_refused() -> None:
    from ray._private.label_utils import validate_label_selector

    for text in ("rack=r1", "ray.io/x=!in(A, B)", "a=b_c.d-e", "a=-b", "a=in()", "a=!!b", "a=b c", "-a=b", "a=in(b,", "a/=b"):
        key, _, condition = text.partition("=")
        try:
            taken = PerRankSettings(labels=(text,)).selector == {key: condition}
        except ConfigError:
            taken = False
        assert taken == (not validate_label_selector({key: condition})), text


@pytest.mark.parametrize(
    ("settings", "field", "reason"),
    [
        ({"gpus": -1.0}, "per_rank.gpus", "at least 0"),
        ({"gpus": 1.5}, "per_rank.gpus", "whole"),
        ({"cpus": float("inf")}, "per_rank.cpus", "finite"),
        ({"cpus": 0.0}, "per_rank.cpus", "room everywhere"),
        ({"resources": ("GPU=1",)}, "per_rank.resources", "setting of its own"),
        ({"resources": ("NIC",)}, "per_rank.resources", "NAME=AMOUNT"),
        ({"resources": ("NIC=many",)}, "per_rank.resources", "no number"),
        ({"resources": ("NIC=0",)}, "per_rank.resources", "amount is 0"),
        ({"labels": ("rack",)}, "per_rank.labels", "KEY=VALUE"),
        ({"labels": ("rack=r1", "rack=r2")}, "per_rank.labels", "already"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(settings: dict[str, object], field: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PerRankSettings(**settings)  # type: ignore[arg-type]
    assert refused.value.field == field and reason in refused.value.reason


def test_what_a_local_cluster_cannot_meet_is_known() -> None:
    assert PerRankSettings(gpus=1.0).of_joined == ""
    assert PerRankSettings(labels=("rack=r1",)).of_joined == "labels"
