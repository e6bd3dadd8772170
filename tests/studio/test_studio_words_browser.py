"""What the studio's pages say of a run, in real Chromium: margins, verdicts, captions, and what a report has not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser, wait_until
from studio_runs import header, kernel
from unlazy import Circle
from unlazy.claims.scorecard import load_results, ours_text, results_folder, scorecard
from unlazy.store import Writer
from unlazy.studio.report import write_run_report

pytestmark = pytest.mark.browser
CLASSES = np.array([3, 5, 8])
WORDS = {
    "meaning": "The measurements do not decide.",
    "gap": "Estimated gap to its linearised twin: 0.4.",
    "when": "The estimate passed the lazy border between step 0 and step 5.",
    "groups": "Left behind: 8 (loss 2.1 to 1.9).",
}
VERDICT = {
    "label": "cannot tell",
    "when": {"network": 5},
    "when_after": {"network": 0},
    "words": WORDS,
    "reasons": ["The measures disagree."],
    "evidence": [],
    "groups": {
        "3": {"share": 0.5, "loss_first": 2, "loss_last": 0.1, "verdict": "starved", "behind": False},
        "8": {"share": 0.5, "loss_first": 2.1, "loss_last": 1.9, "verdict": "keeps", "behind": True},
    },
}


def classes_run(folder: Path, samples: int, seed: int, verdict: dict[str, Any], fingerprint: str | None = "0") -> float:
    """A scope's run over inputs that it could not keep, with classes 3, 5 and 8 of 12; returns its last accuracy."""
    random = np.random.default_rng(seed)
    labels = CLASSES[np.arange(samples) % 3]
    scope = {"probe_kind": "tokens", "groups": {}, "rows": {}}
    right = 0.0
    data = {"name": "probe", "options": {}, "fingerprint": fingerprint}
    with Writer(folder, header(folder.name, 1, kind="scope", recipe={"scope": scope}, data=data)) as writer:
        for step in (0, 5):
            output = random.normal(size=(1, samples, 12)) + step * np.eye(12)[labels] / 3
            right = float((output[0].argmax(1) == labels).mean())
            arrays = {"output": output, "overlap": kernel(samples, 1, step)}
            once = {"probe_y": labels[None]} if step == 0 else {}
            writer.record(step, {"accuracy": np.array([right]), "loss": np.ones(1)}, arrays | once)
        writer.finish()
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return right


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    old = {"label": "mixed", "when": {"network": 5}, "evidence": []}
    accuracy = classes_run(folder / "classes", 200, 0, VERDICT)
    assert 0.5 < accuracy < 0.99
    classes_run(folder / "fewer", 60, 1, old)
    for name, fingerprint in (("again", "0"), ("elsewhere", "1"), ("silent", None)):
        classes_run(folder / name, 200, 2, old, fingerprint)
    random = np.random.default_rng(2)
    with Writer(folder / "real", header("real", 1)) as writer:
        targets, first, second = random.normal(size=(3, 1, 20, 1))
        writer.record(0, {"loss": np.array([2.301])}, {"output": first, "probe_y": targets})
        writer.record(5, {"loss": np.array([2.297])}, {"output": second})
        writer.finish()
    with Writer(folder / "sparse", header("sparse", 1)) as writer:
        writer.record(0, {"loss": np.ones(1)}, {"overlap": kernel(200, 1, 0), "output": np.ones((1, 200))})
        writer.record(5, {"loss": np.ones(1)}, {"output": np.ones((1, 200))})
        writer.finish()
    scope = {"groups": {"0": [0, 1], "1": [2, 3]}, "rows": {}}
    with Writer(folder / "layers", header("layers", 1, kind="scope", recipe={"scope": scope})) as writer:
        named = ["alignment@0", "alignment@2", "alignment_0", "alignment_1", "paths", "paths_0", "paths_1", "loss"]
        for step in (0, 5):
            scalars = {name: np.array([0.1 + place + step]) for place, name in enumerate(named)}
            writer.record(step, scalars, {"paths": np.log1p([[1.0, 2, 4, 800]])})
        writer.finish()
    model = {"width": 4, "depth": 2, "gating": "linear", "in": 2, "out": 1}
    circle = header("dlgn", 10, model=model, data=Circle(n=20).dataset().describe())
    with Writer(folder / "dlgn", circle) as writer:
        for step in (0, 5):
            writer.record(step, {"loss": np.ones(10)}, {})
        writer.finish()
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_console_messages(browser: Browser) -> Iterator[None]:
    yield
    assert browser.console_messages == []


