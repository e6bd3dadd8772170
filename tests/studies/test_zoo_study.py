"""The zoo of planted features: its learners against slow twins, its cells, samples to 90 %, a smoke run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from repository import RESULTS
from unlazy.data.planted import KINDS, Planted
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.spec import relu_spec
from unlazy.runtime import InputError
from unlazy.studies.emergence import zoo
from unlazy.studies.engine import Reproduction, reproduce
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.table import Rows, Table


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Reproduction:
    folder = tmp_path_factory.mktemp("zoo")
    request = Request("zoo", "smoke", folder / "runs", folder / "results")
    return reproduce(request, ExecutionOptions(), progress=lambda *event: None)


def test_everything_is_measured_and_drawn(smoke) -> None:
    assert not smoke.failed
    assert not smoke.not_drawn
    drawn = {path.name for path in smoke.folder.iterdir() if path.suffix in (".png", ".pdf")}
    assert drawn == {f"{name}.{kind}" for name in ("zoo", "recovered", "phases") for kind in ("png", "pdf")}
    assert smoke.results["claims"] == []
    table = Table.read(smoke.folder / "table.csv")
    assert {data.kind for data in zoo.KINDS.values()} == set(KINDS)
    for name, learner, size in product(zoo.KINDS, zoo.LINES, (40, 80)):
        for quantity in ("accuracy", "recovered"):
            where = {"question": "learners", "data": name, "learner": learner, "samples": size}
            (value,) = table.select(quantity, **where)
            assert 0 <= value <= 1.000001
    (span,) = table.select("span_recovered", question="span")
    assert 0 <= span <= 1.000001
    phases = {"question": "phases", "order": 3, "gamma": 0.25, "samples": 80}
    assert set(table.unique("learner", **phases)) == set(zoo.PHASE_TITLES) - {zoo.COUNT}


def test_hierarchies_have_more_seeds_and_the_span_is_asked_at_the_largest_size() -> None:
    cases = zoo.cases(zoo.SCALES["paper"], range(6))
    assert len(set(map(zoo.STUDY.label, cases))) == len(cases)
    for name in zoo.KINDS:
        for n in zoo.SCALES["paper"].sizes:
            seeds = [case.seed for case in cases if (case.question, case.data, case.samples) == ("learners", name, n)]
            assert seeds == list(range(6 if name.startswith("hierarchy") else 3))
    assert sum(case.question == "phases" for case in cases) == 3 * 4 * 3 * 3
    assert [(case.samples, case.seed) for case in cases if case.question == "span"] == [(2000, k) for k in range(3)]


def test_the_span_is_that_of_the_network_that_all_learners_stand_beside(smoke) -> None:
    """The same samples and the same training: accuracy and share of the sum agree."""
    table = Table.read(smoke.folder / "table.csv").where(data="structured patterns", samples=80, learner="network")
    for quantity in ("accuracy", "recovered"):
        one, other = (table.select(quantity, question=question) for question in ("learners", "span"))
        assert one.tolist() == other.tolist()


def test_samples_needed_must_stay_above_ninety() -> None:
    values = {100: [0.95, 0.5, 0.5], 200: [0.85, 0.9, 0.6], 400: [0.92, 0.99, 0.7]}
    rows = Rows(question="learners", data="x", learner="network")
    rows.add("accuracy", list(values.values()), samples=list(values), seed=[0, 1, 2])
    needed = zoo.samples_needed(Table.from_rows(rows.entries), "x", "network")
    assert needed.tolist() == [400, 200, float("inf")]  # a lucky first size does not count


def test_the_page_gives_the_samples_of_the_committed_table() -> None:
    """The medians in docs/explanation/emergence.md, learner by learner; a lower accuracy at the largest size would need more."""
    table = Table.read(RESULTS / "zoo" / "paper" / "table.csv")
    page = (RESULTS.parent / "docs" / "explanation" / "emergence.md").read_text()
    learners = ("network", "dlgn", "machine", "linearised", "kernel")
    for name in zoo.KINDS:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {name}")]
        for learner, cell in zip(learners, line.split("|")[2:7], strict=True):
            needed = float(np.median(zoo.samples_needed(table, name, learner)))
            assert cell.strip().startswith("> 2000" if needed == np.inf else f"{needed:g}"), (name, learner)
    lower = [
        row | ({"value": 0.5} if row.get("samples") == "2000" and row["quantity"] == "accuracy" else {})
        for row in table.rows()
    ]
    assert np.isinf(zoo.samples_needed(Table.from_rows(lower), "single index", "machine")).all()


def test_the_displaced_linearisation_is_the_kernel_machine() -> None:
    net = build(relu_spec(6, width=10, depth=2), seed=0)
    data = Planted("parity", 6, 3)
    x, new = data.draw(20)[0].float(), data.draw(8, "test")[0].float()
    coefficients = torch.linspace(-1, 1, 20)
    line = zoo.linearised_solution(net, x, coefficients)
    wanted = net(new)[:, 0] + tangent_kernel(net, new, x) @ coefficients
    assert torch.allclose(line(new)[:, 0], wanted, rtol=1e-4, atol=1e-4)


def test_training_reduces_the_error_and_repeats() -> None:
    case = zoo.cases(zoo.SCALES["smoke"], [0])[0]
    data = Planted("staircase", 8, 3)
    sample = zoo.Sample.draw(data, 60, case.held, case.tests)
    spec = relu_spec(8, width=16, depth=2)
    start = build(spec, seed=0)
    first, second = (zoo.train_network(build(spec, seed=0), sample, case) for _ in range(2))

    def error(net: Any) -> float:
        return float((net(sample.x)[:, 0] - sample.y).square().mean().detach())

    assert error(first) < 0.9 * error(start)
    assert error(first) == error(second)
    assert sample.test_x.shape == (case.tests, 8)


def test_the_tuned_kernel_is_the_best_of_its_grid_on_held_rows() -> None:
    sample = zoo.Sample.draw(replace(zoo.KINDS["single index"], seed=1), 80, 50, 100)
    x, y, held, tests = (value.double() for value in (sample.x, sample.y, sample.held_x, sample.test_x))
    apart = (x[:, None] - x[None]).square().sum(-1)
    typical = float((apart.sum() / len(x) ** 2).sqrt())
    tried = {}
    for shape, width, ridge in product(zoo.SHAPES, zoo.WIDTHS, zoo.KERNEL_RIDGES):

        def outputs(rows: Tensor, shape: str = shape, width: float = width * typical, ridge: float = ridge) -> Tensor:
            def gram(left: Tensor) -> Tensor:
                far = (left[:, None] - x[None]).square().sum(-1)
                return torch.exp(-far.sqrt() / width if shape == "laplace" else -far / (2 * width**2))

            return gram(rows) @ torch.linalg.solve(gram(x) + ridge * torch.eye(len(x), dtype=x.dtype), y)

        right = float((outputs(held).sign() == sample.held_y).double().mean())
        tried[shape, width, ridge] = (right, float((outputs(tests).sign() == sample.test_y).double().mean()))
    rows = Rows(seed=1)
    zoo.measure_kernel(sample, rows)
    table = Table.from_rows(rows.entries)
    (shape,) = table.unique("shape")
    (width,), (ridge,), (test,) = (table.select(quantity) for quantity in ("width", "ridge", "accuracy"))
    chosen = tried[shape, width, ridge]
    assert chosen[0] == max(right for right, _ in tried.values())
    assert test == pytest.approx(chosen[1])
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
        assert zoo.counting_accuracy(order, gamma) == pytest.approx(best)


def test_directions_in_which_nothing_varies_do_not_count() -> None:
    data = Planted("hierarchy", 20, 2, symbols=4)
    x, hidden = data.draw(400)[0].float(), data.directions()
    constant = torch.zeros(20, dtype=torch.float64)
    constant[:4] = 0.5  # the sum of one token's indicators
    product = hidden @ hidden.T + 100 * torch.outer(constant, constant)
    assert zoo.share_recovered(product, x, hidden) == pytest.approx(1)
    other = torch.eye(20, dtype=torch.float64) - hidden @ hidden.T
    assert zoo.share_recovered(other, x, hidden) < 0.8


def test_the_phase_diagram_has_the_asked_gamma() -> None:
    for gamma in zoo.SCALES["paper"].phase_gammas:
        data = Planted("patterns", 20, 3, mixture=1 - 2 * gamma)
        assert data.patterns().gamma == pytest.approx(gamma)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(InputError, match="rounds must be at least 1"):
        zoo.Settings(rounds=0)
