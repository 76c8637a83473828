"""A program that strikes one process a moment later, also its own starter.

``python chaos/signaller.py PIDFD KILL|STOP SECONDS`` sends SIGKILL, or SIGSTOP and after so many seconds SIGCONT. SIGCONT comes earlier
when its starter is gone (its standard input ends then), or when it gets SIGTERM. ``python chaos/signaller.py -1 SPIN SECONDS`` keeps a core
busy for as long. It imports nothing but the standard library, as it has to start at once.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from contextlib import suppress

BEFORE_S = 0.1
"""Delay from the order to the blow: the answer to the order goes first."""
LOOK = 1_000_000
"""Turns of a loop between two looks at the clock."""


def signal_later(pidfd: int, what: str, lasts_s: float) -> None:
    """Strike once, and end the stop in time."""
    time.sleep(BEFORE_S)
    with suppress(ProcessLookupError):  # it has ended by itself
        if what == "KILL":
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            select.select([pidfd, sys.stdin], [], [], lasts_s)  # a pidfd can be read when its process has ended
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)


def spin(lasts_s: float) -> None:
    """Keep a core busy until the time is over, or its starter is gone."""
    end_s = time.monotonic() + lasts_s
    while time.monotonic() < end_s and not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(LOOK):
            pass


def main(pidfd: str, what: str, lasts_s: str) -> None:
    """Run as the command line says."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if what == "SPIN":
        spin(float(lasts_s))
    else:
        signal_later(int(pidfd), what, float(lasts_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
