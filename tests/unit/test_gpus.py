"""GPUs of this machine for a local cluster, and the device of a rank: too few, or none that PyTorch can use, is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.rank.device import rank_device
from fleet.app.cluster import gpus
from fleet.errors import ConfigError
from fleet.settings.per_rank import PerRankSettings
from fleet.settings.run import RunSettings


def wants(world: int = 3, spares: int = 1, nodes: int = 2, **each: object) -> RunSettings:
    return RunSettings(world=world, spares=spares, nodes=nodes, per_rank=PerRankSettings(**each))  # type: ignore[arg-type]


def test_those_that_are_named_are_visible_and_else_those_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert gpus.visible_gpus() == []
    for name in ("0000:3b:00.0", "0000:86:00.0"):
        (tmp_path / name).mkdir()
    assert gpus.visible_gpus() == ["0", "1"]
    for named, found in (("2, GPU-8a", ["2", "GPU-8a"]), ("", []), ("-1", [])):
        monkeypatch.setenv(gpus.VISIBLE, named)
        assert gpus.visible_gpus() == found


@pytest.mark.parametrize(
    ("each", "visible", "given"), [(1.0, "0,1,2,3,4", 4), (0.5, "0,1,2", 2), (0.0, "0,1", 0), (2.0, "0,1,2,3,4,5,6,7", 8)]
)
def test_each_node_has_as_many(monkeypatch: pytest.MonkeyPatch, each: float, visible: str, given: int) -> None:
    monkeypatch.setenv(gpus.VISIBLE, visible)
    assert len(gpus.gpus_for(wants(gpus=each))) == given


def test_too_few_are_refused_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.VISIBLE, "0,1,2")
    with pytest.raises(ConfigError) as refused:
        gpus.gpus_for(wants(gpus=1.0))
    assert refused.value.field == "per_rank.gpus"
    assert "has 3 GPUs, 1 for each of 2 nodes, which is room for 2 ranks; 3 ranks and 1 spares were asked for" in refused.value.reason


@pytest.mark.parametrize(("name", "value"), [("labels", ("rack=r1",)), ("resources", ("NIC=1",)), ("cpus", 4.0)])
def test_what_only_a_joined_cluster_has_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--address") as refused:
        gpus.gpus_for(wants(**{name: value}))
    assert refused.value.field == f"per_rank.{name}"


def test_a_rank_without_a_gpu_trains_on_the_cpu() -> None:
    assert rank_device(0.0) == torch.device("cpu")


def test_a_rank_whose_pytorch_cannot_use_its_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train on the CPU, and nobody would know."""
    monkeypatch.setenv(gpus.VISIBLE, "7")
    if torch.cuda.is_available():
        assert rank_device(1.0) == torch.device("cuda", 0)
        return
    with pytest.raises(ConfigError) as refused:
        rank_device(1.0)
    assert "GPU 7" in refused.value.reason and refused.value.field == "per_rank.gpus"
