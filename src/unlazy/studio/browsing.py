"""Real Chromium over the studio, for tests, benchmarks and screenshots: every request and every complaint is written down."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unlazy.runtime import InputError, StoreError, chromium

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


class Browser:
    """A browser whose pages remember every request and every complaint."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def open(self, address: str, width: int = 1400, height: int = 1000, **options: Any) -> Any:
        """A page of its own context, with an empty cache."""
        page = self._browser.new_page(viewport={"width": width, "height": height}, **options)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"{page.url}: {error}"))
        page.goto(address)
        return page

    def strangers(self, home: str) -> list[str]:
        """Requests that went anywhere but home."""
        return [url for url in self.requests if not url.startswith((home, "data:", "blob:"))]


@contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium from ``UNLAZY_CHROMIUM`` or Debian; its absence is an error."""
    from playwright.sync_api import sync_playwright

    path = chromium()
    if path is None:
        raise InputError("there is no Chromium: run `make browser`, or set UNLAZY_CHROMIUM.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        try:
            yield Browser(browser)
        finally:
            browser.close()


@contextmanager
def serving(runs: Path, *words: str) -> Iterator[str]:
    """``unlazy studio`` over a folder, in a process of its own; gives its address."""
    code = "from unlazy.cli.app import main; main()"
    command = [sys.executable, "-c", code, "studio", str(runs), "--port", "0", "--no-browser", *words]
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


def settle(page: Any, expression: str, argument: Any = None, seconds: float = 20, every: float = 40) -> Any:
    """The value of a JavaScript expression once it is truthy. Polled from here: the page's own policy forbids eval."""
    end = time.monotonic() + seconds
    while True:
        value = page.evaluate(f"argument => {expression}", argument)
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"{page.url}: {expression} did not become true; last value {value!r}")
        page.wait_for_timeout(every)


def press(page: Any, key: str) -> str:
    """Press a key and wait until the address says something new."""
    before = page.evaluate("location.hash")
    page.keyboard.press(key)
    settle(page, "location.hash !== argument", before)
    return str(page.evaluate("location.hash"))


def fits(page: Any) -> bool:
    """Whether nothing sticks out to the right."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1"))
