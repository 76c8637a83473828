"""What a killed run leaves in a node's memory is removed by the next one, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fleet.host.leftovers import OWNER, own, sweep


def _owned_by_a_process_that_has_ended(folder: Path) -> None:
    folder.mkdir()
    code = f"from pathlib import Path; from fleet.host.leftovers import own; own(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_folder_whose_owner_has_ended_is_removed(tmp_path: Path) -> None:
    _owned_by_a_process_that_has_ended(tmp_path / "fleet-dead")
    assert sweep(tmp_path, "fleet-") == [tmp_path / "fleet-dead"]
    assert not (tmp_path / "fleet-dead").exists()


def test_a_folder_with_one_owner_that_lives_stays(tmp_path: Path) -> None:
    _owned_by_a_process_that_has_ended(tmp_path / "fleet-shared")
    own(tmp_path / "fleet-shared")
    assert sweep(tmp_path, "fleet-") == []


def test_a_pid_that_another_process_has_now_is_no_owner(tmp_path: Path) -> None:
    _owned_by_a_process_that_has_ended(tmp_path / "fleet-dead")
    (owner,) = (tmp_path / "fleet-dead").glob(f"{OWNER}*")
    owner.rename(owner.with_name(f"{OWNER}1"))
    assert sweep(tmp_path, "fleet-") == [tmp_path / "fleet-dead"]


def test_what_nobody_owns_or_cannot_be_seen_from_here_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "fleet-new").mkdir()
    (tmp_path / "fleet-elsewhere").mkdir()
    (tmp_path / "fleet-elsewhere" / f"{OWNER}12").write_text("5 1")
    (tmp_path / "other").mkdir()
    assert sweep(tmp_path, "fleet-") == []
