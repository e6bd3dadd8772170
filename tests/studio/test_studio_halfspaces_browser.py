"""A user's own network in real Chromium: its half-spaces, and marks where two runs hold the same samples, or others."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from browser import Browser, press_and_wait, wait_until
from unlazy import Scope
from unlazy.studio.report import write_run_report

pytestmark = pytest.mark.browser
N, UNITS, LAST = 40, 9, 2
GENERATOR = torch.Generator().manual_seed(5)
POINTS = 1.5 * torch.randn(N, 2, generator=GENERATOR)
ELSEWHERE = 1.5 * torch.randn(N, 2, generator=GENERATOR)
LABELS = (POINTS.prod(1) > 0).long()
ODD = "my run (1), 50% #2 & more?"
STAGES: dict[int, nn.Sequential] = {}  # the network of the run "mine" at its two steps


def watched_run(folder: Path, x: Tensor, gate: type[nn.Module] = nn.ReLU) -> dict[int, nn.Sequential]:
    """A network of one layer, watched at the start and after a jump; returns it at both steps."""
    torch.manual_seed(6)
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, UNITS), gate(), nn.Linear(UNITS, 2))
    start = copy.deepcopy(net)
    with Scope(net, (x, LABELS), folder, budget=float("inf")) as scope:
        with torch.no_grad():
            for p in net.parameters():
                p += torch.randn_like(p)
        scope.step(LAST)
    return {0: start, LAST: net}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spaces")
    STAGES.update(watched_run(folder / "mine", POINTS))
    watched_run(folder / "again", POINTS)
    watched_run(folder / "turned", POINTS.flip(0))
    watched_run(folder / "elsewhere", ELSEWHERE)
    watched_run(folder / "wrapped", POINTS[:, None])
    watched_run(folder / "smooth", POINTS, nn.Tanh)
    watched_run(folder / ODD, POINTS.flip(0))
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_console_messages(browser: Browser) -> Iterator[None]:
    yield
    assert browser.console_messages == []


def readout(page: Any, panel: str, words: str = "") -> str:
    """What stands under a panel, once these words are in it."""
    found = "document.querySelector(`[data-testid='readout-${argument[0]}']`)?.innerText"
    wait_until(page, f"({found})?.includes(argument[1])", [panel, words])
    return str(page.get_by_test_id(f"readout-{panel}").inner_text())


def place_of(shown: str) -> list[float]:
    """The point that a readout names."""
    found = re.match(r"\((\S+), (\S+)\):", shown.replace("\N{MINUS SIGN}", "-"))
    return [float(part) for part in found.groups()] if found else []


def open_units(step: int, point: Tensor) -> int:
    return int((STAGES[step][1](point[None]) > 0).sum())


def ink(page: Any, testid: str) -> int:
    """How many pixels of a canvas are drawn on."""
    script = """testid => { const canvas = document.querySelector(`[data-testid=${testid}]`);
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let drawn = 0;
        for (let i = 3; i < data.length; i += 4) if (data[i] > 20) drawn++;
        return drawn; }"""
    return int(page.evaluate(script, testid))


@pytest.mark.parametrize("where", ["served", "wrapped", "one file"])
def test_units_are_open_where_the_network_opens_them(browser, home, root, tmp_path, where):
    """The panel counts open units of a marked sample as the network itself does, at both ends of the scrubber."""
    address = f"{home}#/run/{'wrapped' if where == 'wrapped' else 'mine'}"
    if where == "one file":
        address = f"{write_run_report([root / 'mine'], tmp_path / 'page.html')[0].as_uri()}#/run/mine"
    counts = set()
    for sample in (0, 7, 23):
        page = browser.open(f"{address}?step=0&mark={sample}")
        assert "Half-spaces" in page.get_by_test_id("panel-halfspaces").inner_text()
        for step, key in ((0, None), (LAST, "End")):
            if key:
                press_and_wait(page, key)
            wanted = open_units(step, POINTS[sample])
            shown = readout(page, "halfspaces", f"{wanted} of {UNITS} units of this layer open")
            assert place_of(shown) == pytest.approx(POINTS[sample].tolist(), abs=0.02)
            counts.add(wanted)
        page.close()
    assert len(counts) > 2


def test_borders_are_drawn_and_lead_to_their_neuron(browser, home):
    page = browser.open(f"{home}#/run/mine?step={LAST}")
    readout(page, "halfspaces")
    wait_until(page, "document.querySelector('[data-testid=panel-units] canvas')")
    smooth = browser.open(f"{home}#/run/smooth?step={LAST}")
    readout(smooth, "halfspaces", f"{N} samples")
    page.wait_for_timeout(300)
    assert ink(page, "halfspaces-canvas") > ink(smooth, "halfspaces-canvas") + 500
    page.goto(f"{home}#/run/mine?step={LAST}&unit=3")
    link = page.get_by_text("open unit 4", exact=True)
    link.click()
    wait_until(page, "document.querySelector('[data-testid=panel-open]')")
    assert page.inner_text("h1") == "Neuron 4"
    weight, bias = STAGES[LAST][1].weight[3].detach().numpy(), float(STAGES[LAST][1].bias[3].detach())
    lengths = page.get_by_test_id("panel-length").inner_text().replace("\N{MINUS SIGN}", "-")
    named = dict(re.findall(r"(length|offset)\s+(-?[\d.]+)", lengths))
    assert float(named["length"]) == pytest.approx(float(np.linalg.norm(weight)), rel=0.02)
    assert float(named["offset"]) == pytest.approx(bias, rel=0.02)
    assert "Open on the side of the tick" in page.get_by_test_id("panel-unit").inner_text()
    page.close()
    smooth.close()


def test_a_network_without_half_spaces_says_why(browser, home):
    page = browser.open(f"{home}#/run/smooth?step={LAST}")
    shown = readout(page, "halfspaces", f"{N} samples · no half-spaces")
    assert "what follows the first layer is tanh, not a ReLU" in shown
    assert "Half-spaces" not in page.get_by_test_id("panel-halfspaces").inner_text()
    assert page.get_by_test_id("panel-units").count() == 0
    page.close()


@pytest.mark.parametrize("where", ["server", "one file"])
def test_a_run_may_be_called_anything_and_be_compared(browser, home, root, tmp_path, where):
    """In a report, too, the second run says which of its samples is meant."""
    start = home
    if where == "one file":
        start = write_run_report([root / ODD, root / "mine"], tmp_path / "page.html")[0].as_uri()
    page = browser.open(f"{start}#/run/{quote(ODD, safe='')}?step={LAST}&mark=3")
    readout(page, "halfspaces", "units of this layer open")
    assert ODD in page.inner_text("h1, h2")
    page.goto(f"{start}#/compare/{quote(ODD, safe='')}/mine?step={LAST}&mark=3")
    wait_until(page, "document.querySelector('[data-testid=marks]')?.innerText.includes('a mark follows its sample')")
    for panel in ("a", "b"):
        readout(page, f"halfspaces-{panel}", "units of this layer open")
        assert marked(page, panel) == pytest.approx(POINTS[N - 1 - 3].tolist(), abs=0.02)
    page.close()


def marked(page: Any, panel: str) -> list[float]:
    return place_of(page.get_by_test_id(f"readout-halfspaces-{panel}").inner_text())


@pytest.mark.parametrize(
    ("other", "number", "words"),
    [("again", 7, None), ("turned", N - 1 - 7, "in another order: a mark follows its sample")],
)
def test_a_mark_follows_its_sample(browser, home, other, number, words):
    """The second run shows the same point of the plane, whatever its number there; kernels and outputs show it too."""
    page = browser.open(f"{home}#/compare/mine/{other}?step={LAST}&mark=7")
    for panel in ("a", "b"):
        readout(page, f"halfspaces-{panel}", "units of this layer open")
        assert marked(page, panel) == pytest.approx(POINTS[7].tolist(), abs=0.02)
    assert f"#{number} " in readout(page, "overlap-b", "and #")
    assert "#7 " in readout(page, "overlap-a", "and #")
    assert re.match(r"#7 .*margin .* and ", readout(page, "output", " and "))
    shown = page.get_by_test_id("marks")
    assert shown.count() == (words is not None)
    assert words is None or words in shown.inner_text()
    page.close()


def keep_mark(page: Any, kernel: str, part: float, key: str, before: str) -> int:
    """Click on the diagonal of a heat map that stands still; returns the number that the address keeps then."""
    wait_until(page, "!document.querySelector('[aria-busy=true]')")
    spot = page.locator(f"[data-map={kernel}]")
    box = spot.bounding_box()
    spot.click(position={"x": part * box["width"], "y": part * box["height"]})
    page.mouse.move(0, 0)
    kept = "(new URLSearchParams(location.hash.split('?')[1]).get(argument[0]) ?? '')"
    wait_until(page, f"{kept} !== argument[1]", [key, before])
    return int(page.evaluate(f"argument => {kept}", [key]).split(",")[0])


def test_a_mark_made_in_the_second_run_is_found_in_the_first(browser, home):
    page = browser.open(f"{home}#/compare/mine/turned?step={LAST}&mark=0&order=stored")
    readout(page, "halfspaces-b", "units of this layer open")
    number = keep_mark(page, "overlap-b", 0.76, "mark", "0")
    assert abs(number - (N - 1 - 30)) <= 1  # three quarters down the second run, which has the samples in reverse
    assert "mark2" not in page.evaluate("location.hash")
    assert f"#{number} " in readout(page, "overlap-a", f"#{number} ")
    readout(page, "overlap-b", f"#{N - 1 - number} ")
    for panel in ("a", "b"):
        assert marked(page, panel) == pytest.approx(POINTS[number].tolist(), abs=0.02)
    page.close()


def test_other_samples_keep_their_marks_apart(browser, home):
    page = browser.open(f"{home}#/compare/mine/elsewhere?step={LAST}&mark=7")
    readout(page, "halfspaces-a", "units of this layer open")
    wait_until(page, "document.querySelector('[data-testid=marks]')?.innerText.includes('belongs to its own run')")
    page.wait_for_timeout(300)
    assert marked(page, "a") == pytest.approx(POINTS[7].tolist(), abs=0.02)
    assert marked(page, "b") == []
    assert " and " not in readout(page, "output", "#7")
    number = keep_mark(page, "overlap-b", 0.31, "mark2", "")
    readout(page, "halfspaces-b", "units of this layer open")
    assert marked(page, "a") == pytest.approx(POINTS[7].tolist(), abs=0.02)
    assert marked(page, "b") == pytest.approx(ELSEWHERE[number].tolist(), abs=0.02)
    assert "mark=7" in page.evaluate("location.hash")
    page.keyboard.press("Escape")
    wait_until(page, "!/mark/.test(location.hash)")
    page.close()
