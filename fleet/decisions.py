"""A policy suggests, one place enforces: what a policy returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Decision:
    """``action`` is a word from the policy's own vocabulary; ``fields`` are the figures it was decided on.

    Until ``valid_until_s`` the policy would say the same again if nothing happens; neither a simulator nor a live run need ask before.
    """

    action: str
    reason: str
    fields: Mapping[str, float] = field(default_factory=dict)
    valid_until_s: float = float("inf")
