"""The studio in real Chromium: pixels against NumPy, keys, addresses, live runs, the playground, and nothing from elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser, fits_width, press_and_wait, wait_until
from studio_runs import STEPS, arrays_at, files_below, header, kernel, write_run
from unlazy.claims.scorecard import load_results, results_folder, scorecard
from unlazy.store import Writer

pytestmark = pytest.mark.browser
SIDE = 24


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio")
    random = np.random.default_rng(0)
    points = random.normal(size=(1, SIDE, 2)).astype(np.float32)
    once = {"probe_x": points, "probe_y": (points[..., :1] > 0).astype(np.float32)}
    write_run(folder / "group" / "first", n=SIDE, once=once)
    write_run(folder / "group" / "second", n=SIDE, once=once)
    with Writer(folder / "wide", header("wide", members=1)) as writer:
        for step in (0, 9):
            neurons = random.normal(size=(1, 10_000, 5)).astype(np.float32)
            bad = kernel(6, 1, step)
            bad[0, 2, 3] = np.nan
            writer.record(step, {"loss": np.array([np.nan])}, {"neurons": neurons, "overlap": bad})
        writer.finish()
    write_run(folder / "broken")
    (folder / "broken" / "run.json").write_text("nonsense")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def watched(browser: Browser, home: str) -> Iterator[Browser]:
    """Every test ends with no complaint on the console and no request to another address."""
    browser.console_messages.clear()
    browser.requests.clear()
    yield browser
    assert browser.console_messages == []
    assert browser.foreign_requests(home) == []


def shown_pixels(page: Any, name: str) -> np.ndarray:
    """RGBA of a heat map's canvas."""
    script = """name => { const canvas = document.querySelector(`[data-map="${name}"]`);
        const [w, h] = [canvas.width, canvas.height];
        return [w, h, Array.from(canvas.getContext("2d").getImageData(0, 0, w, h).data)]; }"""
    width, height, data = page.evaluate(script, name)
    return np.array(data, np.uint8).reshape(height, width, 4)


def drawn_by_numpy(name: str, step: int, member: int) -> np.ndarray:
    """The same picture from the stored numbers."""
    maps = {at: arrays_at(at, n=SIDE)[name][member].astype(np.float64) for at in STEPS}
    maps = {at: values / np.diagonal(values).mean() for at, values in maps.items()}
    diagonals = np.concatenate([np.abs(np.diagonal(values)) for values in maps.values()])
    top = np.quantile(diagonals, 0.98 if name == "tangent" else 1.0)
    level = np.sqrt(np.minimum(np.abs(maps[step]) / top, 1))
    tables = json.loads((files("unlazy.studio") / "static" / "studio" / "colormaps.json").read_text())
    signed = name == "tangent"
    code = np.rint(128 + 127 * np.sign(maps[step]) * level if signed else 255 * level).astype(int)
    colours = np.array(tables["signed" if signed else "unsigned"], np.uint8)[code]
    return np.concatenate([colours, np.full((*code.shape, 1), 255, np.uint8)], axis=-1)


def drawn_step(page: Any, name: str, step: int) -> None:
    wait_until(page, f"document.querySelector('[data-map=\"{name}\"]')?.dataset.step === argument", str(step))
    wait_until(page, f"!document.querySelector('[data-map=\"{name}\"]').closest('[aria-busy=true]')")


@pytest.mark.parametrize(("step", "member"), [(0, 0), (4, 1), (50, 1)])
def test_pixels_are_those_of_numpy(watched, home, step, member):
    page = watched.open(f"{home}#/run/group/first?step={step}&member={member}&order=stored")
    for name in ("overlap", "tangent"):
        drawn_step(page, name, step)
        got, wanted = shown_pixels(page, name), drawn_by_numpy(name, step, member)
        assert got.shape == (SIDE, SIDE, 4)
        assert np.array_equal(got, wanted)
        assert len(np.unique(got.reshape(-1, 4), axis=0)) > 50
    page.close()


