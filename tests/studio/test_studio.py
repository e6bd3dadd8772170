"""What the studio says of runs, what it computes of them, and what it says of claims."""

from __future__ import annotations

import base64
import json
import math
import time

import numpy as np
import pytest
import torch

from studio_runs import STEPS, arrays_at, ask, ask_json, floats, header, write_many, write_run
from unlazy import Run
from unlazy.kernels.compare import centered_alignment
from unlazy.store import Writer
from unlazy.studio.answers import NotFound, address, to_strict_json
from unlazy.studio.api import StudioApi
from unlazy.studio.run_index import RunIndex

# --- runs ----------------------------------------------------------------------------------------------


def test_a_run_page_names_what_the_run_holds(api, store):
    facts = ask_json(api, "run/second")
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
    api = StudioApi(RunIndex(tmp_path))
    facts = ask_json(api, "run/run")
    assert facts["probe"]["kind"] == "circle"
    assert facts["probe"]["frequencies"] == {"top": 2.0, "bottom": 3.0}
    assert facts["probe"]["picked"] == [0, 5, 10, 15]
    assert facts["probe"]["groups"]["top"] == list(range(10))
    assert facts["steps_per_epoch"] == 5
    assert np.array_equal(floats(ask(api, "array/run/probe_x/0")), circle.dataset().x.numpy())
    assert np.array_equal(floats(ask(api, "array/run/probe_y/0", member=1)), circle.dataset().y.numpy())
    data = circle.dataset()
    got = ask_json(api, "spectrum/run/overlap")["alignment"][0]
    wanted = centered_alignment(torch.from_numpy(arrays_at(0, n=4)["overlap"][0]).double(), data.y[::5].double())
    assert got == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "kind", "labels"),
    [
        (np.zeros((1, 3, 2), np.float32), np.array([[[4.0], [7.0], [4.0]]]), "points2d", [4, 7, 4]),
        (np.zeros((1, 3, 2), np.float32), np.array([[[-1.0], [1.0], [-1.0]]]), "points2d", [0, 1, 0]),
        (np.zeros((1, 3, 1, 5, 5), np.float32), np.eye(3)[None], "image", [0, 1, 2]),
        (np.zeros((1, 3, 9), np.float32), np.array([[0.1, 0.2, 0.3]]), "vectors", None),
    ],
)
def test_the_kind_of_points_is_told(tmp_path, x, y, kind, labels):
    write_run(tmp_path / "run", once={"probe_x": x, "probe_y": y})
    probe = ask_json(StudioApi(RunIndex(tmp_path)), "run/run")["probe"]
    assert (probe["kind"], probe["labels"], probe["n"]) == (kind, labels, 3)
    assert probe["image_shape"] == ([1, 5, 5] if kind == "image" else None)


def test_long_curves_are_thinned_and_the_page_says_so(tmp_path):
    write_many(tmp_path, 1, lines=5001)
    facts = ask_json(StudioApi(RunIndex(tmp_path)), "run/group-0/run-0000")
    curve = facts["scalars"]["loss"]
    assert len(curve["steps"]) <= 2001
    assert curve["steps"][0] == 0
    assert curve["steps"][-1] == 5000
    assert "thinned" in facts["problems"][0]


def test_numbers_that_are_no_numbers_become_null():
    assert to_strict_json({"a": [math.nan, (math.inf, 1)], "b": np.float32(2)}) == {"a": [None, [None, 1]], "b": 2.0}


def test_addresses_are_written_as_the_page_writes_them():
    assert (
        address("levels", "a/b c", "ov?r", 4, scale="all", member=0)
        == "/api/levels/a/b%20c/ov%3Fr/4?member=0&scale=all"
    )


# --- what is computed ----------------------------------------------------------------------------------


