"""``--expect``: conditions on a run's report, for CI. A closed grammar over its figures; no text is evaluated as code. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.errors import ConfigError

TWIN = "twin"
TOP = ("goodput", "scheduling_goodput", "training_goodput", "ettr", "other_ratio", "steps", "rolled_back_steps", "wall_s", "median_step_s")
FIGURES: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    **{name: operator.itemgetter(name) for name in TOP},
    "faults": lambda data: data["counts"]["executed"],
    "losses": lambda data: data["counts"]["in_view_losses"],
    "views": lambda data: data["counts"]["views"],
    "checkpoints": lambda data: data["counts"]["checkpoints"].get("durable", 0),
    "loss": lambda data: data["measurements"]["loss"][-1][1] if data["measurements"].get("loss") else None,
}
"""Name -> the figure in the report's JSON; None where the report has none."""
WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {"status": lambda data: str(data["status"])}
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_FORM = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*(.+?)\s*")


@dataclass(frozen=True, slots=True)
class Expectation:
    """One condition; ``text`` is as it was typed. The twin's has no sign and no value."""

    text: str
    name: str
    sign: str = ""
    value: float | str = ""


def parse(text: str) -> Expectation:
    """``goodput>0.9``, ``faults>=3``, ``status==completed`` or ``twin``. Raises ConfigError."""
    if text.strip() == TWIN:
        return Expectation(text, TWIN)
    known = f"Known: {TWIN}, {', '.join([*WORDS, *FIGURES])}."
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError("--expect", text, f"not of the form NAME{'|'.join(COMPARISONS)}VALUE", known)
    name, sign, value = found.groups()
    if name in WORDS and sign not in ("==", "!="):
        raise ConfigError("--expect", text, f"{name} is a word", f"Write {name}==... or {name}!=...")
    if name in WORDS:
        return Expectation(text, name, sign, value)
    if name not in FIGURES:
        raise ConfigError("--expect", text, f"the report has no figure {name}", known)
    try:
        return Expectation(text, name, sign, float(value))
    except ValueError:
        raise ConfigError("--expect", text, f"{value} is no number", "Shares are from 0 to 1, times in seconds.") from None


def parse_all(texts: Sequence[str], twin: bool) -> list[Expectation]:
    """All conditions. Raises ConfigError also when the twin is expected and none will run."""
    found = [parse(text) for text in texts]
    for each in found:
        if each.name == TWIN and not twin:
            raise ConfigError("--expect", each.text, "without --twin there is none", "Add --twin.")
    return found


def unmet(expected: Sequence[Expectation], data: Mapping[str, Any]) -> list[str]:
    """A line for each condition that the report ``data`` does not meet, with the report's figure. ``data`` may have a ``twin``."""
    return [f"expected {each.text}: {words}" for each in expected if (words := _against(each, data))]


def _against(each: Expectation, data: Mapping[str, Any]) -> str:
    """The report's figure, in words; empty when the condition is met."""
    if each.name == TWIN:
        twin = data.get(TWIN)
        return "" if twin and twin["equal"] else f"its verdict is {twin['verdict']}" if twin else "no twin ran"
    value = WORDS[each.name](data) if each.name in WORDS else FIGURES[each.name](data)
    if value is None:
        return f"the report has no {each.name}"
    return "" if COMPARISONS[each.sign](value, each.value) else f"{each.name} is {value if isinstance(value, str) else f'{value:.6g}'}"
