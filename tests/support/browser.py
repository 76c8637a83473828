"""A headless Chromium: the system's own. ``make test`` installs it where it may."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def program(*names: str) -> str:
    """The first of ``names`` that is installed. Raises RuntimeError that says what to install."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(f"none of {', '.join(names)} is installed: `make tools` installs what the tests need, with apt-get, as root")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """Its sandbox is off for root alone, who cannot have one."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program(*NAMES), args=arguments)
        try:
            yield browser
        finally:
            browser.close()
