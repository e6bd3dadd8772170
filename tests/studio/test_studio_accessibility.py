"""Every page of the studio is usable by keyboard and screen reader, light and dark, on a desk and on a phone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from accessibility import keyboard_violations, violations
from browser import Browser, wait_until
from studio_runs import header, kernel, verdict_of, write_run
from unlazy.store import Run, Writer

pytestmark = pytest.mark.browser
PLACES = {
    "runs": ("runs?chart=lr&group=verdict", "document.querySelector('[data-testid=scatter] circle')"),
    "run": ("run/rate-0.1", "document.querySelector('[data-testid=panel-verdict] svg')"),
    "halves": ("run/plane", "document.querySelector('[data-testid=panel-halfspaces]')"),
    "unit": ("run/plane/halfspace/0/1", "document.querySelectorAll('main canvas, main svg').length > 1"),
    "compare": ("compare/rate-0.1/rate-0.01", "document.querySelectorAll('canvas').length > 2"),
    "overlay": ("overlay?q=rate&layer=layer1", "document.querySelector('[data-testid=panel-overlay-loss] svg')"),
    "claims": ("claims?open=C8", "document.querySelectorAll('main tr, main [role=row], main li').length > 3"),
    "play": ("play", "document.querySelectorAll('main select, main input').length > 2"),
    "lost": ("run/nothing", "document.querySelector('[data-testid=problem]')"),
}
LOOKS = [(1400, "light"), (1400, "dark"), (390, "light"), (390, "dark")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accessible")
    random = np.random.default_rng(0)
    for rate, word in ((0.001, "lazy"), (0.01, "mixed"), (0.1, "rich")):
        name = f"rate-{rate}"
        with Writer(folder / name, header(name, 1, config={"lr": rate})) as writer:
            for step in (0, 3, 10, 30):
                once = {"probe_y": np.arange(8)[None] % 3} if step == 0 else {}
                scalars = {
                    key: np.array([rate + 1 / (1 + step)]) for key in ("loss", "a@layer1", "linearisation_error")
                }
                more = {"overlap": kernel(8, 1, step), "output": random.normal(size=(1, 8, 3)).astype(np.float32)}
                writer.record(step, scalars, more | once)
            writer.finish()
        (folder / name / "verdict.json").write_text(json.dumps(verdict_of(word, rate)))
        Run(folder / name).set_labels(tags=["one"], notes="a note")
    write_run(folder / "plane", once={"probe_x": random.normal(size=(2, 8, 2)).astype(np.float32)})
    (folder / "sick").mkdir()
    (folder / "sick" / "run.json").write_text("{")
    return folder


@pytest.mark.parametrize("name", PLACES)
def test_a_page_breaks_no_rule_of_accessibility(browser: Browser, home, name):
    place, ready = PLACES[name]
    for width, scheme in LOOKS:
        page = browser.open(f"{home}#/{place}", width=width, height=900, color_scheme=scheme)
        wait_until(page, ready)
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        page.wait_for_timeout(300)
        assert [f"{width} {scheme}: {one}" for one in violations(page)] == []
        if scheme == "light":
            assert [f"{width}: {one}" for one in keyboard_violations(page)] == []
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dialogs_and_a_training_of_the_playground_break_none(browser: Browser, home, scheme):
    page = browser.open(f"{home}#/run/plane", height=900, color_scheme=scheme)
    wait_until(page, PLACES["halves"][1])
    page.keyboard.press("?")
    wait_until(page, "document.querySelector('dialog[open]')")
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="code").first.click()
    wait_until(page, "document.querySelector('dialog[open] pre')")
    assert violations(page) == []
    page.goto(f"{home}#/play")
    page.get_by_role("button", name="Train").click()
    wait_until(page, "document.querySelectorAll('main canvas').length > 1", seconds=40)
    assert violations(page) == []
    page.close()


BROKEN = """<!doctype html><html><title>t</title><body><main>
<h1>One</h1><h3>Three</h3><button></button><input placeholder="words"><img src="data:,"><a href="#"><svg></svg></a>
<p style="color:#999;background:#fff">grey</p><div aria-label="nobody reads this">x</div><span role="knob">y</span>
<div role="row"><span>no cell</span></div><div role="slider" tabindex="0" aria-label="s"></div><ul><p>z</p></ul>
<div aria-hidden="true"><button>hidden</button></div><button tabindex="3" style="outline:none">late</button>
<div style="overflow:auto;height:20px"><p style="height:90px">long</p></div><b id="i"></b><b id="i"></b>
<table><tr><th></th></tr></table><button aria-controls="gone" aria-pressed="yes">b</button></main>outside</body></html>"""


def test_the_rules_find_what_is_broken(browser: Browser):
    page = browser.open("about:blank")
    page.set_content(BROKEN)
    found = " | ".join(violations(page))
    for rule in (
        "no language",
        "heading skips a level",
        "no name: <button>",
        "no name: <input>",
        "no name: <a>",
        "picture without alt",
        "contrast: <p>",
        "without role",
        "unknown role",
        "row outside a table",
        "row with more than cells",
        "slider without values",
        "foreign child of a list",
        "focus inside aria-hidden",
        "tabindex above 0",
        "scrolls, but not by keys",
        "id twice",
        "empty heading of a table",
        "refers to nothing",
        "bad value",
    ):
        assert rule in found
    page.set_content(
        "<main><button style='outline:none'>a</button><button tabindex=-1>b</button><a href=#>c</a></main>"
    )
    assert keyboard_violations(page) == ["focus cannot be seen: <button> a"]
    page.close()
