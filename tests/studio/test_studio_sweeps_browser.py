"""A sweep in the studio's list, runs over each other, and the first screen of a run, in real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unlazy as ul
from browser import Browser, fits_width, serve_studio, wait_until
from studio_runs import header, kernel, verdict_of
from unlazy.store import Run, Writer
from unlazy.studio.report import write_run_report

pytestmark = pytest.mark.browser
RATES = (0.001, 0.01, 0.1)
WORDS = {0.001: "lazy", 0.01: "mixed", 0.1: "rich"}
STEPS = (0, 3, 10, 30)
CLASSES = np.array([2, 0, 1, 0, 2, 1, 0, 1])


def write_sweep(folder: Path) -> None:
    """Runs of three rates and two seeds, with the files that a scope writes."""
    for rate in RATES:
        for seed in (0, 1):
            name = f"rate-{rate}-seed-{seed}"
            known = {
                "recipe": {"rate": rate, "seed": seed},
                "config": {"lr": rate, "optimizer": "sgd"},
                "provenance": {"started": "2026-01-01T00:00:00+00:00", "seed": seed},
            }
            with Writer(folder / name, header(name, 1, **known)) as writer:
                for step in STEPS:
                    scalars = {
                        "loss": np.array([1 / (1 + rate * step * 100) + seed]),
                        "linearisation_error": np.array([rate]),
                    }
                    once = {"probe_y": CLASSES[None]} if step == 0 else {}
                    writer.record(step, scalars, {"overlap": np.float32(rate) * kernel(8, 1, step)} | once)
                writer.finish()
            (folder / name / "verdict.json").write_text(json.dumps(verdict_of(WORDS[rate], 5 * rate)))
            Run(folder / name).set_labels(tags=["baseline"] * (seed == 0))


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


def open_page(browser: Browser, home: str, place: str, width: int = 1400, height: int = 900) -> Any:
    return browser.open(f"{home}#/{place}", width=width, height=height)


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


def train(folder: Path, rate: float, until: int = 60, stop: BaseException | None = None) -> None:
    """A training of one's own under a scope; ``stop`` is raised after the last step."""
    torch.manual_seed(0)
    x = torch.randn(24, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimiser = torch.optim.SGD(net.parameters(), rate)
    config = {"lr": rate, "width": 16}
    with ul.Scope(net, (x, y), folder, config=config, tags=["own"], notes="mine", budget=1.0) as scope:
        for step in range(1, until + 1):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
            scope.step(step)
        if stop is not None:
            raise stop


def test_runs_of_a_scope_bring_settings_labels_and_how_they_ended(quiet, tmp_path):
    train(tmp_path / "good", 0.5)
    train(tmp_path / "wild", 1e30)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", 0.1, stop=KeyboardInterrupt())
    with serve_studio(tmp_path) as home:
        page = open_page(quiet, home, "runs")
        wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 3")
        rows = {row.get_attribute("data-key"): row.inner_text() for row in page.get_by_test_id("runs-row").all()}
        assert "broke down" in rows["wild"]
        assert "interrupted" in rows["stopped"]
        assert re.search("lazy|mixed|rich|cannot tell", rows["stopped"])
        assert "own" in rows["good"]
        page.get_by_test_id("runs-filter").fill("lr<0.2 state:interrupted tag:own")
        wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 1")
        page.goto(f"{home}#/run/stopped")
        wait_until(page, "document.querySelector('[data-testid=panel-verdict]')")
        assert "lr 0.1" in page.get_by_test_id("config").inner_text()
        assert page.get_by_test_id("notes").inner_text() == "mine"
        assert "interrupted" in page.locator(".head").inner_text()
        page.goto(f"{home}#/run/wild")
        wait_until(page, "/broke down/.test(document.querySelector('[data-testid=panel-verdict]')?.innerText ?? '')")
        page.close()


def test_a_run_that_goes_on_gets_its_verdict_without_a_reload(quiet, tmp_path):
    with Writer(tmp_path / "live", header("live", 1)) as writer, serve_studio(tmp_path) as home:
        writer.record(0, {"loss": np.array([2.0])}, {})
        listed, run = open_page(quiet, home, "runs"), open_page(quiet, home, "run/live")
        wait_until(listed, "document.querySelectorAll('[data-testid=runs-row]').length === 1")
        wait_until(run, "document.querySelector('[data-testid=step]')")
        assert run.get_by_test_id("panel-verdict").count() == 0
        for word, step in (("lazy", 3), ("rich", 10)):
            writer.record(step, {"loss": np.array([1 / step])}, {})
            (tmp_path / "live" / "verdict.json").write_text(json.dumps(verdict_of(word)))
            wait_until(listed, "document.querySelector('[data-testid=runs-row] .chip')?.innerText === argument", word)
            wait_until(
                run, "document.querySelector('[data-testid=panel-verdict] strong')?.innerText === argument", word
            )
            wait_until(run, "document.querySelector('[data-testid=step]').dataset.step === argument", str(step))
        assert "0.1" in listed.get_by_test_id("runs-row").inner_text()
        writer.finish()
        wait_until(listed, "/finished/.test(document.querySelector('[data-testid=runs-row]').innerText)")
        listed.close()
        run.close()


def test_a_report_shows_what_the_page_of_the_run_shows(quiet, home, root, tmp_path):
    path, _ = write_run_report([root / "rate-0.1-seed-0"], tmp_path / "page.html")
    pages = [open_page(quiet, home, "run/rate-0.1-seed-0"), quiet.open(path.as_uri(), height=900)]
    shown = []
    for page in pages:
        wait_until(page, "document.querySelector('[data-testid=panel-verdict] svg') && window.__unlazy.ready")
        panels = page.evaluate("[...document.querySelectorAll('[data-testid^=panel-]')].map(one => one.dataset.testid)")
        parts = ("layers", "advice", "samples", "config", "step")
        shown.append([panels, *(page.get_by_test_id(part).inner_text() for part in parts)])
        page.close()
    assert shown[0] == shown[1]


def test_the_best_of_the_runs_shown_is_bold_and_missing_numbers_stand_in_line(quiet, home):
    page = open_page(quiet, home, "runs")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 8")
    best = page.evaluate(
        "[...document.querySelectorAll('.best')].map(one => one.closest('[data-testid=runs-row]').dataset.key)"
    )
    assert best == ["rate-0.1-seed-0"]
    aligned = (
        "[...document.querySelectorAll('[data-testid=runs-row] .gap')].map(one => getComputedStyle(one).textAlign)"
    )
    assert set(page.evaluate(aligned)) == {"right"}
    page.get_by_test_id("runs-filter").fill("lr<0.1")
    wait_until(page, "document.querySelector('.best')?.closest('[data-key]').dataset.key === 'rate-0.01-seed-0'")
    page.close()


def test_two_runs_show_what_differs_and_one_scale(quiet, home):
    page = open_page(quiet, home, "compare/rate-0.1-seed-0/rate-0.01-seed-0")
    wait_until(page, "document.querySelectorAll('[data-testid=differing]').length === 2")
    assert [one.inner_text() for one in page.get_by_test_id("differing").all()] == ["lr 0.1", "lr 0.01"]
    ends = "['a', 'b'].map(one => document.querySelector(`[data-testid=panel-overlap-${one}] .bar p`)?.innerText)"
    wait_until(page, f"{ends}.every(Boolean)")
    first, second = page.evaluate(ends)
    assert first == second
    assert "mean diagonals" in page.get_by_test_id("panel-overlap-a").inner_text()
    page.close()


def test_curves_of_a_layer_are_drawn_over_each_other(quiet, tmp_path):
    for name in ("one", "two"):
        with Writer(tmp_path / name, header(name, 1)) as writer:
            for step in STEPS:
                writer.record(step, {f"alignment@layer{i}": np.array([i + step]) for i in range(3)}, {})
            writer.finish()
    with serve_studio(tmp_path) as home:
        page = open_page(quiet, home, "overlay?select=one|two")
        page.get_by_test_id("layer").select_option("layer2")
        panel = "document.querySelector('[data-testid=\"panel-overlay-alignment@layer2\"]')"
        wait_until(page, f"{panel}?.querySelectorAll('g[aria-label=line] path').length === 2")
        page.close()


def test_samples_of_a_language_model_are_shown_with_their_texts(quiet, tmp_path):
    torch.manual_seed(0)
    tokens, y = torch.randint(0, 50, (12, 5)), torch.arange(12) % 2
    texts = [f"sentence {i} says “{'ä' * i}” <b>and</b> more" for i in range(12)]
    net = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Flatten(), torch.nn.Linear(40, 2))
    optimiser = torch.optim.SGD(net.parameters(), 0.5)
    with ul.Scope(net, (tokens, y), tmp_path / "runs" / "words", texts=texts, budget=1.0) as scope:
        for step in range(1, 31):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(tokens), y).backward()
            optimiser.step()
            scope.step(step)
    with serve_studio(tmp_path / "runs") as home:
        page = open_page(quiet, home, "run/words")
        wait_until(page, "document.querySelectorAll('[data-testid=samples] q').length >= 8")
        for kind in ("hardest", "easiest", "most moved"):
            assert kind in page.get_by_test_id("samples").inner_text()
        for button in page.get_by_test_id("samples").locator("dd button").all():
            number = int(re.search(r"#(\d+)", button.inner_text())[1])
            assert button.locator("q").inner_text().strip("“”\"'") == texts[number]
        assert "probe text" not in page.inner_text("main")
        assert fits_width(page)
        page.close()


