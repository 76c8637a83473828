"""The live page in a real browser. Its pictures in the documentation are those of a real run: ``tests/fault/test_pictures.py``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from fleet.host import follow
from fleet.ledger.categories import MEANINGS
from fleet.ledger.report import report_of
from fleet.protocol import records as r
from fleet.protocol.causes import TrainRaised
from fleet.protocol.types import Fault, Member, Process
from tests.golden.journals import Story, one_loss
from tests.support.browser import NARROW, WAIT_MS, WIDE, opened, text
from tests.support.waiting import until
from tests.support.watching import READ_TOKEN, WRITE_TOKEN, Watched, controls, watched
from tests.unit.test_curves import learning

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


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
        text(page, "#story", "rank 1.0 is lost: killed by SIGKILL")
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
        page.locator("#inject-kind").select_option("hang")
        page.locator("#inject-place").fill("2")
        page.get_by_role("button", name="Strike once").click()
        text(page, "#chaos-said", "Ordered: by-hand-1")
        page.get_by_role("button", name="Start").click()
        text(page, "#chaos-words", "Planned faults strike.")
        page.get_by_role("button", name="Heal all").click()
        text(page, "#chaos-said", "Ordered: the faults that last are healed")
        page.locator("#inject-kind").select_option("lose_node")
        text(page, "#inject-where", "node")
        page.locator("#inject-kind").select_option("store_gone")
        expect(page.locator("#inject-place")).to_be_hidden()
        page.locator("#inject-kind").select_option("lose_node")
        text(page, "#inject-where", "node")
        port.close()
        page.get_by_role("button", name="Strike once").click()
        expect(page.locator("#chaos")).to_be_hidden(timeout=WAIT_MS)
    stop, fault, *others = port.take()
    assert (stop, others) == ("stop", ["start", "heal"]) and isinstance(fault, Fault)


def test_hosts_show_what_strikes_them_now(browser: Browser, served: Watched) -> None:
    story = Story(world=3)
    for slot, node in enumerate(("node-a", "node-a", "node-b")):
        story.records.append(r.ProcessUp(Member(slot, 0), Process(node, 100 + slot, 1), "t", 0.1))
    story.view(1, [(0, 0), (1, 0), (2, 0)], 200)
    injected = [(Fault("p", 0.3, "t", "partition", node=1), (2,)), (Fault("h", 0.3, "t", "hang", slot=0), (0,))]
    for fault, slots in [*injected, (Fault("s", 0.3, "t", "store_gone"), ())]:
        story.records.append(r.FaultRecord(fault, "executed", tuple(Member(slot, 0) for slot in slots), "", at_s=0.3))
    served.write("run", story.records)
    with opened(browser, f"{served.url}/runs/run") as page:
        text(page, "#injected", "Struck for all: store_gone.")
        expect(page.locator("#hosts .host")).to_have_count(2)
        expect(page.locator("#hosts > .injected")).to_have_text(re.compile("node-b partition"))
        expect(page.locator("#hosts .rank.injected")).to_have_text("0 hang")


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
    story.records.append(r.FaultRecord(Fault(EVIL, 0.2, EVIL, EVIL, slot=0), "executed", (Member(0, 0),), EVIL, at_s=0.2))
    story.lost(0, 0, 300, cause=TrainRaised(EVIL), fault=EVIL)
    story.records.append(r.DecisionMade("interval", EVIL, EVIL, None, 0.4))
    story.records.append(r.Measurement(None, r.StateId(0, 1), EVIL, 1.0, at_s=0.4))
    story.records.append(r.RunEnded("failed", EVIL, 0.5, EVIL, EVIL))
    served.write("evil", story.records)
    with opened(browser, f"{served.url}/runs/evil") as page:
        text(page, "#run", EVIL)
        page.locator("#faults button").click()
        text(page, "#story", EVIL)
        text(page, "#members", EVIL)
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        page.locator("#legend .term").first.focus()
        page.locator(f"[data-curve='{EVIL}'] .plot").focus()
        text(page, "#curves", EVIL)


# ---- curves ----------------------------------------------------------------------------------------------------------------------------


def chart(page: Page, name: str) -> Locator:
    found = page.locator(f"[data-curve='{name}']")
    expect(found.locator(".u-over")).to_be_visible(timeout=WAIT_MS)
    return found


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_every_curve_has_axes_and_the_values_under_the_mouse(browser: Browser, served: Watched, size: dict[str, int]) -> None:
    served.write("done", list(learning("f1").records))
    with opened(browser, f"{served.url}/runs/done", size) as page:
        for name, value in (("loss", r"^step 3[01], 4\.[34] s: (69|70)$"), ("goodput", "so far .*%"), ("speed", " steps/s$")):
            found = chart(page, name)
            expect(found.locator(".readout")).to_contain_text("newest: step 60")
            found.locator(".u-over").hover()
            expect(found.locator(".readout")).not_to_contain_text("newest")
            expect(found.locator(".readout")).to_have_text(re.compile(value))
            until(lambda found=found: all(ink > 50 for ink in found.locator("canvas").evaluate(AXES)), f"{name} has both axes", 10.0)
        page.mouse.move(0, 0)
        expect(chart(page, "loss").locator(".readout")).to_have_text("newest: step 60, 7.3 s: 40")


AXES = """(canvas) => {
  const over = canvas.parentElement.querySelector(".u-over");
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const seen = (...area) => [...copy.getImageData(...area.map((v) => (v * canvas.width) / canvas.clientWidth)).data];
  const ink = (...area) => seen(...area).filter((v, i) => i % 4 === 3 && v > 99).length;
  return [ink(0, 0, over.offsetLeft - 6, canvas.clientHeight), ink(0, over.offsetTop + over.clientHeight + 6, canvas.clientWidth, 40)];
}"""
"""How many pixels are drawn left of the curve, and below it."""


def test_the_arrow_keys_go_along_a_curve(browser: Browser, served: Watched) -> None:
    served.write("done", list(learning("f1").records))
    with opened(browser, f"{served.url}/runs/done") as page:
        plot = chart(page, "loss").get_by_role("slider")
        plot.press("Home")
        expect(plot).to_have_attribute("aria-valuetext", "step 1, 1.2 s: 99")
        plot.press("ArrowRight")
        plot.press("ArrowRight")
        expect(plot).to_have_attribute("aria-valuetext", "step 3, 1.4 s: 97")


def test_faults_are_marked_on_the_curves(browser: Browser, served: Watched) -> None:
    served.write("done", list(learning("f1").records))
    with opened(browser, f"{served.url}/runs/done") as page:
        for name in ("loss", "goodput", "speed"):
            mark = chart(page, name).locator(".fault")
            expect(mark).to_have_attribute("title", "f1: kill_rank (gpu), at 2.1 s")
            mark.hover()
            expect(chart(page, name).locator(".readout")).to_contain_text("▼ f1: kill_rank (gpu)")
        mark = chart(page, "loss").locator(".fault")
        at = mark.evaluate("(e) => parseFloat(e.style.left) / e.parentElement.clientWidth")
        assert at == pytest.approx((10 - 1) / (60 - 1), abs=0.02), "it lies at step 10 of 1 to 60"


def test_a_curve_grows_with_its_run(browser: Browser, served: Watched) -> None:
    records = list(learning("f1").records)
    half = next(number for number, record in enumerate(records) if isinstance(record, r.Measurement)) + 30
    served.write("run", records[:half])
    with opened(browser, f"{served.url}/runs/run") as page:
        expect(chart(page, "loss").locator(".readout")).to_contain_text("newest: step 30")
        served.write("run", records[half:])
        expect(chart(page, "loss").locator(".readout")).to_contain_text("newest: step 60", timeout=WAIT_MS)


# ---- words ------------------------------------------------------------------------------------------------------------------------------


def by_keyboard(page: Page, selector: str) -> Locator:
    """Tab until the element has the focus."""
    page.locator("body").press("Tab")
    for _ in range(100):
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return page.locator(":focus")
        page.keyboard.press("Tab")
    raise AssertionError(f"{selector} cannot be reached by keyboard")


def test_categories_are_explained_to_whoever_has_only_a_keyboard(browser: Browser, served: Watched) -> None:
    served.write("done", list(learning("f1").records))
    with opened(browser, f"{served.url}/runs/done") as page:
        text(page, "#status", "completed")
        assert "title" in by_keyboard(page, "#legend [data-key=rework]").evaluate("(e) => e.getAttributeNames()")
        text(page, "section:has(#legend) .meaning", f"rework {MEANINGS['rework']}")
        by_keyboard(page, "#waterfall [data-key=detect]")
        text(page, "section:has(#waterfall) .meaning", f"detect {MEANINGS['detect']}")
        by_keyboard(page, "#law [data-key=exposed_comm]")
        text(page, "section:has(#law) .meaning", f"exposed communication {MEANINGS['exposed_comm']}")
        by_keyboard(page, "summary")
        page.keyboard.press("Enter")
        for name in r.CATEGORIES.values():
            expect(page.locator("#meanings")).to_contain_text(MEANINGS[name])
        assert page.locator("#meanings dt:visible").count() == len(r.CATEGORIES) + 1


def test_whoever_reads_a_word_stays_there_while_the_run_goes_on(browser: Browser, served: Watched) -> None:
    records = list(learning("f1").records)
    served.write("run", records[:-40])
    with opened(browser, f"{served.url}/runs/run") as page:
        text(page, "#figures", "steps")
        by_keyboard(page, "#waterfall [data-key=detect]")
        served.write("run", records[-40:])
        text(page, "#status", "completed")
        expect(page.locator(":focus")).to_have_attribute("data-key", "detect")


def test_time_that_is_not_decided_yet_is_pending_and_not_lost(browser: Browser, served: Watched) -> None:
    served.write("run", list(learning("f1").records[:20]))
    with opened(browser, f"{served.url}/runs/run") as page:
        rows = page.locator("#waterfall tr")
        expect(rows.last).to_contain_text("pending", timeout=WAIT_MS)
        expect(rows.nth(-2)).to_contain_text("goodput")
        expect(rows.last.locator("span.pending")).to_be_visible()
        text(page, "#legend", "pending")
        assert page.locator("#rows rect title", has_text="pending for").count() == 2


@pytest.mark.parametrize(("total", "progress", "left"), [(100, "10 of 100 steps", "about"), (None, "10 steps", "has not said how many")])
def test_the_time_left_is_said_when_the_number_of_steps_is_known(
    browser: Browser, served: Watched, monkeypatch: pytest.MonkeyPatch, total: int | None, progress: str, left: str
) -> None:
    monkeypatch.setattr(follow, "report_of", lambda *args: dataclasses.replace(report_of(*args), total_steps=total))
    served.write("run", list(one_loss().records[:16]))
    with opened(browser, f"{served.url}/runs/run") as page:
        text(page, "#figures", progress)
        text(page, "#figures div:has(dt:text('time left'))", left)


# ---- what ranks print --------------------------------------------------------------------------------------------------------------------


def prints(served: Watched, member: str, words: str) -> None:
    path = served.root / "run" / "logs" / f"rank-{member}.log"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(words)


def test_the_logs_of_each_rank_are_followed(browser: Browser, served: Watched) -> None:
    served.write("run", list(one_loss().records[:20]))
    prints(served, "0.0", f"\x1b[31mred\x1b[0m {EVIL}\n")
    prints(served, "1.0", "rank one is here\n")
    with opened(browser, f"{served.url}/runs/run") as page:
        text(page, "#log", f"red {EVIL}")
        assert page.locator("#logs img").count() == 0
        page.locator("#log-rank").select_option("1.0")
        expect(page.locator("#log")).to_have_text("rank one is here", timeout=WAIT_MS)
        prints(served, "1.0", "and goes on\n" * 200 + "to here\n")
        text(page, "#log", "to here")
        assert page.locator("#log").evaluate("(e) => e.scrollTop") > 0, "it has scrolled to what is new"
        prints(served, "1.1", "the replacement\n")
        expect(page.locator("#log-rank")).to_have_value("1.1", timeout=WAIT_MS)
        text(page, "#log", "the replacement")


def test_whoever_scrolls_up_in_a_log_stays_there(browser: Browser, served: Watched) -> None:
    served.write("run", list(one_loss().records[:20]))
    prints(served, "0.0", "".join(f"line {number}\n" for number in range(200)))
    with opened(browser, f"{served.url}/runs/run") as page:
        text(page, "#log", "line 199")
        page.locator("#log").evaluate("(e) => { e.scrollTop = 40; }")
        prints(served, "0.0", "line 200\n")
        text(page, "#log", "line 200")
        assert page.locator("#log").evaluate("(e) => e.scrollTop") == 40
        page.get_by_role("button", name="To the newest line").click()
        assert page.locator("#log").evaluate("(e) => e.scrollHeight - e.scrollTop - e.clientHeight") < 2
        expect(page.locator("#log-end")).to_be_hidden()


def test_a_run_without_logs_shows_no_place_for_them(browser: Browser, served: Watched) -> None:
    served.write("done", list(one_loss().records))
    with opened(browser, f"{served.url}/runs/done") as page:
        text(page, "#status", "completed")
        assert page.locator("#logs").is_hidden()


# ---- how it looks ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(browser: Browser, served: Watched, tmp_path: Path, scheme: str) -> None:
    served.write("run", list(learning("f1").records))
    prints(served, "0.0", "a line without an end " * 40)
    with opened(browser, f"{served.url}/runs/run", color_scheme=scheme) as page:
        text(page, "#log", "without an end")
        page.locator("summary").click()
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
  const texts = "h1, h2, p, td, th, dd, dt, small, li, button:not(:disabled), a:not(.skip), .badge, figcaption, pre, summary";
  const all = [...document.querySelectorAll(texts)];
  return Math.min(...all.filter((e) => e.offsetParent && e.textContent.trim()).map(ratio));
}"""
"""The least contrast between a text and what lies behind it, as WCAG counts it."""
