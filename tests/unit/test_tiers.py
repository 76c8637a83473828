"""Every test file is in a tier, and what runs only at night is named with its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_file_is_in_a_tier() -> None:
    assert not [path for path in tiers.test_files() if tiers.tier_of(path) is None]


def test_a_test_file_in_no_tier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiers.tier_of("tests/elsewhere/test_new.py") is None
    monkeypatch.setattr(tiers, "test_files", lambda: ["tests/elsewhere/test_new.py"])
    with pytest.raises(AssertionError):
        test_every_test_file_is_in_a_tier()


def test_each_line_names_what_is_there_once_and_says_why() -> None:
    lines = [line for part in (*tiers.TIERS.values(), *tiers.NIGHTLY.values()) for line in part]
    assert len(lines) == len(set(lines)) == len(tiers.LINES)
    assert not [line for line in lines if not (ROOT / line.partition("::")[0]).exists()]
    assert not [line for part in tiers.NIGHTLY.values() for line, why in part.items() if len(why.split()) < 3]


def test_the_most_specific_line_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = {
        "tests/a": "test",
        "tests/a/test_b.py": "processes",
        "tests/a/test_b.py::test_c": "hosts",
        "tests/a/test_b.py::test_c[1]": "x",
    }
    monkeypatch.setattr(tiers, "LINES", reported)
    assert tiers.tier_of("tests/a/test_x.py::test_y[1]") == "test"
    assert tiers.tier_of("tests/a/test_b.py::test_y") == "processes"
    assert tiers.tier_of("tests/a/test_b.py::test_c[2]") == "hosts"
    assert tiers.tier_of("tests/a/test_b.py::test_c[1]") == "x"
    assert tiers.tier_of("tests/other/test_b.py") is None
    paths = ["tests/a/test_b.py", "tests/a/test_x.py"]
    assert tiers.files("hosts", paths) == ["tests/a/test_b.py"] and tiers.files("test", paths) == ["tests/a/test_x.py"]


def test_a_line_that_names_no_test_of_a_collected_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = {"tests/a": "test", "tests/a/test_b.py::test_gone": "hosts", "tests/a/test_other.py::test_c": "hosts"}
    monkeypatch.setattr(tiers, "LINES", reported)
    assert tiers.unknown(["tests/a/test_b.py::test_c"], whole=True) == ["tests/a/test_b.py::test_gone"]
    assert tiers.unknown(["tests/a/test_b.py::test_c"], whole=False) == []


def test_pytest_runs_a_tier_alone_and_refuses_an_unknown_one() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/contract/test_rank_machine.py"]
    own = subprocess.run([*command, "--tier", "test"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    other = subprocess.run([*command, "--tier", "hosts"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    wrong = subprocess.run([*command, "--tier", "dreams"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert own.returncode == 0 and "deselected" not in own.stdout
    assert "no tests collected" in other.stdout and "deselected" in other.stdout
    assert wrong.returncode != 0 and "dreams" in wrong.stderr
