"""The page in real Chromium, from a file, with the network watched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unlazy.runtime import chromium
from unlazy.studies.halfspace.circle.study import reproduce
from unlazy.studio.circle_page import write_circle_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[str], list[str], str]]:
    from playwright.sync_api import sync_playwright

    browser_path = chromium()
    assert browser_path, "no Chromium: run `make browser`, or set UNLAZY_CHROMIUM"
    folder = tmp_path_factory.mktemp("page")
    reproduce("smoke", runs=folder / "runs", results=folder, progress=lambda *_: None)
    path = write_circle_page(folder / "page.html", folder, folder / "runs", "smoke", None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        requests, complaints = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(Path(path).as_uri())
        page.wait_for_timeout(300)
        yield page, requests, complaints, Path(path).as_uri()
        browser.close()


def test_no_request_leaves_and_nothing_complains(opened) -> None:
    _, requests, complaints, address = opened
    assert [url for url in requests if not url.startswith("data:")] == [address]
    assert complaints == []


def press(page: Any, key: str) -> str:
    """Press a key and wait until the address says something new."""
    before = page.evaluate("location.hash")
    page.keyboard.press(key)
    page.wait_for_function("before => location.hash !== before", arg=before, timeout=5000)
    return str(page.evaluate("location.hash"))


def test_keys_scrub_through_training(opened) -> None:
    page = opened[0]
    start = page.locator("main").screenshot()
    last = press(page, "End")
    assert page.locator("main").screenshot() != start
    before_last = press(page, "ArrowLeft")
    assert before_last != last
    assert press(page, "ArrowRight") == last
    assert press(page, "Home").startswith("#scene=1&frame=0")


def test_an_address_brings_the_same_view_back(opened) -> None:
    page, _, _, address = opened
    state = press(page, "End")
    text = page.inner_text("main")
    page.goto("about:blank")
    page.goto(address + state)
    page.wait_for_function("text => document.querySelector('main').innerText === text", arg=text, timeout=5000)


def test_every_claim_has_its_row(opened) -> None:
    page = opened[0]
    text = page.inner_text("#scorecard")
    assert all(f"C{number}" in text for number in range(7, 16))


def test_it_fits_a_phone(opened) -> None:
    page = opened[0]
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    page.set_viewport_size({"width": 1400, "height": 1000})
