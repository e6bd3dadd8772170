"""What the studio says of runs: bytes against slow twins, damage named, nothing written, nothing outside the root."""

from __future__ import annotations

import base64
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from studioruns import STEPS, arrays_at, files_below, header, kernel, write_many, write_run
from unlazy import Run, centered_alignment
from unlazy.claims.catalogue import CATALOGUE
from unlazy.runtime import StoreError
from unlazy.store import Writer, read_lines
from unlazy.studio import levels, shelf
from unlazy.studio.answers import Answer, BadRequest, NotHere, address, plain
from unlazy.studio.payload import Payload
from unlazy.studio.shelf import Shelf, newest


def ask(payload: Payload, path: str, **parameters: object) -> Answer:
    return payload.answer(path.split("/"), {name: str(value) for name, value in parameters.items()})


def told(payload: Payload, path: str, **parameters: object):
    return json.loads(ask(payload, path, **parameters).body)


def floats(answer: Answer) -> np.ndarray:
    return np.frombuffer(answer.body, "<f4").reshape([int(side) for side in answer.headers["X-Shape"].split(",")])


@pytest.fixture
def store(tmp_path) -> Path:
    write_run(tmp_path / "a" / "first")
    write_run(tmp_path / "second", members=3, n=6)
    return tmp_path


@pytest.fixture
def payload(store) -> Payload:
    return Payload(Shelf(store))


# --- heat maps -----------------------------------------------------------------------------------------


def slow_levels(
    quantity: str, maps: list[np.ndarray], shown: int, top_share: float
) -> tuple[list[list[int]], bool, float]:
    """The rule of the module's docstring, entry by entry."""
    units = [sum(float(m[i, i]) for i in range(len(m))) / len(m) for m in maps]
    scaled = [[[value / unit for value in row] for row in m.tolist()] for m, unit in zip(maps, units, strict=True)]
    diagonal = sorted(abs(m[i][i]) for m in scaled for i in range(len(m)))
    place = top_share * (len(diagonal) - 1)
    low = math.floor(place)
    top = diagonal[low] + (place - low) * (diagonal[min(low + 1, len(diagonal) - 1)] - diagonal[low])
    every = [value for m in scaled for row in m for value in row]
    signed = min(0, *every) < -1e-3 * max(0, *every)
    code = []
    for row in scaled[shown]:
        code.append([])
        for value in row:
            level = math.sqrt(min(abs(value) / top, 1))
            sign = (value > 0) - (value < 0)
            code[-1].append(round(128 + 127 * sign * level) if signed else round(255 * level))
    return code, signed, top


@pytest.mark.parametrize(("quantity", "share"), [("overlap", 1.0), ("tangent", 0.98)])
@pytest.mark.parametrize("member", [0, 1])
def test_levels_follow_the_written_rule(payload, quantity, share, member):
    maps = [arrays_at(step)[quantity][member].astype(np.float64) for step in STEPS]
    for place, step in enumerate(STEPS):
        answer = ask(payload, f"levels/a/first/{quantity}/{step}", member=member)
        wanted, signed, top = slow_levels(quantity, maps, place, share)
        got = np.frombuffer(answer.body, np.uint8).reshape(8, 8)
        assert np.abs(got.astype(int) - np.array(wanted)).max() <= 1  # a tie may round either way
        assert (got == np.array(wanted)).mean() > 0.95
        assert float(answer.headers["X-Top"]) == pytest.approx(top, rel=1e-5)
        assert answer.headers["X-Signed"] == str(int(signed)) == str(int(quantity == "tangent"))
        assert float(answer.headers["X-Unit"]) == pytest.approx(np.trace(maps[place]) / 8, rel=1e-5)


def test_a_scale_of_its_own_uses_the_one_step(payload):
    answer = ask(payload, "levels/a/first/overlap/0", scale="step")
    wanted, _, top = slow_levels("overlap", [arrays_at(0)["overlap"][0].astype(np.float64)], 0, 1.0)
    assert float(answer.headers["X-Top"]) == pytest.approx(top, rel=1e-5)
    assert np.abs(np.frombuffer(answer.body, np.uint8).reshape(8, 8).astype(int) - np.array(wanted)).max() <= 1
    assert answer.headers["X-Clipped"] == "0"


