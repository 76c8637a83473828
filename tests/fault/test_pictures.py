"""The pictures of the documentation are those of a real run, and show what they should. With FLEET_WRITE_DOCS=1 they are written there."""

from __future__ import annotations

import json
import lzma
import os
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect
from rich.text import Text

from dashboards.pages.wrong import verdict, wrong
from fleet.host.processes import calling
from fleet.ledger.goodput import Ledger
from fleet.ledger.tallies import Tally
from fleet.protocol.journal import decode_line
from fleet.protocol.records import Committed, FaultRecord, Measurement, ProcessUp, Record, RunEnded, RunStarted
from tests.support.browser import FIRST_SCREEN, LAPTOP, NARROW, WAIT_MS, WIDE, opened, outside, text
from tests.support.journals import records
from tests.support.pictures import in_terminal, picture, screen
from tests.support.watching import watched

ROOT = Path(__file__).resolve().parents[2]
WRITES = os.environ.get("FLEET_WRITE_DOCS") == "1"
STEPS = 120 if WRITES else 40
LIMIT_S = 280.0
MOST_BYTES, LATE_UNIX_S = 60_000, 4e9
REAL = ROOT / "tests" / "golden" / "long.jsonl.xz"
SECRET = re.compile("(?<=token=)[0-9a-f]+")
RUN = [
    "examples/gpt.py",
    "--world",
    "3",
    "--spares",
    "1",
    "--seed",
    "7",
    "--chaos",
    "mtbf=5s",
    "--set",
    f"steps={STEPS}",
    "--name",
    "gpt",
    "--config",
    "prices.toml",
]
PRICES = """[cost]
usd_per_rank_hour = 2.0
watts_per_rank = 700.0
g_co2_per_kwh = 300.0
budget_usd = 1.0
"""


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A run through faults in a terminal: its folder, and what it wrote."""
    home = tmp_path_factory.mktemp("home")
    (home / "examples").symlink_to(ROOT / "examples")
    (home / "prices.toml").write_text(PRICES)
    command = calling("fleet.app.cli.main", "main", "run", *RUN, "--storage", "runs")
    said = in_terminal(command, os.environ | {"PYTHONPATH": str(ROOT)}, home, LIMIT_S)
    return home / "runs" / "gpt", said


def shown(folder: Path, said: list[bytes]) -> list[Text]:
    """The lines of the terminal, with dots in place of the run's token, and ``~`` for where its runs are kept."""
    lines = screen(b"".join(said))
    for line in lines:
        line.plain = SECRET.sub(lambda found: "." * len(found[0]), line.plain).replace(str(folder.parents[1]), "~")
    return lines


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ROOT / "docs" if WRITES else tmp_path_factory.mktemp("pictures")


def executed(folder: Path) -> list[str]:
    return [record.fault.id for record in records(folder) if isinstance(record, FaultRecord) and record.phase == "executed"]


def test_the_terminal_shows_the_run_and_its_end(pieces: tuple[Path, list[bytes]], pictures: Path) -> None:
    folder, said = pieces
    lines = shown(folder, said)
    seen = "\n".join(line.plain for line in lines)
    assert [record.status for record in records(folder) if isinstance(record, RunEnded)] == ["completed"]
    assert executed(folder), "no fault struck: the pictures would show nothing"
    assert "token=..." in seen and not SECRET.search(seen)
    assert "goodput" in seen and any(fault in seen for fault in executed(folder))
    (pictures / "terminal.svg").write_text(picture(lines, f"fleet run {' '.join(RUN)}"))


