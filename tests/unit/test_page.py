"""The page of a run: complete, self-contained, small, and safe whatever the journal says."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import pytest

from dashboards.pages.plan import PALETTE
from dashboards.pages.run import COLOURS, _nice, render_html
from dashboards.server import STATIC
from fleet.ledger.categories import MEANINGS
from fleet.ledger.report import build_report
from fleet.ledger.slots import NAMES
from fleet.ledger.summary import STEP_NAMES
from fleet.ledger.timeline import STEP
from fleet.protocol import records as r
from fleet.protocol.types import StateId
from tests.golden.journals import Story, one_loss
from tests.support.colours import distance, seen, too_close
from tests.unit.test_curves import learning
from tests.unit.test_report import golden_story

LEAST, LEAST_FROM_PAGE = 15.0, 10.0
"""Differences in CIELAB: several times what people notice; bars lie side by side, and are a few pixels high."""
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Checker(HTMLParser):
    """Refuses tags that are not closed in order, and notes what the page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [tag] * (tag in ("script", "link", "img", "iframe")) + [name for name, _ in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [name for name, _ in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> str:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert checker.fetched == []
    assert "url(" not in page
    assert "nan" not in re.sub(r"<title>.*?</title>", "", page).lower().split()
    return " ".join(" ".join(checker.text).split())


def test_the_page_says_what_happened() -> None:
    text = check(render_html(build_report(golden_story().records)))
    for phrase in ("68.12%", "gpu-1", "slot 1: provision for 1.0 s", "1.0 lost: killed by SIGKILL", "view 2: 1 members",
                   "every 10.0 s: the first", "The ledger closes", "kill_rank suppressed 1", "loss", "process lost"):  # fmt: skip
        assert phrase in text


def test_curves_have_axes_values_and_the_faults() -> None:
    page = render_html(build_report(learning().records))
    text = check(page)
    for phrase in (
        "step 2, 1.3 s: loss 98",
        "step 20",
        "step 60",
        '<text x="38" y="11.0" text-anchor="end">100</text>',
        'speed <span class="soft">in steps/s',
    ):
        assert phrase in page, phrase
    assert page.count("<title>f1: kill_rank (gpu)</title>") == 3, "on the loss, on goodput and on the speed"
    assert "so far 68." in text


def test_what_was_only_planned_cost_nothing_and_is_not_listed() -> None:
    story = learning()
    story.fault("due", "kill_rank", "planned", 90_000)
    page = render_html(build_report(story.records))
    assert '<td class="l">f1</td>' in page and '<td class="l">due</td>' not in page


def test_categories_are_explained_and_pending_is_not_lost() -> None:
    page = render_html(build_report(learning().records[:20]))
    text = check(page)
    assert all(html.escape(meaning, quote=False) in text for name, meaning in MEANINGS.items() if name != STEP)
    names = re.findall(r'<tr><td class="l" title="[^"]+">(\w+)</td>', page)
    assert names[-2:] == ["goodput", "pending"] and names.count("pending") == 1


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 100.0, [0, 50, 100]),
        (40.0, 99.0, [40, 60, 80, 100]),
        (2.0, 2.0, [2]),
        (0.0, 0.0, [0]),
        (-0.003, 0.001, [-0.003, -0.002, -0.001, 0, 0.001]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert _nice(low, high) == pytest.approx(ticks)


def test_every_category_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == {STEP, "pending", *NAMES} - set(STEP_NAMES)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_everybody_can_tell_the_colours_apart() -> None:
    assert too_close(COLOURS, LEAST) == []
    assert too_close({str(number): colour for number, colour in enumerate(PALETTE)}, LEAST) == []


def test_colours_stand_out_from_the_page_in_light_and_dark() -> None:
    styles = (STATIC / "page.css").read_text() + (STATIC.parent / "templates" / "page.html").read_text()
    panels = re.findall(r"--panel: (#[0-9a-f]{6})", styles)
    assert len(panels) == 4
    for panel in panels:
        assert {name for name, colour in COLOURS.items() if distance(colour, panel) < LEAST_FROM_PAGE} == set()


def test_the_simulation_knows_what_the_blind_confuse() -> None:
    """Greys stay what they are, and blue and violet, which differ in red alone, become one."""
    assert distance("#000000", "#ffffff") == pytest.approx(100.0, abs=0.5)
    for missing in ("protanopia", "deuteranopia"):
        assert seen("#808080", missing) == pytest.approx(seen("#808080"), abs=0.5)
    assert too_close({"checkpoint_stall": "#0072b2", "verify": "#7f5ab6"}, 5.0)
    assert not too_close({"step": "#0f9d78", "rework": "#d55e00"}, LEAST)


def test_text_from_the_journal_cannot_become_markup() -> None:
    story = one_loss()
    story.records[-1] = r.RunEnded("failed", "<script>alert(1)</script>", 7.34, "", "")
    story.lost(0, 0, 7340, cause="</title><b>")
    check(render_html(build_report(story.records)))


@pytest.mark.parametrize("length", [1, 2, 3, 20, 40])
def test_a_run_that_is_still_going_on_has_a_page(length: int) -> None:
    assert "running" in check(render_html(build_report(one_loss().records[:length])))


def test_the_page_of_a_large_stormy_run_stays_small() -> None:
    story = Story(world=200)
    story.view(1, [(slot, 0) for slot in range(200)], 0)
    for slot in range(200):
        for incarnation in range(25):
            start = 400 * incarnation + slot
            story.spans(slot, incarnation, "i50 f20 " + "c30 x20 K " * 4 + "c30", generation=1, step=4 * incarnation, at=start)
            story.lost(slot, incarnation, start + 300)
    for step in range(5_000):
        story.records.append(r.Measurement(None, StateId(0, step), "loss", 1.0 / (1 + step), at_s=0.002 * step))
    story.ended(11_000)
    page = render_html(build_report(story.records))
    text = check(page)
    assert len(page) < 2_000_000
    assert "136 slots that lost less are not drawn" in text
    assert page.count("<rect") <= 10_000