def test_what_is_not_finite_is_drawn_as_zero_and_counted(tmp_path):
    bad = kernel(4, 1, 0)
    bad[0, 1, 2], bad[0, 2, 1], bad[0, 3, 3] = np.nan, np.inf, -np.inf
    with Writer(tmp_path / "run", header(members=1)) as writer:
        writer.record(0, {}, {"overlap": bad, "nothing": np.full((1, 3, 3), np.nan)})
    payload = Payload(Shelf(tmp_path))
    answer = ask(payload, "levels/run/overlap/0")
    code = np.frombuffer(answer.body, np.uint8).reshape(4, 4)
    assert answer.headers["X-Bad"] == "3"
    assert code[1, 2] == code[2, 1] == code[3, 3] == 0
    assert code[0, 0] > 0
    empty = ask(payload, "levels/run/nothing/0")
    assert set(empty.body) == {0}
    assert empty.headers["X-Bad"] == "9"


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 23), columns=st.integers(1, 23), most=st.integers(1, 30))
def test_coarse_maps_are_block_means(rows, columns, most):
    values = np.random.default_rng(rows * 31 + columns).normal(size=(rows, columns))
    got, stride = levels.coarse(values, most)
    assert max(got.shape) <= most
    for i in range(got.shape[0]):
        for j in range(got.shape[1]):
            block = values[i * stride : (i + 1) * stride, j * stride : (j + 1) * stride]
            assert got[i, j] == pytest.approx(block.mean())


# --- arrays --------------------------------------------------------------------------------------------


def test_arrays_are_the_members_own_bytes(payload, store):
    run = Run(store / "second")
    for quantity in ("overlap", "output", "paths", "normals"):
        for step in STEPS:
            for member in range(3):
                got = floats(ask(payload, f"array/second/{quantity}/{step}", member=member))
                assert np.array_equal(got, run.array(quantity, step)[member].astype(np.float32))


def test_arrays_come_as_npy_and_csv_too(payload, store, tmp_path):
    wanted = Run(store / "second").array("overlap", 4)[1]
    answer = ask(payload, "array/second/overlap/4", member=1, format="npy")
    (tmp_path / "x.npy").write_bytes(answer.body)
    assert np.array_equal(np.load(tmp_path / "x.npy"), wanted)
    assert 'filename="second-overlap-4.npy"' in answer.headers["Content-Disposition"]
    text = ask(payload, "array/second/overlap/4", member=1, format="csv").body.decode()
    assert np.array_equal(np.loadtxt(text.splitlines(), delimiter=",", dtype=np.float32), wanted)
    with pytest.raises(BadRequest, match="raw, npy or csv"):
        ask(payload, "array/second/overlap/4", format="exe")


@pytest.mark.parametrize(
    "stored",
    [
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.arange(24).reshape(2, 3, 4) % 2 == 0,
        np.arange(24, dtype=">i2").reshape(2, 3, 4),
        np.arange(12, dtype=np.float16).reshape(1, 12),
    ],
    ids=["fortran", "bool", "big-endian", "one-for-all"],
)
def test_any_numbers_can_be_read(tmp_path, stored):
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(0, {}, {"odd": stored})
    got = floats(ask(Payload(Shelf(tmp_path)), "array/run/odd/0", member=1))
    assert np.array_equal(got, stored[min(1, len(stored) - 1)].astype(np.float32))


@pytest.mark.parametrize(
    ("path", "parameters", "error"),
    [
        ("array/second/overlap/5", {}, NotHere),
        ("array/second/nothing/0", {}, NotHere),
        ("array/third/overlap/0", {}, NotHere),
        ("array/second/overlap/0", {"member": 3}, NotHere),
        ("array/second/overlap/0", {"member": "-1"}, BadRequest),
        ("array/second/overlap/x", {}, BadRequest),
        ("array/second", {}, NotHere),
        ("levels/second/output/0", {}, BadRequest),
        ("levels/second/overlap/0", {"scale": "huge"}, BadRequest),
        ("spectrum/second/nothing", {}, NotHere),
        ("embedding/second/nothing", {}, NotHere),
        ("figure/second/overlap.gif", {}, NotHere),
        ("figure/second/nothing.png", {}, NotHere),
        ("runs/more", {}, NotHere),
        ("", {}, NotHere),
        ("elsewhere", {}, NotHere),
    ],
)
def test_what_is_not_there_is_said(payload, path, parameters, error):
    with pytest.raises(error):
        ask(payload, path, **parameters)


