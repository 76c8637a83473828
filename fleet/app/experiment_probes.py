"""Functions for experiments of Chaos Toolkit: one action that trains under faults, and probes that look at the run.

Files of the open format name these functions:
``"provider": {"type": "python", "module": "fleet.app.experiment_probes", "func": "figure", ...}``.
``fleet experiment run FILE`` or ``chaos run FILE`` calls them. A probe gives None when the run cannot tell: that is never "held".
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleet.app.expects import FIGURES
from fleet.errors import ConfigError, RunFailed
from fleet.host.journal import read_journal
from fleet.ledger.checkers import CHECKERS, OK, VIOLATED
from fleet.ledger.pace import WINDOW_S, least_goodput
from fleet.planning.traces.trace import COLUMNS as TRACE_COLUMNS
from fleet.protocol.fault_kinds import FaultPlace, kind_of
from fleet.protocol.records import STOPPED, Committed, DecisionMade, Record

if TYPE_CHECKING:
    from fleet.app.result import Result

COLUMNS = TRACE_COLUMNS[1:]
"""Fields of a fault; its id is made from its line."""
FIGURE_NAMES, CHECK_NAMES = tuple(FIGURES), tuple(checker.name for checker in CHECKERS)
RUNNING = "running"
"""Status of a run whose journal has no end."""
_runs: list[Result] = []
"""Runs of this process, oldest first. Probes look at the newest."""


def train(
    script: str, *, faults: Sequence[Mapping[str, Any]] = (), chaos: str = "", address: str = "", twin: bool = False, name: str = "",
    allow_chaos: bool = False, limits: Mapping[str, float] | None = None, floor: float | str | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Action: train with the function ``train(run)`` of ``script``, through ``faults``; returns when the run is over.

    Args:
        script: a Python file, as ``fleet run`` takes it.
        faults: each with ``kind``, ``at_s`` (seconds of training) and ``slot`` or ``node``, and ``duration_s`` and ``severity`` where the
            kind has them. Instead of ``chaos``.
        chaos: faults at rates, as ``fleet run --chaos`` takes them.
        address: of a Ray cluster to join; empty: a local one of its own.
        allow_chaos: with ``address``: faults may strike the run on that cluster.
        twin: run again without faults, and compare the final bits.
        name: of the run; empty: the script's, with the time.
        limits: the most slots (``ranks``), ``nodes`` and racks (``domains``) that ``faults`` may name in all. More is refused before
            anything is started. For ``chaos`` they are its setting ``limits``: the most hit at once, or in an hour (``ranks/h``).
        floor: a condition such as ``goodput(60s) >= 0.9``. When the pace over 60 s is below that share of the run's own pace, all faults
            are healed, and the run goes on without faults. A share alone is over 30 s.
        settings: any setting of a run, such as ``world=4``.

    Raises ConfigError: something is impossible, and no rank was started. Probes look at a run that fails, too.
    """
    from actors.rank import script_loading
    from chaos.settings import floor_of
    from fleet.app import launching

    if faults and chaos:
        raise ConfigError("faults", len(faults), "are given, and chaos too", "Give one of them.")
    given: str | dict[str, Any] = _chaos(chaos, limits or {}, floor) if chaos else "off"
    if not chaos:
        _check_faults(faults)
        _check_limits(faults, limits or {})
    if faults:
        given = {"trace": _trace(faults)} | ({} if floor is None else floor_of(str(floor), "floor"))
    result = launching.launch(
        script_loading.load_train(script), chaos=given, address=address or None, allow_chaos=allow_chaos, twin=twin, name=name, check=False,
        **settings,
    )  # fmt: skip
    _runs.append(result)
    return {"run": result.name, "status": result.status, "reason": result.reason, "folder": str(result.folder)}


def figure(name: str) -> float | None:
    """Probe: a figure of the report, by the names that ``fleet run --expect`` has."""
    value = FIGURES[name](_newest().report)
    return None if value is None else float(value)


def status() -> str:
    """Probe: how the run ended, such as ``completed``."""
    return _newest().status


def same_bits() -> bool | None:
    """Probe: whether the run ended with the bits of its twin without faults; None: there was no twin, or it came to no end."""
    twin = _newest().twin
    return twin.equal if twin is not None else None


def check(name: str) -> bool | None:
    """Probe: whether a check of the run's own record holds, by its name in the report; None: the journal cannot tell."""
    return {OK: True, VIOLATED: False}.get(_newest().checks.get(name, ""))


def faults_injected(kind: str = "") -> int:
    """Probe: how many faults were carried out; of one kind, or in all. A suppressed fault has shown nothing."""
    kinds: Mapping[str, Mapping[str, int]] = _newest().report["counts"]["faults_by_kind"]
    return sum(phases.get("executed", 0) for each, phases in kinds.items() if kind in ("", each))


def decisions(policy: str, action: str = "") -> int:
    """Probe: how many decisions a policy made, such as ``store`` that the store is away; of one action, or in all."""
    made = (record for record in _journal() if isinstance(record, DecisionMade) and record.policy == policy)
    return sum(action in ("", record.action) for record in made)


