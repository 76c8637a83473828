"""Without a program that only root can install, tests are left out and named; in CI that is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import CI, LEFT_OUT, reported

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
from tests.support.programs import LeftOut, program

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(LeftOut())
""", """
import pytest
from tests.support.programs import program

@pytest.mark.parametrize("number", [1, 2])
def test_that_needs_it(number):
    program("no-such-program")

def test_that_does_not():
    program("no-such-program", "sh")
"""  # fmt: skip


def outcome(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of pytest on a folder with three tests, two of which need what nobody has."""
    for name, text in zip(("conftest.py", "test_it.py"), TESTS, strict=True):
        (folder / name).write_text(text)
    inherited = {name: value for name, value in os.environ.items() if name not in (CI, LEFT_OUT) and not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir", str(folder), *arguments, str(folder)]
    settings = inherited | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_needs_a_missing_program_is_left_out_and_told(workers: str, tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "-n", workers, **{LEFT_OUT: str(tmp_path / "reasons")})
    assert code == 0, said
    assert "left out: 2 tests (no-such-program is not installed)\n" in said
    assert (tmp_path / "reasons").read_text() == "no-such-program is not installed\n" * 2


def test_in_ci_nothing_may_be_left_out(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "-n", "0", **{CI: "true"})
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "left out: 2 tests (no-such-program is not installed): an error, as CI is set" in said


def test_in_ci_what_needs_hardware_is_told_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "test_gpu.py").write_text(
        "from tests.support.programs import hardware\n\ndef test_that_needs_one():\n    hardware('CUDA GPU')\n\n"
        "def test_that_has_it():\n    hardware('')\n"
    )
    code, said = outcome(tmp_path, "-n", "0", "--ignore", str(tmp_path / "test_it.py"), **{CI: "true"})
    assert code == 0, said
    assert "left out: 1 test (this machine has no CUDA GPU)\n" in said


def test_a_file_of_tests_that_skips_itself_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "test_whole.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    code, said = outcome(tmp_path, "-n", "0", **{CI: "true"})
    assert code == pytest.ExitCode.TESTS_FAILED, said
    assert "1 test (could not import 'no_such_package'" in said


def test_what_was_left_out_is_one_line() -> None:
    assert reported(["b", "a", "b"]) == "2 tests (b), 1 test (a)"
    assert reported([]) == ""
