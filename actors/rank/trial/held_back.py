"""Keeps a script from changes outside of its trial: such a change ends the trial, without a result.

Python calls audit hooks before it opens a file, and before some other calls. A hook cannot be removed, so this is for a process that ends
with its trial. It does not see files that a library written in C opens by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
CHANGES = {
    "os.remove": (0,),
    "os.rmdir": (0,),
    "shutil.rmtree": (0,),
    "os.truncate": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
}
"""Events about files besides ``open`` and ``os.mkdir``, and which of their arguments name the changed files."""
REACHES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
DEVICES = ("/dev/", "/proc/")
NOTE = "held-back"
"""The file in a trial's folder that notes the calls held back."""
HERE = ("127.", "::1", "localhost")


class Untried(BaseException):
    """The trial is over without a result. It is no ``Exception``, so that no handler of the script catches it."""


class HeldBack:
    """Ends the trial of this process, or of a child of it, before it changes a file outside of ``folder``.

    Files below a hidden folder, such as ``~/.cache``, may change, as they are caches. A file in the folder notes the call that was held
    back.
    """

    def __init__(self, folder: Path) -> None:
        self._inside = f"{os.path.realpath(folder)}{os.sep}"
        self._note = os.open(folder / NOTE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._alone = False
        sys.addaudithook(self._before)

    def once(self, fn: Callable[[], Any]) -> Any:
        """``fn()``, which one rank runs for all, most likely an upload. It may also not connect to other machines or start programs."""
        self._alone = True
        try:
            return fn()
        finally:
            self._alone = False

    def _before(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if (args[2] or 0) & WRITES:
                self._check(args[0])
        elif event == "os.mkdir":
            if not os.path.isdir(args[0]):
                self._check(args[0])
        elif event in CHANGES:
            for number in CHANGES[event]:
                self._check(args[number])
        elif self._alone and event == "socket.connect":
            if isinstance(address := args[1], tuple) and not str(address[0]).startswith(HERE):
                self._end(f"it connects to {address[0]} in a function of run.once")
        elif self._alone and event in REACHES:
            self._end("it starts a program in a function of run.once")

    def _check(self, path: Any) -> None:
        if isinstance(path, int):  # it is open already
            return
        real = os.path.realpath(os.fsdecode(path))
        hidden = any(part.startswith(".") for part in real.split(os.sep))
        if not hidden and not real.startswith((self._inside, *DEVICES)):
            self._end(f"it changes {real}")

    def _end(self, what: str) -> None:
        os.write(self._note, f"{what}\n".encode())
        raise Untried(what)
