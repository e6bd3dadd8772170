"""A real Chromium and a real studio server, for the page tests, the studio benchmark and the screenshots of the docs.

The browser keeps a list of every request and of every console message of its pages.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unlazy.runtime import InputError, StoreError, chromium_path

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


class Browser:
    """A browser that lists every request and every console message or error of its pages."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.requests: list[str] = []
        self.console_messages: list[str] = []

    def open(self, address: str, width: int = 1400, height: int = 1000, **options: Any) -> Any:
        """Open an address in a new context with an empty cache; returns the page."""
        page = self._browser.new_page(viewport={"width": width, "height": height}, **options)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.console_messages.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: self.console_messages.append(f"{page.url}: {error}"))
        page.goto(address)
        return page

    def foreign_requests(self, home: str) -> list[str]:
        """Requests to any address that does not begin with ``home``."""
        return [url for url in self.requests if not url.startswith((home, "data:", "blob:"))]


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium (``UNLAZY_CHROMIUM``, else Debian's); raises ``InputError`` where there is none."""
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    if path is None:
        raise InputError("there is no Chromium: run `make browser`, or set UNLAZY_CHROMIUM.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        try:
            yield Browser(browser)
        finally:
            browser.close()


@contextmanager
def serve_studio(runs: Path, *arguments: str) -> Iterator[str]:
    """Run ``unlazy studio RUNS ARGUMENTS`` in a process of its own; yields its address."""
    code = "from unlazy.cli.app import main; main()"
    command = [sys.executable, "-c", code, "studio", str(runs), "--port", "0", "--no-browser", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://\S+/", line):
                yield found[0]
                break
        else:
            raise StoreError("the studio did not start; see above.")
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def wait_until(page: Any, expression: str, argument: Any = None, seconds: float = 20, every: float = 40) -> Any:
    """Wait until a JavaScript expression is truthy; returns its value.

    Python asks every ``every`` milliseconds, because the page's content policy forbids the eval that Playwright's own wait uses.
    """
    end = time.monotonic() + seconds
    while True:
        value = page.evaluate(f"argument => {expression}", argument)
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"{page.url}: {expression} did not become true; last value {value!r}")
        page.wait_for_timeout(every)


def press_and_wait(page: Any, key: str) -> str:
    """Press a key, wait until the hash of the address changes, and return the new hash."""
    before = page.evaluate("location.hash")
    page.keyboard.press(key)
    wait_until(page, "location.hash !== argument", before)
    return str(page.evaluate("location.hash"))


def fits_width(page: Any) -> bool:
    """Whether the page needs no horizontal scrolling."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"))