def test_scenes_of_one_member_fold_into_their_quantities(tmp_path):
    with Writer(tmp_path / "run", header(members=3)) as writer:
        for step in range(6):
            everyone = arrays_at(step, members=3)
            arrays = {f"scene_{name}": value[1:2] for name, value in everyone.items()}
            writer.record(step, {}, arrays | (everyone if step in (0, 5) else {}))
        writer.finish()
    payload = Payload(Shelf(tmp_path))
    facts = told(payload, "run/run")
    assert facts["default_member"] == 1
    assert not [name for name in facts["arrays"] if name.startswith("scene_")]
    assert facts["arrays"]["overlap"]["steps"] == [0, 5]
    assert facts["arrays"]["overlap"]["own"] == {"1": [0, 1, 2, 3, 4, 5]}
    assert facts["steps"] == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(floats(ask(payload, "array/run/output/3", member=1)), arrays_at(3, members=3)["output"][1])
    assert np.array_equal(floats(ask(payload, "array/run/output/5", member=2)), arrays_at(5, members=3)["output"][2])
    with pytest.raises(NotHere, match="step 3"):
        ask(payload, "array/run/output/3", member=2)


# --- runs ----------------------------------------------------------------------------------------------


def test_a_run_page_names_what_the_run_holds(payload, store):
    facts = told(payload, "run/second")
    run = Run(store / "second")
    assert facts["header"] == run.header
    assert facts["status"] == {"state": "finished", "step": 50, "error": None}
    assert facts["steps"] == list(STEPS)
    assert facts["maps"] == ["overlap", "tangent"]
    assert facts["embeddings"] == ["neurons"]
    assert facts["arrays"]["normals"] == {"steps": list(STEPS), "shape": [3, 2, 4, 2], "dtype": "float32"}
    steps, values = run.scalars("loss")
    assert facts["scalars"]["loss"] == {"steps": steps.tolist(), "values": values.tolist()}
    assert facts["problems"] == []
    assert facts["verdict"] is None


def test_the_circle_is_made_again_from_its_words(tmp_path):
    from unlazy import Circle

    circle = Circle(n=20, top=2.0, bottom=3.0, offset=0.5)
    head = header(data=circle.dataset().describe())
    write_run(tmp_path / "run", head=head, n=4)
    payload = Payload(Shelf(tmp_path))
    facts = told(payload, "run/run")
    assert facts["probe"]["kind"] == "circle"
    assert facts["probe"]["frequencies"] == {"top": 2.0, "bottom": 3.0}
    assert facts["probe"]["picked"] == [0, 5, 10, 15]
    assert facts["probe"]["groups"]["top"] == list(range(10))
    assert facts["steps_per_epoch"] == 5
    assert np.array_equal(floats(ask(payload, "array/run/probe_x/0")), circle.dataset().x.numpy())
    assert np.array_equal(floats(ask(payload, "array/run/probe_y/0", member=1)), circle.dataset().y.numpy())
    data = circle.dataset()
    got = told(payload, "spectrum/run/overlap")["alignment"][0]
    wanted = centered_alignment(torch.from_numpy(arrays_at(0, n=4)["overlap"][0]).double(), data.y[::5].double())
    assert got == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "kind", "labels"),
    [
        (np.zeros((1, 3, 2), np.float32), np.array([[[4.0], [7.0], [4.0]]]), "points2d", [0, 1, 0]),
        (np.zeros((1, 3, 1, 5, 5), np.float32), np.eye(3)[None], "image", [0, 1, 2]),
        (np.zeros((1, 3, 9), np.float32), np.array([[0.1, 0.2, 0.3]]), "vectors", None),
    ],
)
def test_the_kind_of_points_is_told(tmp_path, x, y, kind, labels):
    write_run(tmp_path / "run", once={"probe_x": x, "probe_y": y})
    probe = told(Payload(Shelf(tmp_path)), "run/run")["probe"]
    assert (probe["kind"], probe["labels"], probe["n"]) == (kind, labels, 3)
    assert probe["image_shape"] == ([1, 5, 5] if kind == "image" else None)


