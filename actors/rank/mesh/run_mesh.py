"""The mesh of a run whose ranks compute shards together, as one rank has it: made when it is first asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from actors.rank.membership.client import Client
from actors.rank.membership.view_groups import Meeting
from actors.rank.state.tracked import StageCut
from fleet.errors import ConfigError, FleetError, RunOver
from fleet.protocol.types import STAGE, Coordinate, stage_of
from fleet.settings.run import RunSettings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from actors.rank.mesh.pipe import Pipeline, StageLink
    from actors.rank.mesh.torch_group import TensorGroup
    from actors.rank.step.layout import LayoutInputs, StateLayout
    from actors.rank.step.train_step import TrainStep

Found = TypeVar("Found")


class RunMesh:
    """Without ``--mesh`` only :attr:`axes` is of use. ``device_of`` gives this rank's device."""

    def __init__(self, settings: RunSettings, client: Client, device_of: Callable[[], torch.device]) -> None:
        self.axes, self._client, self._device_of = settings.mesh, client, device_of
        self.divides, self._staged = settings.in_columns, settings.staged
        self._pipe: Pipeline | None = None

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place. A spare waits for it until it is called. Raises RunOver: the run ends meanwhile."""
        protocol = self._client.protocol
        self._client.wait(lambda: protocol.coordinate or protocol.released is not None)
        if not protocol.coordinate:
            raise RunOver
        return protocol.coordinate

    @functools.cached_property
    def link(self) -> StageLink:
        """The ranks of the other stages. Raises ConfigError: the run has no stages."""
        from actors.rank.mesh.pipe import StageLink

        if not self._staged:
            raise ConfigError("mesh", dict(self.axes) or "none", "the model has no stages in it", f"Start the run with --mesh {STAGE}=2.")
        return StageLink(stage_of(self.coordinate), self.axes[STAGE])

    @functools.cached_property
    def _made(self) -> tuple[TensorGroup, DeviceMesh]:
        from actors.rank.mesh.torch_group import mesh_of

        axis = next((axis for axis in self.axes if axis != STAGE), None)
        if axis is None:
            reason = "its ranks have layers one after the other, and no part of a layer"
            raise ConfigError("mesh", dict(self.axes), reason, "Give the layers to run.pipeline.")
        return mesh_of(dict(self.coordinate)[axis], self.axes[axis], self._device_of(), axis)

    @property
    def _divided(self) -> TensorGroup | None:
        """The ranks with which this one computes each unit, if there are any."""
        return self._made[0] if math.prod(size for axis, size in self.axes.items() if axis != STAGE) > 1 else None

    @property
    def _lost(self) -> str:
        """Why what this rank got from the ranks with which it computes is of no use."""
        return (self.link.lost if self._staged else "") or (self._divided.lost if self._divided is not None else "")

    @property
    def device_mesh(self) -> DeviceMesh:
        """For ``parallelize_module``. Raises ConfigError: the mesh has stages."""
        return self._made[1]

    def pipe(self, layers: Sequence[torch.nn.Module], loss_fn: Any, inputs: Any, begins: Sequence[int]) -> Pipeline:
        """See :meth:`actors.rank.loop.Run.pipeline`."""
        from actors.rank.mesh.pipe import Pipeline, begins_of

        link = self.link
        found = [0, *begins] if begins else begins_of(len(layers), link.stages)
        if len(found) != link.stages or sorted({*found}) != found or found[-1] >= len(layers):
            given = f"{len(layers)} layers, stages begin at {found}"
            raise ConfigError("pipeline", given, f"each of the {link.stages} stages needs a layer", "Take fewer stages, or more layers.")
        self._pipe = Pipeline(layers, loss_fn, inputs, link, found)
        return self._pipe

    def stages(self) -> StageCut:
        """The layers of the model, and which of them are another stage's; none without stages.

        Raises ConfigError: the model is not cut into the stages of the run.
        """
        if not self._staged:
            return StageCut()
        if self._pipe is None:
            raise ConfigError("mesh", dict(self.axes), "the model is not cut into stages", "Call run.pipeline before run.track.")
        others = [layer for number, layer in enumerate(self._pipe.layers) if number not in self._pipe.span]
        leads = not any(place for axis, place in self.coordinate if axis != STAGE)
        return StageCut(self._pipe.layers, frozenset(id(one) for layer in others for one in (*layer.parameters(), *layer.buffers())), leads)

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
        axis, size = next((axis, size) for axis, size in self.axes.items() if axis != STAGE)
        for placement in parameter.placements:
            if placement.is_shard() and parameter.shape[placement.dim] % size:
                reason = f"its dimension {placement.dim} has {parameter.shape[placement.dim]} elements, which {size} ranks do not divide"
                raise ConfigError(f"mesh.{axis}", name, reason, "Choose a width, a number of heads or an axis that divides evenly.")

    def evaluated(self, evaluate: Callable[[], Found]) -> Callable[[], Found] | None:
        """Gives the result of ``evaluate``. Where ranks compute together, each group evaluates now; None: this rank's is broken."""
        if not self.divides:
            return evaluate
        found = evaluate()
        return None if self._lost else lambda: found

    def whole(self, state: Callable[[], Mapping[str, Any]], *, over: bool) -> Callable[[], Mapping[str, Any]] | None:
        """Gives ``state`` with whole tensors: the ranks of a group call it together.

        None: this rank's group is broken, and another one writes the model. If there is none, the run goes back, and comes here again.
        ``over``: no view follows. Then it raises FleetError.
        """
        from actors.rank.mesh.parts import whole
        from actors.rank.mesh.stages import of_all_stages

        found: Mapping[str, Any] = whole(dict(state()))
        if self._staged:
            found = of_all_stages(self.link, found)
        if not self._lost:
            return lambda: found
        if over:
            way_out = "fleet checkpoint export writes it from the last checkpoint."
            raise FleetError(f"run.save: a rank that has a part of the model is gone. {way_out}")
        return None

    def layout(self, given: LayoutInputs) -> StateLayout:
        """The layout of a state of which each column has its part."""
        from actors.rank.mesh.layout import IN_COLUMNS
        from actors.rank.mesh.stages import StageLayout

        if self._staged:
            return StageLayout(given, self.link, self._divided, self.coordinate)
        return IN_COLUMNS[given.settings.optimizer_sharding](given, self._made[0], self.coordinate)

    def meeting(self, train: TrainStep, advance: Callable[[], Any]) -> Meeting:
        from actors.rank.mesh.meeting import ColumnMeeting

        return ColumnMeeting(train, self._client.protocol, advance).exchange
