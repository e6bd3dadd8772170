"""Arrays as the studio hands them out: bytes and levels against slow twins."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studio_runs import STEPS, arrays_at, ask, ask_json, floats, header, kernel
from unlazy import Run
from unlazy.store import Writer
from unlazy.studio import heatmap_encoding
from unlazy.studio.answers import BadRequest, NotFound
from unlazy.studio.api import StudioApi
from unlazy.studio.run_index import RunIndex
from unlazy.studio.run_reader import StoredArray

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
def test_levels_follow_the_written_rule(api, quantity, share, member):
    maps = [arrays_at(step)[quantity][member].astype(np.float64) for step in STEPS]
    for place, step in enumerate(STEPS):
        answer = ask(api, f"levels/a/first/{quantity}/{step}", member=member)
        wanted, signed, top = slow_levels(quantity, maps, place, share)
        got = np.frombuffer(answer.body, np.uint8).reshape(8, 8)
        assert np.abs(got.astype(int) - np.array(wanted)).max() <= 1  # a tie may round either way
        assert (got == np.array(wanted)).mean() > 0.95
        assert float(answer.headers["X-Top"]) == pytest.approx(top, rel=1e-5)
        assert answer.headers["X-Signed"] == str(int(signed)) == str(int(quantity == "tangent"))
        assert float(answer.headers["X-Unit"]) == pytest.approx(np.trace(maps[place]) / 8, rel=1e-5)


def test_a_scale_of_its_own_uses_the_one_step(api):
    answer = ask(api, "levels/a/first/overlap/0", scale="step")
    wanted, _, top = slow_levels("overlap", [arrays_at(0)["overlap"][0].astype(np.float64)], 0, 1.0)
    assert float(answer.headers["X-Top"]) == pytest.approx(top, rel=1e-5)
    assert np.abs(np.frombuffer(answer.body, np.uint8).reshape(8, 8).astype(int) - np.array(wanted)).max() <= 1
    assert answer.headers["X-Clipped"] == "0"


def test_what_is_not_finite_is_drawn_as_zero_and_counted(tmp_path):
    bad = kernel(4, 1, 0)
    bad[0, 1, 2], bad[0, 2, 1], bad[0, 3, 3] = np.nan, np.inf, -np.inf
    with Writer(tmp_path / "run", header(members=1)) as writer:
        writer.record(0, {}, {"overlap": bad, "nothing": np.full((1, 3, 3), np.nan)})
    api = StudioApi(RunIndex(tmp_path))
    answer = ask(api, "levels/run/overlap/0")
    code = np.frombuffer(answer.body, np.uint8).reshape(4, 4)
    assert answer.headers["X-Bad"] == "3"
    assert code[1, 2] == code[2, 1] == code[3, 3] == 0
    assert code[0, 0] > 0
    empty = ask(api, "levels/run/nothing/0")
    assert set(empty.body) == {0}
    assert empty.headers["X-Bad"] == "9"


@settings(max_examples=30)
@given(rows=st.integers(1, 23), columns=st.integers(1, 23), most=st.integers(1, 30))
def test_coarse_maps_are_block_means(rows, columns, most):
    values = np.random.default_rng(rows * 31 + columns).normal(size=(rows, columns))
    got, stride = heatmap_encoding.average_blocks(values, most)
    assert max(got.shape) <= most
    for i in range(got.shape[0]):
        for j in range(got.shape[1]):
            block = values[i * stride : (i + 1) * stride, j * stride : (j + 1) * stride]
            assert got[i, j] == pytest.approx(block.mean())


# --- arrays --------------------------------------------------------------------------------------------


def test_arrays_are_the_members_own_bytes(api, store):
    run = Run(store / "second")
    for quantity in ("overlap", "output", "paths", "normals"):
        for step in STEPS:
            for member in range(3):
                got = floats(ask(api, f"array/second/{quantity}/{step}", member=member))
                assert np.array_equal(got, run.array(quantity, step)[member].astype(np.float32))


def test_arrays_come_as_npy_and_csv_too(api, store, tmp_path):
    wanted = Run(store / "second").array("overlap", 4)[1]
    answer = ask(api, "array/second/overlap/4", member=1, format="npy")
    (tmp_path / "x.npy").write_bytes(answer.body)
    assert np.array_equal(np.load(tmp_path / "x.npy"), wanted)
    assert 'filename="second-overlap-4.npy"' in answer.headers["Content-Disposition"]
    text = ask(api, "array/second/overlap/4", member=1, format="csv").body.decode()
    assert np.array_equal(np.loadtxt(text.splitlines(), delimiter=",", dtype=np.float32), wanted)
    with pytest.raises(BadRequest, match="raw, npy or csv"):
        ask(api, "array/second/overlap/4", format="exe")


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
    got = floats(ask(StudioApi(RunIndex(tmp_path)), "array/run/odd/0", member=1))
    assert np.array_equal(got, stored[min(1, len(stored) - 1)].astype(np.float32))


@pytest.mark.parametrize(
    ("path", "parameters", "error"),
    [
        ("array/second/overlap/5", {}, NotFound),
        ("array/second/nothing/0", {}, NotFound),
        ("array/third/overlap/0", {}, NotFound),
        ("array/second/overlap/0", {"member": 3}, NotFound),
        ("array/second/overlap/0", {"member": "-1"}, BadRequest),
        ("array/second/overlap/x", {}, BadRequest),
        ("array/second", {}, NotFound),
        ("levels/second/output/0", {}, BadRequest),
        ("levels/second/overlap/0", {"scale": "huge"}, BadRequest),
        ("spectrum/second/nothing", {}, NotFound),
        ("embedding/second/nothing", {}, NotFound),
        ("figure/second/overlap.gif", {}, NotFound),
        ("figure/second/nothing.png", {}, NotFound),
        ("runs/more", {}, NotFound),
        ("", {}, NotFound),
        ("elsewhere", {}, NotFound),
    ],
)
def test_what_is_not_there_is_said(api, path, parameters, error):
    with pytest.raises(error):
        ask(api, path, **parameters)


def test_scenes_of_one_member_fold_into_their_quantities(tmp_path):
    with Writer(tmp_path / "run", header(members=3)) as writer:
        for step in range(6):
            everyone = arrays_at(step, members=3)
            arrays = {f"scene_{name}": value[1:2] for name, value in everyone.items()}
            writer.record(step, {}, arrays | (everyone if step in (0, 5) else {}))
        writer.finish()
    api = StudioApi(RunIndex(tmp_path))
    facts = ask_json(api, "run/run")
    assert facts["default_member"] == 1
    assert not [name for name in facts["arrays"] if name.startswith("scene_")]
    assert facts["arrays"]["overlap"]["steps"] == [0, 5]
    assert facts["arrays"]["overlap"]["own"] == {"1": [0, 1, 2, 3, 4, 5]}
    assert facts["steps"] == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(floats(ask(api, "array/run/output/3", member=1)), arrays_at(3, members=3)["output"][1])
    assert np.array_equal(floats(ask(api, "array/run/output/5", member=2)), arrays_at(5, members=3)["output"][2])
    with pytest.raises(NotFound, match="step 3"):
        ask(api, "array/run/output/3", member=2)


# --- files ---------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    kind=st.sampled_from(["<f4", "<f8", ">f8", "<f2", "<i8", "|u1", "|b1", "<u2"]),
    fortran=st.booleans(),
)
def test_a_file_is_read_as_numpy_reads_it(tmp_path_factory, shape, kind, fortran):
    random = np.random.default_rng(sum(shape))
    values = random.integers(0, 2 if kind == "|b1" else 100, shape).astype(kind)
    path = tmp_path_factory.mktemp("arrays") / "values.npy"
    np.save(path, np.asfortranarray(values) if fortran else values)
    for member in range(shape[0]):
        stored = StoredArray(path, member)
        assert stored.shape() == (tuple(shape), values.dtype)
        assert np.array_equal(stored.read(), np.load(path)[member])


def test_many_threads_read_files_without_the_parser(tmp_path, monkeypatch):
    """Two threads in ``ast.literal_eval`` at once can raise SystemError in Python 3.11, and every request is a thread."""

    def parser(*_: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    path = tmp_path / "values.npy"
    np.save(path, np.arange(6.0).reshape(2, 3))
    monkeypatch.setattr("ast.literal_eval", parser)
    with pytest.raises(SystemError):
        np.load(io.BytesIO(path.read_bytes()))  # what NumPy does with the same file
    assert StoredArray(path, 1).read().tolist() == [3, 4, 5]
