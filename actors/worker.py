"""The train function that Ray Train runs in each worker: it finds its slot, node and host, and becomes a rank.

The driver and Ray Train's controller load this module to name that function. So a rank's imports, such as torch, are made only in the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors import domains
from actors.node import socket_path
from actors.rank.home import Home
from fleet.errors import LoopError
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from actors.rank.state.saving import PartsPort

BARRIERS = {
    "report": "report",
    "barrier": "collective.barrier",
    "broadcast_from_rank_zero": "collective.broadcast_from_rank_zero",
    "get_preemption_info": "get_preemption_info",
}
"""Functions of Ray Train that wait for all workers, by their name in Ray's utilities. Spares never come to them."""
INSTEAD = "Use run.evaluate(...) for figures, and step.on_commit(fn) for work once a step; Fleet makes checkpoints itself."


@dataclass(frozen=True)
class RankSpec:
    """The arguments of a rank. ``folder`` has the agents' sockets and the rings. ``host`` is None where nodes differ; ``logs`` is None
    where nodes
    share no folder."""

    settings: RunSettings
    folder: Path
    host: str | None
    train: Callable[[Any], None]
    parts: Callable[[], PartsPort]
    home: Home | None = None
    logs: Path | None = None


def rank_main(config: dict[str, Any]) -> None:
    import ray
    import ray.train

    from actors import ray_internals
    from actors.rank.main import run_rank

    spec: RankSpec = config["spec"]
    slot = ray.train.get_context().get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    host = spec.host or ray.util.get_node_ip_address()
    ray_internals.hush()
    refuse_barriers()
    domains.settle(spec.settings.domains)
    agent = socket_path(spec.folder, node)
    run_rank(spec.train, spec.settings, slot, node, spec.folder, host, spec.parts(), agent, spec.home, spec.logs)


def refuse_barriers() -> None:
    """Make Ray Train's barriers raise LoopError in this process, at the user's line. This includes functions that are imported already."""
    from actors import ray_internals

    for method, name in BARRIERS.items():
        ray_internals.replace_in_train_function(method, _refusal(f"ray.train.{name}()"))


def _refusal(call: str) -> Callable[..., Any]:
    from actors.rank.verify.body import users_line

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise LoopError(f"{call} was called at {users_line()}: it waits for all processes of the run, also for spares. {INSTEAD}")

    return refused