def text_of(page: Any, testid: str, words: str = "") -> str:
    """The text of a part of the page, once it has any and these words are in it: arrays arrive one after the other."""
    found = "document.querySelector(`[data-testid='${argument[0]}']`)?.innerText ?? ''"
    wait_until(page, f"({found}).length > 3 && ({found}).includes(argument[1])", [testid, words])
    return str(page.get_by_test_id(testid).inner_text())


def test_the_output_panel_counts_as_many_right_as_the_accuracy(browser, home, root):
    page = browser.open(f"{home}#/run/classes?step=5")
    found = re.search(r"(\d+) of (\d+) samples", text_of(page, "readout-output", "samples"))
    assert found
    stored = json.loads((root / "classes" / "metrics.jsonl").read_text().splitlines()[-1])["scalars"]["accuracy"][0]
    assert int(found[1]) / int(found[2]) == stored
    assert page.get_by_role("button", name="class", exact=True).count() == 1  # the order by class is offered
    assert "alignment" in text_of(page, "panel-alignment").lower()
    page.close()


def test_a_verdict_is_told_in_its_own_words(browser, home):
    page = browser.open(f"{home}#/run/classes?step=0")
    card = text_of(page, "panel-verdict")
    for sentence in (WORDS["meaning"], WORDS["when"], WORDS["gap"], "The measures disagree."):
        assert sentence in card
    assert "1 shrank, 1 left behind" in card
    assert "left the lazy regime" not in card
    assert "no longer lazy" not in page.inner_text("main")
    page.get_by_role("button", name="step 5").click()
    wait_until(page, "location.hash.includes('step=5')")
    page.get_by_test_id("verdict-groups").locator("summary").click()
    groups = text_of(page, "verdict-groups")
    assert WORDS["groups"] in groups
    assert "starved" not in groups
    page.goto(f"{home}#/run/fewer")
    wait_until(page, "document.querySelector('[data-testid=panel-verdict]')?.innerText.includes('mixed')")
    assert "It left the lazy regime by step 5." in text_of(page, "panel-verdict")
    page.close()


def test_two_runs_of_classes_are_both_drawn(browser, home):
    page = browser.open(f"{home}#/compare/classes/fewer?step=5")
    assert text_of(page, "readout-output", "blue") == "blue: first run · orange: second run"
    script = """() => { const canvas = document.querySelector("[data-testid=output-canvas]");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let [blue, orange] = [0, 0];
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 40) {
            if (data[i + 2] > data[i] + 60) blue++;
            if (data[i] > data[i + 2] + 60) orange++; }
        return [blue, orange]; }"""
    page.wait_for_timeout(300)
    blue, orange = page.evaluate(script)
    assert min(blue, orange) > 100
    assert "cannot be subtracted" in text_of(page, "unlike")
    page.close()


@pytest.mark.parametrize(
    ("other", "notice", "drawn"), [("again", None, 1), ("elsewhere", "unlike", 0), ("silent", "unsure", 1)]
)
def test_kernels_over_other_samples_are_not_subtracted(browser, home, other, notice, drawn):
    page = browser.open(f"{home}#/compare/classes/{other}?step=5")
    panel = page.get_by_test_id("panel-overlap-difference")
    if notice:
        words = {"unlike": "measured on different data", "unsure": "do not say on which samples"}[notice]
        assert words in text_of(page, notice, words)
    else:
        wait_until(page, "document.querySelector('[data-map=overlap-difference]')")
    assert panel.locator("canvas").count() == drawn
    assert panel.get_by_test_id("unlike").count() + panel.get_by_test_id("unsure").count() == (notice is not None)
    assert panel.get_by_text("figure", exact=True).count() == drawn
    page.close()


