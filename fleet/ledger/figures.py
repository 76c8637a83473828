"""Figures for readers: a few digits, thousands apart, and a unit that fits. Pure."""

from __future__ import annotations

SMALL, LARGE = 1e-3, 1e12
"""Between these a figure has no power of ten."""
PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
ROUGH = 1e-3
"""One digit behind the point is too coarse for a smaller share."""


def figure(value: float, digits: int = 4) -> str:
    """``1.432``, ``0.00612``, ``12,345``; ``6.1e-05`` where it is very small or large."""
    size = abs(value)
    if size and not SMALL <= size < LARGE:
        return f"{value:.{digits - 1}g}"
    return f"{value:,.0f}" if size >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def with_prefix(value: float, unit: str) -> str:
    """``53.2 GFLOP/s``."""
    prefix, factor = next(((prefix, factor) for prefix, factor in PREFIXES if value >= factor), ("", 1.0))
    return f"{figure(value / factor, 3)} {prefix}{unit}"


def share(value: float) -> str:
    """``91.2%``, and ``0.042%`` for a share below a thousandth."""
    return f"{value:.1%}" if not 0 < abs(value) < ROUGH else f"{100 * value:.2g}%"
