"""The result of a run that was started from Python: figures, the whole report, and the final state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.app.ending import saved_step
from fleet.app.twins import Sameness
from fleet.errors import FleetError
from fleet.protocol.records import COMPLETED, UNSAVED

if TYPE_CHECKING:
    from fleet.ledger.report import Report


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The same run without faults, made after the first one.

    Attributes:
        verdict: ``equal`` or ``different``, bit for bit; ``not completed``: the twin did not come to its end, and nothing was compared.
        world: the twin's world size.
        result: the twin's result.
    """

    verdict: str
    world: int
    result: Result

    @property
    def equal(self) -> bool | None:
        """Whether both ended with the same bits; None where nothing was compared."""
        return Sameness(self.verdict).equal


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run. Times are in seconds, shares from 0 to 1.

    Attributes:
        name: of the run: ``fleet report NAME`` shows more.
        status: ``completed``; ``completed, not saved`` when its last state could not be stored; ``stopped`` on request; or ``failed``.
        reason: why it ended, in a sentence.
        folder: of its journal and of its ranks' output.
        store: URL under which its checkpoints lie.
        digest: SHA-256 of the final state; empty when the run did not complete.
        steps: optimizer steps that are committed.
        saved_step: step of the newest durable checkpoint, which ``state`` loads; None without one.
        goodput: share of the wanted ranks' time that went into steps that count.
        wall_s: from the first process to the end.
        median_step_s: None before two commits.
        faults: number of faults that struck.
        ranks_lost: number of ranks that were lost while they trained.
        views: number of views.
        rolled_back_steps: number of steps that were rolled back, and computed again.
        loss: the last one that was noted; None without one.
        checks: name of each check of the run's own record -> ``ok``, ``unknown`` or ``violated``.
        report: the whole report, as ``fleet report --json`` prints it.
        twin: the run without faults; None where none was asked for, or the run did not complete.
    """

    name: str
    status: str
    reason: str
    folder: Path
    store: str
    digest: str
    steps: int
    saved_step: int | None
    goodput: float
    wall_s: float
    median_step_s: float | None
    faults: int
    ranks_lost: int
    views: int
    rolled_back_steps: int
    loss: float | None
    checks: Mapping[str, str]
    report: Mapping[str, Any] = field(repr=False)
    twin: Twin | None = None

    @property
    def completed(self) -> bool:
        """Whether the run has come to its end: all steps are committed, or its loop has ended it."""
        return self.status in (COMPLETED, UNSAVED)

    def state(self, map_location: Any = "cpu") -> dict[str, Any]:
        """The state of the newest durable checkpoint, which is the final one of a completed run: tracked name -> its ``state_dict``.

        Args:
            map_location: the device for the tensors: a ``torch.device``, or its name.

        Raises:
            FleetError: there is no sound checkpoint.
            OSError: the store cannot be read.
        """
        from storage.backends.urls import redact
        from storage.checkpoint.export import load_state
        from storage.checkpoint.store import CheckpointStore

        store = CheckpointStore(self.store)
        newest = store.newest_valid()
        if newest is None:
            raise FleetError(f"run {self.name} has no sound checkpoint in {redact(self.store)}: there is no state to load")
        return load_state(store, newest, map_location)[0]


def result_of(folder: Path, store: str, verdict: Mapping[str, Any] | None = None, twin: Twin | None = None) -> Result:
    """The result from the journal in a run's folder. ``verdict`` is that on its ``twin``, see ``fleet.app.plans.compare``.

    Raises JournalError when no line of the journal is good.
    """
    from fleet.app.expects import FIGURES
    from fleet.host.follow import open_report

    data = report_data(*open_report(folder / "journal.jsonl"), verdict)
    return Result(
        name=data["run"], status=data["status"], reason=data["reason"], folder=folder, store=store, digest=data["digest"],
        steps=data["steps"], saved_step=saved_step(data["checkpoints"]), goodput=data["goodput"], wall_s=data["wall_s"],
        median_step_s=data["median_step_s"], faults=data["counts"]["executed"], ranks_lost=data["counts"]["in_view_losses"],
        views=data["counts"]["views"], rolled_back_steps=data["rolled_back_steps"], loss=FIGURES["loss"](data),
        checks={one["check"]: one["verdict"] for one in data["checks"]}, report=data, twin=twin,
    )  # fmt: skip


def report_data(report: Report, damage: str, twin: Mapping[str, Any] | None) -> dict[str, Any]:
    """The report as plain data, with the damage of the journal, and the comparison with the twin."""
    from fleet.ledger import checkers

    data = report.to_dict() | {"damage": damage}
    return data | {"twin": twin, "checks": checkers.with_twin(data["checks"], twin["equal"])} if twin is not None else data
