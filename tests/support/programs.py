"""Programs that tests run and that no Python package brings. ``make tools`` installs them where it may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from chaos.brake import LIMITS

CI, LEFT_OUT = "CI", "FLEET_LEFT_OUT"
"""Environment variables. With the first nothing may be left out; the second names a file for the reasons, one line a test."""
NO_HARDWARE = "this machine has no"
"""So begins the reason of what may be left out in CI, too."""


def program(*names: str) -> str:
    """The first of ``names`` that is installed. Without one the test is skipped, with the first name as reason."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"{names[0]} is not installed")
    return found


def namespaces() -> None:
    """Skip the test that asks where this process may not make namespaces: it is not root, or its container forbids it."""
    made = subprocess.run([program("unshare"), "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, timeout=60, check=False)
    if made.returncode:
        pytest.skip("namespaces cannot be made here: root and CAP_SYS_ADMIN are needed")


def blkio() -> None:
    """Skip the test that asks where no device can be slowed down."""
    if not LIMITS.exists():
        pytest.skip("no device can be slowed down here: cgroup version 1 is needed")


def hardware(missing: str) -> None:
    """Skip the test that asks where this machine lacks ``missing``. In CI that is told, and no failure: nothing installs it."""
    if missing:
        pytest.skip(f"{NO_HARDWARE} {missing}")


def reported(reasons: Iterable[str]) -> str:
    """``2 tests (a), 1 test (b)``, the most frequent reason first."""
    counted = Counter(reasons).most_common()
    return ", ".join(f"{count} test{'s' if count > 1 else ''} ({reason})" for reason, count in counted)


class LeftOut:
    """A plugin of pytest: tells at the end what was skipped and why. Where ``CI`` is set that is a failure, but for want of hardware."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def _see(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            assert isinstance(report.longrepr, tuple)
            self._reasons.append(report.longrepr[2].removeprefix("Skipped: "))

    @property
    def _is_error(self) -> bool:
        return bool(os.environ.get(CI)) and not all(reason.startswith(NO_HARDWARE) for reason in self._reasons)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._see(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._see(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_error:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._reasons:
            return
        only = f": an error, as {CI} is set" if self._is_error else ""
        terminalreporter.write_line(f"left out: {reported(self._reasons)}{only}", red=bool(only), yellow=not only)
        if file := os.environ.get(LEFT_OUT):
            with Path(file).open("a") as reasons:
                reasons.writelines(f"{reason}\n" for reason in self._reasons)


if __name__ == "__main__":
    print("left out:", reported(Path(sys.argv[1]).read_text().splitlines()) or "nothing")
