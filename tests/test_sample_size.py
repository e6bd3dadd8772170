"""The sample-size study: its three models against autograd, its stopping rule by hand, and verdicts that flip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy import InputError
from unlazy.data.images import load_images
from unlazy.studies.tangent.sample_size import study
from unlazy.studies.tangent.sample_size.networks import KINDS, Layout, Stack, by_windows, change, run, start
from unlazy.studies.tangent.sample_size.train import (
    RATES,
    Descent,
    Job,
    Task,
    best_epoch,
    descend,
    jobs,
    matches,
    patience_lost,
    subsets,
)
from unlazy.training.ensemble import Member, batch_order
from unlazy.training.linearised import linearise

DENSE = Layout((1, 8, 8), (), (7, 6))
CONVOLUTIONAL = Layout((2, 8, 8), (3, 4), (5,))
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
    base, x = start(layout, [3, 4], "cpu"), images(layout)
    for member in range(2):
        assert torch.allclose(run(base, x)[member], module(layout, base, member)(x[member]), atol=1e-5)
    assert torch.equal(start(layout, [4], "cpu")[1][0][0], base[1][0][1])  # a seed's network is its own


@LAYOUTS
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_linearised_models_are_the_tangent_at_the_start(layout: Layout, kind: str) -> None:
    """Any numbers in place of what is trained: the outputs are f_0 + J d, J d by forward mode on PyTorch's own layers."""
    stack, x = Stack(kind, layout, [3, 4]), images(layout)
    assert torch.allclose(stack(x), run(stack.base, x))  # nothing has moved yet
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in stack.parameters():
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=random))
    for member in range(2):
        tangent = linearise(module(layout, stack.base, member))
        pieces = [piece[member].flatten() for layer in stack.trained for piece in change(layer)]
        tangent.displacement.data = torch.cat(pieces).detach()
        assert torch.allclose(stack(x)[member], tangent(x[member]), atol=1e-4)
    shared = stack.outputs(x[0], at_once=2)
    assert torch.allclose(shared[0], stack(x)[0], atol=1e-4)
    assert torch.allclose(shared[1], stack(x[[0, 0]])[1], atol=1e-4)


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
    moved = change(stack.trained[1])
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
    found = by_windows(h, (weight, bias), (other, None))
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


def test_runs_made_on_a_gpu_are_found_and_words_choose_jobs() -> None:
    paper = study.SCALES["paper"]
    here, there = jobs(paper), jobs(paper, "cuda")
    assert [job.folder(Path()) for job in here] == [job.folder(Path()) for job in there]
    assert len({job.folder(Path()) for job in here}) == len(here)
    chosen = [job for job in there if matches(job, "mnist-sgd,fixed|full,125")]
    assert [(job.task.name, job.size, job.kind) for job in chosen] == [
        ("mnist-sgd", 125, "fixed"),
        ("mnist-sgd", 125, "full"),
    ]
    assert [job.batch for job in chosen] == [25, 25]


def test_training_alone_leaves_runs_that_are_judged_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study.main(["--scale", "smoke", "--device", "cpu", "--runs", str(tmp_path / "runs"), "--only", "digits-sgd"])
    assert "6 of 6 trainings" in capsys.readouterr().out
    study.main(["--scale", "smoke", "--device", "cpu", "--runs", str(tmp_path / "runs")])
    assert "9 of 9 trainings" in capsys.readouterr().out

    def refuse(job: Job, data: Path | None = None) -> None:
        raise AssertionError(f"trained again: {job}, {data}")

    monkeypatch.setattr("unlazy.studies.tangent.sample_size.train.descend", refuse)
    table = study.reproduce(
        "smoke", runs=tmp_path / "runs", results=tmp_path / "results", progress=lambda what, done, total: None
    )
    assert set(table["errors"]) == {"digits-sgd", "digits-adam"}
    with pytest.raises(InputError, match="no training matches"):
        study.main(["--scale", "smoke", "--runs", str(tmp_path / "runs"), "--only", "cifar-10-adam"])