def test_spectra_are_eigenvalues_over_the_trace(api):
    answer = ask_json(api, "spectrum/second/tangent", member=2)
    assert answer["steps"] == list(STEPS)
    for step, values in zip(answer["steps"], answer["values"], strict=True):
        values_of = np.linalg.eigvalsh(arrays_at(step, n=6, members=3)["tangent"][2].astype(np.float64))[::-1]
        assert np.allclose(values, values_of / values_of.sum(), atol=1e-5)


def test_ten_thousand_neurons_are_thinned(tmp_path):
    random = np.random.default_rng(0)
    with Writer(tmp_path / "run", header(members=1)) as writer:
        writer.record(0, {}, {"neurons": random.normal(size=(1, 10_000, 5)).astype(np.float32)})
    answer = ask_json(StudioApi(RunIndex(tmp_path)), "embedding/run/neurons")
    points = np.frombuffer(base64.b64decode(answer["points"]), "<f4")
    assert answer["units"] == 10_000
    assert len(answer["shown"]) <= 2000
    assert points.size == 2 * len(answer["shown"])
    assert np.isfinite(points).all()


@pytest.mark.parametrize("panel", ["losses", "loss_top", "overlap", "tangent", "spectrum-overlap", "normals", "output"])
def test_the_code_of_a_panel_makes_its_figure(api, tmp_path, monkeypatch, panel):
    from matplotlib.image import imread

    monkeypatch.chdir(tmp_path)
    code = ask(api, f"code/second/{panel}", step=4, member=1).body.decode()
    exec(compile(code, "code", "exec"), {})
    (made,) = tmp_path.glob("*.png")
    (tmp_path / "route.png").write_bytes(ask(api, f"figure/second/{panel}.png", step=4, member=1).body)
    assert np.array_equal(imread(made), imread(tmp_path / "route.png"))
    assert imread(made).std() > 0.01  # something is drawn


@pytest.mark.parametrize(("form", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figures_for_print_are_the_same_every_time(api, form, start):
    first = ask(api, f"figure/second/overlap.{form}").body
    assert first.startswith(start)
    assert ask(api, f"figure/second/overlap.{form}").body == first


# --- claims --------------------------------------------------------------------------------------------


def test_claims_link_to_figures_and_runs(tmp_path):
    write_run(tmp_path / "runs" / "c", head=header(study="circle", scale="desk"))
    results = tmp_path / "results"
    (results / "circle" / "desk").mkdir(parents=True)
    (results / "circle" / "desk" / "fig.png").write_bytes(b"\x89PNG")
    row = {"id": "C7", "study": "circle", "scale": "desk", "verdict": "holds", "figure": "results/circle/desk/fig.png"}
    table = {"study": "circle", "scale": "desk", "claims": [row]}
    (results / "circle" / "desk" / "results.json").write_text(json.dumps(table))
    api = StudioApi(RunIndex(tmp_path / "runs"), results)
    rows = {row["id"]: row for row in ask_json(api, "claims")}
    assert set(rows) == {"C7"}
    assert rows["C7"]["run_keys"] == ["c"]
    assert rows["C7"]["figure_url"] == "/api/claim-figure/circle/desk/fig.png"
    assert ask(api, "claim-figure/circle/desk/fig.png").body == b"\x89PNG"
    for path in (
        "claim-figure/circle/desk/other.png",
        "claim-figure/../desk/fig.png",
        "claim-figure/circle/../desk/results.json",
    ):
        with pytest.raises(NotFound):
            ask(api, path)


def test_a_result_that_is_being_made_is_waited_for():
    from concurrent.futures import ThreadPoolExecutor

    from unlazy.studio.result_cache import ResultCache

    once, made = ResultCache(2), []

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
    api = StudioApi(RunIndex(tmp_path))
    facts = ask_json(api, "run/mine")
    assert facts["problems"] == []
    assert "tangent" in facts["maps"]
    assert facts["status"]["state"] == "finished"
    printed = {"meaning", "gap", "when", "groups", "layers", "samples", "advice"}
    assert set(facts["verdict"]["words"]) == printed
    for name, fact in facts["arrays"].items():
        assert ask(api, f"array/mine/{name}/{fact['steps'][-1]}").body


class Letters(torch.nn.Module):
    """Scores from whole numbers, one argument or two."""

    def __init__(self, outputs: int = 10) -> None:
        super().__init__()
        self.letters, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, outputs)

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        found = self.letters(first) + (0 if second is None else self.letters(second))
        return self.head(torch.relu(found).mean(1))


@pytest.mark.parametrize("inputs", ["tokens", "several", "vectors"])
@pytest.mark.parametrize("classes", [[3, 5, 8], list(range(10))])
def test_positive_margins_are_as_many_as_right_answers(tmp_path, inputs, classes):
    from unlazy import Scope
    from unlazy.studio.probe_set import probe_set_of

    random = torch.Generator().manual_seed(0)
    labels = torch.tensor(classes)[torch.arange(40) % len(classes)]
    text = torch.randint(12, (40, 4), generator=random)
    x = {"tokens": text, "several": {"first": text, "second": text.flip(1)}, "vectors": torch.randn(40, 5)}[inputs]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.ReLU(), torch.nn.Linear(9, 10))
    net = net if inputs == "vectors" else Letters()
    with Scope(net, probe=(x, labels), run=tmp_path / "mine") as scope:
        for step in range(2):
            scope.step(step)
    api = StudioApi(RunIndex(tmp_path))
    facts = ask_json(api, "run/mine")
    assert (facts["probe"]["labels"], facts["probe"]["n"]) == (labels.tolist(), 40)
    opened = api.run_index.open("mine")
    margins = probe_set_of(opened).margins(opened.find_array("output", 0, 0).read())
    assert margins is not None
    assert (margins > 0).mean() == facts["scalars"]["accuracy"]["values"][0][0]
    aligned = ask_json(api, "spectrum/mine/tangent")["alignment"][
        0
    ]  # class numbers are no sizes: one-hot, as the scope has it
    assert aligned == pytest.approx(facts["scalars"]["tangent_alignment"]["values"][0][0], abs=1e-5)


