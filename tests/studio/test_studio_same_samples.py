"""Kernels are subtracted and marks shared only where two runs hold the same samples, as far as they tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from studio_runs import ask, ask_json, header, write_run
from unlazy import Scope
from unlazy.data.circle import Circle
from unlazy.models.spec import relu_spec
from unlazy.probes import standard
from unlazy.studio.answers import BadRequest, NotFound
from unlazy.studio.api import StudioApi
from unlazy.studio.run_index import RunIndex
from unlazy.training.ensemble import Member
from unlazy.training.fit import Recipe, fit
from unlazy.training.recorder import FixedSteps, Measure

POINTS = np.random.default_rng(0).normal(size=(1, 8, 3)).astype(np.float32)


def data(name: str = "mine", fingerprint: str | None = "0") -> dict[str, Any]:
    return {"name": name, "options": {}, "fingerprint": fingerprint}


def recipe(batches: list[str | None], rows: list[int] | None = None) -> dict[str, Any]:
    measures = [{"probe": "kernels", "steps": [0], "batch": batch} for batch in batches]
    return {"measures": measures, "scope": {"rows": {} if rows is None else {"overlap": rows}}}


def judged(root: Path, first: dict[str, Any], second: dict[str, Any], *points: np.ndarray | None) -> Any:
    """What is said of the overlap kernels of two runs with these headers and inputs."""
    given = points or (None, None)
    for name, more, x in (("first", first, given[0]), ("second", second, given[1])):
        once = {} if x is None else {"probe_x": x}
        write_run(root / name, (0,), head=header(name, **more), once=once)
    return ask_json(StudioApi(RunIndex(root)), "kernel-samples/first/overlap", other="second")


def test_equal_inputs_count_whatever_the_targets_are(tmp_path):
    """Relabelled data have another fingerprint; the samples are the same ones."""
    found = judged(tmp_path, {"data": data(fingerprint="a")}, {"data": data(fingerprint="b")}, POINTS, POINTS)
    assert found["same"] is True


def test_other_inputs_count_whatever_the_fingerprints_are(tmp_path):
    moved = POINTS.copy()
    moved[0, 5] += 1
    found = judged(tmp_path, {"data": data()}, {"data": data()}, POINTS, moved)
    assert found["same"] is False
    assert "1 of 8 rows" in found["why"]
    assert "different samples" in found["why"]


def test_the_same_inputs_in_another_order_are_other_rows(tmp_path):
    found = judged(tmp_path, {"data": data()}, {"data": data()}, POINTS, POINTS[:, ::-1])
    assert (found["same"], "8 of 8" in found["why"]) == (False, True)
    assert "the same samples in another order" in found["why"]


def test_rows_of_a_kernel_decide_where_it_saw_only_some(tmp_path):
    many = np.random.default_rng(1).normal(size=(1, 20, 3)).astype(np.float32)
    even, odd = list(range(0, 16, 2)), list(range(1, 17, 2))
    assert judged(tmp_path / "a", {"recipe": recipe([], even)}, {"recipe": recipe([], even)}, many, many)["same"]
    differing = judged(tmp_path / "b", {"recipe": recipe([], even)}, {"recipe": recipe([], odd)}, many, many)
    assert differing["same"] is False
    shifted = many[:, [1, 0, *range(2, 20)]]  # row 0 is another sample, row 1 is not looked at
    assert (
        "1 of 8"
        in judged(tmp_path / "c", {"recipe": recipe([], even)}, {"recipe": recipe([], even)}, many, shifted)["why"]
    )


@pytest.mark.parametrize(
    ("first", "second", "same", "words"),
    [
        ({"data": data(fingerprint="a")}, {"data": data(fingerprint="a")}, True, "same fingerprint"),
        ({"data": data("mnist", "a")}, {"data": data("probe", "a")}, True, "same fingerprint"),
        ({"data": data(fingerprint="a")}, {"data": data(fingerprint="b")}, False, "inputs, targets or both"),
        ({"data": data("mnist", None)}, {"data": data("fashion", None)}, False, "mnist and fashion"),
        ({"data": data(fingerprint=None)}, {"data": data(fingerprint=None)}, None, "do not say"),
        ({"data": data(fingerprint="a")}, {"data": None}, None, "do not say"),
        ({"recipe": recipe([], [0, 1])}, {"recipe": recipe([], [0, 2])}, False, "different rows"),
        ({"recipe": recipe(["k"])}, {"recipe": recipe(["k"])}, True, "same fingerprint"),
        ({"recipe": recipe(["k", None])}, {"recipe": recipe(["m", None])}, None, "several sets"),
        (
            {"data": data(fingerprint="a"), "recipe": recipe(["k"])},
            {"data": data(fingerprint="b"), "recipe": recipe(["k"])},
            None,
            "several sets",
        ),
        (
            {"data": data(fingerprint="a"), "recipe": recipe(["k"])},
            {"data": data(fingerprint="b"), "recipe": recipe(["m"])},
            False,
            "inputs, targets or both",
        ),
    ],
)
def test_without_inputs_the_headers_decide_or_nobody_does(tmp_path, first, second, same, words):
    found = judged(tmp_path, first, second)
    assert found["same"] is same
    assert words in found["why"]


def test_what_differs_is_not_subtracted_anywhere(tmp_path):
    judged(tmp_path, {"data": data(fingerprint="a")}, {"data": data(fingerprint="b")})
    api = StudioApi(RunIndex(tmp_path))
    for place in ("difference/first/overlap/0", "figure/first/difference-overlap.png", "code/first/difference-overlap"):
        with pytest.raises(BadRequest, match="different data"):
            ask(api, place, other="second")
    assert ask(api, "difference/first/overlap/0", other="first", member2=1).body


def test_what_nobody_knows_is_subtracted(tmp_path):
    judged(tmp_path, {"data": data(fingerprint=None)}, {"data": data(fingerprint=None)})
    assert ask(StudioApi(RunIndex(tmp_path)), "difference/first/overlap/0", other="second").body


def test_sizes_and_names_that_are_not_there(tmp_path):
    write_run(tmp_path / "first", (0,))
    write_run(tmp_path / "second", (0,), n=9)
    api = StudioApi(RunIndex(tmp_path))
    assert (
        ask_json(api, "kernel-samples/first/overlap", other="second")["why"]
        == "One kernel is over 8 samples, the other over 9."
    )
    assert ask_json(api, "kernel-samples/first/overlap", other="first")["same"] is True
    for place, other in (
        ("kernel-samples/first/nothing", "second"),
        ("kernel-samples/first/overlap", "third"),
        ("kernel-samples/first", "second"),
    ):
        with pytest.raises(NotFound):
            ask(api, place, other=other)


def sample_match(root: Path, *points: np.ndarray | None, **more: Any) -> dict[str, Any]:
    """What is said of the samples of two runs with these inputs."""
    judged(root, more.get("first", {}), more.get("second", {}), *points)
    return ask_json(StudioApi(RunIndex(root)), "sample-match/first", other="second")


def test_marks_follow_samples_into_another_order(tmp_path):
    same = sample_match(tmp_path / "same", POINTS, POINTS.copy(), second={"data": data(fingerprint="b")})
    assert (same["same"], same["order"]) == (True, None)
    shuffled = np.random.default_rng(4).permutation(8)
    found = sample_match(tmp_path / "mixed", POINTS, POINTS[:, shuffled])
    assert found["same"] is True
    for sample, place in enumerate(found["order"]):
        assert np.array_equal(POINTS[:, shuffled][0, place], POINTS[0, sample])
    assert "a mark follows its sample" in found["why"]


def test_equal_inputs_are_told_apart_by_their_turn(tmp_path):
    """The first of two equal rows is the first of them in the other run, and zero has one sign."""
    twice = POINTS.copy()
    twice[0, 5], twice[0, 0, 0] = twice[0, 2], 0.0
    minus = twice.copy()
    minus[0, 0, 0] = -0.0
    assert sample_match(tmp_path / "a", twice, minus)["order"] is None
    turned = sample_match(tmp_path / "b", twice, minus[:, ::-1])["order"]
    assert turned == [7, 6, 2, 4, 3, 5, 1, 0]


def test_other_samples_share_no_marks(tmp_path):
    moved, fewer = POINTS.copy(), POINTS[:, :7]
    moved[0, 5] += 1
    repeated = POINTS.copy()
    repeated[0, 5] = repeated[0, 2]  # every row of it is in the other run, which has more
    for name, other in (("moved", moved), ("fewer", fewer), ("repeated", repeated), ("wide", POINTS[:, :, :2])):
        for pair in ((POINTS, other), (other, POINTS)):
            found = sample_match(tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}", *pair)
            assert (found["same"], found["order"]) == (False, None), name
    assert "belongs to its own run" in found["why"]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (data(fingerprint="a"), data(fingerprint="a"), True),
        (data(fingerprint="a"), data(fingerprint="b"), False),
        (data(fingerprint=None), data(fingerprint=None), None),
    ],
)
def test_without_inputs_marks_go_by_the_headers(tmp_path, first, second, same):
    found = sample_match(tmp_path, first={"data": first}, second={"data": second})
    assert (found["same"], found["order"]) == (same, None)


def test_runs_as_scopes_and_trainings_write_them(tmp_path):
    x, y = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    for name, samples in (("first", (x, y)), ("second", (x, y)), ("turned", (x.flip(0), y.flip(0)))):
        net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
        with Scope(net, samples, tmp_path / name) as scope:
            scope.step(1)
    looks = [Measure(standard.kernels, FixedSteps.at({0}))]
    for name, bottom in (("slow", 4), ("fast", 6)):
        circle = Circle(n=12, bottom=bottom).dataset()
        fit(Recipe(relu_spec(2, width=3, depth=1), (Member(0, 0.01, None),), epochs=1), circle, looks, tmp_path / name)
    api = StudioApi(RunIndex(tmp_path))
    pairs = {("first", "second"): True, ("first", "turned"): False, ("slow", "fast"): True, ("slow", "first"): False}
    for (one, other), same in pairs.items():
        assert ask_json(api, f"kernel-samples/{one}/tangent", other=other)["same"] is same, (one, other)
    assert ask_json(api, "sample-match/first", other="turned")["order"] == list(range(11, -1, -1))
    assert ask_json(api, "sample-match/first", other="first") | {"why": ""} == {"same": True, "order": None, "why": ""}
    assert ask_json(api, "sample-match/slow", other="first")["same"] is False
    for place, other in (("sample-match/first", "third"), ("sample-match/third", "first"), ("sample-match/first", "")):
        with pytest.raises(NotFound):
            ask(api, place, other=other)