def test_long_curves_are_thinned_and_the_page_says_so(tmp_path):
    write_many(tmp_path, 1, lines=5001)
    facts = told(Payload(Shelf(tmp_path)), "run/group-0/run-0000")
    curve = facts["scalars"]["loss"]
    assert len(curve["steps"]) <= 2001
    assert curve["steps"][0] == 0
    assert curve["steps"][-1] == 5000
    assert "thinned" in facts["problems"][0]


def test_numbers_that_are_no_numbers_become_null():
    assert plain({"a": [math.nan, (math.inf, 1)], "b": np.float32(2)}) == {"a": [None, [None, 1]], "b": 2.0}


def test_addresses_are_written_as_the_page_writes_them():
    assert (
        address("levels", "a/b c", "ov?r", 4, scale="all", member=0)
        == "/api/levels/a/b%20c/ov%3Fr/4?member=0&scale=all"
    )


# --- lists, damage -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), max_size=12), window=st.integers(1, 400), torn=st.booleans())
def test_the_tail_says_what_the_whole_file_says(tmp_path_factory, sizes, window, torn):
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    lines = [
        {"step": step, "scalars": {f"s{'x' * size}": [step], "loss": [-step]}, "arrays": {}, "checkpoint": None}
        for step, size in enumerate(sizes)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + ('{"step": 9' if torn else ""))
    step, latest = newest(path, window)
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
    payload = Payload(Shelf(store))
    answer = told(payload, "runs")
    assert [card["key"] for card in answer["runs"]] == ["a/first"]
    assert [entry["folder"] for entry in answer["broken"]] == ["second"]
    assert answer["broken"][0]["error"]
    assert told(payload, "run/a/first")["problems"] == []
    assert told(payload, "runs") == answer  # the second time from memory


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
HEAD = ("kind", "study", "scale", "recipe", "members", "model", "data", "provenance", "id", "format")


@settings(max_examples=80, deadline=None)
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
    payload = Payload(Shelf(root))
    listed = told(payload, "runs")
    keys = {card["key"] for card in listed["runs"]} | {entry["folder"] for entry in listed["broken"]}
    assert keys == {"group-0/run-0000", "group-1/run-0001"}
    assert "group-0/run-0000" in {card["key"] for card in listed["runs"]}
    assert told(payload, "claims")
    try:
        told(payload, "run/group-1/run-0001")
    except NotHere as error:
        assert str(error)  # noqa: PT017


def test_a_run_with_a_damaged_line_still_opens_and_says_so(store):
    path = store / "second" / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = b'{"step": 1, "scal'
    path.write_bytes(b"\n".join(lines))
    facts = told(Payload(Shelf(store)), "run/second")
    assert facts["steps"] == [step for step in STEPS if step != 1]
    assert "line 2" in facts["problems"][0]


def test_a_missing_or_cut_array_is_named_and_the_rest_goes_on(store):
    arrays = store / "second" / "arrays"
    (arrays / "overlap" / "00000004.npy").unlink()
    last = arrays / "tangent" / "00000050.npy"
    last.write_bytes(last.read_bytes()[:-8])
    (arrays / "paths" / "00000050.npy").write_bytes(b"not an array")
    payload = Payload(Shelf(store))
    facts = told(payload, "run/second")
    assert any("paths" in problem for problem in facts["problems"])
    assert ask(payload, "levels/second/overlap/0").body  # the scale goes over what can be read
    assert len(told(payload, "spectrum/second/overlap")["steps"]) == len(STEPS) - 1
    for path in ("array/second/overlap/4", "levels/second/overlap/4", "array/second/paths/50"):
        with pytest.raises(NotHere):
            ask(payload, path)
    with pytest.raises(NotHere, match="truncated"):
        ask(payload, "array/second/tangent/50", member=2)


