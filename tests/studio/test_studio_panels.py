"""Every panel has its numbers, a figure and code that runs as it is and draws the numbers of the page."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from studio_runs import STEPS, arrays_at, ask, header, write_run
from unlazy import Scope
from unlazy.store import Writer
from unlazy.studio.answers import BadRequest, NotFound
from unlazy.studio.api import StudioApi
from unlazy.studio.run_index import RunIndex

UNIT: dict[str, Any] = {"layer": 1, "unit": 2}
OTHER: dict[str, Any] = {"other": "second", "member2": 0}
CLASSES = np.array([3, 5, 8])[np.arange(30) % 3]
VERDICT = {
    "label": "rich",
    "when": {"network": 4},
    "evidence": [
        {
            "measure": "gate_flips",
            "value": 0.3,
            "interval": [0.2, 0.4],
            "lazy_below": 0.1,
            "rich_above": 0.2,
            "says": "rich",
        },
        {
            "measure": "tangent_distance",
            "value": 0.01,
            "interval": None,
            "lazy_below": 0.1,
            "rich_above": 0.2,
            "says": "lazy",
        },
        {"measure": "unknown", "value": None, "interval": None, "lazy_below": 0.1, "rich_above": 0.2, "says": None},
    ],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("panels")
    random = np.random.default_rng(0)
    points = random.normal(size=(1, 8, 2)).astype(np.float32)
    groups = {"recipe": {"name": "first", "scope": {"groups": {"left": [0, 1, 2], "right": [3, 4, 5, 6, 7]}}}}
    once = {"probe_x": points, "probe_y": (points[..., :1] > 0).astype(np.float32)}
    write_run(folder / "first", once=once, head=header("first") | groups)
    (folder / "first" / "verdict.json").write_text(json.dumps(VERDICT))
    write_run(folder / "second", steps=(0, 2, 50), once=once)
    with Writer(
        folder / "pictures", header("pictures", 1, data={"name": "digits", "options": {}, "fingerprint": "0"})
    ) as writer:
        for step in (0, 5):
            writer.record(
                step, {}, {"normals": random.normal(size=(1, 2, 6, 64)), "offsets": random.normal(size=(1, 2, 6))}
            )
        writer.finish()
    for name, steps in (("classes", (0, 5)), ("others", (0, 3))):
        with Writer(folder / name, header(name, 1)) as writer:
            for step in steps:
                writer.record(step, {}, {"output": random.normal(size=(1, 30, 12)), "probe_y": CLASSES[None]})
            writer.finish()
    with Writer(folder / "real", header("real", 1)) as writer:
        output, targets = random.normal(size=(2, 1, 20, 3))
        writer.record(0, {}, {"output": output, "probe_y": targets})
        writer.finish()
    return folder


@pytest.fixture(scope="module")
def api(root: Path) -> StudioApi:
    return StudioApi(RunIndex(root))


def run_code(api: StudioApi, panel: str, key: str = "first", **parameters: object) -> Any:
    """The figure that the text behind a code link makes, run by itself in the present folder."""
    text = ask(api, f"code/{key}/{panel}", **parameters).body.decode()
    space: dict[str, Any] = {}
    exec(compile(text, "code", "exec"), space)
    return space["figure"]


def lines(figure: Any) -> dict[str, np.ndarray]:
    """The named curves of a figure."""
    return {line.get_label(): np.asarray(line.get_ydata(), float) for line in figure.axes[0].lines}


PANELS = [
    ("alignment", {}),
    ("spectra", {}),
    ("units", {}),
    ("halfspaces", {"layer": 1}),
    ("verdict", {}),
    ("map-normals", {}),
    ("map-neurons", {}),
    ("loss,loss_top", {}),
    ("unit-normals", UNIT),
    ("unit-neurons", {"layer": 0, "unit": 3}),
    ("turned-normals", UNIT),
    ("length-neurons", {"layer": 0, "unit": 3}),
    ("open-normals", UNIT),
    ("difference-overlap", OTHER),
    ("difference-tangent", OTHER),
    ("loss", OTHER),
    ("output", OTHER),
]


@pytest.mark.parametrize(
    ("panel", "more"), PANELS, ids=[f"{panel}{'-two' if 'other' in more else ''}" for panel, more in PANELS]
)
def test_figure_and_code_are_the_same_picture(api, tmp_path, monkeypatch, panel, more):
    from matplotlib.image import imread

    monkeypatch.chdir(tmp_path)
    run_code(api, panel, step=4, member=1, **more)
    (made,) = tmp_path.glob("*.png")
    (tmp_path / "route").write_bytes(ask(api, f"figure/first/{panel}.png", step=4, member=1, **more).body)
    assert np.array_equal(imread(made), imread(tmp_path / "route", format="png"))
    assert imread(made).std() > 0.01  # something is drawn


def dots(axis: Any) -> np.ndarray:
    """Heights of all dots of a figure, in order."""
    drawn = [marks.get_offsets() for marks in axis.collections if type(marks).__name__ == "PathCollection"]
    return np.sort(np.concatenate([np.asarray(places)[:, 1] for places in drawn]))


def ahead_of_the_others(api: StudioApi, key: str, step: int) -> np.ndarray:
    """Margins by the plainest means."""
    output = api.run_index.open(key).find_array("output", step, 0).read()
    return np.array([row[own] - max(np.delete(row, own)) for row, own in zip(output, CLASSES, strict=True)])


def test_the_figure_of_classes_is_the_margins_of_the_page(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    axis = run_code(api, "output", "classes", step=5).axes[0]
    wanted = ahead_of_the_others(api, "classes", 5)
    assert np.allclose(dots(axis), np.sort(wanted))
    assert [label.get_text() for label in axis.get_xticklabels()] == ["3", "5", "8"]
    assert axis.get_title("left").endswith(f"right for {(wanted > 0).sum()} of 30")


def test_the_figure_of_two_runs_has_the_margins_of_both(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    axis = run_code(api, "output", "classes", step=5, other="others").axes[0]
    wanted = [ahead_of_the_others(api, "classes", 5), ahead_of_the_others(api, "others", 3)]
    assert np.allclose(dots(axis), np.sort(np.concatenate(wanted)))
    assert [label.get_text() for label in axis.get_legend().get_texts()] == ["first, step 5", "second, step 3"]


def test_real_targets_are_drawn_beside_the_output(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (drawn,) = run_code(api, "output", "real").axes[0].collections
    opened = api.run_index.open("real")
    wanted = [opened.find_array(name, 0, 0).read().ravel() for name in ("probe_y", "output")]
    assert np.allclose(drawn.get_offsets(), np.stack(wanted, 1))
    line = lines(run_code(api, "output", step=4, member=1))
    assert "target" in line  # one number per sample: a third curve


@pytest.mark.parametrize("panel", ["halfspaces", "unit-normals"])
def test_half_spaces_of_images_are_pictures(api, tmp_path, monkeypatch, panel):
    monkeypatch.chdir(tmp_path)
    figure = run_code(api, panel, "pictures", step=5, layer=1, unit=4)
    stored = np.load(next((api.run_index.folder("pictures") / "arrays" / "normals").glob("*5.npy")))[0, 1]
    shown = [np.asarray(axis.images[0].get_array(), float) for axis in figure.axes if axis.images]
    wanted = stored if panel == "halfspaces" else stored[4:5]
    assert np.allclose(shown[: len(wanted)], wanted.reshape(-1, 8, 8))


def test_all_units_of_images_are_a_map(api):
    """Discs are for the plane; other normals are drawn by their directions."""
    assert ask(api, "figure/pictures/units.png", step=5).body.startswith(b"\x89PNG")


def test_alignment_and_spectra_are_those_of_the_page(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = lines(run_code(api, "alignment", step=4, member=1))
    spectra = lines(run_code(api, "spectra", step=4, member=1))
    for name in ("overlap", "tangent"):
        told = json.loads(ask(api, f"spectrum/first/{name}", member=1).body)
        assert np.array_equal(drawn[name], told["alignment"])
        wanted = np.array(told["values"][STEPS.index(4)])
        seen = spectra[f"{name}, step 4"]
        assert np.array_equal(seen[wanted > 1e-6], wanted[wanted > 1e-6])
        assert np.isnan(seen[wanted <= 1e-6]).all()


def test_the_map_of_units_is_that_of_the_page(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = run_code(api, "map-normals", step=16, member=1)
    told = json.loads(ask(api, "embedding/first/normals", member=1).body)
    points = np.frombuffer(base64.b64decode(told["points"]), "<f4").reshape(len(told["steps"]), -1, 2)
    assert np.allclose(figure.axes[0].collections[0].get_offsets(), points[STEPS.index(16)], atol=1e-6)


def test_a_unit_is_told_by_its_own_numbers(api, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors = [arrays_at(step)["normals"][1, 1, 2].astype(float) for step in STEPS]
    offsets = [float(arrays_at(step)["offsets"][1, 1, 2]) for step in STEPS]
    turned = lines(run_code(api, "turned-normals", member=1, **UNIT))["turned"]
    for got, vector in zip(turned, vectors, strict=True):
        cross = vectors[0][0] * vector[1] - vectors[0][1] * vector[0]
        assert got == pytest.approx(np.degrees(abs(np.arctan2(cross, vectors[0] @ vector))), abs=1e-4)
    length = lines(run_code(api, "length-normals", member=1, **UNIT))
    assert np.allclose(length["length"], [np.hypot(*vector) for vector in vectors])
    assert np.allclose(length["offset"], offsets)
    points = np.load(next((root / "first" / "arrays" / "probe_x").glob("*.npy")))[0]
    shares = lines(run_code(api, "open-normals", member=1, **UNIT))
    for name, places in (("left", range(3)), ("right", range(3, 8))):
        wanted = [
            sum(points[i] @ vector + offset >= 0 for i in places) / len(places)
            for vector, offset in zip(vectors, offsets, strict=True)
        ]
        assert np.allclose(shares[name], wanted)


@pytest.mark.parametrize("shape", [(40, 2), (40, 1, 2)])
def test_half_spaces_of_a_users_network_are_drawn(tmp_path, monkeypatch, shape):
    """Borders of its first layer in every figure that shows borders, from weights and biases as they are in the network."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2))
    x, y = torch.randn(shape), torch.arange(40) % 2
    start = net[1].weight.detach().numpy().astype(float)
    with Scope(net, (x, y), tmp_path / "runs" / "mine", budget=float("inf")) as scope:
        with torch.no_grad():
            net[1].weight += torch.randn(5, 2)
            net[1].bias += torch.randn(5)
        scope.step(1)
    api = StudioApi(RunIndex(tmp_path / "runs"))
    weight, bias = (net[1].weight.detach().numpy().astype(float), net[1].bias.detach().numpy().astype(float))
    points = x.reshape(40, 2).numpy()
    heights = points @ weight.T + bias
    axis = run_code(api, "halfspaces", "mine", step=1, layer=0).axes[0]
    assert axis.get_title(loc="left") == "half-spaces of layer 1, step 1"
    assert np.allclose(axis.collections[0].get_offsets(), points)
    borders = [np.asarray(line.get_xydata()) for line in axis.lines[::2]]
    ticks = [np.asarray(line.get_xydata()) for line in axis.lines[1::2]]
    for unit in range(5):
        assert np.allclose(borders[unit] @ weight[unit] + bias[unit], 0, atol=1e-5)
        assert (ticks[unit][1] - ticks[unit][0]) @ weight[unit] > 0
    assert "half-spaces, step 1" in run_code(api, "units", "mine", step=1).axes[0].get_title(loc="left")
    unit = {"layer": 0, "unit": 3}
    length = lines(run_code(api, "length-neurons", "mine", **unit))
    assert length["length"][-1] == pytest.approx(np.linalg.norm(weight[3]), rel=1e-6)
    assert length["offset"][-1] == pytest.approx(bias[3], rel=1e-6)
    shares = lines(run_code(api, "open-neurons", "mine", **unit))
    for label in (0, 1):
        assert shares[str(label)][-1] == pytest.approx(np.mean(heights[y.numpy() == label, 3] > 0))
    turned = lines(run_code(api, "turned-neurons", "mine", **unit))["turned"]
    cosine = weight[3] @ start[3] / np.linalg.norm(weight[3]) / np.linalg.norm(start[3])
    assert turned.tolist() == pytest.approx([0, np.degrees(np.arccos(cosine))], rel=1e-4)
    for panel in ("halfspaces", "units", "unit-neurons"):
        assert ask(api, f"figure/mine/{panel}.png", step=1, layer=0, unit=3).body.startswith(b"\x89PNG")


