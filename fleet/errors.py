"""Errors of Fleet. Each names the setting, process or file to act on, and the reason."""

from __future__ import annotations

from reprlib import Repr

_BRIEF = Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 6, 400, 400
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxset = _BRIEF.maxdict = 50
"""A value may be a file's worth of brackets: an error shows its beginning."""


class FleetError(Exception):
    """Base of every error that Fleet raises on purpose."""


class ConfigError(FleetError):
    """A setting is unknown or impossible. Raised before any process starts.

    Args:
        field: the name of the setting, as the user wrote it.
        value: its value.
        reason: the reason why that value cannot work.
        way_out: advice on a value that works.
    """

    def __init__(self, field: str, value: object, reason: str, way_out: str = "") -> None:
        super().__init__(field, value, reason, way_out)
        self.field, self.value, self.reason, self.way_out = field, value, reason, way_out

    def __str__(self) -> str:
        hint = f" {self.way_out}" if self.way_out else ""
        return f"{self.field} = {_BRIEF.repr(self.value)}: {self.reason}.{hint}"


class LoopError(FleetError):
    """A mistake of the train function that would come again in another process. It ends the run at once, and no node is to blame."""


class ProtocolError(FleetError):
    """A message or record breaks the protocol; a bug in Fleet, not in the user's program."""


class LineRefused(FleetError, ConnectionError):
    """A side refused a connection, or ended it, because of a message on it. ``reason`` is one of ``fleet.protocol.proof.Reason``."""

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
        result: the run's ``fleet.Result`` where ``fleet.launch`` raises this; else None.
    """

    result: object = None

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}\n{self.detail}" if self.detail else self.reason


class OutOfSight(FleetError):
    """The run's cluster does not answer, so that the run's state and end are unknown here. The run may go on."""


PASSING = ("unreachable", "timeout", "server")
"""Causes of a store's failure that can pass by themselves."""


def may_pass(error: BaseException) -> bool:
    """Whether a store that failed with ``error`` may work again by itself: it is out of reach, too slow, or has a server error."""
    return getattr(error, "cause", "") in PASSING


class GroupLost(FleetError):
    """The group of ``generation`` cannot be used any more, or could not be formed. The rank quiesces and waits for the next view."""

    def __init__(self, reason: str, generation: int = -1) -> None:
        super().__init__(reason, generation)
        self.reason, self.generation = reason, generation

    def __str__(self) -> str:
        return f"process group of generation {self.generation}: {self.reason}"


class RunOver(BaseException):
    """The run ends, and this rank does not hold the final state. It unwinds the train function, so that no code behind the loop runs here.

    It is no ``Exception``, so that no handler of the user's takes it for a failure of the step.
    """


class Fenced(FleetError):
    """This process is a stale incarnation of its slot: another process has taken its place, so it must exit."""
