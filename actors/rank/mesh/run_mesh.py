"""The mesh of a run whose ranks compute shards together, as one rank has it: made when it is first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from actors.rank.membership.client import Client
from actors.rank.membership.view_groups import ViewGroups
from fleet.errors import RunOver
from fleet.protocol.types import Coordinate, StateId, View
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from actors.rank.mesh.torch_group import TensorGroup
    from actors.rank.step.layout import LayoutInputs, StateLayout
    from actors.rank.step.train_step import TrainStep


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
    def torch(self) -> DeviceMesh:
        """For ``parallelize_module``."""
        return self._made[1]

    def layout(self, given: LayoutInputs) -> StateLayout:
        """The layout of a state of which each column has its part."""
        from actors.rank.mesh.layout import ColumnLayout

        return ColumnLayout(given, self._made[0], self.coordinate)

    def meeting(self, train: TrainStep, advance: Callable[[], Any]) -> Callable[[ViewGroups, View], StateId]:
        """Brings the members of a view to one state."""
        from actors.rank.mesh.meeting import ColumnMeeting

        return ColumnMeeting(train, self._client.protocol, advance).exchange
