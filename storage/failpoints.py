"""Where a crash of the store is tried. Code that changes files says :func:`reach` with a label; nothing happens unless a test listens."""

from __future__ import annotations

from collections.abc import Callable

LABELS = (
    "save: file opened", "save: block stored", "save: about to flush", "save: about to be placed", "save: placed",
    "upload: begun", "upload: block sent", "upload: about to complete", "upload: completed",
    "commit: parts checked", "commit: values written", "commit: metadata written", "commit: manifest written",
    "retain: looked around", "retain: about to delete", "delete: manifest gone", "delete: one file gone", "retain: swept",
    "restore: manifest read", "restore: block read", "restore: verified",
)  # fmt: skip
"""Every label, so that a sweep over them can show that it left none out."""

listener: Callable[[str], None] | None = None


def reach(label: str) -> None:
    """Tell the listener, if there is one, that execution has come to ``label``."""
    if listener is not None:
        listener(label)
