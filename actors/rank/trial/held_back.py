"""What a script would do to the world outside its trial: it ends the trial instead, which says nothing of the script then.

Python tells of each file that it opens, and of other calls, before it makes them (its audit events). A hook cannot be taken away, so this
is for a process that ends with its trial. What a library written in C opens by itself is not seen.
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
"""Events about files besides ``open`` and ``os.mkdir``, and which of their arguments name what they change."""
REACHES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
DEVICES = ("/dev/", "/proc/")
NOTE = "held-back"
"""Of what was held back, in the folder of a trial."""
HERE = ("127.", "::1", "localhost")


class Untried(BaseException):
    """The trial is over, and says nothing of the script. Not an ``Exception``, so that no handler of the script's takes it for its own."""


class HeldBack:
    """Ends the trial of this process, or of a child of it, before it changes a file outside of ``folder``.

    Caches are left alone: what lies below a hidden folder, such as ``~/.cache``. A note of what was held back is in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._inside = f"{os.path.realpath(folder)}{os.sep}"
        self._note = os.open(folder / NOTE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._alone = False
        sys.addaudithook(self._before)

    def once(self, fn: Callable[[], Any]) -> Any:
        """``fn()``, which one rank does for all: an upload, most likely. It may not reach out to other machines and programs, either."""
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
                self._end(f"it connects to {address[0]} in what is done once")
        elif self._alone and event in REACHES:
            self._end("it starts a program in what is done once")

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
