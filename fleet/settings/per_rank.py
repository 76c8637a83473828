"""Resources that each rank, or spare, takes of a Ray cluster, and labels of its nodes. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.settings.fields import setting

WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
KEY = re.compile(rf"(?:{WORD}/)?{WORD}")
CONDITION = re.compile(rf"!?{WORD}|!?in\({WORD}(?:, ?{WORD})*\)")
"""Conditions in Ray's form: VALUE, !VALUE, in(A,B) or !in(A,B)."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""In a process's environment: the GPUs that it may use. Ray sets it for each rank to the rank's own GPUs: their first is number 0 there."""
EPSILON = 1e-9
"""Three tenths make room for three ranks that take a tenth each."""
OWN = {"CPU": "per_rank.cpus", "GPU": "per_rank.gpus"}
"""Resources that have a setting of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRankSettings:
    """Resources of Ray that a rank takes, and labels of the nodes that it may be on. A spare takes the same."""

    cpus: float = setting(1.0, "Ray CPUs that a rank takes of a cluster that the run joined.")
    gpus: float = setting(0.0, "GPUs that a rank has, or the part of one that it shares, such as 0.5.")
    resources: tuple[str, ...] = setting((), "NAME=AMOUNT: other Ray resources that a rank takes of a cluster that the run joined.")
    labels: tuple[str, ...] = setting(
        (),
        "KEY=VALUE, KEY=!VALUE, KEY=in(A,B) or KEY=!in(A,B): Ray labels of nodes that ranks may be on, of a cluster that the run joined.",
    )

    def __post_init__(self) -> None:
        for name, amount in (("cpus", self.cpus), ("gpus", self.gpus)):
            _check_amount(f"per_rank.{name}", amount)
        if not self.takes:
            way_out = "Give it a CPU, or another resource that says how many ranks a node has room for."
            raise ConfigError("per_rank.cpus", self.cpus, "a rank that takes nothing has room everywhere", way_out)
        _ = self.selector

    @property
    def takes(self) -> dict[str, float]:
        """Amount by Ray's name of a resource; none of the amounts is 0."""
        own = {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}
        return own | dict(_amount(text) for text in self.resources)

    @property
    def selector(self) -> dict[str, str]:
        """Condition by key of a label, in Ray's form."""
        found: dict[str, str] = {}
        for text in self.labels:
            key, condition = _condition(text)
            if key in found:
                raise ConfigError(
                    "per_rank.labels", text, f"{key} has a condition already", f"Give one: {key}=in(A,B) takes several values."
                )
            found[key] = condition
        return found

    @property
    def of_joined(self) -> str:
        """The first setting that only a cluster that the run joined can meet; empty when there is none."""
        given = {"cpus": self.cpus != 1.0, "resources": bool(self.resources), "labels": bool(self.labels)}
        return next((name for name, value in given.items() if value), "")


def room(resources: Mapping[str, float], takes: Mapping[str, float]) -> int:
    """The number of ranks that ``resources`` have room for when each rank ``takes`` so much; 0 where it takes nothing."""
    return max(0, min((int(resources.get(name, 0.0) / amount + EPSILON) for name, amount in takes.items() if amount > 0), default=0))


def meets(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels may have a rank, as Ray decides it: a node without the label does not have the value."""
    return all(_holds(labels.get(key), condition) for key, condition in selector.items())


def _holds(value: str | None, condition: str) -> bool:
    wanted = condition.removeprefix("!")
    values = [each.strip() for each in wanted[3:-1].split(",")] if wanted.startswith("in(") else [wanted]
    return (value in values) != condition.startswith("!")


def _amount(text: str) -> tuple[str, float]:
    name, given, amount = text.partition("=")
    if not (name and given):
        raise ConfigError("per_rank.resources", text, "must be NAME=AMOUNT", "For example TPU=4.")
    if name in OWN:
        raise ConfigError("per_rank.resources", text, f"{name} has a setting of its own", f"Set {OWN[name]}.")
    try:
        number = float(amount)
    except ValueError:
        raise ConfigError("per_rank.resources", text, f"{amount} is no number", "For example TPU=4.") from None
    _check_amount("per_rank.resources", number, text)
    if not number:
        raise ConfigError("per_rank.resources", text, "the amount is 0", "Leave it out.")
    return name, number


def _check_amount(field: str, amount: float, text: str = "") -> None:
    if not 0 <= amount < math.inf:
        raise ConfigError(field, text or amount, "must be a finite number, at least 0")
    if amount > 1 and amount != int(amount):
        raise ConfigError(
            field, text or amount, "Ray gives amounts above 1 in whole numbers", f"Choose {int(amount)}, or {int(amount) + 1}."
        )


def _condition(text: str) -> tuple[str, str]:
    key, given, condition = text.partition("=")
    if not (given and KEY.fullmatch(key) and CONDITION.fullmatch(condition)):
        reason = "must be KEY=VALUE, KEY=!VALUE, KEY=in(A,B) or KEY=!in(A,B)"
        raise ConfigError("per_rank.labels", text, reason, "For example ray.io/accelerator-type=H200.")
    return key, condition
