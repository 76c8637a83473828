"""Measurements of ``fleet experiment scale``, in place of assumptions of ``fleet plan``. Pure: text in, fields of a plan out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.laws.scale_fit import slowest
from fleet.planning.scale import FORMAT, VERSION
from fleet.settings import fields

OPTION = "--measured"
WRITE_IT = "Give the file that fleet experiment scale --json has written."


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """Measurements of a job."""

    kernel_efficiency: float | None = fields.setting(
        None, "Share of the peak that ranks reached while they computed; None: its FLOPs or the device are unknown.", least=0, most=1
    )
    overlap: float | None = fields.setting(None, "Share of the gradient exchange that computing hid, where measured.", least=0, most=1)
    spread: float = fields.setting(0.0, "Deviation of a rank's compute time from step to step, as a share of it.", least=0)
    device: str = fields.setting("", "The accelerator; empty where it is unknown.")
    cpu_quota: float | None = fields.setting(None, "Cores of a rank that had only a part of one.", least=0)
    script: str = fields.setting("", "The training script.")


def read_measured(text: str) -> MeasuredJob:
    """The job of a file of ``fleet experiment scale``. Raises ConfigError, by the field, for any other file."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(OPTION, text[:40], f"is no JSON: {error}", WRITE_IT) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        given = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{OPTION}: format", given, f"must be {FORMAT}", WRITE_IT)
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{OPTION}: version", content.get("version"), f"this Fleet reads version {VERSION}", "Run fleet experiment scale again."
        )
    said = content.get("plan")
    if not isinstance(said, dict):
        raise ConfigError(f"{OPTION}: plan", said, "is missing: fleet experiment scale has not ended", "Run it to the end.")
    given = content | said
    return fields.read(MeasuredJob, {each.name: given.get(each.name) for each in dataclasses.fields(MeasuredJob)}, f"{OPTION}: ")


def fields_of(found: MeasuredJob, hardware: str, gpus: int) -> dict[str, float]:
    """Fields of ``PlanInput`` that the measurement replaces. Raises ConfigError where it comes from other hardware."""
    known: dict[str, float] = {"slowest_speed": 1.0 / (1.0 + found.spread * slowest(gpus))}
    if found.kernel_efficiency:
        if found.device != hardware:
            reason = f"the kernels were measured on {found.device}, and the plan is about {hardware}"
            raise ConfigError(f"{OPTION}: device", found.device, reason, f"Plan with --hardware {found.device}.")
        known["kernel_efficiency"] = found.kernel_efficiency
    return known if found.overlap is None else known | {"overlap": found.overlap}


def sentences(found: MeasuredJob, known: Mapping[str, float]) -> list[str]:
    """Sentences on the measured and the assumed inputs of a plan."""
    figures = ", ".join(f"{name} {value:.3g}" for name, value in known.items())
    said = [f"Measured with {found.script}, in place of assumptions: {figures}."]
    missing = [name for name in ("kernel_efficiency", "overlap") if name not in known]
    if missing:
        why = "the share of the peak needs cost.device, for its peak, and a count of FLOPs; the hidden share has no measurement"
        said.append(f"Not measured, and assumed: {', '.join(missing)} ({why}).")
    if found.cpu_quota is not None:
        said.append(f"Each rank had {found.cpu_quota:g} cores only: ranks of a real fleet share no host, and have another network.")
    return said
