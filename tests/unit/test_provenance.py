"""The code that a run is made of: a digest of all that differs from its commit, and the patch with which it can be had again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fleet.host import provenance as made_of
from fleet.host.provenance import PATCH, code_of, provenance

GOOD = "def train(run):\n    pass\n"
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]


def git(folder: Path, *words: str, given: bytes = b"") -> str:
    return subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True, input=given).stdout.decode()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "code" / "jobs"
    folder.mkdir(parents=True)
    (folder / "job.py").write_text(GOOD)
    (folder.parent / ".gitignore").write_text("*.secret\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        git(folder.parent, *words)
    return folder / "job.py"


def digest(script: Path) -> str:
    return str(provenance(str(script))["diff_sha256"])


def test_a_tree_as_committed_leaves_no_patch(script: Path, tmp_path: Path) -> None:
    code = code_of(str(script))
    assert (code.patch, code.left_out, code.record()["patch"]) == (b"", (), "")
    code.keep(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_untracked_files_count_and_ignored_ones_do_not(script: Path) -> None:
    (script.parent / "a.secret").write_text("token")
    assert digest(script) == ""
    module = script.parent.parent / "my model [1].py"
    module.write_text("LAYERS = 1\n")
    one = digest(script)
    module.write_text("LAYERS = 2\n")
    assert len({"", one, digest(script)}) == 3
    assert git(script.parent.parent, "status", "--porcelain").startswith("??")  # git's own index is as it was


def test_the_patch_makes_the_code_again(script: Path, tmp_path: Path) -> None:
    top = script.parent.parent
    script.write_text(GOOD + "# changed\n")
    (script.parent / "model.py").write_text("LAYERS = 2\n")
    (top / "table.bin").write_bytes(bytes(range(256)))
    code = code_of(str(script))
    code.keep(tmp_path / "run")
    assert code.record()["patch"] == PATCH
    git(tmp_path, "clone", "-q", str(top), "again")
    git(tmp_path / "again", "checkout", "-q", code.commit)
    git(tmp_path / "again", "apply", str(tmp_path / "run" / PATCH))
    for name in ("jobs/job.py", "jobs/model.py", "table.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (top / name).read_bytes()
    assert code_of(str(tmp_path / "again" / "jobs" / "job.py")) == code


def test_what_runs_leave_behind_is_no_code(script: Path) -> None:
    for name in ("runs/one/journal.jsonl", "runs/one/twin/part", "runs/nodes.jsonl", "runs/.fleet/token", "jobs/__pycache__/job.pyc"):
        path = script.parent.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert digest(script) == ""


def test_a_large_file_counts_by_name_and_size(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_of, "UNTRACKED_BYTES", 100)
    (script.parent / "large.bin").write_bytes(b"x" * 101)
    code = code_of(str(script))
    assert code.patch == b""
    assert code.record()["untracked"] == ["jobs/large.bin"]
    assert code.record()["untracked_left_out"] == "jobs/large.bin (101 bytes)"
    one = digest(script)
    (script.parent / "large.bin").write_bytes(b"x" * 102)
    assert len({"", one, digest(script)}) == 3


def test_a_large_patch_is_not_kept_and_the_record_says_so(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_of, "PATCH_BYTES", 100)
    script.write_text(GOOD + "# changed\n" * 50)
    code = code_of(str(script))
    code.keep(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert code.record()["patch"] == f"not kept: {len(code.patch)} bytes, at most 100"
