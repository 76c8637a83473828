"""Writers that die, for real, at the worst moments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fleet.instructions import CommitCheckpoint
from fleet.types import Part, StateId
from storage.checkpoint import CheckpointStore, write_part
from storage.files import TEMPORARY, LocalFiles

ROOT = Path(__file__).parents[2]


def die(code: str, *arguments: str) -> None:
    """Run ``code`` in a process of its own, which must end by killing itself."""
    ended = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, timeout=120, check=False)
    assert ended.returncode == -9


DIE_IN_PART = """
import os, signal, sys
import storage.checkpoint as checkpoint, torch
write = checkpoint._Hashing.write
def deadly(self, data):
    write(self, data)
    if self.bytes > 100_000:
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return len(data)
checkpoint._Hashing.write = deadly
checkpoint.write_part(sys.argv[1], "c2", 0, 1, [(i, torch.ones(20_000)) for i in range(10)])
"""

DIE_BEFORE_MANIFEST = """
import os, signal, sys
import torch
from pathlib import Path
from fleet.instructions import CommitCheckpoint
from fleet.types import StateId
from storage.checkpoint import CheckpointStore, write_part
part = write_part(sys.argv[1], "c2", 0, 1, [(0, torch.ones(5))])
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
CheckpointStore(sys.argv[1]).commit(CommitCheckpoint("c2", StateId(0, 2), (part,), "", 0.0, 0.0))
"""


def commit(url: str, checkpoint: str, part: Part) -> int:
    return CheckpointStore(url).commit(CommitCheckpoint(checkpoint, StateId(0, 1), (part,), "", 0.0, 0.0))


@pytest.mark.parametrize("code", [DIE_IN_PART, DIE_BEFORE_MANIFEST], ids=["in a part", "before the manifest"])
def test_whoever_dies_leaves_the_checkpoint_before_it(tmp_path: Path, code: str) -> None:
    url, store = str(tmp_path), CheckpointStore(str(tmp_path))
    commit(url, "c1", write_part(url, "c1", 0, 1, [(0, torch.zeros(5))]))
    die(code, url)
    left = [file.name for file in (tmp_path / "checkpoints" / "c2").iterdir()]
    assert any(name.startswith(TEMPORARY) for name in left), "it died while it wrote"
    assert "manifest.json" not in left
    assert store.newest() == store.newest_valid() == "c1"
    commit(url, "c2", write_part(url, "c2", 0, 1, [(0, torch.full((5,), 2.0))]))
    assert torch.equal(store.load("c2")[1][0], torch.full((5,), 2.0)), "the next attempt is not disturbed by what was left"
    commit(url, "c3", write_part(url, "c3", 0, 1, [(0, torch.zeros(5))]))
    assert store.retain(1) == ("c2", "c1")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["c3"]


def test_a_writer_that_raises_leaves_no_file_and_keeps_the_one_before(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    with files.writing("d/f") as file:
        file.write(b"old")

    def half() -> None:
        with files.writing("d/f") as file:
            file.write(b"ne")
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        half()
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["f"]
    assert (tmp_path / "d" / "f").read_bytes() == b"old"


def test_importing_storage_loads_neither_ray_nor_torch() -> None:
    code = "import sys, storage.checkpoint; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
