"""Who operates a cluster that was there before may keep chaos to those who know a token.

The token is the first line of ``~/.fleet/chaos-token`` on the head, of the user as whom Ray runs there. Who starts a run with chaos has the
same in the variable ``FLEET_CHAOS_TOKEN``. It is a guard against mistakes: who may start jobs on the cluster can do as they like anyway.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from fleet.errors import ConfigError

VARIABLE, FILE = "FLEET_CHAOS_TOKEN", ".fleet/chaos-token"


def shown() -> str:
    """What this process's user has to show: the token's digest, which travels with the plan; empty without one."""
    return _digest(os.environ.get(VARIABLE, ""))


def check(digest: str, home: Path) -> None:
    """Whether chaos is allowed on the cluster whose head has this home. Raises ConfigError."""
    path = home / FILE
    wanted = _digest(path.read_text().strip()) if path.exists() else ""
    if not wanted or hmac.compare_digest(wanted, digest):
        return
    reason = f"the cluster's operator has set a token for chaos, and {VARIABLE} has " + ("another" if digest else "none")
    raise ConfigError("--allow-chaos", "yes", reason, f"Ask the operator for it, and set {VARIABLE}; or run without --chaos.")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest() if token else ""
