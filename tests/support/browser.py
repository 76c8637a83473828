"""A headless Chromium: the system's own. ``make tools`` installs it where it may."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.programs import program

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 390, "height": 844}
LAPTOP = {"width": 1280, "height": 800}
WAIT_MS = 20_000
FIRST_SCREEN = ("#status", "#figures > div", "#cost > div", "#factors > div", "#cost-words", "#wrong > li")
"""What is seen of a run without scrolling: state, goodput, cost, factors, and what is wrong."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Its sandbox is off for root alone, who cannot have one."""
    installed = program(*NAMES)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=installed, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, size: dict[str, int] = WIDE, *, loses_server: bool = False, **context: object) -> Iterator[Page]:
    """A page; whatever it logs or throws fails the test, but for requests that fail while its server is gone."""
    said: list[str] = []
    page = browser.new_context(viewport=size, **context).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(WAIT_MS)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    yield page
    page.context.close()
    unexpected = [line for line in said if not (loses_server and "net::ERR" in line)]
    assert not unexpected, unexpected


def text(page: Page, selector: str, words: str) -> None:
    """``words`` come to be shown there."""
    expect(page.locator(selector)).to_contain_text(words, timeout=WAIT_MS)


MEASURE = """(selectors) => selectors.flatMap((selector) => [...document.querySelectorAll(selector)].map((each) => {
  const { left, top, right, bottom, width, height } = each.getBoundingClientRect();
  const words = each.innerText.trim();
  const seen = width > 0 && height > 0 && left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight && each.checkVisibility();
  return { selector, words, seen, place: [left, top, right, bottom].map(Math.round) };
}))"""
"""In one go: the page is drawn anew while its run goes on."""


def outside(page: Page, *selectors: str) -> list[str]:
    """Elements of which not all is on the screen, with their edges. Raises AssertionError where there are none, or one says nothing."""
    assert page.evaluate("scrollY") == 0
    found = page.evaluate(MEASURE, list(selectors))
    assert {each["selector"] for each in found} == set(selectors)
    assert all(each["words"] for each in found), found
    return [f"{each['selector']} {each['words']!r}: {each['place']}" for each in found if not each["seen"]]