def test_runs_that_share_the_other_setting_are_joined_in_the_scatter(quiet, tmp_path):
    for rate in (0.01, 0.1, 1.0):
        for width in (8, 64):
            name = f"{rate}-{width}"
            with Writer(tmp_path / name, header(name, 1, config={"lr": rate, "width": width})) as writer:
                writer.record(0, {"loss": np.array([rate / width])}, {})
                writer.finish()
    with serve_studio(tmp_path) as home:
        page = open_page(quiet, home, "runs?chart=lr&chartY=loss")
        wait_until(page, "document.querySelectorAll('[data-testid=scatter] g[aria-label=line] path').length === 2")
        labels = page.locator("[data-testid=scatter] g[aria-label=text] text").all_text_contents()
        assert labels == ["width 64", "width 8"]
        ticks = page.locator("[data-testid=scatter] g[aria-label^='y-axis tick label'] text").all_text_contents()
        assert 2 <= len([tick for tick in ticks if tick]) <= 6
        page.close()


def test_a_step_of_the_scrubber_moves_the_cursor_and_draws_no_chart_again(quiet, home):
    for place, panel in (("overlay?q=rate", "panel-overlay-loss"), ("run/rate-0.1-seed-0", "panel-curve-loss")):
        page = open_page(quiet, home, place)
        chart = f"document.querySelector('[data-testid={panel}] svg')"
        wait_until(page, chart)
        page.wait_for_timeout(300)
        page.evaluate(f"() => {{ window.drawn = {chart}; }}")
        page.keyboard.press("ArrowLeft")
        wait_until(page, "/step=10/.test(location.hash)")
        page.wait_for_timeout(200)
        assert page.evaluate(f"window.drawn === {chart}")
        page.close()