def test_best_epoch_before_patience_ends() -> None:
    falling = np.linspace(0.9, 0.1, 30)
    assert best_epoch(falling) == (29, False)
    late = np.concatenate([[0.5], np.full(20, 0.6), [0.1]])
    assert best_epoch(late) == (0, True)  # the better epoch comes one too late
    assert best_epoch(late[1:]) == (20, False)
    assert not patience_lost(np.stack([late, falling[:22]], 1))
    assert patience_lost(np.stack([late, late], 1))


def test_seeds_do_not_see_each_other() -> None:
    task = Task("digits", Layout((1, 8, 8), (), (6,)), "sgd", (30,), 40)
    together = descend(Job(task, "full", 30, 2, 3, "cpu"))
    assert together.shape == (2, 3, 2)
    assert np.array_equal(descend(Job(task, "full", 30, 1, 3, "cpu"))[0], together[0])


def test_larger_sets_hold_smaller_ones() -> None:
    digits = load_images("digits")
    small, large = (subsets(digits, size, [0, 1])[0] for size in (10, 30))
    assert torch.equal(large[:, :10], small)
    assert not torch.equal(small[0], small[1])


def test_settings_are_checked_and_small_jobs_come_first() -> None:
    with pytest.raises(InputError, match="optimiser"):
        Task("digits", DENSE, "newton", (5,), 10)
    with pytest.raises(InputError, match="sizes"):
        Task("digits", DENSE, "sgd", (), 10)
    sizes = [job.size for job in jobs(study.SCALES["paper"])]
    assert sizes == sorted(sizes)
    with pytest.raises(InputError, match="not 5000"):
        descend(Job(Task("digits", DENSE, "sgd", (5000,), 10), "full", 5000, 1, 1, "cpu"))


def test_smoke_scale_runs_writes_and_judges_nothing(tmp_path: Path) -> None:
    def quiet(what: str, done: int, total: int) -> None:
        assert 0 <= done <= total, what

    table = study.reproduce("smoke", runs=tmp_path / "runs", results=tmp_path / "results", progress=quiet)
    assert [(row["id"], row["verdict"]) for row in table["claims"]] == [("L10", "cannot tell")]
    assert json.loads((tmp_path / "results/sample-size/smoke.json").read_text())["study"] == "sample-size"
    assert (tmp_path / "results/sample-size/smoke/errors.png").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("metrics.jsonl")}
    study.reproduce("smoke", runs=tmp_path / "runs", results=tmp_path / "results", progress=quiet)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("metrics.jsonl")}


def table_with(fixed: float, adaptive: float, full: float) -> dict[str, Any]:
    found = dict(zip(KINDS, (fixed, adaptive, full), strict=True))
    small = {kind: {"best": [error] * 5, "clean": [error] * 5, "epochs": [9.0] * 5} for kind, error in found.items()}
    large = {kind: {"best": [0.5] * 5, "clean": [0.5] * 5, "epochs": [9.0] * 5} for kind in KINDS}
    tasks = {task: {kind: [small[kind], large[kind]] for kind in KINDS} for task in study.PUBLISHED}
    frame = {"scale": "paper", "settings": {}, "provenance": {}}
    return frame | {"errors": tasks, "sizes": {task: [125, 4000] for task in tasks}}


def verdict(*errors: float) -> str:
    (row,) = study.claims(table_with(*errors))
    return str(row["verdict"])


def test_claim_flips() -> None:
    assert verdict(0.3, 0.2, 0.1) == "holds"
    assert verdict(0.2, 0.21, 0.1) == "partly"  # far behind the network, but not better
    assert verdict(0.3, 0.2, 0.19) == "partly"  # better, but the network is as bad
    assert verdict(0.2, 0.21, 0.2) == "fails"


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
