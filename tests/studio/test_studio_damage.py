"""The studio among damaged and growing runs: damage named, nothing written, nothing outside the root."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studio_runs import STEPS, ask, ask_json, files_below, header, kernel, write_many, write_run
from unlazy.runtime import StoreError
from unlazy.store import Writer, read_lines
from unlazy.studio import run_index
from unlazy.studio.answers import NotFound
from unlazy.studio.api import StudioApi
from unlazy.studio.run_index import RunIndex, newest_scalars

# --- lists, damage -------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 60), max_size=12), window=st.integers(1, 400), torn=st.booleans())
def test_the_tail_says_what_the_whole_file_says(tmp_path_factory, sizes, window, torn):
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    lines = [
        {"step": step, "scalars": {f"s{'x' * size}": [step], "loss": [-step]}, "arrays": {}, "checkpoint": None}
        for step, size in enumerate(sizes)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + ('{"step": 9' if torn else ""))
    step, latest = newest_scalars(path, window)
    whole = read_lines(path)
    assert step == (whole[-1].step if whole else 0)
    everything = {}
    for line in whole:
        everything |= line.scalars
    assert latest.items() <= everything.items()
    assert latest.get("loss") == everything.get("loss")


def damage(folder: Path, how: str) -> None:
    if how in ("run.json", "status.json", "metrics.jsonl"):
        (folder / how).write_bytes(b"nonsense\n")
    elif how == "types":
        good = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(good | {"members": 7, "provenance": [], "recipe": 3, "data": "x"}))
    elif how == "empty":
        for name in ("run.json", "status.json", "metrics.jsonl"):
            (folder / name).write_bytes(b"")


@pytest.mark.parametrize("how", ["run.json", "status.json", "metrics.jsonl", "types", "empty"])
def test_a_damaged_run_is_named_and_the_others_are_shown(store, how):
    damage(store / "second", how)
    (store / "empty-folder").mkdir()
    api = StudioApi(RunIndex(store))
    answer = ask_json(api, "runs")
    assert [card["key"] for card in answer["runs"]] == ["a/first"]
    assert [entry["folder"] for entry in answer["broken"]] == ["second"]
    assert answer["broken"][0]["error"]
    assert ask_json(api, "run/a/first")["problems"] == []
    assert ask_json(api, "runs") == answer  # the second time from memory


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
HEAD = ("kind", "study", "scale", "recipe", "members", "model", "data", "provenance", "id", "format")


@settings(max_examples=80)
@given(name=st.sampled_from([*HEAD, "status", "step", "scalars", "arrays"]), value=anything)
def test_whatever_a_file_holds_the_pages_stand(tmp_path_factory, name, value):
    root = tmp_path_factory.mktemp("odd")
    write_many(root, 2, lines=2)
    folder = root / "group-1" / "run-0001"
    if name in HEAD:
        good = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(good | {name: value}))
    elif name == "status":
        (folder / "status.json").write_text(json.dumps({"state": value, "step": value, "error": value}))
    else:
        line = {"step": 3, "scalars": {}, "arrays": {}, "checkpoint": None} | {name: value}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    api = StudioApi(RunIndex(root))
    listed = ask_json(api, "runs")
    keys = {card["key"] for card in listed["runs"]} | {entry["folder"] for entry in listed["broken"]}
    assert keys == {"group-0/run-0000", "group-1/run-0001"}
    assert "group-0/run-0000" in {card["key"] for card in listed["runs"]}
    assert ask_json(api, "claims")
    try:
        ask_json(api, "run/group-1/run-0001")
    except NotFound as error:
        assert str(error)  # noqa: PT017


def test_a_run_with_a_damaged_line_still_opens_and_says_so(store):
    path = store / "second" / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = b'{"step": 1, "scal'
    path.write_bytes(b"\n".join(lines))
    facts = ask_json(StudioApi(RunIndex(store)), "run/second")
    assert facts["steps"] == [step for step in STEPS if step != 1]
    assert "line 2" in facts["problems"][0]


def test_a_missing_or_cut_array_is_named_and_the_rest_goes_on(store):
    arrays = store / "second" / "arrays"
    (arrays / "overlap" / "00000004.npy").unlink()
    last = arrays / "tangent" / "00000050.npy"
    last.write_bytes(last.read_bytes()[:-8])
    (arrays / "paths" / "00000050.npy").write_bytes(b"not an array")
    api = StudioApi(RunIndex(store))
    facts = ask_json(api, "run/second")
    assert any("paths" in problem for problem in facts["problems"])
    assert ask(api, "levels/second/overlap/0").body  # the scale goes over what can be read
    assert len(ask_json(api, "spectrum/second/overlap")["steps"]) == len(STEPS) - 1
    for path in ("array/second/overlap/4", "levels/second/overlap/4", "array/second/paths/50"):
        with pytest.raises(NotFound):
            ask(api, path)
    with pytest.raises(NotFound, match="truncated"):
        ask(api, "array/second/tangent/50", member=2)


def test_pickled_arrays_are_refused(store):
    path = store / "second" / "arrays" / "paths" / "00000050.npy"
    np.save(path, np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(NotFound, match="not numbers"):
        ask(StudioApi(RunIndex(store)), "array/second/paths/50")


def test_nothing_here_is_said_plainly(tmp_path):
    assert ask_json(StudioApi(RunIndex(tmp_path)), "runs") == {
        "root": str(tmp_path.resolve()),
        "runs": [],
        "broken": [],
    }


def test_a_run_being_written_is_read_as_far_as_it_goes(tmp_path):
    run_index = RunIndex(tmp_path)
    api = StudioApi(run_index)
    with Writer(tmp_path / "run", header(members=1)) as writer:
        facts = ask_json(api, "run/run")
        assert (facts["status"]["state"], facts["live"], facts["steps"]) == ("running", True, [])
        assert "Nothing has been measured yet." in facts["problems"]
        for step in (0, 3):
            writer.record(step, {"loss": np.array([1.0 + step])}, {"overlap": kernel(4, 1, step)})
            assert ask_json(api, "run/run")["steps"] == [at for at in (0, 3) if at <= step]
            assert ask_json(api, "runs")["runs"][0]["step"] == step
        with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 4, "sc')
        assert ask_json(api, "run/run")["steps"] == [0, 3]
        first = ask_json(api, "run/run")["version"]
    assert ask_json(api, "runs")["runs"][0]["state"] == "interrupted"
    assert ask_json(api, "run/run")["status"]["state"] == "interrupted"  # no file says so: the lock is gone
    with Writer(tmp_path / "run", header(members=1)) as writer:  # no checkpoint: begins anew
        writer.record(1, {"loss": np.array([7.0])})
        writer.finish()
    facts = ask_json(api, "run/run")
    assert facts["scalars"]["loss"] == {"steps": [1], "values": [[7.0]]}
    assert facts["version"] != first


def test_growing_runs_are_parsed_from_where_they_were(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=range(5), finish=False)
    run_index = RunIndex(tmp_path)
    run_index.open("run")
    monkeypatch.setattr("unlazy.studio.run_reader.read_lines", None)  # would raise if the whole were parsed again
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (5, 6):
            file.write(
                json.dumps({"step": step, "scalars": {"loss": [0.5, 0.5]}, "arrays": {}, "checkpoint": None}) + "\n"
            )
    assert run_index.open("run").lines == read_lines(folder / "metrics.jsonl")


# --- nothing outside, nothing changed ------------------------------------------------------------------


def test_links_and_paths_that_leave_the_root_are_refused(tmp_path):
    secret = write_run(tmp_path / "elsewhere" / "secret")
    root = tmp_path / "root"
    write_run(root / "run")
    (root / "linked").symlink_to(secret, target_is_directory=True)
    (root / "half").mkdir()
    (root / "half" / "run.json").symlink_to(secret / "run.json")
    line = {"step": 99, "scalars": {}, "checkpoint": None}
    line["arrays"] = {"sly": "../../../elsewhere/secret/arrays/overlap/00000000"}
    (root / "run" / "arrays" / "door").symlink_to(secret / "arrays" / "overlap")
    other = line | {"step": 100, "arrays": {"door": "door/00000000"}}
    with (root / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps(other) + "\n")
    api = StudioApi(RunIndex(root))
    listed = ask_json(api, "runs")
    assert [card["key"] for card in listed["runs"]] == ["run"]
    assert [entry["folder"] for entry in listed["broken"]] == ["half"]
    for path in (
        "array/run/sly/99",
        "array/run/door/100",
        "figure/run/sly.png",
        "levels/run/door/100",
        "run/half",
        "run/linked",
        "run/../elsewhere/secret",
    ):
        with pytest.raises((NotFound, StoreError)):
            ask(api, path)


def crawl(api: StudioApi) -> int:
    """Every address there is."""
    count = 0
    for card in ask_json(api, "runs")["runs"]:
        facts = ask_json(api, f"run/{card['key']}")
        for name, fact in facts["arrays"].items():
            for step in fact["steps"]:
                ask(api, f"array/{card['key']}/{name}/{step}")
                count += 1
                if name in facts["maps"]:
                    ask(api, f"levels/{card['key']}/{name}/{step}", scale="step")
                    ask(api, f"levels/{card['key']}/{name}/{step}")
        for name in facts["maps"]:
            ask(api, f"spectrum/{card['key']}/{name}")
        for name in facts["embeddings"]:
            ask(api, f"embedding/{card['key']}/{name}")
        for panel in ("losses", "loss", "overlap", "spectrum-tangent", "normals", "output"):
            ask(api, f"figure/{card['key']}/{panel}.png")
            ask(api, f"code/{card['key']}/{panel}")
    ask(api, "claims")
    return count


def test_looking_changes_no_file(store):
    before = files_below(store)
    assert crawl(StudioApi(RunIndex(store))) >= 60
    assert files_below(store) == before


def test_runs_that_did_not_change_are_not_read_again(tmp_path, monkeypatch):
    write_many(tmp_path, 100)
    api = StudioApi(RunIndex(tmp_path))
    cards = ask_json(api, "runs")["runs"]
    assert len(cards) == 100
    assert {card["last"]["loss"] for card in cards} == {1 / 50}
    read = []
    monkeypatch.setattr(run_index, "newest_scalars", lambda path, *_: read.append(path) or (0, {}))
    assert ask_json(api, "runs")["runs"] == cards
    assert read == []
