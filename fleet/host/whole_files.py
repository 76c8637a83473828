"""Small files that other processes read: each file is there whole, or as it was before."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file at ``path`` by one with ``text``. Several processes may do so at a time. Raises OSError."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
