"""The mesh of a run whose ranks compute shards together, as one rank has it: made when it is first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from actors.rank.membership.client import Client
from actors.rank.membership.view_groups import Meeting
from fleet.errors import ConfigError, FleetError, RunOver
from fleet.protocol.types import Coordinate
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from actors.rank.mesh.torch_group import TensorGroup
    from actors.rank.step.layout import LayoutInputs, StateLayout
    from actors.rank.step.train_step import TrainStep

Found = TypeVar("Found")


class RunMesh:
    """Without ``--mesh`` only :attr:`axes` is of use. ``device_of`` gives this rank's device."""

    def __init__(self, settings: RunSettings, client: Client, device_of: Callable[[], torch.device]) -> None:
        self.axes, self._client, self._device_of = settings.mesh, client, device_of
        self.divides = settings.group > 1

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place. A spare waits for it until it is called. Raises RunOver: the run ends meanwhile."""
        protocol = self._client.protocol
        self._client.wait(lambda: protocol.coordinate or protocol.released is not None)
        if not protocol.coordinate:
            raise RunOver
        return protocol.coordinate

    @functools.cached_property
    def _made(self) -> tuple[TensorGroup, DeviceMesh]:
        from actors.rank.mesh.torch_group import mesh_of

        ((axis, place),) = self.coordinate
        return mesh_of(place, self.axes[axis], self._device_of(), axis)

    @property
    def device_mesh(self) -> DeviceMesh:
        """For ``parallelize_module``."""
        return self._made[1]

    def check(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Raises ConfigError for a parameter that is divided over another mesh, or that this one's ranks do not divide evenly."""
        from actors.rank.mesh.parts import is_whole

        for root, module in modules.items():
            for name, one in module.named_parameters():
                if not is_whole(one):
                    self._check(f"{root}.{name}", one)

    def _check(self, name: str, parameter: Any) -> None:
        way_out = 'Start the run with --mesh tensor=RANKS, and give run.mesh["tensor"] to parallelize_module.'
        if not self.axes:
            raise ConfigError("model", name, "it is divided over a mesh of the script's own, whose ranks Fleet cannot replace", way_out)
        group, _ = self._made
        if parameter.device_mesh.get_group(0) is not group:
            raise ConfigError("model", name, f"it is divided over another mesh than run.mesh: {parameter.device_mesh}", way_out)
        axis, size = next(iter(self.axes.items()))
        for placement in parameter.placements:
            if placement.is_shard() and parameter.shape[placement.dim] % size:
                reason = f"its dimension {placement.dim} has {parameter.shape[placement.dim]} elements, which {size} ranks do not divide"
                raise ConfigError(f"mesh.{axis}", name, reason, "Choose a width, a number of heads or an axis that divides evenly.")

    def evaluated(self, evaluate: Callable[[], Found]) -> Callable[[], Found] | None:
        """Gives the result of ``evaluate``. Where ranks compute together, each group evaluates now; None: this rank's is broken."""
        if not self.divides:
            return evaluate
        found = evaluate()
        return None if self._made[0].lost else lambda: found

    def whole(self, state: Callable[[], Mapping[str, Any]], *, over: bool) -> Callable[[], Mapping[str, Any]] | None:
        """Gives ``state`` with whole tensors: the ranks of a group call it together.

        None: this rank's group is broken, and another one writes the model. If there is none, the run goes back, and comes here again.
        ``over``: no view follows. Then it raises FleetError.
        """
        from actors.rank.mesh.parts import whole

        found: Mapping[str, Any] = whole(dict(state()))
        if not self._made[0].lost:
            return lambda: found
        if over:
            way_out = "fleet checkpoint export writes it from the last checkpoint."
            raise FleetError(f"run.save: a rank that has a part of the model is gone. {way_out}")
        return None

    def layout(self, given: LayoutInputs) -> StateLayout:
        """The layout of a state of which each column has its part."""
        from actors.rank.mesh.layout import IN_COLUMNS

        return IN_COLUMNS[given.settings.optimizer_sharding](given, self._made[0], self.coordinate)

    def meeting(self, train: TrainStep, advance: Callable[[], Any]) -> Meeting:
        from actors.rank.mesh.meeting import ColumnMeeting

        return ColumnMeeting(train, self._client.protocol, advance).exchange
