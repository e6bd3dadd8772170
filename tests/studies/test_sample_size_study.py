"""The sample-size study: its three models against autograd, its stopping rule by hand, and verdicts that flip."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repository import RESULTS
from unlazy import InputError
from unlazy.claims.rule import judge_claim
from unlazy.data.images import load_images
from unlazy.store import Run
from unlazy.studies.engine import reproduce
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Work
from unlazy.studies.table import Table
from unlazy.studies.tangent import sample_size as study
from unlazy.studies.tangent.sample_size_networks import (
    CUT_DEVIATION,
    KINDS,
    LECUN,
    PATIENCE,
    RATES,
    Descent,
    Layout,
    ModelCase,
    ScriptTask,
    Stack,
    Task,
    batch_size,
    best_epoch,
    convolve_by_windows,
    draw_start,
    draw_subsets,
    is_patience_over,
    layer_change,
    network_outputs,
    train_until_patience_ends,
)
from unlazy.training.ensemble import Member, batch_order
from unlazy.training.linearised import linearise

DENSE = Layout((1, 8, 8), (), (7, 6))
CONVOLUTIONAL = Layout((2, 8, 8), (3, 4), (5,))
WORK = Work("sample-size", "smoke", Path())
LAYOUTS = pytest.mark.parametrize("layout", [DENSE, CONVOLUTIONAL], ids=["dense", "convolutional"])


def module(layout: Layout, base: list[tuple[Tensor, Tensor]], member: int) -> nn.Sequential:
    """The same network in PyTorch's own layers."""
    parts: list[nn.Module] = []
    for place, (weight, bias) in enumerate(base):
        convolution = weight.ndim == 5
        if not convolution and (place == 0 or base[place - 1][0].ndim == 5):
            parts.append(nn.Flatten())
        shape = weight.shape[2:0:-1]
        layer = nn.Conv2d(*shape, 3, padding=1) if convolution else nn.Linear(*shape)
        layer.weight.data, layer.bias.data = weight[member].clone(), bias[member].clone()
        parts.append(layer)
        if place + 1 < len(base):
            parts += [nn.ReLU(), *([nn.AvgPool2d(2)] if convolution else [])]
    return nn.Sequential(*parts)


def images(layout: Layout, members: int = 2, n: int = 5) -> Tensor:
    return torch.randn(members, n, *layout.shape, generator=torch.Generator().manual_seed(0))


@LAYOUTS
def test_stack_is_its_networks_side_by_side(layout: Layout) -> None:
    base, x = draw_start(layout, [3, 4], "cpu"), images(layout)
    for member in range(2):
        assert torch.allclose(network_outputs(base, x)[member], module(layout, base, member)(x[member]), atol=1e-5)
    assert torch.equal(draw_start(layout, [4], "cpu")[1][0][0], base[1][0][1])  # a seed's network is its own


@LAYOUTS
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_linearised_models_are_the_tangent_at_the_start(layout: Layout, kind: str) -> None:
    """Any numbers in place of what is trained: the outputs are f_0 + J d, J d by forward mode on PyTorch's own layers."""
    stack, x = Stack(kind, layout, [3, 4]), images(layout)
    assert torch.allclose(stack(x), network_outputs(stack.base, x))  # nothing has moved yet
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in stack.parameters():
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=random))
    for member in range(2):
        tangent = linearise(module(layout, stack.base, member))
        pieces = [piece[member].flatten() for layer in stack.trained for piece in layer_change(layer)]
        tangent.displacement.data = torch.cat(pieces).detach()
        assert torch.allclose(stack(x)[member], tangent(x[member]), atol=1e-4)
    shared = stack.outputs(x[0], at_once=2)
    assert torch.allclose(shared[0], stack(x)[0], atol=1e-4)
    assert torch.allclose(shared[1], stack(x[[0, 0]])[1], atol=1e-4)
    states = stack.start_states(x[0])
    assert (states is None) == (layout is CONVOLUTIONAL)
    if states is not None:  # a short cut: what f_0 makes of the images is kept
        assert torch.allclose(stack.outputs_from(states), shared, atol=1e-4)