def test_the_verdict_is_drawn_with_its_values(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figure = run_code(api, "verdict")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words == ["0.01  lazy", "0.3  rich"]  # from the bottom up; what has no value is left out
    assert "rich" in figure.axes[0].get_title(loc="left")
    places = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert np.allclose(places, [-0.9, 2.0])  # in units of the gap between the thresholds
    with pytest.raises(NotFound, match="no verdict"):
        ask(api, "figure/second/verdict.png")


def test_the_difference_is_the_same_in_figure_and_data(api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (arrays_at(step)["overlap"].astype(float) for step in (4, 2))
    wanted = first[1] / first[1].trace() * 8 - second[0] / second[0].trace() * 8
    figure = run_code(api, "difference-overlap", step=4, member=1, **OTHER)  # the second run's last step before 4 is 2
    assert np.allclose(figure.axes[0].images[0].get_array(), wanted)
    (tmp_path / "d.npy").write_bytes(ask(api, "difference/first/overlap/4", member=1, format="npy", **OTHER).body)
    assert np.allclose(np.load(tmp_path / "d.npy"), wanted)
    text = ask(api, "difference/first/overlap/4", member=1, format="csv", **OTHER).body.decode()
    assert np.allclose(np.loadtxt(text.splitlines(), delimiter=","), wanted, rtol=1e-6)
    with pytest.raises(BadRequest, match="subtracted"):
        ask(api, "difference/first/output/4", **OTHER)
    with pytest.raises(NotFound):
        ask(api, "difference/first/overlap/4", other="../second")


def test_path_counts_of_a_scope_are_drawn_as_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts = np.array([[0.0, 1, 7, 300]])
    for name, kind, kept in (("scope", "scope", np.log1p(counts)), ("train", "train", counts)):
        with Writer(tmp_path / "runs" / name, header(name, 1, kind=kind)) as writer:
            writer.record(0, {"paths": kept.mean(1)}, {"paths": kept})
            writer.finish()
    api = StudioApi(RunIndex(tmp_path / "runs"))
    for name in ("scope", "train"):
        dots = run_code(api, "array-paths", name, step=0).axes[0].collections[0].get_offsets()
        assert np.allclose(dots[:, 1], counts[0])
    both = run_code(api, "array-paths", "scope", step=0, other="train", member2=0)
    assert np.allclose([line.get_ydata() for line in both.axes[0].lines if len(line.get_ydata())], counts)


def test_an_array_and_a_scalar_of_one_name_have_a_figure_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Writer(tmp_path / "runs" / "mine", header("mine", 1, kind="scope")) as writer:
        for step in (0, 5):
            writer.record(step, {"paths": np.array([2.0 + step])}, {"paths": np.full((1, 4), 3.0)})
        writer.finish()
    api = StudioApi(RunIndex(tmp_path / "runs"))
    curve = run_code(api, "paths", "mine", step=5).axes[0]
    assert curve.get_ylabel() == "mean of ln(1 + active paths)"
    assert curve.lines[0].get_ydata().tolist() == [2, 7]
    assert run_code(api, "array-paths", "mine", step=5).axes[0].get_ylabel() == "active paths"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("figure/first/unit-normals.png?layer=9&unit=0", NotFound),
        ("figure/first/turned-normals.png?layer=0&unit=99", NotFound),
        ("figure/first/difference-overlap.png", NotFound),
        ("figure/first/overlap.png?other=nothing", NotFound),
        ("code/first/loss?other=third", NotFound),
        ("code/first/unit-normals?layer=x", BadRequest),
        ("figure/classes/halfspaces.png", NotFound),  # keeps no inputs
        ("code/classes/halfspaces", NotFound),
        ("frames/first/overlap?steps=x", BadRequest),
        ("frames/first/overlap?steps=4&kind=else", BadRequest),
    ],
)
def test_what_is_not_there_is_said(api, path, error):
    place, _, query = path.partition("?")
    with pytest.raises(error):
        ask(api, place, **dict(part.split("=") for part in query.split("&") if part))