def test_pickled_arrays_are_refused(store):
    path = store / "second" / "arrays" / "paths" / "00000050.npy"
    np.save(path, np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(NotHere, match="not numbers"):
        ask(Payload(Shelf(store)), "array/second/paths/50")


def test_nothing_here_is_said_plainly(tmp_path):
    assert told(Payload(Shelf(tmp_path)), "runs") == {"root": str(tmp_path.resolve()), "runs": [], "broken": []}


def test_a_run_being_written_is_read_as_far_as_it_goes(tmp_path):
    shelf = Shelf(tmp_path)
    payload = Payload(shelf)
    with Writer(tmp_path / "run", header(members=1)) as writer:
        facts = told(payload, "run/run")
        assert (facts["status"]["state"], facts["live"], facts["steps"]) == ("running", True, [])
        assert "Nothing has been measured yet." in facts["problems"]
        for step in (0, 3):
            writer.record(step, {"loss": np.array([1.0 + step])}, {"overlap": kernel(4, 1, step)})
            assert told(payload, "run/run")["steps"] == [at for at in (0, 3) if at <= step]
            assert told(payload, "runs")["runs"][0]["step"] == step
        with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 4, "sc')
        assert told(payload, "run/run")["steps"] == [0, 3]
        first = told(payload, "run/run")["version"]
    assert told(payload, "runs")["runs"][0]["state"] == "interrupted"
    assert told(payload, "run/run")["status"]["state"] == "interrupted"  # no file says so: the lock is gone
    with Writer(tmp_path / "run", header(members=1)) as writer:  # no checkpoint: begins anew
        writer.record(1, {"loss": np.array([7.0])})
        writer.finish()
    facts = told(payload, "run/run")
    assert facts["scalars"]["loss"] == {"steps": [1], "values": [[7.0]]}
    assert facts["version"] != first


def test_growing_runs_are_parsed_from_where_they_were(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", steps=range(5), finish=False)
    shelf = Shelf(tmp_path)
    shelf.open("run")
    monkeypatch.setattr("unlazy.studio.openrun.read_lines", None)  # would raise if the whole were parsed again
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (5, 6):
            file.write(
                json.dumps({"step": step, "scalars": {"loss": [0.5, 0.5]}, "arrays": {}, "checkpoint": None}) + "\n"
            )
    assert shelf.open("run").lines == read_lines(folder / "metrics.jsonl")


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
    payload = Payload(Shelf(root))
    listed = told(payload, "runs")
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
        with pytest.raises((NotHere, StoreError)):
            ask(payload, path)


def crawl(payload: Payload) -> int:
    """Every address there is."""
    count = 0
    for card in told(payload, "runs")["runs"]:
        facts = told(payload, f"run/{card['key']}")
        for name, fact in facts["arrays"].items():
            for step in fact["steps"]:
                ask(payload, f"array/{card['key']}/{name}/{step}")
                count += 1
                if name in facts["maps"]:
                    ask(payload, f"levels/{card['key']}/{name}/{step}", scale="step")
                    ask(payload, f"levels/{card['key']}/{name}/{step}")
        for name in facts["maps"]:
            ask(payload, f"spectrum/{card['key']}/{name}")
        for name in facts["embeddings"]:
            ask(payload, f"embedding/{card['key']}/{name}")
        for panel in ("losses", "loss", "overlap", "spectrum-tangent", "normals", "output"):
            ask(payload, f"figure/{card['key']}/{panel}.png")
            ask(payload, f"code/{card['key']}/{panel}")
    ask(payload, "claims")
    return count


def test_looking_changes_no_file(store):
    before = files_below(store)
    assert crawl(Payload(Shelf(store))) >= 60
    assert files_below(store) == before


def test_runs_that_did_not_change_are_not_read_again(tmp_path, monkeypatch):
    write_many(tmp_path, 100)
    payload = Payload(Shelf(tmp_path))
    cards = told(payload, "runs")["runs"]
    assert len(cards) == 100
    assert {card["last"]["loss"] for card in cards} == {1 / 50}
    read = []
    monkeypatch.setattr(shelf, "newest", lambda path, *_: read.append(path) or (0, {}))
    assert told(payload, "runs")["runs"] == cards
    assert read == []


# --- what is computed ----------------------------------------------------------------------------------


def test_spectra_are_eigenvalues_over_the_trace(payload):
    answer = told(payload, "spectrum/second/tangent", member=2)
    assert answer["steps"] == list(STEPS)
    for step, values in zip(answer["steps"], answer["values"], strict=True):
        values_of = np.linalg.eigvalsh(arrays_at(step, n=6, members=3)["tangent"][2].astype(np.float64))[::-1]
        assert np.allclose(values, values_of / values_of.sum(), atol=1e-5)


def test_ten_thousand_neurons_are_thinned(tmp_path):
    random = np.random.default_rng(0)
    with Writer(tmp_path / "run", header(members=1)) as writer:
        writer.record(0, {}, {"neurons": random.normal(size=(1, 10_000, 5)).astype(np.float32)})
    answer = told(Payload(Shelf(tmp_path)), "embedding/run/neurons")
    points = np.frombuffer(base64.b64decode(answer["points"]), "<f4")
    assert answer["units"] == 10_000
    assert len(answer["shown"]) <= 2000
    assert points.size == 2 * len(answer["shown"])
    assert np.isfinite(points).all()


@pytest.mark.parametrize("panel", ["losses", "loss_top", "overlap", "tangent", "spectrum-overlap", "normals", "output"])
def test_the_code_of_a_panel_makes_its_figure(payload, tmp_path, monkeypatch, panel):
    from matplotlib.image import imread

    monkeypatch.chdir(tmp_path)
    code = ask(payload, f"code/second/{panel}", step=4, member=1).body.decode()
    exec(compile(code, "code", "exec"), {})
    (made,) = tmp_path.glob("*.png")
    (tmp_path / "route.png").write_bytes(ask(payload, f"figure/second/{panel}.png", step=4, member=1).body)
    assert np.array_equal(imread(made), imread(tmp_path / "route.png"))
    assert imread(made).std() > 0.01  # something is drawn


@pytest.mark.parametrize(("form", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figures_for_print_are_the_same_every_time(payload, form, start):
    first = ask(payload, f"figure/second/overlap.{form}").body
    assert first.startswith(start)
    assert ask(payload, f"figure/second/overlap.{form}").body == first


# --- claims --------------------------------------------------------------------------------------------


def test_claims_link_to_figures_and_runs(tmp_path):
    write_run(tmp_path / "runs" / "c", head=header(study="circle", scale="desk"))
    results = tmp_path / "results"
    (results / "circle" / "desk").mkdir(parents=True)
    (results / "circle" / "desk" / "fig.png").write_bytes(b"\x89PNG")
    row = {"id": "C7", "study": "circle", "scale": "desk", "verdict": "holds", "figure": "results/circle/desk/fig.png"}
    table = {"study": "circle", "scale": "desk", "claims": [row]}
    (results / "circle" / "desk.json").write_text(json.dumps(table))
    payload = Payload(Shelf(tmp_path / "runs"), results)
    rows = {row["id"]: row for row in told(payload, "claims")}
    assert len(rows) == len(CATALOGUE)
    assert rows["C7"]["run_keys"] == ["c"]
    assert rows["C7"]["figure_url"] == "/api/claim-figure/circle/desk/fig.png"
    assert ask(payload, "claim-figure/circle/desk/fig.png").body == b"\x89PNG"
    for path in (
        "claim-figure/circle/desk/other.png",
        "claim-figure/../desk/fig.png",
        "claim-figure/circle/../desk.json",
    ):
        with pytest.raises(NotHere):
            ask(payload, path)


def test_a_result_that_is_being_made_is_waited_for():
    from concurrent.futures import ThreadPoolExecutor

    from unlazy.studio.analysis import Once

    once, made = Once(2), []

    def make() -> int:
        time.sleep(0.05)
        made.append(1)
        return len(made)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: once("key", make), range(8))) == {1}
    once("other", make)
    once("third", make)
    assert once("key", make) == 4  # the oldest was forgotten
    with pytest.raises(ZeroDivisionError):
        once("bad", lambda: 1 // 0)
    assert once("bad", lambda: 7) == 7


def test_a_scope_of_somebodys_own_loop_is_shown_whole(tmp_path):
    from unlazy import Scope

    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    net = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))
    with Scope(net, probe=(x, x[:, :1]), run=tmp_path / "mine") as scope:
        for step in range(3):
            scope.step(step)
    payload = Payload(Shelf(tmp_path))
    facts = told(payload, "run/mine")
    assert facts["problems"] == []
    assert "tangent" in facts["maps"]
    assert facts["status"]["state"] == "finished"
    for name, fact in facts["arrays"].items():
        assert ask(payload, f"array/mine/{name}/{fact['steps'][-1]}").body
