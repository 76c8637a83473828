"""Fleet: train through failure, inject failure on purpose, account for every rank-second.

``import fleet`` is light; torch and ray are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.rank.loop import Run as Run
    from actors.rank.step import Step as Step
    from fleet.app.configuration import configured as configured

__version__ = "0.1.0"
__all__ = ["Run", "Step", "__version__", "configured"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in ("Run", "Step"):
        from actors.rank import loop

        return getattr(loop, name)
    if name == "configured":
        from fleet.app import configuration

        return configuration.configured
    raise AttributeError(f"module 'fleet' has no attribute {name!r}")
