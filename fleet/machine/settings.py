"""The part of ``FleetMachine`` that takes new settings in a running run."""

from __future__ import annotations

from fleet.machine.state import MachineState
from fleet.protocol.decisions import SettingTo
from fleet.protocol.events import SettingChanged
from fleet.protocol.records import DecisionMade
from fleet.settings.live import changed


def on_setting(machine: MachineState, event: SettingChanged, now_s: float) -> None:
    """Journal a change and make it. The sender has checked it: see :func:`fleet.settings.live.changed`."""
    text = f"{event.key} = {event.value:g}"
    machine.write(DecisionMade("settings", "set", text, SettingTo(event.key, event.value), now_s))
    configure(machine, event.key, event.value)


def configure(machine: MachineState, key: str, value: float) -> None:
    """Give a setting a new value from now on. Raises ConfigError when the value is not allowed."""
    machine.settings = settings = changed(machine.settings, key, value)
    if key.startswith("checkpoint."):
        machine.checkpoints.configure(settings)
    if key == "timeouts.progress_s":
        machine.progress.limit_s = machine.progress.ceiling_s = value
    if machine.stragglers.policy is not None:
        machine.stragglers.policy.configure(settings.straggler)
