"""Test accuracy of the gates' kernels, the first kernel's residual, and the drawing of four paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unlazy import build
from unlazy.kernels.overlap import neural_path_kernel, overlap_kernel
from unlazy.models.spec import relu_spec
from unlazy.runtime import stream
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace.circle_checkpoints import CircleNetworks
from unlazy.studies.halfspace.circle_networks import PLATEAU
from unlazy.studies.halfspace.kernels_over_time import overlap_with_training, regression_accuracy, share_to_reach
from unlazy.studies.halfspace.path_drawing import DEPTH, choose_paths, open_gates, path_region
from unlazy.studies.halfspace.residual_paths import kernel_residual, prediction, smooth_around
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.table import Table

RANDOM = stream(0, "kernels over time")


def test_the_kernel_is_the_overlap_kernel_over_all_paths() -> None:
    x = torch.randn(9, 5, generator=RANDOM, dtype=torch.float64)
    net = build(relu_spec(5, 3, width=4, depth=3, value_bias=False), dtype=torch.float64)
    train = torch.arange(9) < 6
    found = overlap_with_training([layer > 0.5 for layer in net.gates(x).hard()], train)
    assert torch.allclose(found * 4**3, overlap_kernel(net, x)[train])
    assert torch.allclose(found * 4**3 * (x[train] @ x.mT), neural_path_kernel(net, x)[train])


def test_regression_learns_what_its_kernel_separates_and_no_more() -> None:
    labels = torch.arange(60) % 3
    y, train = torch.nn.functional.one_hot(labels, 3).double(), torch.arange(60) < 40
    classes = (labels[:, None] == labels[None]).double()
    assert regression_accuracy(classes[train], y, train) == 1
    assert regression_accuracy(torch.ones(40, 60, dtype=torch.float64), y, train) < 0.5


def test_a_level_counts_from_when_it_is_kept() -> None:
    steps = np.array([0, 10, 100, 1000])
    curve = np.array([[0.8, 0.7, 0.7], [0.7, 0.8, 0.7], [0.8, 0.8, 0.7], [0.8, 0.8, 0.7]])
    assert share_to_reach(steps, curve, np.array([0.805] * 3)).tolist() == [0.1, 0.01, np.inf]


def test_residual_is_taken_when_the_flow_reaches_the_plateau() -> None:
    nets = CircleNetworks("author", "relu", (0, 1), 3, width=8, depth=2)
    for member in (0, 1):
        left = kernel_residual(nets, member)
        assert 0.5 * PLATEAU < float((left**2).mean()) <= PLATEAU
        top, bottom = (left[inside.numpy()] for inside in nets.data().groups.values())
        assert (top**2).mean() < (bottom**2).mean()  # the slow half is fitted first


def test_prediction_is_one_where_less_residual_means_more_paths() -> None:
    left = np.array([0.1, 0.5, 0.2, 0.9])
    assert prediction(left, -left) == pytest.approx(1)
    assert prediction(left, left**3) == pytest.approx(-1)
    assert np.isnan(prediction(left, np.array([1.0, np.nan, 2.0, 3.0])))
    flat = smooth_around(np.sin(np.linspace(0, 40 * np.pi, 500, endpoint=False)))  # one cycle a window
    assert np.allclose(flat, np.sqrt(0.5), atol=1e-6)


def test_drawn_paths_have_convex_regions_and_differ() -> None:
    gates = open_gates()
    paths = choose_paths(gates)
    assert len({*paths}) == 4
    for path in paths:
        places = np.argwhere(path_region(gates, path))
        assert len(places) > 0
        picks = np.random.default_rng(0).integers(0, len(places), (200, 2))
        middles = (places[picks[:, 0]] + places[picks[:, 1]]) / 2
        on_grid = middles[(middles % 1 == 0).all(1)].astype(int)
        assert path_region(gates, path)[on_grid[:, 0], on_grid[:, 1]].all()
        assert len(path) == DEPTH


@pytest.mark.parametrize("name", ["kernels-over-time", "residual-paths"])
def test_studies_run_and_draw(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp(name)
    request = Request(name, "smoke", folder / "runs", folder / "results")
    done = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert not done.failed
    assert not done.not_drawn
    assert len(Table.read(request.folder / "table.csv")) > 0
