"""Ray Train with its own `TorchftConfig`: Ray starts dead workers again one by one, while the others go on by torchft.

Ray holds the lighthouse, in an actor, and its worker group makes each worker a replica group of its own. The loop of a rank, and all times
of lighthouse and Manager, are those of :mod:`benchmarks.peers.torchft_alone`. Cluster and health checks are those of
:mod:`benchmarks.peers.stock_ray`. The first participant writes its checkpoint itself: `ray.train.report` would wait for all workers, also
for a dead one.
"""

from __future__ import annotations

from benchmarks.peers import stock_ray, torchft_alone


class StockTorchft(stock_ray.StockRay):
    name = "stock_torchft"
    packages = ("torch", "ray", "torchft")
    module = "stock_torchft"


SYSTEM = StockTorchft()


def drive(workdir: str, settings_json: str) -> None:
    """Process of the driver."""
    from ray.train.v2.torch.torchft_config import TorchftConfig

    stock_ray.fit(workdir, settings_json, train_rank, TorchftConfig(lighthouse_kwargs=torchft_alone.LIGHTHOUSE, backend="gloo"))


def train_rank(config: dict[str, str]) -> None:
    """Ray Train's loop on one rank."""
    from ray import train

    torchft_alone.train_rank(config["workdir"], config["settings"], str(train.get_context().get_world_rank()))