def test_a_panel_older_than_the_timeline_says_so(browser, home):
    page = browser.open(f"{home}#/run/sparse?step=5")
    assert text_of(page, "older") == "as of step 0"
    assert page.get_by_test_id("panel-overlap").get_by_test_id("older").count() == 1
    assert page.get_by_test_id("panel-output").get_by_test_id("older").count() == 0
    page.keyboard.press("Home")
    wait_until(page, "!document.querySelector('[data-testid=older]')")
    page.goto(f"{home}#/compare/classes/sparse?step=5")
    words = "the first kernel is of step 5, the second of step 0"
    assert words in text_of(page, "apart", words)
    page.goto(f"{home}#/compare/classes/again?step=5")
    wait_until(page, "document.querySelector('[data-map=overlap-difference]')")
    assert page.get_by_test_id("apart").count() == 0
    page.close()


def test_real_targets_stand_beside_the_output(browser, home):
    page = browser.open(f"{home}#/run/real?step=5")
    assert "on the line it is right" in text_of(page, "readout-output", "target")
    ticks = page.locator("[data-testid=panel-curve-loss] svg [aria-label='y-axis tick label'] text").all_text_contents()
    assert len(ticks) > 2
    assert len(set(ticks)) == len(ticks)
    page.close()


def test_curves_of_layers_groups_and_paths_are_named_for_what_they_are(browser, home):
    page = browser.open(f"{home}#/run/layers?step=5&mark=3")
    assert "800 active paths" in text_of(page, "readout-paths", "active")  # a scope keeps ln(1 + count)
    page.evaluate("document.querySelectorAll('main details').forEach(part => { part.open = true; })")
    by_layer = text_of(page, "panel-curve-alignment@", "layer 0")
    assert ("layer 2" in by_layer, "class" in by_layer) == (True, False)
    assert "class 1" in text_of(page, "panel-curve-alignment", "class 0")
    assert "ln(1 + active paths)" in text_of(page, "panel-curve-paths")
    assert "This panel failed" not in page.inner_text("main")
    page.close()


def test_a_dlgn_without_half_spaces_says_that_they_were_not_stored(browser, home):
    page = browser.open(f"{home}#/run/dlgn?step=5")
    panel = text_of(page, "panel-halfspaces", "did not store")
    assert "ReLU" not in panel
    assert "output" not in panel
    page.goto(f"{home}#/runs")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 9")
    assert "· 10 members" not in page.inner_text("main")
    assert "10 members" in page.inner_text("main")
    page.close()


def test_claims_have_the_numbers_of_the_command_line(browser, home):
    page = browser.open(f"{home}#/claims")
    rows = [row for row in scorecard(load_results(results_folder())) if ours_text(row)]
    wait_until(page, "document.querySelectorAll('[data-testid=claims-row]').length >= argument", len(rows))
    seen = 0
    for row in rows:
        shown = page.locator(f"[data-id='{row['id']}'] .ours").inner_text().replace("\N{MINUS SIGN}", "-")
        parts = re.match(r"(\S+) \[(\S+), (\S+)\]", ours_text(row))
        if parts:
            seen += 1
            assert shown.split()[1] == parts[1]  # the first word is the column's name
            ends = "" if len(set(parts.groups())) == 1 else f"{parts[2]} to {parts[3]}"
            assert shown.endswith(ends)
            assert "never to never" not in shown
    assert seen > 5
    page.close()


def test_help_promises_what_the_page_has(browser, home, root, tmp_path):
    path, _ = write_run_report([root / "classes", root / "fewer"], tmp_path / "page.html")
    for address, served in ((f"{home}#/run/classes", True), (path.as_uri(), False)):
        page = browser.open(address)
        wait_until(page, "document.querySelector('[data-testid=panel-output]')")
        page.keyboard.press("?")
        words = page.locator("dialog").inner_text()
        assert ("Each panel has" in words) == served
        assert ("one file" in words) != served
        links = page.locator(".links").all_inner_texts()
        assert any("figure" in link for link in links) == served
        page.close()
