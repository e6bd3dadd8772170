"""The one-file report: the server's answers under the page's addresses, small enough to send, nothing from elsewhere."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from studio_runs import STEPS, arrays_at, files_below, header, write_run
from unlazy.cli import app as cli
from unlazy.runtime import InputError, StoreError
from unlazy.store import Writer
from unlazy.studio import bundle as built
from unlazy.studio import report as module
from unlazy.studio.answers import address
from unlazy.studio.api import StudioApi
from unlazy.studio.report import Picture, Report, Scene, report_content, write_run_report
from unlazy.studio.run_index import RunIndex


@pytest.fixture
def store(tmp_path) -> Path:
    write_run(tmp_path / "runs" / "one", members=3)
    write_run(tmp_path / "runs" / "deep" / "two & <three>")
    return tmp_path / "runs"


def content_of(page: str) -> dict:
    return json.loads(re.search(r'<script[^>]*id="unlazy-inline"[^>]*>(.*?)</script>', page, re.S)[1])


def unpacked(response: dict) -> np.ndarray:
    kind = response["headers"]["X-Dtype"]
    shape = [int(side) for side in response["headers"]["X-Shape"].split(",")]
    return np.frombuffer(base64.b64decode(response["base64"]), "<f4" if kind == "float32" else kind).reshape(shape)


def test_what_is_inside_is_what_the_server_says(store):
    api = StudioApi(RunIndex(store))
    content = report_content(api, Report("t", "l", (Scene("one", member=2),)))
    responses = content["responses"]
    for step in STEPS:
        served = api.answer(["levels", "one", "tangent", str(step)], {"member": "2", "scale": "all"})
        inside = responses[address("levels", "one", "tangent", step, member=0, scale="all")]
        assert base64.b64decode(inside["base64"]) == served.body
        assert {**served.headers}.items() <= inside["headers"].items()
        for name in ("output", "paths", "normals", "offsets"):
            got = unpacked(responses[address("array", "one", name, step, member=0)])
            assert np.array_equal(got, arrays_at(step, members=3)[name][2].astype(np.float32))
    for kind, name in (("spectrum", "overlap"), ("embedding", "neurons")):
        served = json.loads(api.answer([kind, "one", name], {"member": "2"}).body)
        assert responses[address(kind, "one", name, member=0)] == served
    run = responses["/api/run/one"]
    assert len(run["header"]["members"]) == 1
    assert run["header"]["members"][0]["seed"] == 2
    assert all(fact["shape"][0] == 1 for fact in run["arrays"].values())
    assert run["scalars"]["loss"]["values"][0] == [2.0]
    assert "One member" in content["notice"]
    json.dumps(content, allow_nan=False)


def test_runs_of_a_page_can_be_compared(store):
    api = StudioApi(RunIndex(store))
    first, second = "one", "deep/two & <three>"
    responses = report_content(api, Report("t", "l", (Scene(first), Scene(second))))["responses"]
    for key, other in ((first, second), (second, first)):
        served = api.answer(["sample-match", *key.split("/")], {"other": other})
        assert responses[address("sample-match", key, other=other)] == json.loads(served.body)
        for name in ("overlap", "tangent"):
            served = api.answer(["kernel-samples", *key.split("/"), name], {"other": other})
            assert responses[address("kernel-samples", key, name, other=other)] == json.loads(served.body)
    alone = report_content(api, Report("t", "l", (Scene(first),)))["responses"]
    assert not any(path.startswith(("/api/sample-match", "/api/kernel-samples")) for path in alone)


def test_a_run_twice_is_one_run_and_any_name_is_found(store):
    odd = store / "a?b #1 50%41"
    write_run(odd, members=1)
    page, _ = write_run_report([odd, odd], store / "page.html")
    content = content_of(page.read_text())
    assert content["title"] == content["scenes"][0]["title"] == odd.name
    assert content["entry"] == "#/run/a%3Fb%20%231%2050%2541"


def test_a_shelf_that_is_one_run_has_it_under_its_name(store):
    api = StudioApi(RunIndex(store / "one"))
    [card] = json.loads(api.answer(["runs"], {}).body)["runs"]
    assert card["key"] == "one"
    assert json.loads(api.answer(["run", "one"], {}).body)["key"] == "one"


def test_addresses_are_those_that_the_page_writes():
    """frontend/test/source.test.ts holds the page to the same."""
    assert address("run", "deep/my run (1)") == "/api/run/deep/my%20run%20(1)"
    assert address("run", "50% of what?#1") == "/api/run/50%25%20of%20what%3F%231"
    assert address("sample-match", "a b/c", other="d e/f'&") == "/api/sample-match/a%20b/c?other=d%20e%2Ff'%26"
    assert address("array", "ä~!*", "tangent", 4, member=0) == "/api/array/%C3%A4~!*/tangent/4?member=0"


def test_a_page_says_what_it_left_out(store, monkeypatch):
    api = StudioApi(RunIndex(store))
    content = report_content(api, Report("t", "l", (Scene("one"),)), most_steps=3)
    assert "3 of 5 stored steps are in this page." in content["notice"]
    assert content["responses"]["/api/run/one"]["steps"] == [0, 4, 50]
    assert not any("/overlap/16?" in path for path in content["responses"])
    monkeypatch.setattr(module, "ARRAY_BYTES", 100)
    monkeypatch.setattr(module, "MAP_BYTES", 10)
    monkeypatch.setattr(module, "LEAST_SIDE", 4)
    content = report_content(api, Report("t", "l", (Scene("one"),)))
    assert "neurons is too large" in content["notice"]
    assert "averaged to at most 4 points" in content["notice"]
    level = content["responses"][address("levels", "one", "overlap", 0, member=0, scale="all")]
    assert level["headers"]["X-Shape"] == "4,4"


def test_exact_numbers_of_maps_come_along_where_they_fit(store, monkeypatch):
    api, report = StudioApi(RunIndex(store)), Report("t", "l", (Scene("one", member=2),))
    responses = report_content(api, report)["responses"]
    for step in STEPS:
        got = unpacked(responses[address("array", "one", "tangent", step, member=0)])
        assert np.array_equal(got, arrays_at(step, members=3)["tangent"][2].astype(np.float32))
    maps = [name for name in ("overlap", "tangent") if address("array", "one", name, 0, member=0) in responses]
    numbers = sum(4 * len(STEPS) * arrays_at(0, members=3)[name][2].size for name in maps)
    monkeypatch.setattr(module, "EXACT_BYTES", numbers - 1)
    responses = report_content(api, report)["responses"]
    assert not any("/array/one/tangent/" in path for path in responses)
    assert address("levels", "one", "tangent", 0, member=0, scale="all") in responses


def test_a_damaged_array_is_left_out_and_named(store):
    (store / "one" / "arrays" / "overlap" / "00000004.npy").write_bytes(b"")
    content = report_content(StudioApi(RunIndex(store)), Report("t", "l", (Scene("one"),)))
    assert content["responses"]["/api/run/one"]["arrays"]["overlap"]["steps"] == [0, 1, 16, 50]
    assert "00000004" in content["notice"]


def test_a_run_without_arrays_makes_a_page(tmp_path):
    with Writer(tmp_path / "run", header(members=1)) as writer:
        writer.record(0, {"loss": np.ones(1)})
    content = report_content(StudioApi(RunIndex(tmp_path)), Report("t", "l", (Scene("run"),)))
    assert content["responses"]["/api/run/run"]["arrays"] == {}
    with pytest.raises(StoreError, match="no run 'other'"):
        report_content(StudioApi(RunIndex(tmp_path)), Report("t", "l", (Scene("other"),)))
    with pytest.raises(InputError, match="1 members"):
        report_content(StudioApi(RunIndex(tmp_path)), Report("t", "l", (Scene("run", member=1),)))


def test_the_file_asks_for_nothing_but_itself(store, tmp_path):
    folders = [store / "one", store / "deep" / "two & <three>"]
    before = files_below(store)
    path, _ = write_run_report(folders, tmp_path / "page.html")
    assert files_below(store) == before
    page = path.read_text()
    bare = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?!data:|#)[a-z/.]", bare)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'")
    script = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(script) == 1
    assert built.inline_hash(script[0]) in policy
    assert "unsafe" not in policy
    content = content_of(page)
    assert [scene["key"] for scene in content["scenes"]] == ["one", "deep/two & <three>"]
    assert content["entry"] == "#/run/one"
    assert "<three>" not in page  # names are escaped wherever they stand


def test_content_cannot_break_out_of_its_element():
    sly = {"a": "</script><script>alert(1)</script>", "b": "<!--", "c": "\u2028"}
    text = built.script_json(sly)
    assert "<" not in text
    assert "\u2028" not in text
    assert json.loads(text) == sly
    page = built.single_file_page("</title><script>alert(1)</script>", sly)
    assert "alert(1)</script>" not in page.replace("\\u003c/script\\u003e", "")


def test_a_bundle_that_is_missing_or_foreign_is_told(monkeypatch):
    monkeypatch.setattr(built, "page_files", dict)
    with pytest.raises(StoreError, match="make frontend"):
        built.single_file_page("t", {})
    monkeypatch.setattr(built, "page_files", lambda: {"index.html": b"<p>", "studio.js": b"", "studio.css": b""})
    with pytest.raises(StoreError, match="build it again"):
        built.single_file_page("t", {})


def test_a_figure_must_be_a_picture():
    with pytest.raises(InputError, match="not a PNG"):
        Picture("id", "title", "caption", b"GIF89a")


def test_the_command_writes_a_page_for_a_run_named_by_folder_or_id(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    answer = CliRunner().invoke(cli.app, ["report", str(store / "one"), "-o", "out/page.html"], catch_exceptions=False)
    assert answer.exit_code == 0
    assert "opens without a server" in answer.output
    assert content_of(Path("out/page.html").read_text())["title"] == "one"
    run_id = json.loads((store / "one" / "run.json").read_text())["id"]
    answer = CliRunner().invoke(
        cli.app, ["report", run_id[:8], "--root", str(store), "--steps", "2"], catch_exceptions=False
    )
    assert answer.exit_code == 0
    assert "2 of 5 stored steps" in answer.output
    with pytest.raises(InputError, match="is a folder"):
        CliRunner().invoke(cli.app, ["report", str(store / "one"), "-o", "out"], catch_exceptions=False)
