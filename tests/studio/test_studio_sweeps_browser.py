"""A sweep in the studio's list, runs over each other, and the first screen of a run, in real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser, fits_width, wait_until
from studio_runs import header, kernel
from unlazy.store import Writer

pytestmark = pytest.mark.browser
RATES = (0.001, 0.01, 0.1)
WORDS = {0.001: "lazy", 0.01: "mixed", 0.1: "rich"}
STEPS = (0, 3, 10, 30)
CLASSES = np.array([2, 0, 1, 0, 2, 1, 0, 1])


def verdict_of(word: str) -> dict[str, Any]:
    return {
        "label": word,
        "gap": 0.7,
        "reasons": [],
        "evidence": [
            {"measure": "linearisation_error", "value": 0.6, "lazy_below": 0.1, "rich_above": 0.5, "says": "rich"}
        ],
        "phases": [
            {"word": "lazy", "first": 0, "last": 3, "until": 6},
            {"word": word, "first": 10, "last": 30, "until": None},
        ],
        "layers": {
            "lines": [
                {"name": "0", "word": "", "rank": 2, "frozen_cost": 0.1, "says": "rank 2 of 2"},
                {"name": "2", "word": "", "rank": 1, "frozen_cost": 0.4, "says": "rank 1 of 2"},
            ]
        },
        "samples": {"hardest": [{"sample": 3, "value": 2.5}], "easiest": [{"sample": 1, "value": 0.1}]},
        "words": {
            "meaning": "It learned features.",
            "advice": "What to do:\n    Raise the rate.\n    Lower the scale.",
        },
    }


def write_sweep(folder: Path) -> None:
    """Runs of three rates and two seeds; the file verdict.json as a scope writes it."""
    for rate in RATES:
        for seed in (0, 1):
            name = f"rate-{rate}-seed-{seed}"
            with Writer(folder / name, header(name, 1, recipe={"rate": rate, "seed": seed})) as writer:
                for step in STEPS:
                    scalars = {
                        "loss": np.array([1 / (1 + rate * step * 100) + seed]),
                        "linearisation_error": np.array([rate]),
                    }
                    once = {"probe_y": CLASSES[None]} if step == 0 else {}
                    writer.record(step, scalars, {"overlap": kernel(8, 1, step)} | once)
                writer.finish()
            (folder / name / "verdict.json").write_text(json.dumps(verdict_of(WORDS[rate])))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps")
    write_sweep(folder)
    with Writer(folder / "diverged", header("diverged", 1)) as writer:
        for step, loss in zip(STEPS, (1.0, 2.0, 3e17, np.nan), strict=True):
            writer.record(step, {"loss": np.array([loss])}, {})
        writer.finish()
    broken = verdict_of("cannot tell") | {"reasons": ["The loss is not a number: training broke down."]}
    (folder / "diverged" / "verdict.json").write_text(json.dumps(broken))
    with Writer(folder / "layers", header("layers", 1)) as writer:
        for step in STEPS:
            writer.record(step, {f"alignment@layer{i}": np.array([i + step / 30]) for i in range(22)}, {})
        writer.finish()
    return folder


def with_settings(route: Any) -> None:
    """The list as a server answers that knows the settings of a run."""
    answer = route.fetch()
    listed = answer.json()
    for card in listed["runs"]:
        if found := re.match(r"rate-([\d.]+)-seed-(\d)", card["key"]):
            card["config"] = {"lr": float(found[1]), "optimizer": "sgd"}
            card |= {"seed": int(found[2]), "gap": float(found[1]) * 5, "tags": ["baseline"] * (found[2] == "0")}
    route.fulfill(response=answer, json=listed)


def open_page(browser: Browser, home: str, place: str, width: int = 1400, height: int = 900) -> Any:
    page = browser.open("about:blank", width=width, height=height)
    page.route("**/api/runs*", with_settings)
    page.goto(f"{home}#/{place}")
    return page


@pytest.fixture
def quiet(browser: Browser) -> Iterator[Browser]:
    """Every test ends with no complaint on the console."""
    browser.console_messages.clear()
    yield browser
    assert browser.console_messages == []


def keys(page: Any) -> list[str]:
    return list(page.evaluate("[...document.querySelectorAll('[data-testid=runs-row]')].map(row => row.dataset.key)"))


def test_settings_are_columns_that_filter_sort_and_group(quiet, home):
    page = open_page(quiet, home, "runs?sort=-lr")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 8")
    heads = page.evaluate("[...document.querySelectorAll('.heads [role=columnheader]')].map(head => head.innerText)")
    assert "lr ↓" in heads
    assert "optimizer" not in heads  # the same in every run
    assert [key[:8] for key in keys(page)[:6]] == ["rate-0.1"] * 2 + ["rate-0.0"] * 4
    page.get_by_test_id("runs-filter").fill("lr>1e-3 verdict:rich tag:baseline")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 1")
    assert keys(page) == ["rate-0.1-seed-0"]
    page.get_by_test_id("runs-filter").fill("momentum>0.9")
    wait_until(page, "/momentum/.test(document.querySelector('[data-testid=unknown]')?.innerText ?? '')")
    page.get_by_test_id("runs-filter").fill("rate")
    page.get_by_test_id("group").select_option("lr")
    wait_until(page, "document.querySelectorAll('[data-testid=group-row]').length === 3")
    first = page.get_by_test_id("group-row").first.inner_text()
    assert "lr = 0.001" in first
    assert "2 lazy" in first
    wait_until(page, "location.hash.includes('group=lr')")
    page.get_by_test_id("columns").click()
    page.get_by_label("optimizer").check()
    wait_until(page, "document.querySelector('.heads').innerText.includes('optimizer')")
    page.close()


def test_a_third_tick_keeps_the_first_and_all_are_drawn(quiet, home):
    page = open_page(quiet, home, "runs?q=rate")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 6")
    for row in page.get_by_test_id("runs-row").all()[:3]:
        row.get_by_role("checkbox").check()
    wait_until(page, "document.querySelectorAll('.chosen').length === 3")
    page.get_by_test_id("overlay").click()
    lines = (
        "document.querySelector('[data-testid=panel-overlay-loss]')?.querySelectorAll('g[aria-label=line] path').length"
    )
    wait_until(page, f"{lines} === 3")
    assert page.get_by_test_id("legend").get_by_role("link").count() == 3
    page.close()


def test_runs_over_each_other_by_group_have_mean_and_band(quiet, home):
    page = open_page(quiet, home, "overlay?q=rate&group=lr")
    panel = "document.querySelector('[data-testid=panel-overlay-loss]')"
    wait_until(page, f"{panel}?.querySelectorAll('g[aria-label=area] path').length === 3")
    assert page.evaluate(f"{panel}.querySelectorAll('g[aria-label=line] path').length") == 3
    page.locator("[data-testid=panel-overlay-loss] .plotted").hover(position={"x": 60, "y": 60})
    told = page.get_by_test_id("values").inner_text()
    assert "step 0" in told
    assert "lr 0.001 1.5" in told  # the mean of 1 and 2
    page.get_by_test_id("group").select_option("")
    wait_until(page, f"{panel}?.querySelectorAll('g[aria-label=line] path').length === 6")
    page.close()


def test_a_dot_of_the_scatter_opens_its_run(quiet, home):
    page = open_page(quiet, home, "runs?chart=lr")
    wait_until(page, "document.querySelectorAll('[data-testid=scatter] circle').length === 6")
    page.get_by_test_id("scatter-y").select_option("loss")
    wait_until(page, "/chartY=loss/.test(location.hash)")
    page.locator("[data-testid=scatter] a").first.click()
    wait_until(page, "/#\\/run\\/rate/.test(location.hash)")
    page.close()


@pytest.mark.parametrize("width", [1400, 390])
def test_a_run_opens_on_what_happened(quiet, home, width):
    page = open_page(quiet, home, "run/rate-0.1-seed-0", width)
    wait_until(page, "document.querySelector('[data-testid=panel-verdict]')")
    assert page.get_by_test_id("step").get_attribute("data-step") == "30"
    card = page.get_by_test_id("panel-verdict")
    assert card.locator("strong").inner_text() == "rich"
    assert "Raise the rate." in card.get_by_test_id("advice").inner_text()
    assert "What to do:" not in card.get_by_test_id("advice").inner_text()
    assert "#3" in card.get_by_test_id("samples").inner_text()
    assert "+0.4" in card.get_by_test_id("layers").inner_text()
    phases = page.evaluate("[...document.querySelectorAll('[data-testid=phase]')].map(one => one.dataset.word)")
    assert phases == ["lazy", "rich"]
    assert page.locator("[data-testid=scrubber] i").count() == len(STEPS)
    place = page.locator("[data-testid=panel-verdict] strong").bounding_box()
    assert place["y"] + place["height"] < 844
    text = page.locator("[data-testid=panel-verdict] .word").bounding_box()
    assert text["width"] > 0.4 * min(width, 1400)
    if width == 1400:
        samples = page.get_by_test_id("samples").bounding_box()
        assert samples["y"] + 60 < 900
    assert fits_width(page)
    page.close()


def test_a_training_that_broke_down_gets_no_word_and_no_stretched_axis(quiet, home):
    page = open_page(quiet, home, "run/diverged")
    wait_until(page, "document.querySelector('[data-testid=panel-verdict]')")
    card = page.get_by_test_id("panel-verdict").inner_text()
    assert "broke down" in card
    assert "rich" not in re.sub("Lazy or rich", "", card)
    loss = page.get_by_test_id("panel-curve-loss")
    wait_until(page, "/3\\.0e\\+17/.test(document.querySelector('[data-testid=beyond]')?.innerText ?? '')")
    ticks = loss.locator("svg g[aria-label^='y-axis tick label'] text").all_text_contents()
    assert max(float(tick) for tick in ticks) <= 2
    loss.get_by_role("button", name="log").click()
    wait_until(page, "!document.querySelector('[data-testid=beyond]')")
    page.close()


def test_curves_mark_measurements_zoom_and_name_every_line(quiet, home):
    page = open_page(quiet, home, "run/layers")
    page.get_by_test_id("further").locator("summary").click()
    panel = page.get_by_test_id("panel-curve-alignment@")
    wait_until(page, "document.querySelectorAll('g[aria-label=dot] circle').length === argument", 22 * len(STEPS))
    assert "more" not in panel.locator("ul").inner_text()
    assert panel.locator("ul li").count() == 22
    plotted = panel.locator(".plotted").bounding_box()
    y = plotted["y"] + 60
    page.mouse.move(plotted["x"] + 0.3 * plotted["width"], y)
    page.mouse.down()
    page.mouse.move(plotted["x"] + plotted["width"] - 2, y, steps=4)
    page.mouse.up()
    wait_until(page, "/zoom=3,30/.test(location.hash)")
    assert page.get_by_test_id("step").get_attribute("data-step") == "30"  # a drag zooms, it does not scrub
    panel.get_by_role("button", name="whole training").click()
    wait_until(page, "!/zoom/.test(location.hash)")
    page.mouse.click(plotted["x"] + 48, y)
    wait_until(page, "/step=0/.test(location.hash)")
    page.close()


def test_samples_are_sorted_by_class_unless_asked_otherwise(quiet, home):
    page = open_page(quiet, home, "run/rate-0.1-seed-0")
    wait_until(page, "document.querySelector('[data-map=overlap]')")
    names = page.locator(".columns span").all_inner_texts()
    assert names == ["0", "1", "2"]
    page.get_by_role("button", name="as stored").click()
    wait_until(page, "!document.querySelectorAll('.columns span').length")
    page.close()


def test_verdict_step_and_loss_are_on_a_phone(quiet, home):
    page = open_page(quiet, home, "runs?q=rate", 390, 844)
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 6")
    row = page.get_by_test_id("runs-row").first.inner_text()
    assert re.search("lazy|mixed|rich", row)
    assert "step 30" in row
    assert "loss" in row
    assert fits_width(page)
    page.goto(f"{home}#/overlay?q=rate&group=lr")
    wait_until(page, "document.querySelector('[data-testid=panel-overlay-loss]')")
    assert fits_width(page)
    page.close()
