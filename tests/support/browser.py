"""A headless Chromium: the system's own. ``make tools`` installs it where it may."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.programs import program

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 390, "height": 844}
WAIT_MS = 20_000


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
