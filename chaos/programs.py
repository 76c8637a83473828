"""Starts programs of this package that perform a fault for a while, where their starter cannot. Each ends with its standard input."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Sequence


def begin(program: str, *words: object, descriptors: Sequence[int] = ()) -> subprocess.Popen[str]:
    """Start the file ``program``, which imports only the standard library; it gets these descriptors, too. Raises OSError."""
    command = [sys.executable, "-I", "-S", program, *map(str, words)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors, start_new_session=True, text=True
    )  # fmt: skip


def ready(child: subprocess.Popen[str], limit_s: float) -> str:
    """The reason why the program has not written ``ready`` within the limit; empty when it has."""
    assert child.stdout is not None
    spoken, _, _ = select.select([child.stdout], [], [], limit_s)
    said = child.stdout.readline().strip() if spoken else ""
    return "" if said == "ready" else said or f"it was not ready within {limit_s:g} s"
