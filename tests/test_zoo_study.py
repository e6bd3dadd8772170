"""The zoo of planted features: its learners against slow twins, its arrangement, samples to 90 %, plumbing at smoke scale."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unlazy.data.planted import KINDS, Planted
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.spec import relu_spec
from unlazy.runtime import InputError
from unlazy.studies.emergence.zoo import figures, measure, study, tuned


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("zoo")
    table = study.reproduce("smoke", runs=folder / "runs", results=folder, progress=lambda *event: None)
    return folder, table


def test_results_are_written(smoke) -> None:
    folder, table = smoke
    assert json.loads((folder / "zoo" / "smoke.json").read_text()) == table
    figures_made = {path.name for path in (folder / "zoo" / "smoke").iterdir()}
    assert figures_made == {f"{name}.{kind}" for name in ("zoo", "recovered", "phases") for kind in ("png", "pdf")}
    assert table["claims"] == []
    assert [0 <= row["network_span"] <= 1.000001 for row in table["relevant"]] == [True]
    assert {data.kind for data in measure.ANIMALS.values()} == set(KINDS)
    for rows in table["animals"].values():
        assert [len(cells) for cells in rows] == [1, 1]
        assert all(0 <= cell[f"{name}_accuracy"] <= 1 for cells in rows for cell in cells for name in figures.LEARNERS)
        assert all(0 <= cell[f"{name}_recovered"] <= 1.000001 for cell in rows[0] for name in figures.LEARNERS)


def test_values_are_arranged_in_the_order_of_the_jobs() -> None:
    settings = replace(measure.SCALES["desk"], seeds=2, hierarchy_seeds=1)
    jobs = study.jobs(settings, Path("nowhere"))
    assert len({job.path for job in jobs}) == len(jobs)
    found = study.arranged(settings, [job.options | {job.measure.__name__: True} for job in jobs])
    for name, rows in found["animals"].items():
        for n, cells in zip(settings.sizes, rows, strict=True):
            wanted = {"name": name, "n": n, "animal": True, "kernel": True}
            seeds = 3 if name.startswith("hierarchy") else 2
            assert cells == [wanted | {"seed": seed} for seed in range(seeds)]
    for order, rows in found["phases"].items():
        for gamma, line in zip(settings.phase_gammas, rows, strict=True):
            for n, cells in zip(settings.phase_sizes, line, strict=True):
                wanted = {"order": int(order), "gamma": gamma, "n": n, "phase": True}
                assert cells == [wanted | {"seed": seed} for seed in range(settings.phase_seeds)]
    wanted = {"n": settings.sizes[-1], "relevant": True}
    assert found["relevant"] == [wanted | {"seed": seed} for seed in range(settings.seeds)]


def test_samples_needed_must_stay_above_ninety() -> None:
    rows = [[0.95, 0.5, 0.5], [0.85, 0.9, 0.6], [0.92, 0.99, 0.7]]
    cells = [[{"network_accuracy": value} for value in row] for row in rows]
    table = {"settings": {"sizes": [100, 200, 400]}, "animals": {"x": cells}}
    assert study.samples_needed(table, "x", "network") == [400.0, 200.0, None]  # a lucky first size does not count


def test_the_displaced_linearisation_is_the_kernel_machine() -> None:
    net = build(relu_spec(6, width=10, depth=2), seed=0)
    data = Planted("parity", 6, 3)
    x, new = data.draw(20)[0].float(), data.draw(8, "test")[0].float()
    coefficients = torch.linspace(-1, 1, 20)
    line = measure.moved_along(net, x, coefficients)
    wanted = net(new)[:, 0] + tangent_kernel(net, new, x) @ coefficients
    assert torch.allclose(line(new)[:, 0], wanted, rtol=1e-4, atol=1e-4)


def test_training_reduces_the_error_and_repeats() -> None:
    settings = measure.SCALES["smoke"]
    data = Planted("staircase", 8, 3)
    sample = measure.Sample.of(data, 60, settings)
    spec = relu_spec(8, width=16, depth=2)
    start = build(spec, seed=0)
    first, second = (measure.trained(build(spec, seed=0), sample, settings, 0) for _ in range(2))

    def error(net: Any) -> float:
        return float((net(sample.x)[:, 0] - sample.y).square().mean().detach())

    assert error(first) < 0.9 * error(start)
    assert error(first) == error(second)
    assert sample.test_x.shape == (settings.tests, 8)


def test_the_tuned_kernel_is_the_best_of_its_grid_on_held_rows() -> None:
    settings, name = measure.SCALES["smoke"], "single index"
    data = measure.with_seed(measure.ANIMALS[name], 1)
    sample = measure.Sample.of(data, 80, settings)
    x, y, held, tests = (value.double() for value in (sample.x, sample.y, sample.held_x, sample.test_x))
    apart = (x[:, None] - x[None]).square().sum(-1)
    typical = float((apart.sum() / len(x) ** 2).sqrt())
    tried = {}
    for shape, width, ridge in product(tuned.SHAPES, tuned.WIDTHS, tuned.RIDGES):

        def outputs(rows: Tensor, shape: str = shape, width: float = width * typical, ridge: float = ridge) -> Tensor:
            def gram(left: Tensor) -> Tensor:
                far = (left[:, None] - x[None]).square().sum(-1)
                return torch.exp(-far.sqrt() / width if shape == "laplace" else -far / (2 * width**2))

            return gram(rows) @ torch.linalg.solve(gram(x) + ridge * torch.eye(len(x), dtype=x.dtype), y)

        right = float((outputs(held).sign() == sample.held_y).double().mean())
        tried[shape, width, ridge] = (right, float((outputs(tests).sign() == sample.test_y).double().mean()))
    values = tuned.kernel(settings, name, 80, 1)
    chosen = tried[values["kernel_shape"], values["kernel_width"], values["kernel_ridge"]]
    assert chosen[0] == max(right for right, _ in tried.values())
    assert values["kernel_accuracy"] == pytest.approx(chosen[1])
    assert len({right for right, _ in tried.values()}) > 3  # the grid matters


def test_the_counting_rule_is_the_best_threshold() -> None:
    for order, gamma in ((3, 0.05), (5, 0.25), (7, 0.4)):
        patterns = Planted("patterns", 8, order, mixture=1 - 2 * gamma).patterns()
        every = patterns.population()
        counts = every.indicators[:, patterns.relevant_set()].sum(1)
        best = 0.0
        for cut in range(order + 2):
            right = float(every.weights[(counts >= cut) == (every.y > 0)].sum())
            best = max(best, right, 1 - right)
        assert figures.counting(order, gamma) == pytest.approx(best)


def test_directions_in_which_nothing_varies_do_not_count() -> None:
    data = Planted("hierarchy", 20, 2, symbols=4)
    x, hidden = data.draw(400)[0].float(), data.directions()
    constant = torch.zeros(20, dtype=torch.float64)
    constant[:4] = 0.5  # the sum of one token's indicators
    product = hidden @ hidden.T + 100 * torch.outer(constant, constant)
    assert measure.found_by(product, x, hidden) == pytest.approx(1)
    other = torch.eye(20, dtype=torch.float64) - hidden @ hidden.T
    assert measure.found_by(other, x, hidden) < 0.8


def test_the_phase_diagram_has_the_asked_gamma() -> None:
    for gamma in measure.SCALES["paper"].phase_gammas:
        data = Planted("patterns", 20, 3, mixture=1 - 2 * gamma)
        assert data.patterns().gamma == pytest.approx(gamma)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="rounds must be at least 1"):
        measure.Settings(seeds=1, rounds=0)
