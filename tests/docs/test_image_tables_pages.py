"""Gates, patches, kernels, figures and the page of the CIFAR tables: against slow twins, and against the committed numbers."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from image_cases import stripes
from repository import ROOT
from unlazy import plots
from unlazy.models.build import build
from unlazy.models.folding import half_space_normals
from unlazy.models.gate_product import divide_by_channel_size, multiply_by_gate, plain_backward, plain_forward
from unlazy.models.gates import HardGate
from unlazy.models.spec import ImageSpec
from unlazy.runtime import InputError
from unlazy.studies.halfspace import image_networks, image_tables, table1, table2
from unlazy.studies.halfspace.image_tables import PAPER_ACCURACIES, draw_accuracies
from unlazy.studies.halfspace.table2 import draw_normal_images, gate_normals
from unlazy.studies.study import Results, Work
from unlazy.studies.table import Table
from unlazy.training.batches import DeviceImages

sys.path.insert(0, str(ROOT / "docs"))
import cifar_page

TINY = ImageSpec((3, 4), (1, 1), channels=1, gate=HardGate(4.0))


# --- gates and patches -------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
def test_one_pass_formulas_are_the_gates(soft: bool) -> None:
    q, v, g = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    q, v = q.requires_grad_(), v.requires_grad_()
    share = torch.sigmoid(3.0 * q)
    hard = (q >= 0).double()
    out = share * v if soft else (share + (hard - share).detach()) * v
    torch.testing.assert_close(plain_forward(q, v, 3.0, soft=soft), out)
    wanted = torch.autograd.grad(out, (q, v), g)
    found = plain_backward(g, q.detach(), v.detach(), 3.0, soft=soft)
    torch.testing.assert_close(found, wanted)


def test_even_gates_keep_every_half_space_and_bring_all_gates_within_reach() -> None:
    plain = build(replace(TINY, gate=HardGate(2.0)), seed=1).double()
    even = build(replace(TINY, gate=HardGate(2.0), even_gates=True), seed=1).double()
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(plain.train()(x), even.train()(x))
    torch.testing.assert_close(plain.eval()(x), even.eval()(x))
    q = torch.randn(40, 3, 5, 5, dtype=torch.float64) * torch.tensor([50.0, 10.0, 20.0])[:, None, None]
    assert torch.equal(divide_by_channel_size(q) >= 0, q >= 0)
    torch.testing.assert_close(
        divide_by_channel_size(q).square().mean((0, 2, 3)), torch.ones(3).double(), rtol=1e-4, atol=0
    )
    reached = []
    for make in (lambda given: given, divide_by_channel_size):
        given = q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(multiply_by_gate(HardGate(2.0), make(given), torch.ones_like(q)).sum(), given)
        reached.append(float((slope > 0.01 * slope.max()).double().mean()))
    assert reached[0] < 0.2
    assert reached[1] > 0.95
    with pytest.raises(InputError, match="hard gates"):
        ImageSpec((3,), even_gates=True)


def test_patches_come_from_another_picture_of_the_batch() -> None:
    data = DeviceImages.from_images(stripes(60), "cpu")
    plain = list(data.batches(0, 0, 20, augment=False))
    mixed = list(data.batches(0, 0, 20, augment=False, mixed=0.5))
    touched = 0
    for (x, y), (other, label) in zip(plain, mixed, strict=True):
        assert torch.equal(y, label)
        from_next = (other == x.roll(1, 0)) | (other == x)
        assert from_next.all()
        touched += int((other != x).flatten(1).any(1).sum())
    assert 10 < touched < 50  # of 60, half of them chosen


# --- kernels -----------------------------------------------------------------------------------------


def test_a_hundredth_of_the_images_may_hold_the_trace() -> None:
    assert image_networks.top_share(np.eye(200)) == pytest.approx(0.01)
    assert image_networks.top_share(np.diag([1.0] * 98 + [49.0, 2.0])) == pytest.approx(49 / 149, abs=1e-6)
    assert image_networks.top_share(np.diag([3.0, 1.0])) == pytest.approx(0.75)  # one image at least


def test_dead_classes_are_marked() -> None:
    overlap = np.diag([100.0, 10.0, 0.0])
    assert image_networks.mean_log_paths(overlap, np.array([0, 0, 1]), 2) == [1.5, -1.0]


def test_normals_are_those_of_the_gates() -> None:
    net = build(TINY, seed=4).eval()
    found = gate_normals(net, (0, 3), count=2, size=8)
    for layer in (0, 3):
        height = net.pre_activations(torch.zeros(1, 1, 8, 8))[layer].shape[2]
        units = [(channel, height // 2, height // 2) for channel in range(2)]
        wanted, _ = half_space_normals(net, layer, units, (8, 8))
        made = torch.from_numpy(found[f"layer_{layer}"]).float()
        torch.testing.assert_close(made, wanted / wanted.abs().amax((1, 2, 3), keepdim=True), rtol=1e-2, atol=1e-3)
    with plots.style():
        assert len(draw_normal_images(found).axes) == 4


# --- figures -----------------------------------------------------------------------------------------


def results_of(module: Any, table: Table | None = None) -> Results:
    study = module.STUDY
    folder = ROOT / "results" / study.name / "paper"
    table = Table.read(folder / "table.csv") if table is None else table
    work = Work(study.name, "paper", folder)
    return Results(study, "paper", study.settings("paper"), study.seeds_of("paper"), table, work, folder)


@pytest.mark.parametrize("module", [table1, table2], ids=["1", "2"])
def test_figures_show_measured_bars_and_the_papers_diamonds(module: Any) -> None:
    results = results_of(module)
    table = results.table
    with plots.style():
        figure = draw_accuracies(results)
    panels = [axis for axis in figure.axes if axis.get_title(loc="left")]
    for axis in panels:
        data, layout = axis.get_title(loc="left").split(", ")
        own = table.where(data=data, layout=layout, recipe="main")
        heights = {round(float(bar.get_height()), 1) for bar in axis.patches}
        for model in own.unique("model"):
            longest = max(image_tables.list_trainings(own, model=model))
            values = image_tables.end_accuracies(own, longest, model=model)
            assert round(float(np.median(values)), 1) in heights
        diamonds = [float(line.get_ydata()[0]) for line in axis.lines if line.get_marker() == "D"]
        assert sorted(diamonds) == sorted(PAPER_ACCURACIES[data, layout].values())
    assert len(panels) == (1 if module is table1 else 4)


def test_only_half_spaces_have_their_colour() -> None:
    with plots.style():
        (axis,) = draw_accuracies(results_of(table1)).axes
    names = [label.get_text().replace("\n", " ") for label in axis.get_xticklabels()]
    orange = {
        names[round(bar.get_x() + bar.get_width() / 2)]
        for bar in axis.patches
        if to_hex(bar.get_facecolor()) == to_hex(plots.COLOURS["orange"])
    }
    assert len(names) > len(orange) == 4  # two soft networks, made hard, and two trained hard
    assert all(name.startswith("DLGN") for name in orange)


def test_kernels_are_drawn_with_one_line_a_network() -> None:
    results = results_of(table1)
    with plots.style():
        figure = table1.draw_kernels(results)
    assert [len(axis.lines) for axis in figure.axes] == [11] * 6
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5 + 2  # models and trainings
    single = results.table.where(quantity=list(table1.KERNEL_CURVES), at=[0, 1])
    with plots.style():
        assert table1.draw_kernels(results_of(table1, single)).axes


def test_committed_normals_are_drawn() -> None:
    with plots.style():
        assert len(table2.draw_normals(results_of(table2)).axes) == 7 * 8


# --- the page ----------------------------------------------------------------------------------------


def test_the_page_says_what_was_measured_and_missed() -> None:
    text = cifar_page.page(ROOT / "results")
    rows = text.splitlines()
    soft = "| cifar-10, conv | DLGN, soft gates | 3 seeds, 100 epochs, rate 0.0004 | 77.1 ± 0.6 | 70.3 ± 0.4 |"
    assert f"{soft} 61.0 ± 1.3 | -3.3 ± 1.3 | 73.2 |" in rows
    hard = "| cifar-10, resnet-34 | DLGN, hard gates | 1 seed, 40 epochs, rate 0.3 | 99.9 | 88.1 | 88.1 | 6.3 |"
    assert f"{hard}  |" in rows
    assert "| cifar-10, resnet-34: at least 88 % | 88.1 | reached |" in rows
    assert "| cifar-10, wide: past 91 % | 91.2 | reached |" in rows
    gaps = "7.2 (1 seed, 10 epochs, rate 0.3); 6.3 (1 seed, 25 epochs, rate 0.3); 6.7 (1 seed, 30 epochs, rate 0.6)"
    aim = "resnet-110: within 6 points of its ReLU twin, trained longest"
    assert f"| cifar-10, {aim} | {gaps} | missed |" in rows
    assert "earlier table" not in text
    assert "{{" not in text


def test_the_page_follows_its_tables_and_marks_stale_findings(tmp_path: Path) -> None:
    for name in ("table1", "table2", "hard-gate-search"):
        for file in ("table.csv", "results.json", "findings.md"):
            (tmp_path / name / "paper").mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "results" / name / "paper" / file, tmp_path / name / "paper" / file)
    path = tmp_path / "table2" / "paper" / "table.csv"
    Table.read(path).without(layout="resnet-110").write(path)
    path = tmp_path / "hard-gate-search" / "paper" / "table.csv"
    table = Table.read(path)
    lost = {"layout": "wide", "data": "cifar-10"}
    Table.from_rows(
        [row | {"value": row["value"] - 1} if row | lost == row else row for row in table.rows()], digits=17
    ).write(path)
    text = cifar_page.page(tmp_path)
    assert "| cifar-10, wide: past 91 % | 90.2 | missed |" in text
    assert "trained longest | none | not run |" in text
    assert text.count("*(written for an earlier table)*") == 2  # those of Table 1 are as they were
