"""Programs that call ``fleet.launch`` and ``fleet.Trainer``, each in a process of its own: one process is in one cluster at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from chaos.arrivals import save_trace
from fleet.protocol.types import Fault
from tests.support.processes import begin

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
HEAD = """
import json, os, signal, sys, tempfile, threading, time
from pathlib import Path
import torch
import fleet

FLAGS = Path(os.environ["FLAGS"])

def told(**facts):
    (FLAGS / "facts.json").write_text(json.dumps(facts))

def first(name):
    try:
        os.close(os.open(FLAGS / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
"""


def start(folder: Path, body: str, *command: str) -> subprocess.Popen[str]:
    """A program in ``folder``, with the functions above; ``command`` stands before its path."""
    script = folder / "test_program.py"
    script.write_text(HEAD + body)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FLAGS": str(folder)}
    line = [sys.executable, *command, str(script)]
    return begin(line, folder, environment)


def facts(folder: Path, body: str, *command: str) -> dict[str, Any]:
    """What the program has told, once it has ended well."""
    process = start(folder, body, *command)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return found | {"said": said}


def kill_trace(folder: Path, *kills: tuple[float, int]) -> Path:
    """Faults that kill ranks: (seconds of training, slot) of each."""
    path = folder / "trace.csv"
    save_trace(tuple(Fault(f"f{number}", at_s, "gpu", "kill_rank", slot=slot) for number, (at_s, slot) in enumerate(kills)), path)
    return path
