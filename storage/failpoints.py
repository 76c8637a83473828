"""Where a crash of the store is tried. Code that changes files says :func:`reach` with a label; nothing happens unless a test listens."""

from __future__ import annotations

from collections.abc import Callable

listener: Callable[[str], None] | None = None


def reach(label: str) -> None:
    """Tell the listener, if there is one, that execution has come to ``label``."""
    if listener is not None:
        listener(label)
