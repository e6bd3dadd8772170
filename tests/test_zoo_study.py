"""The zoo of planted features: its learners against slow twins, its arrangement, samples to 90 %, plumbing at smoke scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from unlazy.data.planted import KINDS, Planted
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.spec import relu_spec
from unlazy.runtime import InputError
from unlazy.studies.emergence.zoo import figures, measure, study


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("zoo")
    table = study.reproduce("smoke", runs=folder / "runs", results=folder, progress=lambda *event: None)
    return folder, table


def test_results_are_written(smoke) -> None:
    folder, table = smoke
    assert json.loads((folder / "zoo" / "smoke.json").read_text()) == table
    figures_made = {path.name for path in (folder / "zoo" / "smoke").iterdir()}
    assert figures_made == {"zoo.png", "zoo.pdf", "phases.png", "phases.pdf"}
    assert table["claims"] == []
    assert {data.kind for data in measure.ANIMALS.values()} == set(KINDS)
    for rows in table["animals"].values():
        assert [len(cells) for cells in rows] == [1, 1]
        assert all(0 <= cell[f"{name}_accuracy"] <= 1 for cells in rows for cell in cells for name in figures.LEARNERS)
        assert all(0 <= cell[f"{name}_recovered"] <= 1.000001 for cell in rows[0] for name in figures.LEARNERS)


def test_values_are_arranged_in_the_order_of_the_jobs() -> None:
    settings = measure.SCALES["desk"]
    jobs = study.jobs(settings, Path("nowhere"))
    assert len({job.path for job in jobs}) == len(jobs)
    found = study.arranged(settings, [dict(job.options) for job in jobs])
    for name, rows in found["animals"].items():
        for n, cells in zip(settings.sizes, rows, strict=True):
            assert cells == [{"name": name, "n": n, "seed": seed} for seed in range(settings.seeds)]
    for order, rows in found["phases"].items():
        for gamma, line in zip(settings.phase_gammas, rows, strict=True):
            for n, cells in zip(settings.phase_sizes, line, strict=True):
                wanted = {"order": int(order), "gamma": gamma, "n": n}
                assert cells == [wanted | {"seed": seed} for seed in range(settings.phase_seeds)]


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
