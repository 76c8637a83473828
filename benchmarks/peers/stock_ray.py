"""Stock Ray Train: `TorchTrainer` with gloo and DDP, `FailureConfig(max_failures=-1)`, a checkpoint every ``checkpoint_steps``.

It has a local cluster of its own, with a CPU for each rank and each spare. Health checks come every 0.5 s (default 2 s), in its favour.
After a failure, Ray Train stops all workers, starts new ones and hands them the newest checkpoint. The loop goes on from its step, as its
guide says.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.common import EventLog, LoggedRun, Settings, not_installed, rank_environment

HEALTH_CHECK_INTERVAL_S = "0.5"


class StockRay:
    name = "stock"
    extra_faults: tuple[str, ...] = ()
    hang_timeout_s = 0.0
    packages: tuple[str, ...] = ("torch", "ray")
    call = "import sys; from benchmarks.peers import stock_ray; stock_ray.drive(*sys.argv[1:])"

    def missing(self) -> str | None:
        return not_installed(*self.packages)

    def start(self, workdir: Path, settings: Settings) -> LoggedRun:
        environment = {
            **rank_environment(),
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": HEALTH_CHECK_INTERVAL_S,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RUST_LOG": "error",
        }
        return LoggedRun(workdir, settings, [sys.executable, "-c", self.call, str(workdir), settings.to_json()], environment)


SYSTEM = StockRay()


def drive(workdir: str, settings_json: str) -> None:
    """Process of the driver."""
    fit(workdir, settings_json, train_rank)


def fit(workdir: str, settings_json: str, train: Callable[[dict[str, str]], None], torch_config: Any = None) -> None:
    """Start a cluster, and one `fit()` of ``train`` that never ends by itself; SIGTERM ends both."""
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    settings = Settings.from_json(settings_json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    session = tempfile.mkdtemp(prefix="bench-ray-")  # short: Ray puts unix sockets below it
    ray.init(address="local", num_cpus=settings.world + settings.spares, include_dashboard=False, log_to_driver=False, _temp_dir=session)
    try:
        TorchTrainer(
            train,
            train_loop_config={"workdir": workdir, "settings": settings_json},
            torch_config=torch_config,
            scaling_config=ScalingConfig(num_workers=settings.world),
            run_config=RunConfig(
                name="stock",
                storage_path=str(Path(workdir) / "storage"),
                failure_config=FailureConfig(max_failures=-1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


def train_rank(config: dict[str, str]) -> None:
    """Ray Train's loop on one rank."""
    import torch.distributed as dist
    from ray import train
    from ray.train.torch import prepare_model

    from benchmarks.peers.workload import backward_share, build, share_of

    settings, slot = Settings.from_json(config["settings"]), train.get_context().get_world_rank()
    model, optimizer = build(settings)
    step = _restore(model, optimizer)
    ddp: Any = prepare_model(model)
    epoch = [time.monotonic_ns()]
    dist.broadcast_object_list(epoch)
    log = EventLog(Path(config["workdir"]) / "events", slot)
    while True:
        optimizer.zero_grad()
        backward_share(ddp, settings, step, share_of(settings, slot), ddp.no_sync)
        optimizer.step()
        step += 1
        log.write(step, settings.global_samples, "commit", epoch[0])
        if step % settings.checkpoint_steps == 0:
            _report(model, optimizer, step, slot)


def _restore(model: Any, optimizer: Any) -> int:
    import torch
    from ray import train

    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(os.path.join(directory, "state.pt"), weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _report(model: Any, optimizer: Any, step: int, slot: int) -> None:
    import torch
    from ray import train

    if slot != 0:
        train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as directory:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, os.path.join(directory, "state.pt"))
        train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(directory))
