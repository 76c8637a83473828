"""The live page in a real browser. ``python -m tests.contract.test_live_page RUN_FOLDER`` makes the screenshots of the documentation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from fleet import records as r
from fleet.types import Fault, Member
from tests.golden.journals import Story, one_loss
from tests.support.browser import chromium
from tests.support.watching import READ_TOKEN, WRITE_TOKEN, Watched, controls, watched

DOCS = Path(__file__).parents[2] / "docs"
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 390, "height": 844}
WAIT_MS = 20_000
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Watched]:
    with watched(tmp_path) as server:
        yield server


@contextmanager
def opened(browser: Browser, url: str, *, loses_server: bool = False, **context: object) -> Iterator[Page]:
    """A page; whatever it logs or throws fails the test, but for requests that fail while its server is gone."""
    said: list[str] = []
    page = browser.new_context(viewport=WIDE, **context).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(WAIT_MS)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    yield page
    page.context.close()
    assert [line for line in said if not (loses_server and "net::ERR" in line)] == []


def text(page: Page, selector: str, words: str) -> None:
    """``words`` come to be shown there."""
    expect(page.locator(selector)).to_contain_text(words, timeout=WAIT_MS)


def test_a_finished_run_opens_from_its_journal(browser: Browser, served: Watched) -> None:
    served.write("done", list(one_loss("f1").records))
    with opened(browser, f"{served.url}/") as page:
        page.get_by_role("link", name="done").click()
        text(page, "#status", "completed")
        text(page, "#figures", "68.12%")
        text(page, "#figures", "60 steps")
        text(page, "#waterfall", "provision")
        text(page, "#prediction", "faults")
        text(page, "#legend", "rework")
        text(page, "#ledger", "The ledger closes")
        assert page.title() == "68.12% story"
        assert page.locator("#rows svg").count() == 2
        assert "provision 1.0 s" in (page.locator("#rows svg").nth(1).get_attribute("aria-label") or "")
        assert page.locator("#chaos").is_hidden()


def test_a_fault_tells_its_story_to_mouse_and_keyboard(browser: Browser, served: Watched) -> None:
    served.write("done", list(one_loss("f1").records))
    with opened(browser, f"{served.url}/runs/done") as page:
        mark = page.get_by_role("button", name="f1 executed: kill_rank (gpu), at 2.1 s")
        mark.click()
        text(page, "#story", "f1: kill_rank (gpu), 1.5 s of rank time")
        text(page, "#story", "rank 1.0 is lost: signal 9")
        expect(page.locator("#marks button").first).to_have_attribute("aria-pressed", "true")
        page.reload()
        text(page, "#status", "completed")
        page.keyboard.press("Tab")
        text(page, ":focus", "Skip to the figures")
        page.locator("#faults button").focus()
        page.keyboard.press("Enter")
        text(page, "#story", "provision 1.0 s")


def test_a_live_run_is_followed_and_found_again(browser: Browser, tmp_path: Path) -> None:
    records = list(one_loss("f1").records)
    half = next(number for number, record in enumerate(records) if isinstance(record, r.ProcessLost))
    with watched(tmp_path) as served:
        served.write("run", records[:half])
        port = served.server.port
        with opened(browser, f"{served.url}/runs/run", loses_server=True) as page:
            text(page, "#line", "live")
            text(page, "#figures", "10 steps")
            served.write("run", records[half : half + 40])
            text(page, "#faults", "f1")
            served.server.__exit__(None, None, None)
            text(page, "#line", "reconnecting")
            with watched(tmp_path, port=port) as again:
                text(page, "#line", "live")
                again.write("run", records[half + 40 :])
                text(page, "#figures", "60 steps")
                text(page, "#status", "completed")


def test_chaos_is_ordered_by_whoever_has_the_token(browser: Browser, served: Watched) -> None:
    served.write("run", list(one_loss().records[:20]))
    port = controls()
    served.server.control("run", port)
    with opened(browser, f"{served.url}/runs/run") as page:
        text(page, "#status", "running")
        assert page.locator("#chaos").is_hidden()
    with opened(browser, f"{served.url}/runs/run#token={WRITE_TOKEN}") as page:
        assert WRITE_TOKEN not in page.url
        text(page, "#chaos-words", "Planned faults strike.")
        page.get_by_role("button", name="Stop").click()
        text(page, "#chaos-words", "No planned fault strikes.")
        page.locator("#strike-kind").select_option("hang")
        page.locator("#strike-place").fill("2")
        page.get_by_role("button", name="Strike once").click()
        text(page, "#chaos-said", "Ordered: by-hand-1")
        page.get_by_role("button", name="Start").click()
        text(page, "#chaos-words", "Planned faults strike.")
        page.locator("#strike-kind").select_option("lose_node")
        text(page, "#strike-where", "node")
        port.close()
        page.get_by_role("button", name="Strike once").click()
        expect(page.locator("#chaos")).to_be_hidden(timeout=WAIT_MS)
    assert [type(each).__name__ for each in port.take()] == ["Stop", "Strike", "Start"]


def test_a_reader_without_a_token_is_asked_for_it(browser: Browser, tmp_path: Path) -> None:
    with watched(tmp_path, READ_TOKEN) as served:
        served.write("run", list(one_loss().records))
        page = browser.new_page()
        page.goto(f"{served.url}/runs/run")
        page.get_by_label("This server asks for a token:").fill(READ_TOKEN)
        page.get_by_role("button", name="Open").click()
        text(page, "#status", "completed")
        page.close()


def test_text_of_the_journal_stays_text(browser: Browser, served: Watched) -> None:
    story = Story(world=2)
    story.records[0] = r.RunStarted(r.VERSION, EVIL, 0.0, 1.7e9, 2, 0, 16, EVIL)
    story.view(1, [(0, 0), (1, 0)], 100)
    story.records.append(r.FaultRecord(Fault(EVIL, 0.2, EVIL, EVIL, slot=0), "executed", 0.2, (Member(0, 0),), EVIL))
    story.lost(0, 0, 300, cause=EVIL, fault=EVIL)
    story.records.append(r.DecisionMade("interval", EVIL, EVIL, {}, 0.4))
    story.records.append(r.Measurement(r.StateId(0, 1), EVIL, 1.0, 0.4))
    story.records.append(r.RunEnded("failed", EVIL, 0.5, EVIL, EVIL))
    served.write("evil", story.records)
    with opened(browser, f"{served.url}/runs/evil") as page:
        text(page, "#run", EVIL)
        page.locator("#faults button").click()
        text(page, "#story", EVIL)
        text(page, "#seats", EVIL)
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(browser: Browser, served: Watched, tmp_path: Path, scheme: str) -> None:
    served.write("done", list(one_loss("f1").records))
    with opened(browser, f"{served.url}/runs/done", color_scheme=scheme) as page:
        text(page, "#status", "completed")
        for size in (WIDE, NARROW):
            page.set_viewport_size(size)  # type: ignore[arg-type]
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.screenshot(path=tmp_path / "page.png", full_page=True)
            assert page.evaluate(CONTRAST) >= 4.5


CONTRAST = """() => {
  const part = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map((v) => part(Number(v) / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const own = (e) => getComputedStyle(e).backgroundColor;
  const behind = (e) => (e === document.body || own(e) !== "rgba(0, 0, 0, 0)" ? own(e) : behind(e.parentElement));
  const ratio = (e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const all = [...document.querySelectorAll("h1, h2, p, td, th, dd, dt, small, li, button:not(:disabled), a:not(.skip), .badge")];
  return Math.min(...all.filter((e) => e.offsetParent && e.textContent.trim()).map(ratio));
}"""
"""The least contrast between a text and what lies behind it, as WCAG counts it."""


def make_screenshots(folder: Path) -> None:
    """Two widths, light and dark, of the run in ``folder``, whose first fault is chosen."""
    with watched(folder.parent) as served, chromium() as browser:
        for name, size, scheme in (("live-wide", WIDE, "light"), ("live-narrow", NARROW, "dark")):
            with opened(browser, f"{served.url}/runs/{folder.name}", color_scheme=scheme) as page:
                expect(page.locator("#status")).not_to_contain_text("running", timeout=WAIT_MS)
                page.set_viewport_size(size)  # type: ignore[arg-type]
                page.locator("#faults button").last.click()
                page.evaluate("scrollTo(0, 0)")
                page.screenshot(path=DOCS / f"{name}.png", full_page=size is WIDE)


if __name__ == "__main__":
    make_screenshots(Path(sys.argv[1]).resolve())
