"""Runs an experiment of Chaos Toolkit's open format, and says of each probe whether it was held, was violated, or could not be told.

An experiment may be cut off: its user stops it, or its method does not finish. Then no probe counts as violated, since its value is that of
a part.

The format, its activities and its tolerances are those of ``chaostoolkit-lib``. That library's own runner stops at the first probe that
fails, and knows two verdicts. This runner asks all probes, once, after the method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet.app import experiment_probes
from fleet.errors import ConfigError
from fleet.host.extras import need
from fleet.protocol.exit_codes import Exit

HELD, VIOLATED, UNKNOWN = "held", "violated", "could not be told"
DEEPEST = 100
"""An experiment has so many levels at most: what reads it calls itself for each of them."""


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """The verdict on one probe: its value, and the tolerated values."""

    probe: str
    verdict: str
    value: Any
    tolerance: Any
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """The outcome of an experiment. ``failed``: why its method did not finish; empty: it did. ``floor``: its faults were called off."""

    title: str
    verdicts: tuple[ProbeVerdict, ...]
    failed: str = ""
    floor: bool = False

    @property
    def held(self) -> int:
        """Number of probes that were held."""
        return sum(one.verdict == HELD for one in self.verdicts)

    @property
    def exit_code(self) -> Exit:
        """DONE only when there is a probe, and all probes were held. Faults that were called off have shown nothing, for any probe."""
        if self.floor:
            return Exit.CALLED_OFF
        return Exit.DONE if 0 < self.held == len(self.verdicts) and not self.failed else Exit.FAILED

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain data, for JSON."""
        probes = [{name: getattr(one, name) for name in ProbeVerdict.__slots__} for one in self.verdicts]
        return {"title": self.title, "exit_code": int(self.exit_code), "failed": self.failed, "floor": self.floor, "probes": probes}


WHOLE = "Its top level has title, description, steady-state-hypothesis and method; experiments/rank-dies.json is one."


def load(path: str) -> Mapping[str, Any]:
    """The experiment in a file, JSON or YAML. Raises ConfigError: it cannot be read, or is no experiment, or its format's library is
    missing."""
    need("chaoslib", "chaostoolkit", "FILE", path)
    from chaoslib.exceptions import ChaosException
    from chaoslib.experiment import ensure_experiment_is_valid
    from chaoslib.loader import load_experiment

    if not Path(path).is_file():
        raise ConfigError("FILE", path, "there is no such file", "Name an experiment; those of Fleet are in experiments/.")
    try:
        experiment: Mapping[str, Any] = load_experiment(path)
        if not isinstance(experiment, Mapping) or _deeper(experiment, DEEPEST):
            raise TypeError(f"it has to be a table of at most {DEEPEST} levels")
        ensure_experiment_is_valid(experiment)
    except (ChaosException, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError("FILE", path, f"it cannot be read as an experiment: {error}", WHOLE) from error
    if not _probes(experiment):
        raise ConfigError("FILE", path, "its hypothesis has no probe, so nothing could be held", "Add steady-state-hypothesis.probes.")
    for probe in _probes(experiment):
        _check_names(probe["provider"])
    return experiment


def _deeper(value: Any, levels: int) -> bool:
    """Whether tables and lists lie in each other more than ``levels`` deep. A list of YAML may lie in itself."""
    layer = {id(value): value}
    for _ in range(levels):
        inside = (each.values() if isinstance(each, Mapping) else each for each in layer.values())
        layer = {id(item): item for items in inside for item in items if isinstance(item, Mapping | list)}
    return bool(layer)


def _check_names(provider: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that no probe of Fleet's knows: now, and not after the run."""
    known = {"figure": experiment_probes.FIGURE_NAMES, "check": experiment_probes.CHECK_NAMES}.get(str(provider.get("func")))
    name = (provider.get("arguments") or {}).get("name")
    if provider.get("module") == experiment_probes.__name__ and known is not None and name not in known:
        raise ConfigError(f"{provider['func']}.name", name, "is not known", f"Known: {', '.join(known)}.")


def run(experiment: Mapping[str, Any]) -> ExperimentOutcome:
    """Carry out the method, ask the probes, and always roll back. Raises ConfigError when the method is refused before it begins."""
    settings = _settings(experiment)
    try:
        failed = _carry_out(experiment["method"], settings)
        cut = failed or experiment_probes.cut_off()
        verdicts = tuple(_less_violated(judge(probe, settings), cut) for probe in _probes(experiment))
        return ExperimentOutcome(experiment["title"], verdicts, failed, experiment_probes.stopped_by_floor())
    finally:
        _carry_out(experiment.get("rollbacks") or [], settings)


def _less_violated(verdict: ProbeVerdict, cut: str) -> ProbeVerdict:
    """The verdict, or "could not be told" for a violated probe of an experiment that was cut off. ``cut``: why; empty: it was not."""
    return replace(verdict, verdict=UNKNOWN, reason=cut) if cut and verdict.verdict == VIOLATED else verdict


def _settings(experiment: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the file, with its values from the environment. Raises ConfigError."""
    from chaoslib.configuration import load_configuration
    from chaoslib.exceptions import ChaosException

    try:
        found: Mapping[str, Any] = load_configuration(dict(experiment.get("configuration") or {}))
    except ChaosException as error:
        raise ConfigError("configuration", str(error), "cannot be loaded", "Set the environment variables that the file names.") from error
    return found


def _carry_out(activities: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """Carry out activities one after the other, up to the first that fails. Returns why it failed. Raises ConfigError: one is refused."""
    from chaoslib.activity import run_activity
    from chaoslib.exceptions import ChaosException

    for activity in activities:
        try:
            run_activity(activity, settings, {})
        except ChaosException as error:  # the library puts the error into words, and keeps it as the context
            if isinstance(error.__context__, ConfigError):
                raise error.__context__ from None
            return f"{activity['name']}: {' '.join(str(error).split())}"
    return ""


def judge(probe: Mapping[str, Any], settings: Mapping[str, Any]) -> ProbeVerdict:
    """Ask one probe. A probe that fails, or gives no value, is not held."""
    from chaoslib.activity import run_activity
    from chaoslib.exceptions import ChaosException
    from chaoslib.hypothesis import within_tolerance

    name, tolerance = probe["name"], probe["tolerance"]
    try:
        value = run_activity(probe, settings, {})
    except ChaosException as error:
        return ProbeVerdict(name, UNKNOWN, None, tolerance, " ".join(str(error).split()))
    if value is None:
        return ProbeVerdict(name, UNKNOWN, None, tolerance, "the run does not say")
    try:
        holds = within_tolerance(tolerance, value)
    except (TypeError, ValueError):
        holds = None
    in_range = isinstance(tolerance, Mapping) and tolerance.get("type") == "range"
    if holds is None or (in_range and not isinstance(value, int | float)):
        return ProbeVerdict(name, UNKNOWN, value, tolerance, f"{value!r} cannot be compared with {tolerance}")
    return ProbeVerdict(name, HELD if holds else VIOLATED, value, tolerance)


def _probes(experiment: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = (experiment.get("steady-state-hypothesis") or {}).get("probes") or []
    return found
