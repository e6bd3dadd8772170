"""The one-file report in real Chromium, from a file, with the network watched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from accessibility import keyboard_violations, violations
from browser import Browser, fits_width, press_and_wait, wait_until
from unlazy.cli.studies import write_demo_page
from unlazy.studies.engine import reproduce
from unlazy.studies.request import ExecutionOptions, Request

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def opened(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Browser, str]:
    folder = tmp_path_factory.mktemp("page")
    request = Request("circle", "smoke", folder / "runs", folder)
    reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    path = write_demo_page(folder / "page.html", request)
    page = browser.open(Path(path).as_uri())
    wait_until(page, "window.__unlazy?.ready")
    return page, browser, Path(path).as_uri()


def test_no_request_leaves_and_nothing_complains(opened) -> None:
    _, browser, address = opened
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [address]
    assert browser.console_messages == []


def test_keys_scrub_through_training(opened) -> None:
    page = opened[0]
    press_and_wait(page, "End")
    wait_until(page, "Number(document.querySelector('[data-map=overlap]').dataset.step) > 0")
    last = page.locator("[data-map=overlap]").screenshot()
    before_last = press_and_wait(page, "ArrowLeft")
    assert press_and_wait(page, "ArrowRight") != before_last
    press_and_wait(page, "Home")
    wait_until(page, "document.querySelector('[data-map=overlap]').dataset.step === '0'")
    assert page.locator("[data-map=overlap]").screenshot() != last


def test_pointing_at_a_map_tells_its_exact_number(opened) -> None:
    page = opened[0]
    page.locator("[data-map=tangent]").hover(position={"x": 4, "y": 4})
    told = page.get_by_test_id("readout-tangent")
    wait_until(page, "/: -?[0-9]/.test(document.querySelector('[data-testid=readout-tangent]')?.innerText ?? '')")
    assert "\N{ALMOST EQUAL TO}" not in told.inner_text()
    page.mouse.move(0, 0)


def test_an_address_brings_the_same_view_back(opened) -> None:
    page, browser, address = opened
    state = press_and_wait(page, "End")
    wait_until(page, "Number(document.querySelector('[data-map=overlap]').dataset.step) > 0")
    step = page.locator("[data-map=overlap]").get_attribute("data-step")
    again = browser.open(address + state)
    wait_until(again, "document.querySelector('[data-map=overlap]')?.dataset.step === argument", step)
    assert again.evaluate("location.hash") == state
    assert again.inner_text("[data-testid=step]") == page.inner_text("[data-testid=step]")
    again.close()


def test_networks_can_be_switched(opened) -> None:
    page = opened[0]
    before = page.evaluate("location.hash")
    page.get_by_role("group", name="Networks").get_by_role("button", name=re.compile("ReLU")).click()
    wait_until(page, "location.hash !== argument", before)
    wait_until(page, "document.querySelector('[data-map=overlap]')")
    assert "relu" in page.evaluate("decodeURIComponent(location.hash)")


def test_story_figures_and_every_claim_are_there(opened) -> None:
    page = opened[0]
    text = page.inner_text("body")
    assert "What a network learns first" in text
    assert "Does the easy half come first?" in text
    assert all(f"C{number}" in text for number in range(7, 16))
    assert page.locator("figure img").count() >= 7
    assert all(
        page.evaluate("[...document.querySelectorAll('figure img')].map(image => image.src.startsWith('data:'))")
    )


def test_it_fits_a_phone(opened) -> None:
    page = opened[0]
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(300)
    assert fits_width(page)
    page.set_viewport_size({"width": 1400, "height": 1000})


def test_a_stranger_finds_words_before_the_panels_and_a_picture_on_a_phone(opened) -> None:
    page, browser, address = opened
    names = page.get_by_role("group", name="Networks").inner_text()
    assert "Gated network" in names
    assert not re.search("author:|pilot:|experts", page.inner_text("main").split("Scorecard")[0].split("Figures")[0])
    explanation = page.get_by_test_id("explanation").bounding_box()
    assert explanation["y"] < page.get_by_test_id("panel-halfspaces").bounding_box()["y"]
    phone = browser.open(address, width=390, height=844)
    wait_until(phone, "window.__unlazy?.ready")
    picture = phone.locator("main canvas").first.bounding_box()
    assert picture["y"] + 100 < 844
    phone.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_it_breaks_no_rule_of_accessibility(opened, scheme, width) -> None:
    _, browser, address = opened
    page = browser.open(address, width=width, height=900, color_scheme=scheme)
    wait_until(page, "window.__unlazy?.ready")
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.wait_for_timeout(300)
    assert violations(page) == []
    assert keyboard_violations(page) == []
    page.close()
