"""A set of small numbers as bits, in numbers that travel as doubles."""

from __future__ import annotations

from collections.abc import Sequence

BITS = 48
"""Bits in one number; a double holds integers up to 53 bits."""


def width(count: int) -> int:
    """How many numbers hold ``count`` bits."""
    return -(-count // BITS)


def numbers_of(bits: int, count: int) -> list[float]:
    """The numbers that hold ``bits``, an integer of ``count`` bits."""
    return [float(bits >> BITS * number & (1 << BITS) - 1) for number in range(width(count))]


def any_of(rows: Sequence[Sequence[float]]) -> int:
    """The bits that are in some of ``rows``, each as :func:`numbers_of` gives it."""
    found = 0
    for row in rows:
        for number, bits in enumerate(row):
            found |= int(bits) << BITS * number
    return found