def test_factors_multiply_out_as_written() -> None:
    stack = Stack("adaptive", CONVOLUTIONAL, [0])
    with torch.no_grad():
        for tensor in stack.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
    weight, bias, outer, inner, places = (tensor[0].detach() for tensor in stack.trained[1])
    wanted = torch.zeros_like(weight).flatten(2)
    for out in range(len(wanted)):
        for into in range(wanted.shape[1]):
            for place in range(9):
                wanted[out, into, place] = (
                    outer[out][:, None, None] * inner[:, into][None, :, None] * places[:, place] * weight.flatten(2)
                ).sum()
    moved = layer_change(stack.trained[1])
    assert torch.allclose(moved[0][0].flatten(2), wanted, atol=1e-3)
    assert torch.allclose(moved[1][0], outer @ bias, atol=1e-5)


def test_convolutions_by_windows_are_those_in_groups() -> None:
    """What GPUs do in place of them: the same outputs and gradients, in float64; two layers of different width at once."""
    random = torch.Generator().manual_seed(2)
    shapes = (4, 2 * 3, 6, 8), (2, 5, 3, 3, 3), (2, 5), (2, 7, 3, 3, 3)
    given = [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]
    h, weight, bias, other = given
    wanted = [
        F.conv2d(h, weight.flatten(0, 1), bias.flatten(), padding=1, groups=2),
        F.conv2d(h, other.flatten(0, 1), padding=1, groups=2),
    ]
    found = convolve_by_windows(h, (weight, bias), (other, None))
    pull = [torch.randn(outputs.shape, generator=random, dtype=torch.float64) for outputs in wanted]
    for one, two in zip(
        [*found, *torch.autograd.grad(found, given, pull)],
        [*wanted, *torch.autograd.grad(wanted, given, pull)],
        strict=True,
    ):
        assert torch.allclose(one, two, atol=1e-12)


@LAYOUTS
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_descent_is_the_plain_loop(layout: Layout, optimiser: str, kind: str) -> None:
    """Bit for bit, batch after batch, the last one smaller; trial steps leave no trace."""
    members = [Member(seed, RATES[optimiser]) for seed in (0, 1)]
    x, labels = images(layout, n=7), torch.arange(14).reshape(2, 7) % 10
    model, twin = (Stack(kind, layout, [0, 1]) for _ in range(2))
    plain = (
        torch.optim.Adam(twin.parameters(), lr=1e-3)
        if optimiser == "adam"
        else torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    )
    descent, own = Descent(model, optimiser, x, labels, 3), torch.arange(2)[:, None]
    for epoch in range(3):
        order = batch_order(members, epoch, 7)
        descent.epoch(order)
        for some in order.split(3, 1):
            out, wanted = twin(x[own, some]), labels[own, some]
            plain.zero_grad()
            (F.cross_entropy(out.flatten(0, 1), wanted.flatten(), reduction="sum") / some.shape[1]).backward()
            plain.step()
    moved = [tensor.detach() for tensor in model.parameters()]
    for tensor, other in zip(moved, twin.parameters(), strict=True):
        assert torch.equal(tensor, other)
    assert not torch.equal(moved[0], Stack(kind, layout, [0, 1]).parameters()[0].detach())


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


def test_every_training_has_a_folder_whatever_the_device() -> None:
    cases = study.cases(study.STUDY.settings("paper"), range(10))
    folders = [case.folder(size, Path()) for case in cases for size in case.task.sizes]
    assert len(set(folders)) == len(folders) == 33 + 9 + 6
    assert "device" not in cases[0].recipe(125)
    assert [len(case.seeds) for case in cases[::3]] == [10, 10, 10, 5, 5, 10, 5]
    assert [batch_size(size) for size in (20, 125, 250)] == [20, 25, 50]


def test_smoke_scale_runs_draws_and_trains_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("sample-size", "smoke", tmp_path / "runs", tmp_path / "results")
    found = reproduce(request, ExecutionOptions(only="digits-sgd,*"), progress=quiet)
    assert found.results["measured_cases"] == 3
    found = reproduce(request, ExecutionOptions(), progress=quiet)
    assert found.results["measured_cases"] == found.results["declared_cases"] == 9
    assert not found.failed
    assert not found.not_drawn
    assert [row["id"] for row in found.results["claims"]] == ["L10"]
    assert (found.folder / "errors.png").exists()
    table = (found.folder / "table.csv").read_bytes()

    def refuse(case: ModelCase, size: int, work: Work) -> None:
        raise AssertionError(f"trained again: {case}, {size}, {work}")

    monkeypatch.setattr("unlazy.studies.tangent.sample_size_networks.train_until_patience_ends", refuse)
    for path in (request.work.runs / "measured").glob("*.json"):
        path.unlink()  # measured again, from the runs
    again = reproduce(request, ExecutionOptions(), progress=quiet)
    assert not again.failed
    assert (again.folder / "table.csv").read_bytes() == table


