"""The circle study at smoke scale: figures show what was measured, the page holds it all."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from unlazy import plots
from unlazy.cli.studies import write_demo_page
from unlazy.kernels.compare import trace_normalise
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace import circle as figures
from unlazy.studies.halfspace import circle_networks
from unlazy.studies.halfspace.circle_networks import Settings, Stack, fast_rms
from unlazy.studies.registry import find_studies, studies
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Results, Work
from unlazy.studies.table import Table


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Request, Results, figures.CircleRuns]:
    folder = tmp_path_factory.mktemp("smoke")
    request = Request("circle", "smoke", folder / "runs", folder)
    reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    results = request.with_table(Table.read(request.folder / "table.csv"))
    return request, results, figures.CircleRuns(results)


def stack_of(smoke, arm: str) -> Stack:
    return smoke[2].stacks["author", arm]


def test_results_hold_every_stack_and_claim(smoke) -> None:
    request, table = smoke[0], smoke[1].table
    results = json.loads((request.folder / "results.json").read_text())
    assert {(row["preset"], row["arm"]) for row in table.rows()} == {(one.preset, one.arm) for one in request.cases}
    assert [row["id"] for row in results["claims"]] == [f"C{i}" for i in range(7, 16)]
    assert results["provenance"]["sources_sha256"] == request.sources_hash()


def test_measured_numbers_are_those_of_the_run(smoke) -> None:
    table, source = smoke[1].table, smoke[2]
    run, where = source.runs["author", "pwc"], {"preset": "author", "arm": "pwc", "beta": 4}
    loss = run.scalars("loss")[1][run.scalars("loss")[0] == 48][0]
    assert table.select("loss", 3, **where) == pytest.approx(loss.tolist(), rel=1e-4)
    tangent = torch.from_numpy(run.array("tangent", 48)).double()
    diagonal = tangent.diagonal(dim1=1, dim2=2)
    share = (diagonal[:, :50].sum(1) / diagonal.sum(1)).tolist()
    assert table.select("tangent_top_share", 3, **where) == pytest.approx(share, abs=1e-5)
    normals = run.array("normals", 0)
    cosine = normals[..., 1] / np.linalg.norm(normals, axis=-1)
    near = (cosine >= np.cos(np.pi / 6)).mean(-1)  # [seeds, layers]
    for layer in range(3):
        assert np.allclose(table.select("near_top_30", 0, layer=layer + 1, **where), near[:, layer], rtol=1e-4)


def test_times_are_first_crossings(smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pretend(Run):
        def scalars(self, name):
            steps, values = super().scalars(name)
            if name == "loss":
                values = np.where((steps >= 32)[:, None] & (np.arange(2) == 0), 0.001, 0.3)
            return steps, values

    request, _, source = smoke
    folder = source.runs["author", "pwc"].folder
    monkeypatch.setattr(circle_networks.Training, "run", lambda training, work: Pretend(folder))
    rows = circle_networks.measure(stack_of(smoke, "pwc"), Work("circle", "smoke", request.runs))
    table = Table.from_rows(rows.entries)
    assert table.select("epochs_to_reach").tolist() == [2.0, np.inf]
    assert table.select("epochs_plateau").tolist() == [2.0, np.inf]
    assert table.select("epochs").tolist() == [4.0, 4.0]


def test_fast_rms_separates_slow_from_fast() -> None:
    t = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    slow, fast = torch.cos(3 * torch.pi * t), torch.cos(8 * torch.pi * t)
    assert float(fast_rms(slow, 4)) < 1e-12
    assert float(fast_rms(0.5 * fast + slow, 4)) == pytest.approx(0.5 / 2**0.5)


# --- figures: read back what they draw -----------------------------------------------------------------


def test_loss_figure_draws_the_medians(smoke) -> None:
    source = smoke[2]
    with plots.style():
        axis = figures.draw_loss(smoke[1]).axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    epochs, values = source.curve("author", "relu", "loss", None)
    assert np.allclose(lines["ReLU net"].get_ydata(), np.median(values, axis=1))
    assert np.allclose(lines["ReLU net"].get_xdata(), epochs)
    assert epochs[0] == 0.5  # the start, on a logarithmic axis


@pytest.mark.parametrize("quantity", ["overlap", "tangent"])
def test_kernel_figures_draw_the_kernels(smoke, quantity: str) -> None:
    source = smoke[2]
    with plots.style():
        axes = figures.draw_kernels(quantity, smoke[1]).axes
    titled = [axis for axis in axes if axis.get_title(loc="left") == "epoch 3"]
    for axis, arm in zip(titled, ("relu", "pwc"), strict=True):
        stored = torch.from_numpy(source.runs["author", arm].array(quantity, 48)[0]).double()
        assert np.allclose(axis.get_images()[0].get_array(), trace_normalise(stored))


def test_function_figure_draws_target_and_output(smoke) -> None:
    source = smoke[2]
    with plots.style():
        axis = figures.draw_functions(smoke[1]).axes[0]
    target, output = (line.get_ydata() for line in axis.get_lines()[:2])
    assert np.allclose(target, stack_of(smoke, "pwc").circle().dataset().y[:, 0])
    assert np.allclose(output, source.runs["author", "pwc"].array("output", 48)[0])


def test_half_planes_are_filled_where_units_are_open() -> None:
    from matplotlib.path import Path as Outline

    random = np.random.default_rng(0)
    normals, offsets = random.normal(size=(2, 3, 2)), random.normal(size=(2, 3)) / 2
    with plots.style():
        axes = plots.grid(1, 1, (4, 3))[1]
        plots.draw_half_planes(axes[0, 0], normals, offsets)
    filled = [Outline(path.vertices) for path in axes[0, 0].collections[1].get_paths()]
    for layer in range(2):
        for unit in range(3):
            for point in random.uniform(-0.7, 0.7, size=(20, 2)):
                value = normals[layer, unit] @ point + offsets[layer, unit]
                if abs(value) > 0.05:
                    place = point + np.array([2.3 * unit, -2.3 * layer])
                    assert any(outline.contains_point(place) for outline in filled) == (value >= 0)


def test_saved_figures_are_reproducible(smoke, tmp_path: Path) -> None:
    for name in ("a", "b"):
        with plots.style():
            plots.save_figure(figures.draw_loss(smoke[1]), tmp_path / name)
    for suffix in (".png", ".pdf"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


# --- the page ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(smoke) -> str:
    request = smoke[0]
    return write_demo_page(request.results / "page.html", request).read_text()


def test_page_asks_for_nothing_but_itself(page: str) -> None:
    bare = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?!data:|#)[a-z/.]", bare)
    assert "default-src 'none'" in page
    assert "@import" not in page


def test_page_carries_the_scenes(page: str, smoke) -> None:
    content = json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.S)[1])
    scene = next(scene for scene in content["scenes"] if scene["title"] == "Gated network")
    assert len({scene["title"] for scene in content["scenes"]}) == len(content["scenes"])
    for shown in content["scenes"]:
        assert not re.search("author|pilot|experts|DLGN|beta", shown["title"])
        assert len(shown["meaning"]) > 40
    run = smoke[2].runs["author", "pwc"]
    steps = run.array_steps("scene_output")
    facts = content["responses"][f"/api/run/{scene['key']}"]
    assert facts["arrays"]["output"]["steps"] == sorted({*steps, *run.array_steps("output")})
    assert facts["steps_per_epoch"] == 16
    stored = content["responses"][f"/api/array/{scene['key']}/output/{steps[-1]}?member=0"]
    output = np.frombuffer(base64.b64decode(stored["base64"]), "<f4")
    assert np.array_equal(output, run.array("scene_output", steps[-1])[0])
    assert np.allclose(output, run.array("output", steps[-1])[0], atol=1e-6)


def test_page_names_every_claim(page: str) -> None:
    for number in range(7, 16):
        assert f"C{number}" in page


def test_unknown_studies_and_settings_are_refused() -> None:
    assert find_studies("half-space") == [entry.name for entry in studies() if entry.paper == "half-space"]
    with pytest.raises(InputError, match="circle"):
        find_studies("qqq")
    with pytest.raises(InputError, match="author, pilot"):
        Settings(epochs=1, frozen_epochs=1, presets=("nobody",))
