"""Errors that say who must act, on which field, and why."""

from __future__ import annotations


class FleetError(Exception):
    """Base of every error that Fleet raises on purpose."""


class ConfigError(FleetError):
    """A setting is unknown or impossible. Raised before any process starts.

    Args:
        field: the name of the setting, as the user wrote it.
        value: what it was set to.
        reason: why that cannot work.
        way_out: what to set instead.
    """

    def __init__(self, field: str, value: object, reason: str, way_out: str = "") -> None:
        super().__init__(field, value, reason, way_out)
        self.field, self.value, self.reason, self.way_out = field, value, reason, way_out

    def __str__(self) -> str:
        hint = f" {self.way_out}" if self.way_out else ""
        return f"{self.field} = {self.value!r}: {self.reason}.{hint}"


class LoopError(FleetError):
    """A mistake of the train function that another process would make, too: it ends the run at once, and no node is to blame."""


class ProtocolError(FleetError):
    """A message or record breaks the protocol; a bug in Fleet, not in the user's program."""


class LineRefused(FleetError, ConnectionError):
    """A connection was refused, or ended, for what came on it. ``reason`` is one of ``fleet.protocol.proof.Reason``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return self.detail


class JournalError(FleetError):
    """A journal cannot be read: it is of another version, or damaged before its last line."""


class LedgerError(FleetError):
    """The rank-seconds of a run overlap or leave a gap."""


class RunFailed(FleetError):
    """The run ended without reaching its last step. ``reason`` is a sentence for the user.

    Attributes:
        result: what the run came to, a ``fleet.Result``, where ``fleet.launch`` raises this; else None.
    """

    result: object = None

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}\n{self.detail}" if self.detail else self.reason


class OutOfSight(FleetError):
    """How a run is, or ends, cannot be seen from here: its cluster does not answer. The run may go on."""


PASSING = ("unreachable", "timeout", "server")
"""Causes of a store's failure that end without anybody's doing."""


def may_pass(error: BaseException) -> bool:
    """Whether a store that failed like this may work again by itself: it is out of reach, too late, or not well."""
    return getattr(error, "cause", "") in PASSING


class GroupLost(FleetError):
    """The group of ``generation`` cannot be used any more, or could not be formed. The rank quiesces and waits for the next view."""

    def __init__(self, reason: str, generation: int = -1) -> None:
        super().__init__(reason, generation)
        self.reason, self.generation = reason, generation

    def __str__(self) -> str:
        return f"process group of generation {self.generation}: {self.reason}"


class RunOver(BaseException):
    """The run ends, and this rank does not hold the final state: unwinds the train function, so that no code behind the loop runs here.

    Not an ``Exception``, so that a handler of the user's does not take it for a failure of the step.
    """


class Fenced(FleetError):
    """This process is a stale incarnation of its slot: another has taken its place, so it must exit."""