def test_best_epoch_before_patience_ends() -> None:
    falling = np.linspace(0.9, 0.1, 30)
    assert best_epoch(falling) == (29, False)
    late = np.concatenate([[0.5], np.full(20, 0.6), [0.1]])
    assert best_epoch(late) == (0, True)  # the better epoch comes one too late
    assert best_epoch(late[1:]) == (20, False)
    assert not is_patience_over(np.stack([late, falling[:22]], 1))
    assert is_patience_over(np.stack([late, late], 1))


def test_seeds_do_not_see_each_other() -> None:
    task = Task("digits", Layout((1, 8, 8), (), (6,)), "sgd", (30,), 40)
    together = train_until_patience_ends(ModelCase(task, "full", (0, 1), 3), 30, WORK)
    assert together.shape == (2, 3, 2)
    assert np.array_equal(train_until_patience_ends(ModelCase(task, "full", (1,), 3), 30, WORK)[0], together[1])


def test_larger_sets_hold_smaller_ones() -> None:
    digits = load_images("digits")
    small, large = (draw_subsets(digits, size, [0, 1])[0] for size in (10, 30))
    assert torch.equal(large[:, :10], small)
    assert not torch.equal(small[0], small[1])


def test_every_epoch_has_its_own_images_only_where_they_are_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images that the trainings really see, epoch by epoch."""
    seen: list[Tensor] = []
    epoch = Descent.epoch

    def watch(descent: Descent, order: Tensor) -> None:
        seen.append(descent.x.clone())
        epoch(descent, order)

    monkeypatch.setattr(Descent, "epoch", watch)
    layout, digits = Layout((1, 8, 8), (), (6,)), load_images("digits")
    for redrawn in (True, False):
        seen.clear()
        task = ScriptTask("digits", layout, "sgd", (30,), 40, redrawn=redrawn)
        train_until_patience_ends(ModelCase(task, "full", (0, 1), 3), 30, WORK)
        wanted = [draw_subsets(digits, 30, [0, 1], number if redrawn else 0)[0] for number in range(3)]
        assert [torch.equal(one, two) for one, two in zip(seen, wanted, strict=True)] == [True] * 3
        assert torch.equal(seen[0], seen[1]) != redrawn


def test_lecun_start_has_its_variance_and_no_biases() -> None:
    layout = Layout((1, 20, 20), (), (300,))
    weight, bias = draw_start(layout, [0, 1], "cpu", LECUN)[0]
    assert weight.var().item() * 400 == pytest.approx(1, abs=0.02)
    assert weight.abs().max() <= 2 / (CUT_DEVIATION * 20)
    assert not bias.any()
    normal = torch.distributions.Normal(0.0, 1.0)
    cut = torch.tensor(2.0, dtype=torch.float64)
    inside = 2 * float(normal.cdf(cut)) - 1
    variance = 1 - 4 * float(torch.exp(normal.log_prob(cut))) / inside
    assert variance**0.5 == pytest.approx(CUT_DEVIATION, abs=1e-6)
    assert torch.equal(draw_start(layout, [1], "cpu", LECUN)[0][0][0], weight[1])


def test_last_epoch_is_where_the_stopping_rule_ends_a_seed() -> None:
    """Two seeds of one stack: the first stops after its own patience, the second is still better at the end."""
    stopped = np.concatenate([[0.5, 0.2], np.full(PATIENCE, 0.3), [0.9, 0.9]])
    going_on = np.linspace(0.9, 0.1, len(stopped))
    series = np.stack([np.stack([one, one], 1) for one in (stopped, going_on)])

    class FakeRun(Run):
        def array_steps(self, name: str) -> list[int]:
            return [len(stopped)]

        def array(self, name: str, step: int) -> np.ndarray:
            return series

    first, second = study.errors_by_seed(FakeRun.__new__(FakeRun))
    assert first == (0.2, 0.2, 0.3, 2.0)
    assert second == pytest.approx((0.1, 0.1, 0.1, len(stopped)))


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="epochs"):
        study.cases(study.STUDY.settings("smoke", {"epochs": 0}), (0,))
    with pytest.raises(InputError, match="not 5000"):
        train_until_patience_ends(ModelCase(Task("digits", DENSE, "sgd", (5000,), 10), "full", (0,), 1), 5000, WORK)


def test_small_sets_are_averaged_geometrically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors 0.1 and 0.4 up to 1000 images; a larger set does not count."""
    errors = {125: 0.1, 1000: 0.4, 2000: 0.9}
    monkeypatch.setattr(study, "train", lambda case, size, work: size)
    monkeypatch.setattr(study, "errors_by_seed", lambda size: [(errors[size], 0.5, 2 * errors[size], 3.0)] * 2)
    task = Task("mnist", DENSE, "sgd", tuple(errors), 10)
    table = Table.from_rows(study.measure(ModelCase(task, "full", (0, 1), 9), WORK).entries)
    assert table.select("error_on_small_sets") == pytest.approx([0.2, 0.2])
    assert table.select("last_error_on_small_sets") == pytest.approx([0.4, 0.4])
    distance = (abs(np.log(0.1 / 0.067)) + abs(np.log(0.4 / 0.032))) / 2
    assert table.select("distance_to_published") == pytest.approx([distance] * 2, rel=1e-5)
    assert table.select("error", size=2000, epoch_chosen_on="same") == pytest.approx([0.9, 0.9])
    assert table.select("error", size=125, epoch_chosen_on="other") == pytest.approx([0.5, 0.5])