def test_no_classes_no_margins():
    from unlazy.studio.probe_set import ProbeSet

    output = np.eye(3)
    assert ProbeSet(y=np.array([[0.5], [1.0], [2.0]])).margins(output) is None
    assert ProbeSet(y=np.array([[0.0], [1.0], [3.0]])).margins(output) is None  # there is no output 3
    assert ProbeSet().margins(output) is None
    assert ProbeSet(y=np.array([[0.0], [1.0], [2.0]])).margins(output[:, :1]) is None
    found = ProbeSet(y=np.array([[0.0], [1.0], [1.0]])).margins(output)
    assert found is not None
    assert found.tolist() == [1, 1, -1]


def test_rows_of_a_kernel_are_the_samples_the_scope_chose(tmp_path):
    rows = [1, 2, 5, 7]
    scope = {"probe_kind": "vectors", "groups": {}, "rows": {"tangent": rows}}
    labels = np.array([[0, 1, 2, 0, 1, 2, 0, 1]])
    head = header(recipe={"name": "mine", "batch": 4, "scope": scope})
    write_run(tmp_path / "run", head=head, n=4, once={"probe_y": labels})
    api = StudioApi(RunIndex(tmp_path))
    assert ask_json(api, "run/run")["probe"]["rows"] == {"tangent": rows}
    hot = torch.nn.functional.one_hot(torch.from_numpy(labels[0])).double()
    for name, chosen in (("tangent", rows), ("overlap", [0, 2, 4, 6])):
        kernel = torch.from_numpy(arrays_at(0, n=4)[name][0]).double()
        wanted = float(centered_alignment(kernel, hot[chosen]))
        assert ask_json(api, f"spectrum/run/{name}")["alignment"][0] == pytest.approx(wanted, rel=1e-6)
