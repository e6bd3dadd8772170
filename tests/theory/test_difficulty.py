"""Which points bend the kernel: the table against kernels written out, and the scored study's parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from repository import ROOT
from unlazy import DLGN, HardGate, InputError, Unsupported
from unlazy.kernels.averaged_tangents import ParameterPath as Way
from unlazy.kernels.averaged_tangents import averaged_diagonal, averaged_tangents
from unlazy.kernels.tangent import tangent_kernel
from unlazy.studies.engine import reproduce
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.table import Table
from unlazy.studies.tangent import difficulty as study
from unlazy.theory.adaptive_model import AdaptiveTangents
from unlazy.theory.adaptive_solutions import AlternatingSearch
from unlazy.theory.difficulty import Difficulty, difficulty


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(seed: int, outputs: int = 3) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    for number, parameter in enumerate(net.parameters()):
        parameter.data = draws(*parameter.shape, seed=10 * seed + number) / parameter.shape[-1] ** 0.5
    return net


X, LABELS = draws(7, 4, seed=90), torch.tensor([0, 1, 2, 0, 1, 2, 1])


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


def test_before_training_it_is_the_structured_solution() -> None:
    net, few = network(1), AlternatingSearch(rounds=4)
    table = difficulty(net, X, LABELS, search=few)
    targets = torch.eye(3, dtype=torch.float64)[LABELS] - 1 / 3
    fitted = AdaptiveTangents(net, search=few).fit(X, targets)
    adapted = fitted.kernel(X).diagonal().reshape(7, 3).sum(1)  # the whole kernel, written out
    assert torch.allclose(table.adapted, adapted, rtol=1e-10)
    assert torch.allclose(table.start, tangent_kernel(net, X).diagonal(), rtol=1e-10)
    assert torch.allclose(table.bending, fitted.bending(X), rtol=1e-10)
    assert torch.all(table.bending >= 1)  # features are stretched, never shrunk


def test_free_structure_has_the_same_diagonal_as_its_kernel() -> None:
    net = network(2, 1)
    fitted = AdaptiveTangents(net, structure="free").fit(X, draws(7, 1, seed=3))
    new = draws(5, 4, seed=91)
    assert torch.allclose(fitted.diagonals(new)[1], fitted.kernel(new).diagonal(), rtol=1e-10)


def test_after_training_it_is_the_averaged_kernel() -> None:
    first, last = network(1), network(2)
    middle = {name: tensor + 1 for name, tensor in first.state_dict().items()}
    line = difficulty(last, X, LABELS, start=first.state_dict(), points=9)
    wanted = averaged_tangents(last, Way([first.state_dict(), last.state_dict()], 9, "gauss"), X).kernel().diagonal()
    assert torch.allclose(line.adapted, wanted, rtol=1e-10)
    assert torch.allclose(line.start, tangent_kernel(first, X).diagonal(), rtol=1e-10)
    bent = difficulty(last, X, LABELS, start=[first.state_dict(), middle], points=9)
    assert not torch.allclose(bent.adapted, line.adapted, rtol=1e-2)
    assert torch.equal(last(X), network(2)(X))  # the model itself is left alone


def test_diagonal_a_few_samples_at_a_time_is_the_same() -> None:
    way = Way([network(1).state_dict(), network(2).state_dict()], 5)
    whole = averaged_diagonal(network(1), way, X)
    assert torch.allclose(averaged_diagonal(network(1), way, X, memory=1), whole, rtol=1e-12)


def test_table_is_ordered_and_says_so() -> None:
    table = Difficulty(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 2.0, 8.0]), ("a", "b", "c"))
    assert table.hardest().tolist() == [0, 2, 1]
    assert table.hardest(1).tolist() == [0]
    assert table.rows(2)[1] == {"point": 2, "label": "c", "bending": 2.0, "start": 4.0, "adapted": 8.0}
    lines = str(table).splitlines()
    assert lines[1].split() == ["0", "a", "3.000", "1", "3"]
    assert lines[-1] == "3 points: least 1.000, median 2.000, most 3.000"
    (axes,) = table.figure(marked=[2]).axes
    curve, dots = axes.get_lines()
    assert np.asarray(curve.get_ydata()).tolist() == [3, 2, 1]
    assert np.asarray(dots.get_xydata()).tolist() == [[2, 2]]


def test_wrong_labels_and_hard_gates_are_refused() -> None:
    net = network(1)
    with pytest.raises(InputError, match="5 labels for 7 points"):
        difficulty(net, X, LABELS[:5])
    with pytest.raises(InputError, match="tells 3 apart"):
        difficulty(net, X, LABELS + 1)
    with pytest.raises(InputError, match="columns"):
        difficulty(net, X, draws(7, 2))
    with pytest.raises(InputError, match="classes must be"):
        difficulty(net, X, LABELS[:, None])
    hard = [DLGN(4, 3, width=4, depth=2, gate=HardGate(), seed=seed).double() for seed in (0, 1)]
    with pytest.raises(Unsupported, match="jump"):
        difficulty(hard[1], X, LABELS, start=hard[0].state_dict())
    with pytest.raises(InputError, match="no tangent feature"):
        difficulty(nn.Linear(4, 3, bias=False).double(), torch.cat([X, torch.zeros(1, 4).double()]),
                   torch.cat([LABELS, LABELS[:1]]), ridge=1.0)  # fmt: skip


def test_one_output_takes_two_classes() -> None:
    net, two = network(3, 1), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    signs = 2 * two[:, None].double() - 1
    assert torch.allclose(difficulty(net, X, two).bending, difficulty(net, X, signs).bending)


# --- the scored study --------------------------------------------------------------------------------


def test_area_under_the_curve_by_hand() -> None:
    wrong = np.array([True, True, False, False, False])
    assert study.area_under_curve(np.array([5.0, 4, 1, 2, 3]), wrong) == 1
    assert study.area_under_curve(np.array([1.0, 4, 2, 3, 4]), wrong) == pytest.approx(2.5 / 6)
    from sklearn.metrics import roc_auc_score

    scores, labels = draws(60).round(decimals=1).numpy(), draws(60, seed=5).numpy() > 1
    assert study.area_under_curve(scores, labels) == pytest.approx(roc_auc_score(labels, scores))


def test_flipped_labels_are_other_classes() -> None:
    labels = torch.arange(40) % 10
    turned = study.with_wrong_labels(labels, 12, seed=3)
    assert int((turned != labels).sum()) == 12
    assert set(turned.tolist()) <= set(range(10))
    assert not torch.equal(study.with_wrong_labels(labels, 12, seed=4) != labels, turned != labels)


@pytest.mark.parametrize("loss", study.LOSSES)
def test_losses_and_gradient_norms_one_by_one(loss: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 10))
    labels = torch.tensor([0, 9, 3, 3, 1, 2, 8])
    losses, norms = study.losses_and_norms(net, loss, X.float(), labels)
    for i in range(7):
        out = net(X.float()[i : i + 1])
        target = nn.functional.one_hot(labels[i : i + 1], 10).float()
        value = nn.functional.mse_loss(out, target) if loss == "squared" else nn.functional.cross_entropy(out, target)
        slopes = torch.autograd.grad(value, list(net.parameters()))
        assert float(losses[i]) == pytest.approx(float(value.detach()), rel=1e-5)
        assert float(norms[i]) == pytest.approx(float(sum(s.square().sum() for s in slopes) ** 0.5), rel=1e-4)


def test_study_runs_small_and_draws(tmp_path: Path) -> None:
    request = Request("difficulty", "smoke", tmp_path / "runs", tmp_path / "results")
    found = reproduce(request, ExecutionOptions(), progress=quiet)
    assert not found.failed
    assert not found.not_drawn
    assert {path.stem for path in found.folder.glob("*.png")} == {"areas", "hardest"}
    table = Table.read(found.folder / "table.csv")
    for loss in study.LOSSES:
        for score in study.SCORES:
            areas = table.select("area_under_curve", data="digits", loss=loss, score=score)
            assert len(areas) == 2
            assert np.all((areas >= 0) & (areas <= 1))
        assert np.isfinite(table.select("learned", loss=loss, labels="wrong", seeds=(0, 1))).all()
    kernel = [table.select("area_under_curve", loss=loss, score="kernel_start") for loss in study.LOSSES]
    assert np.array_equal(*kernel)  # the start knows no loss


def test_settings_are_checked() -> None:
    for words, change in (("early", {"early": 4}), ("no label is wrong", {"wrong": 0.001})):
        with pytest.raises(InputError, match=words):
            study.cases(study.STUDY.settings("smoke", change), (0,))


def test_a_score_that_knows_the_wrong_labels_is_drawn_at_one() -> None:
    """The committed table with one score made perfect: its dots and its bar move to the right end."""
    request = Request("difficulty", "paper", ROOT / "none", ROOT / "results")
    table = Table.read(request.folder / "table.csv")
    perfect = Table.from_rows(
        [{**row, "value": 1.0} if row.get("score") == "loss_end" else row for row in table.rows()]
    )
    place = list(study.SCORES)[::-1].index("loss_end")

    def shown(table: Table) -> list[float]:
        results = request.with_table(table)
        axis = study.areas_figure(results).axes[0]
        return np.asarray(axis.get_lines()[2 * place].get_xdata()).tolist()

    assert len(shown(table)) == 5
    assert max(shown(table)) < 1
    assert shown(perfect) == [1.0] * 5