# --- verdicts ----------------------------------------------------------------------------------------


def parts(table: Table, scale: str = "paper") -> list[str]:
    (claim,) = study.CLAIMS
    return [part["verdict"] for part in judge_claim(claim, table, study.STUDY.seeds_of(scale))["parts"]]


def table_with(fixed: float, adaptive: float, full: float) -> Table:
    found = dict(zip(KINDS, (fixed, adaptive, full), strict=True))
    rows = [
        {"task": str(task), "kind": kind, "seed": seed, "quantity": "error_on_small_sets", "value": error}
        for task in (*study.MNIST_REDRAWN.values(), *study.CIFAR_10_REDRAWN.values())
        for kind, error in found.items()
        for seed in range(task.seeds or 10)
    ]
    return Table.from_rows(rows)


def test_claim_flips() -> None:
    assert parts(table_with(0.3, 0.2, 0.1)) == ["holds", "holds"] * 3
    assert parts(table_with(0.2, 0.21, 0.1)) == ["fails", "holds"] * 3  # far behind the network, but not better
    assert parts(table_with(0.3, 0.2, 0.19)) == ["holds", "fails"] * 3  # better, but the network is as bad
    assert parts(table_with(0.2, 0.21, 0.2)) == ["fails", "fails"] * 3
    no_network = table_with(0.3, 0.2, 0.1).without(kind="full", task="mnist-sgd-redrawn-1000")
    assert parts(no_network) == ["holds", "holds", "holds", "not measured", "holds", "holds"]


def test_a_falsified_table_flips_its_control() -> None:
    """Committed, fixed sets from the other start: adaptive features are not better on MNIST, and far behind the network."""
    table, (claim,) = Table.read(RESULTS / "sample-size" / "paper" / "table.csv"), study.CLAIMS
    halved = [
        {**row, "value": row["value"] / (2 if row.get("task") == "mnist-sgd" and row["kind"] == "adaptive" else 1)}
        for row in table.rows()
    ]
    own = [part.says.startswith(study.task_words(study.MNIST)) for part in claim.controls]
    for given, wanted in ((table, ["fails", "holds"]), (Table.from_rows(halved, digits=17), ["holds", "fails"])):
        judged = judge_claim(claim, given, study.STUDY.seeds_of("paper"))["controls"]
        assert [part["verdict"] for part, mine in zip(judged, own, strict=True) if mine] == wanted


def test_gradient_of_a_stack_is_that_of_each_network() -> None:
    """Against PyTorch's own layers, for the second of two seeds."""
    stack, x = Stack("full", CONVOLUTIONAL, [0, 1]), images(CONVOLUTIONAL)
    labels = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    loss = F.cross_entropy(stack(x).flatten(0, 1), labels.flatten(), reduction="sum") / 5
    loss.backward()
    alone = module(CONVOLUTIONAL, stack.base, 1)
    F.cross_entropy(alone(x[1]), labels[1]).backward()
    first = alone[0]
    assert isinstance(first, nn.Conv2d)
    assert stack.trained[0][0].grad is not None
    assert torch.allclose(stack.trained[0][0].grad[1], first.weight.grad, atol=1e-5)  # type: ignore[arg-type]
