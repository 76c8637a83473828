"""Names for rare states of the decision core and of a rank's half, at their places in the code.

A test that watches learns the states that its runs have reached. If no run reaches a state, no run has tried the code there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_reached: set[str] | None = None


def probe(name: str) -> None:
    """The code has come to the rare state ``name``. It is noted only within :func:`watch`.

    ``name`` is a literal text, and no other probe has it: ``tests/simulation/probes.py`` finds all probes in the source.
    """
    if _reached is not None:
        _reached.add(name)


@contextmanager
def watch() -> Iterator[set[str]]:
    """Gives the set of all names that are reached until the block ends. An outer watch gets them at the end of this one."""
    global _reached  # noqa: PLW0603  one comparison is all that a probe may cost, so there is no object to ask
    before, found = _reached, set[str]()
    _reached = found
    try:
        yield found
    finally:
        _reached = before
        if before is not None:
            before |= found