def checkpoints_sound() -> bool | None:
    """Probe: whether every durable checkpoint of the run reads as it was written; None: there is none."""
    from storage.checkpoint.manifest import CheckpointDamaged
    from storage.checkpoint.store import CheckpointStore

    store = CheckpointStore(_newest().store)
    names = store.list()
    try:
        for name in names:
            store.verify(name)
    except CheckpointDamaged:
        return False
    return True if names else None


def floor_kept() -> bool:
    """Probe: whether chaos was never stopped for its cost."""
    return not any(isinstance(record, DecisionMade) and record.policy == "floor" for record in _journal())


def stall_s() -> float | None:
    """Probe: the longest time between two committed steps, in seconds; None: fewer than two steps."""
    times = [record.at_s for record in _journal() if isinstance(record, Committed)]
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=None)


def lowest_goodput(window_s: float = WINDOW_S) -> float | None:
    """Probe: the run's least pace over ``window_s`` seconds, as a share of its own; None: the run was shorter."""
    return least_goodput(_journal(), window_s)


def _journal() -> Iterator[Record]:
    return read_journal(_newest().folder / "journal.jsonl", spans=False)


def cut_off() -> str:
    """Why the newest run did not come to an end of its own; empty when it did. Probes then judge a part.

    Its user or a limit has stopped it, or its driver was lost and has written no end.
    """
    status = _runs[-1].status if _runs else ""
    if status == RUNNING:
        return "the run was cut off: its journal has no end"
    return f"the run was stopped: {_runs[-1].reason}" if status == STOPPED else ""


def stopped_by_floor() -> bool:
    """Whether there was a run, and its chaos was stopped for its cost."""
    return bool(_runs) and not floor_kept()


def _newest() -> Result:
    if not _runs:
        raise RunFailed("no run has been made yet: the action fleet.app.experiment_probes.train comes before probes")
    return _runs[-1]


def _chaos(chaos: str, limits: Mapping[str, float], floor: float | str | None) -> str:
    """The text for ``fleet run --chaos``. Raises ConfigError when it would be refused."""
    from chaos.settings import STORM, parse_chaos

    words = [STORM if chaos.strip() == "storm" else chaos]
    words += ["limits=" + "+".join(f"{name}:{most:g}" for name, most in limits.items())] if limits else []
    words += [f"floor={floor}"] if floor is not None else []
    text = ",".join(words)
    _ = parse_chaos(text)  # before the script is looked at
    return text


def _check_faults(faults: Sequence[Mapping[str, Any]]) -> None:
    for number, fault in enumerate(faults):
        if not isinstance(fault, Mapping) or any(isinstance(value, Mapping | list) for value in fault.values()):
            raise ConfigError(f"faults[{number}]", fault, "is no table of single values", 'Write {"kind": "hang", "at_s": 1, "slot": 1}.')
        if wrong := fault.keys() - set(COLUMNS):
            raise ConfigError(f"faults[{number}]", sorted(wrong)[0], "a fault has no such field", f"Known: {', '.join(COLUMNS)}.")


def _check_limits(faults: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> None:
    for name, place in (("ranks", "slot"), ("nodes", "node")):
        if name not in limits:
            continue
        if any(_takes_all(fault) for fault in faults):
            raise ConfigError(f"limits.{name}", limits[name], "one of the faults takes all ranks", "Leave the limit out.")
        if any(_takes_racks(fault) for fault in faults):
            reason = "the size of a rack is not known beforehand"
            raise ConfigError(f"limits.{name}", limits[name], reason, "Set limits.domains instead: racks at most.")
        hit = len({fault[place] for fault in faults if fault.get(place) is not None})
        if hit > limits[name]:
            raise ConfigError(f"limits.{name}", limits[name], f"the faults hit {hit}", "Raise the limit, or plan fewer.")
    racks = sum(_takes_racks(fault) for fault in faults)
    if racks > limits.get("domains", racks):
        raise ConfigError("limits.domains", limits["domains"], f"the faults hit {racks}", "Raise the limit, or plan fewer.")
    if unknown := limits.keys() - {"ranks", "nodes", "domains"}:
        raise ConfigError("limits", sorted(unknown)[0], "there is no such limit", "Known: ranks, nodes, domains.")


def _takes_all(fault: Mapping[str, Any]) -> bool:
    kind = kind_of(str(fault.get("kind")))
    return kind.takes_ranks and kind.targets == (FaultPlace.COORDINATOR,)


def _takes_racks(fault: Mapping[str, Any]) -> bool:
    kind = kind_of(str(fault.get("kind")))
    return kind.whole_rack or kind.whole_rail


def _trace(faults: Sequence[Mapping[str, Any]]) -> str:
    """The faults as CSV, which travels with the run's settings."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({"component": "experiment", **fault} for fault in faults)
    return text.getvalue()
