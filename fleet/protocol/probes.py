"""Rare states of the decision core and of a rank's half, each with a name where the code has it.

A test that watches learns which of them its runs have reached. A state that no run reaches is one whose code no run has tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_reached: set[str] | None = None


def probe(name: str) -> None:
    """The code has come to the rare state ``name``. Nothing is noted unless somebody watches.

    ``name`` is a literal text, and no other probe has it: ``tests/simulation/probes.py`` finds all of them in the source.
    """
    if _reached is not None:
        _reached.add(name)


@contextmanager
def watch() -> Iterator[set[str]]:
    """Gives the set of all names that are reached until the block ends. A watch around this one learns them then."""
    global _reached  # noqa: PLW0603  one comparison is all that a probe may cost, so there is no object to ask
    before, found = _reached, set[str]()
    _reached = found
    try:
        yield found
    finally:
        _reached = before
        if before is not None:
            before |= found