def test_keys_scrub_and_play(watched, home):
    page = watched.open(f"{home}#/run/group/first")
    drawn_step(page, "overlap", 50)  # a finished run opens at its end
    press_and_wait(page, "ArrowLeft")
    drawn_step(page, "overlap", 16)
    press_and_wait(page, "ArrowLeft")
    drawn_step(page, "overlap", 4)
    press_and_wait(page, "ArrowRight")
    drawn_step(page, "overlap", 16)
    press_and_wait(page, "Home")
    drawn_step(page, "overlap", 0)
    page.keyboard.press("Space")
    drawn_step(page, "overlap", 50)
    page.close()


def test_an_address_brings_the_same_view_back(watched, home):
    page = watched.open(f"{home}#/run/group/first?step=4&member=1&mark=3,5")
    drawn_step(page, "tangent", 4)
    press_and_wait(page, "ArrowRight")
    state = page.evaluate("location.href")
    drawn_step(page, "tangent", 16)
    page.wait_for_timeout(300)
    again = watched.open(state)
    drawn_step(again, "tangent", 16)
    wait_until(again, "document.querySelector('main').innerText === argument", page.inner_text("main"))
    assert np.array_equal(shown_pixels(page, "tangent"), shown_pixels(again, "tangent"))
    assert again.evaluate("location.href") == state
    page.close()
    again.close()


def test_the_list_names_what_is_broken_and_shows_the_rest(watched, home):
    page = watched.open(f"{home}#/runs")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length >= 2")
    text = page.inner_text("main")
    assert "first" in text
    assert "second" in text
    assert "broken" in text
    page.get_by_test_id("runs-filter").fill("second")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 1")
    page.close()


def test_a_live_run_appears_and_grows_without_a_reload(watched, home, root):
    page = watched.open(f"{home}#/runs")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length >= 2")
    page.evaluate("window.sameDocument = true")
    with Writer(root / "fresh", header("fresh", members=1)) as writer:
        wait_until(page, "document.querySelector('main').innerText.includes('fresh')")
        writer.record(0, {"loss": np.ones(1)}, {"overlap": kernel(6, 1, 0)})
        page.get_by_role("link", name="fresh").click()
        drawn_step(page, "overlap", 0)
        for step in (1, 2):
            writer.record(step, {"loss": np.ones(1)}, {"overlap": kernel(6, 1, step)})
        drawn_step(page, "overlap", 2)  # it follows the newest_scalars step
        writer.finish()
    assert page.evaluate("window.sameDocument")
    page.close()


def test_two_runs_side_by_side(watched, home):
    page = watched.open(f"{home}#/compare/group%2Ffirst/group%2Fsecond?step=4")
    for name in ("overlap-a", "overlap-b", "overlap-difference"):
        drawn_step(page, name, 4)
    assert np.array_equal(
        shown_pixels(page, "overlap-a"), shown_pixels(page, "overlap-b")
    )  # they hold the same numbers
    assert len(np.unique(shown_pixels(page, "overlap-difference").reshape(-1, 4), axis=0)) == 1
    page.close()


@pytest.mark.parametrize("place", ["run/group/first/halfspace/1/2", "run/group/first/neuron/3"])
def test_every_unit_has_an_address(watched, home, place):
    page = watched.open(f"{home}#/{place}?step=4")
    wait_until(page, "document.querySelector('main')?.innerText.length > 100")
    page.wait_for_timeout(300)
    assert page.locator("[data-testid=problem]").count() == 0
    page.close()


def test_ten_thousand_neurons_and_numbers_that_are_none(watched, home):
    page = watched.open(f"{home}#/run/wide?step=9")
    drawn_step(page, "overlap", 9)
    wait_until(
        page, "/10,?000/.test(document.querySelector('[data-testid=panel-neurons]')?.innerText ?? '')", seconds=60
    )
    assert "not finite" in page.get_by_test_id("readout-overlap").inner_text()
    page.close()


