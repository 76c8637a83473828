"""A token for chaos on a cluster that was there before: its operator sets it, and a user needs it for a run with chaos.

The token is the first line of ``~/.fleet/chaos-token`` on the head, in the home of the user that runs Ray there. A run with chaos needs the
same text in the variable ``FLEET_CHAOS_TOKEN``. The token guards against mistakes alone: a user who starts jobs there can do anything
anyway.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from fleet.errors import ConfigError

VARIABLE, FILE = "FLEET_CHAOS_TOKEN", ".fleet/chaos-token"


def shown() -> str:
    """The digest of this user's token, which travels with the plan; empty without a token."""
    return _digest(os.environ.get(VARIABLE, ""))


def check(digest: str, home: Path) -> None:
    """Raises ConfigError when the cluster whose head has this home asks for another token."""
    path = home / FILE
    wanted = _digest(path.read_text().strip()) if path.exists() else ""
    if not wanted or hmac.compare_digest(wanted, digest):
        return
    reason = f"the cluster's operator has set a token for chaos, and {VARIABLE} has " + ("another" if digest else "none")
    raise ConfigError("--allow-chaos", "yes", reason, f"Ask the operator for it, and set {VARIABLE}; or run without --chaos.")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest() if token else ""
