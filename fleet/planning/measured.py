"""What ``fleet scale`` has measured, in place of what ``fleet plan`` would assume. Pure: text in, fields of a plan out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError
from fleet.laws.scale_fit import slowest
from fleet.planning.scale import FORMAT, VERSION

OPTION = "--measured"
WRITE_IT = "Give the file that fleet scale --json has written."


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """Of a job that was measured.

    Attributes:
        kernel_efficiency: share of the peak that ranks reached while they computed; None where its FLOPs or the device are not known.
        overlap: share of the gradient exchange that computing hid; None where that was not measured.
        spread: standard deviation of a rank's compute time from step to step, as a share of it: what the slowest is waited for.
        device: on which accelerator; empty where that was not said.
        cpu_quota: cores of a rank where it had a part of one only.
        script: what was trained.
    """

    kernel_efficiency: float | None
    overlap: float | None
    spread: float
    device: str
    cpu_quota: float | None
    script: str


def read_measured(text: str) -> MeasuredJob:
    """From the file of ``fleet scale``. Raises ConfigError, by the field, for any other."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(OPTION, text[:40], f"is no JSON: {error}", WRITE_IT) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        given = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{OPTION}: format", given, f"must be {FORMAT}", WRITE_IT)
    if content.get("version") != VERSION:
        raise ConfigError(f"{OPTION}: version", content.get("version"), f"this Fleet reads version {VERSION}", "Run fleet scale again.")
    said = content.get("plan")
    if not isinstance(said, dict):
        raise ConfigError(f"{OPTION}: plan", said, "is not there: fleet scale has not come to its end", "Run it to the end.")
    return MeasuredJob(
        kernel_efficiency=_share(said, "kernel_efficiency"),
        overlap=_share(said, "overlap"),
        spread=_number(said, "spread"),
        device=_text(content, "device"),
        cpu_quota=None if content.get("cpu_quota") is None else _number(content, "cpu_quota"),
        script=_text(content, "script"),
    )


def _number(content: Mapping[str, Any], name: str) -> float:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{OPTION}: {name}", value, "must be a finite number, at least 0", WRITE_IT)
    return float(value)


def _share(content: Mapping[str, Any], name: str) -> float | None:
    if content.get(name) is None:
        return None
    value = _number(content, name)
    if value > 1:
        raise ConfigError(f"{OPTION}: {name}", value, "is a share, from 0 to 1", WRITE_IT)
    return value


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{OPTION}: {name}", value, "must be a text", WRITE_IT)
    return value


def fields_of(found: MeasuredJob, hardware: str, gpus: int) -> dict[str, float]:
    """Fields of ``PlanInput`` that the measurement takes the place of. Raises ConfigError where it was made on other hardware."""
    fields: dict[str, float] = {"slowest_speed": 1.0 / (1.0 + found.spread * slowest(gpus))}
    if found.kernel_efficiency:
        if found.device != hardware:
            reason = f"the kernels were measured on {found.device}, and the plan is about {hardware}"
            raise ConfigError(f"{OPTION}: device", found.device, reason, f"Plan with --hardware {found.device}.")
        fields["kernel_efficiency"] = found.kernel_efficiency
    return fields if found.overlap is None else fields | {"overlap": found.overlap}


def sentences(found: MeasuredJob, fields: Mapping[str, float]) -> list[str]:
    """What of a plan was measured, and what was not."""
    figures = ", ".join(f"{name} {value:.3g}" for name, value in fields.items())
    said = [f"Measured with {found.script}, in place of what is assumed: {figures}."]
    missing = [name for name in ("kernel_efficiency", "overlap") if name not in fields]
    if missing:
        why = "what kernels reach needs cost.device, whose peak counted FLOPs are held against; how much is hidden nobody measures"
        said.append(f"Not measured, and assumed: {', '.join(missing)} ({why}).")
    if found.cpu_quota is not None:
        said.append(f"Each rank had {found.cpu_quota:g} cores only: ranks of a real fleet share no host, and have another network.")
    return said