def test_every_claim_is_on_the_scorecard(watched, home):
    page = watched.open(f"{home}#/claims")
    claims = len(scorecard(load_results(results_folder())))
    assert claims >= 58
    wait_until(page, f"document.querySelectorAll('[data-testid=claims-row]').length === {claims}")
    page.close()


def test_the_playground_moves(watched, home):
    page = watched.open(f"{home}#/play")
    page.get_by_test_id("play-start").click()
    wait_until(page, "document.querySelector('main canvas')", seconds=60)
    frames, end = set(), time.monotonic() + 60
    while len(frames) < 4:
        assert time.monotonic() < end, f"only {len(frames)} different pictures in a minute"
        frames.add(page.locator("main canvas").first.screenshot())
    status = page.get_by_test_id("play-status").inner_text()
    wait_until(page, "document.querySelector('[data-testid=play-status]').innerText !== argument", status)
    page.get_by_test_id("play-stop").click()
    wait_until(
        page, "/stopped|finished|interrupted/.test(document.querySelector('[data-testid=play-status]').innerText)"
    )
    page.close()


@pytest.mark.parametrize(
    "place", ["runs", "run/group/first?step=4", "claims", "play", "compare/group%2Ffirst/group%2Fsecond"]
)
def test_pages_fit_a_phone(watched, home, place):
    page = watched.open(f"{home}#/{place}", width=390, height=800)
    wait_until(page, "document.querySelector('main')?.innerText.length > 100")
    page.wait_for_timeout(500)
    assert fits_width(page)
    page.close()


PLACES = {
    "run/group/first?step=4": 9,
    "run/group/first/halfspace/1/2?step=4": 4,
    "run/group/first/neuron/3?step=4": 3,
    "compare/group%2Ffirst/group%2Fsecond?step=4": 8,
}


@pytest.mark.parametrize("place", PLACES)
def test_every_panel_has_its_numbers_a_figure_and_its_code(watched, home, place):
    page = watched.open(f"{home}#/{place}")
    wait_until(page, "document.querySelectorAll('section[data-testid^=panel-]').length >= argument", PLACES[place])
    page.wait_for_timeout(1500)  # spectra and maps come a little later
    script = """() => [...document.querySelectorAll("section[data-testid^=panel-]")].map(panel => ({
        name: panel.dataset.testid, words: [...panel.querySelectorAll(".links :is(a, button)")].map(link => link.innerText),
        addresses: [...panel.querySelectorAll(".links a")].map(link => link.getAttribute("href"))}))"""
    for panel in page.evaluate(script):
        assert {"data", "figure", "code"} <= set(panel["words"]), panel["name"]
        for address in panel["addresses"]:
            answer = page.request.get(f"{home}{address}")
            assert answer.status == 200, (panel["name"], address, answer.text())
            assert len(answer.body()) > 100 or "format=" in address
    page.close()


def test_frames_come_many_at_a_time(watched, home):
    page = watched.open(f"{home}#/run/group/first")
    drawn_step(page, "overlap", 50)
    wait_until(page, "!/loading/.test(document.querySelector('[data-testid=status]')?.innerText ?? '')")
    page.wait_for_timeout(500)
    asked = [url for url in watched.requests if "/api/" in url]
    assert any("/api/frames/group/first/overlap" in url for url in asked)
    for name in ("overlap", "tangent"):
        single = [url for url in asked if f"/api/levels/group/first/{name}/" in url]
        assert len(single) < len(STEPS)
    page.close()


def test_what_is_not_there_is_said(watched, home):
    page = watched.open(f"{home}#/run/group/third")
    wait_until(page, "document.querySelector('[data-testid=problem]')?.innerText.includes('third')")
    watched.console_messages.clear()  # Chromium itself writes every 404 on the console
    page.close()


def test_looking_left_every_file_as_it_was(watched, home, root):
    before = files_below(root)
    page = watched.open(f"{home}#/run/group/second")
    drawn_step(page, "overlap", 50)
    press_and_wait(page, "Home")
    drawn_step(page, "overlap", 0)
    assert files_below(root) == before
    page.close()