# --- many steps in one answer --------------------------------------------------------------------------


def unpacked(body: bytes) -> list[tuple[dict[str, Any], bytes]]:
    (length,) = struct.unpack("<I", body[:4])
    place, found = 4 + length, []
    for head in json.loads(body[4:place]):
        size = head.get("bytes", 0)
        found.append((head, body[place : place + size]))
        place += -(-size // 4) * 4
    assert place == len(body)
    return found


@pytest.mark.parametrize(
    ("kind", "quantity"), [("array", "output"), ("array", "normals"), ("levels", "overlap"), ("levels", "tangent")]
)
@pytest.mark.parametrize("scale", ["all", "step"])
def test_a_batch_is_the_single_answers_in_a_row(api, kind, quantity, scale):
    steps = [50, 0, 4]
    batch = ask(api, f"frames/first/{quantity}", kind=kind, steps=",".join(map(str, steps)), member=1, scale=scale)
    for step, (head, body) in zip(steps, unpacked(batch.body), strict=True):
        more = {"scale": scale} if kind == "levels" else {}
        single = ask(api, f"{kind}/first/{quantity}/{step}", member=1, **more)
        assert head["step"] == step
        assert body == single.body
        assert head["headers"] == dict(single.headers)


def test_a_batch_names_what_it_cannot_read_and_ends_in_time(api, monkeypatch):
    found = unpacked(ask(api, "frames/first/output", steps="0,3,4").body)
    assert [("error" in head, head["step"]) for head, _ in found] == [(False, 0), (True, 3), (False, 4)]
    monkeypatch.setattr("unlazy.studio.api.LARGEST_BATCH", 10)
    assert [head["step"] for head, _ in unpacked(ask(api, "frames/first/output", steps="0,1,4").body)] == [0]