def test_the_terminal_shows_how_far_the_run_is(pieces: tuple[Path, list[bytes]], pictures: Path) -> None:
    folder, said = pieces
    lines = shown(folder, said[: 2 * len(said) // 3])
    seen = "\n".join(line.plain for line in lines)
    assert "step" in lines[-1].plain and "goodput" in lines[-1].plain, seen
    (pictures / "terminal-live.svg").write_text(picture(lines, f"fleet run {' '.join(RUN)}"))


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_the_page_shows_the_run(pieces: tuple[Path, list[bytes]], browser: Browser, size: dict[str, int], scheme: str) -> None:
    folder, _ = pieces
    measured = [record for record in records(folder) if isinstance(record, Measurement) and record.name == "loss"]
    with watched(folder.parent) as served, opened(browser, f"{served.url}/runs/gpt", size, color_scheme=scheme) as page:
        expect(page.locator("#status")).not_to_contain_text("running", timeout=WAIT_MS)
        text(page, "#ledger", "The ledger closes")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert set(executed(folder)) <= marked(page, "goodput")
        assert set(executed(folder)) & marked(page, "loss")
        step = max(record.state.step for record in measured)
        expect(chart(page, "loss").locator(".readout")).to_contain_text(f"newest: step {step}, ")
        page.locator("#faults button").last.click()
        text(page, "#story", executed(folder)[0])
        point_at(page, chart(page, "loss"))


def test_the_first_screen_says_whether_it_is_well_what_it_costs_and_what_is_wrong(
    pieces: tuple[Path, list[bytes]], browser: Browser
) -> None:
    folder, _ = pieces
    with watched(folder.parent) as served, opened(browser, f"{served.url}/runs/gpt", LAPTOP) as page:
        expect(page.locator("#status")).not_to_contain_text("running", timeout=WAIT_MS)
        text(page, "#figures", "tokens a second")
        for words in ("USD so far", "kWh so far", "kg CO2 so far", "of 1 USD", "per million tokens"):
            text(page, "#cost", words)
        short = "" if WRITES else "|FLOPs are not counted"  # where no process of the first rank has lived for ten steps
        expect(page.locator("#factors")).to_contain_text(re.compile(f"of the measured peak{short}"), timeout=WAIT_MS)
        executed_ones = page.locator("#faults tr").filter(has_not_text="suppressed").locator("button")
        expect(page.locator("#wrong button").first).to_have_text(executed_ones.first.inner_text())
        assert outside(page, *FIRST_SCREEN) == []


@pytest.mark.parametrize(("end", "size", "scheme"), [("", LAPTOP, "light"), ("-phone", NARROW, "dark")])
@pytest.mark.parametrize("state", ["starting", "well", "degraded", "ended"])
def test_the_page_says_how_it_is(
    pictures: Path, browser: Browser, tmp_path: Path, state: str, end: str, size: dict[str, int], scheme: str
) -> None:
    """The journal of a run that has been, as it was at such a moment, seen then."""
    with lzma.open(REAL) as file:
        found = [decode_line(line) for line in file]
    with watched(tmp_path) as served:
        served.write("gpt", moment(found, state))
        os.utime(tmp_path / "gpt" / "journal.jsonl", (LATE_UNIX_S, LATE_UNIX_S))  # it grows, however slow this machine is
        with opened(browser, f"{served.url}/runs/gpt", size, color_scheme=scheme) as page:
            expect(page.locator("#verdict")).to_have_class("stopped" if state == "ended" else state, timeout=WAIT_MS)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert outside(page, "#status", "#verdict") == []
            expect(page.locator("#cost")).to_contain_text("for the start" if state == "starting" else "of it to faults")
            screenshot(page, pictures / f"live-{state}{end}.png")


def moment(found: list[Record], state: str) -> list[Record]:
    """The records until the newest moment that was in ``state``, with a start that makes that moment now."""
    ledger, tally, last = Ledger(), Tally(), len(found) if state == "ended" else 0
    for number, record in enumerate(found, 1):
        ledger.apply(record)
        tally.add(record)
        if isinstance(record, ProcessUp | Committed) and state != "ended":
            summary = ledger.summary(record.at_s)
            last = number if verdict(summary, wrong(summary, tally.slots(), injected=tally.injected())).state == state else last
    assert last, f"the run was never {state}"
    begun, newest_s = found[0], max(getattr(record, "at_s", 0.0) for record in found[:last])
    assert isinstance(begun, RunStarted)
    config = json.loads(begun.config)
    config["settings"]["cost"] = tomllib.loads(PRICES)["cost"]
    unix_s = time.time() - (newest_s - begun.at_s)
    return [replace(begun, run="gpt", unix_time_s=unix_s, config=json.dumps(config)), *found[1:last]]


def screenshot(page: Page, path: Path) -> None:
    """Of what is on the screen, in few colours."""
    page.screenshot(path=path)
    with Image.open(path) as taken:
        taken.convert("RGB").quantize(64).save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES


def marked(page: Page, name: str) -> set[str]:
    """The ids of the faults that are marked on a curve."""
    marks = chart(page, name).locator(".fault").all()
    return {(mark.get_attribute("title") or "").partition(":")[0] for mark in marks}


def chart(page: Page, name: str) -> Locator:
    return page.locator(f"[data-curve='{name}']")


def point_at(page: Page, found: Locator) -> None:
    """As the mouse would, and as the arrow keys do: it stays there while the page scrolls."""
    plot = found.get_by_role("slider")
    plot.press("End")
    for _ in range(10):
        plot.press("ArrowLeft")
    expect(found.locator(".readout")).not_to_contain_text("newest")
    plot.blur()
