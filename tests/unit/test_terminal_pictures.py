"""The terminal of the tests shows what a real one would."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console
from rich.style import Style

from tests.support.pictures import in_terminal, picture, screen

PROGRAM = """
from rich.console import Console
from rich.progress import Progress
console = Console()
with Progress(console=console, transient=True, auto_refresh=False) as progress:
    task = progress.add_task("training", total=3)
    for step in range(3):
        console.print(f"[red]- rank {step}[/] is lost")
        progress.update(task, advance=1, refresh=True)
console.print("[bold]done[/] " + str(console.width))
"""


def run(program: str, folder: Path, columns: int = 60) -> list[bytes]:
    return in_terminal([sys.executable, "-c", program], os.environ, folder, 30.0, columns)


def test_a_bar_that_was_erased_is_not_to_be_seen_and_colours_are(tmp_path: Path) -> None:
    data = b"".join(run(PROGRAM, tmp_path))
    lines = screen(data, 60)
    assert data.count(b"training") >= 3
    assert [line.plain for line in lines] == ["- rank 0 is lost", "- rank 1 is lost", "- rank 2 is lost", "done 60"]
    assert lines[0].get_style_at_offset(Console(), 0).color == Style(color="red").color


def test_a_program_that_fails_or_hangs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="oops"):
        run("raise SystemExit('oops')", tmp_path)
    with pytest.raises(TimeoutError, match="did not end"):
        in_terminal([sys.executable, "-c", "while True: print('on and on')"], os.environ, tmp_path, 0.5)


def test_the_picture_is_whole_and_fetches_nothing() -> None:
    lines = screen(b"\x1b[32mstep 12\x1b[0m & <b>\r\n\x1b[38;2;1;2;3mdone\x1b[0m")
    drawn = picture(lines, "fleet run")
    root = ET.fromstring(drawn)
    text = " ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")).replace("\xa0", " ")
    assert "step 12" in text and "& <b>" in text and "done" in text and "#010203" in drawn
    assert "url(http" not in drawn and "@font-face" not in drawn
