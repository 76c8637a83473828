"""Ray Train with its own `TorchftConfig`: Ray starts dead workers again one by one, while the others go on by torchft.

Ray holds the lighthouse, in an actor, and its worker group makes each worker a replica group of its own. The loop of a rank, and all times
of lighthouse and Manager, are those of :mod:`benchmarks.peers.torchft_alone`. Cluster and health checks are those of
:mod:`benchmarks.peers.stock_ray`. The first participant writes its checkpoint itself: `ray.train.report` would wait for all workers, also
for a dead one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers import stock_ray, torchft_alone

IMPORTED = "import sys; from ray.train.v2.torch.torchft_config import TorchftConfig"
"""Ray Train hands it on in no public module."""


class StockTorchft(stock_ray.StockRay):
    name = "stock_torchft"
    packages = ("torch", "ray", "torchft")
    call = f"{IMPORTED}; from benchmarks.peers import stock_torchft; stock_torchft.drive(TorchftConfig, *sys.argv[1:])"


SYSTEM = StockTorchft()


def drive(config: Callable[..., Any], workdir: str, settings_json: str) -> None:
    """Process of the driver."""
    stock_ray.fit(workdir, settings_json, train_rank, config(lighthouse_kwargs=torchft_alone.LIGHTHOUSE, backend="gloo"))


def train_rank(config: dict[str, str]) -> None:
    """Ray Train's loop on one rank."""
    from ray import train

    torchft_alone.train_rank(config["workdir"], config["settings"], str(train.get_context().get_world_rank()))
