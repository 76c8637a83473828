"""The examples of ``docs/extending.md``, each on a copy of the packages: what a heading promises is counted, and its last block runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.blocks import ROOT, Block, blocks_of
from tests.tidy.rules import SHIPPED

PAGE = "docs/extending.md"
PLACE = re.compile(r'(?P<how>new|into) (?P<path>[\w/.]+\.(?:py|toml))(?: (?P<side>after|before|at) "(?P<line>.+)")?')


@dataclass(frozen=True)
class Example:
    """One section: how many files its heading promises, the blocks that change files, and the one that shows what then holds."""

    title: str
    files: int
    changes: tuple[Block, ...]
    check: Block


def examples() -> list[Example]:
    text = (ROOT / PAGE).read_text()
    found_in = re.finditer(r"^## (.+): (\d+) files?$", text, re.M)
    headings = [(text[: match.start()].count("\n") + 1, match[1], int(match[2])) for match in found_in]
    found = []
    for (line, title, files), end in zip(headings, [*(line for line, *_ in headings[1:]), 10**9], strict=True):
        blocks = [block for block in blocks_of(PAGE) if line < block.line < end]
        [check] = [block for block in blocks if block.marker == "check"]
        found.append(Example(title, files, tuple(block for block in blocks if PLACE.fullmatch(block.marker)), check))
    return found


def put(block: Block, tree: Path) -> str:
    """Carry one block out; the path of the file that it changes."""
    place = PLACE.fullmatch(block.marker)
    assert place is not None
    path = tree / place["path"]
    assert path.exists() == (place["how"] == "into"), f"{block}: {place['path']}"
    if place["how"] == "new":
        path.write_text(block.text)
        return place["path"]
    lines = path.read_text().splitlines(keepends=True)
    [at] = [number for number, line in enumerate(lines) if line.strip().startswith(place["line"])]
    first, last = {"before": (at, at), "at": (at, at + 1), "after": (at + 1, at + 1)}[place["side"]]
    lines[first:last] = [block.text]
    path.write_text("".join(lines))
    return place["path"]


def copied(folder: Path) -> Path:
    for package in SHIPPED:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(block: Block, tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(block.text)]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.title)
def test_an_example_works_and_takes_as_many_files_as_it_says(example: Example, tmp_path: Path) -> None:
    tree = copied(tmp_path)
    assert run(example.check, tree).returncode != 0, "what is shown holds without the example"
    touched = {put(block, tree) for block in example.changes}
    assert len(touched) == example.files, touched
    done = run(example.check, tree)
    assert done.returncode == 0, done.stderr


def test_there_is_an_example_of_each() -> None:
    assert {example.title: example.files for example in examples()} == {
        "A fault kind": 2, "A straggler policy": 2, "A metric": 1, "A checkpoint tier": 4, "A layout of the state": 2
    }  # fmt: skip
