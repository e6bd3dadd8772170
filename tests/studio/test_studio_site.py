"""The static site of a folder of runs: the server's answers in files, relative addresses, and no file of anybody else."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from typer.testing import CliRunner

from browser import Browser, fits_width, wait_until
from studio_runs import STEPS, ask, ask_json, header, write_run
from unlazy.cli import app as cli
from unlazy.runtime import InputError
from unlazy.studio.answers import address
from unlazy.studio.api import StudioApi
from unlazy.studio.run_index import RunIndex
from unlazy.studio.site import MANIFEST, export_site

KEYS = ("deep/one & <two>", "same", "same-2", "turned", "other")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs over the same samples, in another order, and over others; one folder that is no run."""
    root = tmp_path_factory.mktemp("site") / "runs"
    x = np.random.default_rng(0).normal(size=(1, 8, 2)).astype(np.float32)
    for key, inputs in zip(KEYS, (x, x, x, x[:, ::-1].copy(), x + 1), strict=True):
        write_run(root / key, once={"probe_x": inputs}, members=1, head=header(key, 1) | {"config": {"lr": len(key)}})
    (root / "sick").mkdir()
    (root / "sick" / "run.json").write_text("{")
    return root


@pytest.fixture(scope="module")
def site(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("www") / "some" / "place"
    export_site(store, out)
    return out


def content_of(site: Path) -> dict[str, Any]:
    page = (site / "index.html").read_text()
    content: dict[str, Any] = json.loads(re.search(r'id="unlazy-inline">(.*?)</script>', page, re.S)[1])
    return content


def test_files_hold_what_the_server_answers(store, site):
    api, content = StudioApi(RunIndex(store)), content_of(site)
    assert content["site"]["runs"].keys() == set(KEYS)
    listed = {card["key"]: card for card in content["responses"]["/api/runs"]["runs"]}
    assert {key: card["config"] for key, card in listed.items()} == {key: {"lr": len(key)} for key in KEYS}
    for key in KEYS:
        folder = site / content["site"]["runs"][key]
        answers = json.loads((folder / "answers.json").read_text())
        for step, (kind, name) in product(STEPS, (("levels", "tangent"), ("array", "output"), ("array", "overlap"))):
            more = {"scale": "all"} if kind == "levels" else {}
            packed = answers[address(kind, key, name, step, member=0, **more)]
            body = (site / packed["file"]).read_bytes()[packed["at"] : packed["at"] + packed["bytes"]]
            served = ask(api, f"{kind}/{key}/{name}/{step}", member=0, **more)
            assert body == served.body
            assert packed["headers"] == served.headers
        facts, served = json.loads((folder / "facts.json").read_text()), ask_json(api, f"run/{key}")
        assert facts["scalars"] == served["scalars"]
        assert facts["steps"] == served["steps"]


def test_one_pair_of_runs_answers_for_all_pairs_over_the_same_samples(store, site):
    api, content = StudioApi(RunIndex(store)), content_of(site)
    samples, responses = content["site"]["samples"], content["responses"]
    assert len({tuple(pair) for pair in samples.values()}) == 3  # the samples, in another order, others
    for first, second in product(KEYS, repeat=2):
        if first != second:
            same = samples[first] == samples[second]
            pair = samples[first] if same else (samples[first][0], samples[second][0])
            inside = responses[address("sample-match", pair[0], other=pair[1])]
            assert inside == ask_json(api, f"sample-match/{first}", other=second)
            inside = responses[address("kernel-samples", pair[0], "overlap", other=pair[1])]
            assert inside == ask_json(api, f"kernel-samples/{first}/overlap", other=second)


def test_the_manifest_names_every_file_and_nothing_reaches_outside(site):
    written = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert set(json.loads((site / MANIFEST).read_text())["files"]) == written - {MANIFEST}
    assert not re.search(r'(src|href)="(/|http)', (site / "index.html").read_text())


def test_a_folder_that_is_no_export_is_left_alone(store, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="not an export"):
        export_site(store, tmp_path)
    (tmp_path / MANIFEST).write_text('{"files"')
    with pytest.raises(InputError, match="not an export"):
        export_site(store, tmp_path)
    with pytest.raises(InputError, match="is a file"):
        export_site(store, tmp_path / "thesis.tex")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex", MANIFEST]


def test_a_second_export_replaces_its_own_files_and_keeps_those_of_others(tmp_path):
    write_run(tmp_path / "runs" / "one", members=1)
    out, outside = tmp_path / "site", tmp_path / "precious.txt"
    export_site(tmp_path / "runs", out)
    (out / "CNAME").write_text("example.org")
    outside.write_text("mine")
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps(manifest | {"files": [*manifest["files"], "../precious.txt"]}))
    before = set(out.rglob("*.bin"))
    write_run(tmp_path / "runs" / "two", members=1)
    export_site(tmp_path / "runs", out)
    assert (out / "CNAME").read_text() == "example.org"
    assert outside.read_text() == "mine"
    assert not any(path.exists() for path in before)
    assert len(list(out.glob("data-*"))) == 1
    assert content_of(out)["site"]["runs"].keys() == {"one", "two"}


def test_the_command_says_what_it_wrote_and_what_it_left_out(store, tmp_path):
    done = CliRunner().invoke(cli.app, ["export", str(store), "-o", str(tmp_path / "site")])
    assert done.exit_code == 0, done.output
    assert "5 runs in" in done.output
    assert "left out: sick" in done.output
    assert not list((tmp_path / "site").rglob("run.json"))  # no folder of the site looks like a run


class Quiet(SimpleHTTPRequestHandler):
    """A plain web server that says nothing."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address of the site below a path of a plain web server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site.parent.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/some/place/"
    server.shutdown()
    server.server_close()


@pytest.mark.browser
def test_list_run_compare_and_overlay_open_from_a_plain_web_server(browser: Browser, served: str):
    browser.console_messages.clear()
    browser.requests.clear()
    page = browser.open(served)
    failed: list[str] = []
    page.on("response", lambda answer: failed.append(f"{answer.status} {answer.url}") if answer.status > 399 else None)
    page.on("requestfailed", lambda request: failed.append(request.url))
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 5")
    assert "Playground" not in page.inner_text("header")
    page.get_by_role("link", name="one & <two>").click()
    wait_until(page, "window.__unlazy.ready && document.querySelector('[data-map=overlap]')")
    assert page.get_by_test_id("step").get_attribute("data-step") == str(STEPS[-1])
    page.keyboard.press("Home")
    wait_until(page, "document.querySelector('[data-map=overlap]').dataset.step === '0'")
    assert fits_width(page)
    same, turned = (quote(key, safe="") for key in ("same", "turned"))
    page.goto(f"{served}#/compare/{same}/same-2")
    wait_until(page, "document.querySelector('[data-map=overlap-difference], [data-testid=panel-overlap-difference]')")
    wait_until(page, "document.querySelectorAll('canvas').length > 2")
    assert page.get_by_test_id("unlike").count() == 0
    page.goto(f"{served}#/compare/{same}/{turned}")
    wait_until(page, "/another order/.test(document.querySelector('[data-testid=unlike]')?.innerText ?? '')")
    page.goto(f"{served}#/overlay?q=same")
    lines = (
        "document.querySelector('[data-testid=panel-overlay-loss]')?.querySelectorAll('g[aria-label=line] path').length"
    )
    wait_until(page, f"{lines} === 2")
    page.goto(f"{served}#/play")
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length === 5")
    page.close()
    assert browser.console_messages == []
    assert failed == []
    assert browser.foreign_requests(served) == []
