"""The first screen of the live page, measured in a real browser: state, goodput, cost, factors and what is wrong are seen at once."""

from __future__ import annotations

import dataclasses
import math

from playwright.sync_api import Browser, expect

from fleet.host.clock import unix_time_s
from fleet.protocol import records as r
from fleet.protocol.decisions import SettingTo
from fleet.protocol.types import Fault, Member, StateId
from tests.golden.journals import Story, one_loss
from tests.support.browser import FIRST_SCREEN, LAPTOP, NARROW, WAIT_MS, opened, outside, text
from tests.support.watching import Watched
from tests.unit.test_metrics import PRICES, everything

LASTED_S = 38.0


def beset() -> Story:
    """A run with all that can be wrong at once, many figures, and long names."""
    story = everything(unix_time_s() - LASTED_S)
    started = story.records[0]
    assert isinstance(started, r.RunStarted)
    story.records[0] = dataclasses.replace(started, run="gpt-20260101-120000-3f2a")
    story.records += [r.Measurement(None, StateId(0, 60), f"evaluation_loss_{n}", math.nan if n % 2 else 0.5, at_s=37.0) for n in range(6)]
    for name, kind in (("f2", "hang"), ("f3", "isolate_coordinator"), ("f4", "store_gone")):
        fault = Fault(name, 37.1, "gpu", kind, slot=None if kind == "store_gone" else 0)
        injected = () if kind == "store_gone" else (Member(0, 0),)
        story.records.append(r.FaultRecord(fault, "executed", injected, "", at_s=37.1))
    story.records.append(r.DecisionMade("corruption", "go_back", "shard 3 differs", None, 37.2))
    story.lost(1, 1, 37_300, generation=3)
    story.view(4, [(0, 0)], 37_400, 60, causes=("1.1",))
    return story


def test_all_of_it_is_seen_without_scrolling(browser: Browser, served: Watched) -> None:
    served.write("run", everything(unix_time_s() - LASTED_S).records)
    with opened(browser, f"{served.url}/runs/run", LAPTOP) as page:
        text(page, "#status", "running")
        for words in ("goodput", "60 steps", "tokens a second", "40,960"):
            text(page, "#figures", words)
        for words in ("USD so far", "kWh so far", "kg CO2 so far", "budget left", "of 0.04 USD", "per million tokens", "per kept step"):
            text(page, "#cost", words)
        for words in ("scheduling", "x runtime", "x program (MFU)", "of the measured peak"):
            text(page, "#factors", words)
        text(page, "#verdict", "No. ")
        text(page, "#wrong", "of the budget of 0.04 USD is spent")
        text(page, "#wrong", "f1 kill_rank executed at 2.1 s, ")
        text(page, "#wrong", "Z: 1.5 s of rank time, 0.000856 USD")
        assert outside(page, *FIRST_SCREEN) == []


def test_nor_with_all_that_can_be_wrong_at_once(browser: Browser, served: Watched) -> None:
    served.write("run", beset().records)
    with opened(browser, f"{served.url}/runs/run", LAPTOP) as page:
        for words in (
            "1 of 2 ranks does not train.",
            "Struck now: hang (slot 0), isolate_coordinator (slot 0), store_gone.",
            "Not finite:",
        ):
            text(page, "#wrong", words)
        text(page, "#wrong", "Wrong results were found")
        text(page, "#wrong-words", "older fault")
        assert outside(page, *FIRST_SCREEN) == []


def test_a_run_without_prices_says_so_and_has_its_factors(browser: Browser, served: Watched) -> None:
    served.write("done", list(one_loss("f1").records))
    with opened(browser, f"{served.url}/runs/done", LAPTOP) as page:
        text(page, "#wrong", "Nothing is wrong.")
        text(page, "#verdict", "It has stopped. It is completed: all steps are committed.")
        text(page, "#no-cost", "Nobody says what a slot costs")
        expect(page.locator("#cost")).to_be_hidden(timeout=WAIT_MS)
        text(page, "#factors", "the model's FLOPs are not counted")
        assert [
            each for selector in ("#status", "#figures > div", "#factors > div", "#wrong > li") for each in outside(page, selector)
        ] == []
        page.locator("#wrong").get_by_role("button", name="f1").click()
        text(page, "#story", "f1: kill_rank (gpu), 1.5 s of rank time")
        expect(page.locator("#story")).to_be_in_viewport()


def test_what_is_measured_can_be_outside(browser: Browser, served: Watched) -> None:
    served.write("run", everything(unix_time_s() - LASTED_S).records)
    with opened(browser, f"{served.url}/runs/run", LAPTOP) as page:
        text(page, "#wrong", "f1 kill_rank")
        page.set_viewport_size(NARROW)  # type: ignore[arg-type]
        assert outside(page, *FIRST_SCREEN), "a phone shows one below the other"


def test_a_budget_that_is_raised_is_shown_at_once(browser: Browser, served: Watched) -> None:
    served.write("run", everything(unix_time_s() - LASTED_S).records)
    with opened(browser, f"{served.url}/runs/run", LAPTOP) as page:
        text(page, "#cost", f"of {PRICES['budget_usd']} USD")
        served.write("run", [r.DecisionMade("settings", "set", "cost.budget_usd = 5", SettingTo("cost.budget_usd", 5.0), LASTED_S)])
        text(page, "#cost", "of 5 USD, for")
        expect(page.locator("#wrong")).not_to_contain_text("budget", timeout=WAIT_MS)


def test_on_a_phone_problems_come_first_and_faults_that_were_kept_back_are_none(browser: Browser, served: Watched) -> None:
    story = beset()
    fault = Fault("f9", 37.0, "gpu", "kill_rank", slot=0)
    story.records.append(r.FaultRecord(fault, "suppressed", (), "too many at once", at_s=37.4))
    served.write("run", story.records)
    with opened(browser, f"{served.url}/runs/run", NARROW) as page:
        text(page, "#wrong", "1 of 2 ranks does not train.")
        tops = [page.locator(selector).bounding_box() for selector in ("#wrong", "#figures")]
        assert tops[0] is not None and tops[1] is not None and tops[0]["y"] < tops[1]["y"]
        assert "f9" not in page.locator("#wrong").inner_text()


def test_a_run_that_starts_has_no_goodput_yet(browser: Browser, served: Watched) -> None:
    story = Story(world=2)
    story.records[0] = dataclasses.replace(story.records[0], unix_time_s=unix_time_s() - 5.0)
    served.write("run", story.records)
    with opened(browser, f"{served.url}/runs/run", LAPTOP) as page:
        text(page, "#verdict", "It is starting. No step is committed yet")
        assert "0.00%" not in page.locator("#figures").inner_text()
