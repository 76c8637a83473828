"""Fleet's backend for Ray Train, which does no work: ranks form their groups themselves, inside the train function."""

from __future__ import annotations

from dataclasses import dataclass

from ray.train.backend import Backend, BackendConfig


class FleetBackend(Backend):
    """Lets Ray Train replace single workers in place, and does no other work.

    The hooks stay empty on purpose: an error in ``on_start`` ends the run, and ``on_shutdown`` is called for workers that are dead.
    """

    has_replica_groups = True


@dataclass
class FleetBackendConfig(BackendConfig):
    """Give this to a Ray Train trainer as ``backend_config``.

    It is not a ``TorchConfig``, which would make the controller import torch and set up a process group of its own.
    """

    @property
    def backend_cls(self) -> type[FleetBackend]:
        return FleetBackend
