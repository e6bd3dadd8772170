"""Which layers learn: measures by layer, trainings with one layer frozen or linear, the table, and samples that stand out."""

from __future__ import annotations

import copy
import html
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp

from unlazy.kernels import jacobian
from unlazy.runtime import InputError
from unlazy.scope.blocks import MOST_BLOCKS, find_blocks
from unlazy.scope.history import History
from unlazy.scope.layer_table import LayerRule, layer_table
from unlazy.scope.scope import Scope
from unlazy.scope.verdict import judge
from unlazy.store import Run

STEPS, RATE = 12, 0.05
LAYERS = ("0", "2", "4")


def setting() -> tuple[nn.Module, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.LayerNorm(10), nn.ReLU(), nn.Linear(10, 3)).double()
    x = torch.randn(40, 4).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return net, x, y, [(x[rows], y[rows]) for rows in torch.randperm(40).repeat(4)[:120].split(10)]


def train(net: nn.Module, batches: list[tuple[Tensor, Tensor]], scope: Scope | None = None) -> None:
    optimiser = torch.optim.Adam(net.parameters(), RATE)
    for step, (x, y) in enumerate(batches, 1):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
        if scope is not None:
            scope.step(step)


def watched(folder: Path | None = None) -> tuple[Scope, nn.Module, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """A trained network under a scope, and its start."""
    net, x, y, batches = setting()
    start = copy.deepcopy(net)
    scope = Scope(net, (x, y), folder, budget=math.inf, strict=True)
    train(net, batches, scope)
    scope.verdict()
    return scope, start, x, y, batches


def make_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, RATE)


def own(layer: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name.startswith(f"{layer}.")}


# --- cheap measures ------------------------------------------------------------------------------------------------------


def test_numbers_of_a_layer_agree_with_slow_ones_in_float64() -> None:
    scope, start, x, y, _ = watched()
    before = {name: p.detach() for name, p in start.named_parameters()}
    after = {name: p.detach() for name, p in scope.model.named_parameters()}
    f_0, f_now = functional_call(start, before, x), functional_call(start, after, x)
    for layer in LAYERS:
        moved = own(layer, after)
        alone, reset = functional_call(start, before | moved, x), functional_call(start, after | own(layer, before), x)
        rows = jacrev(lambda values: functional_call(start, before | values, x))(own(layer, before))
        along = sum((rows[name] * (moved[name] - before[name])).flatten(2).sum(2) for name in moved)
        last = {name: scope.history.last(f"{name}@{layer}") for name in ("layer_error", "layer_move", "reset_cost")}
        assert last["layer_error"] == pytest.approx(
            float((alone - f_0 - along).norm() / (alone - f_0).norm()), abs=1e-9
        )
        assert last["layer_move"] == pytest.approx(float((alone - f_0).norm() / (f_now - f_0).norm()), rel=1e-9)
        assert last["reset_cost"] == pytest.approx(
            float(F.cross_entropy(reset, y) - F.cross_entropy(f_now, y)), abs=1e-9
        )
        change = torch.cat([(moved[name] - before[name]).flatten() for name in moved])
        unit = torch.cat([before[name].flatten() for name in moved])
        assert scope.history.last(f"layer_motion@{layer}") == pytest.approx(
            float(change.norm() / unit.norm()), rel=1e-6
        )


def test_shares_of_the_kernel_are_those_of_explicit_gradients_and_add_up() -> None:
    scope, start, x, _, _ = watched()
    kernels = []
    for net in (start, scope.model):
        values = {name: p.detach() for name, p in net.named_parameters()}
        rows = jacrev(lambda at: functional_call(start, at, x))(values)
        flat = {name: row.flatten(2) for name, row in rows.items()}
        kernels.append(
            {layer: sum(torch.einsum("nop,mop->nm", r, r) for r in own(layer, flat).values()) for layer in LAYERS}
        )
    first, last = kernels
    whole, change = sum(last.values()), sum(last.values()) - sum(first.values())
    for layer in LAYERS:
        share, part = last[layer].trace() / whole.trace(), last[layer] - first[layer]
        assert scope.history.last(f"tangent_share@{layer}") == pytest.approx(float(share), rel=1e-6)
        expected = float((part * change).sum() / change.square().sum())
        assert scope.history.last(f"tangent_change_share@{layer}") == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for name in ("tangent_share", "tangent_change_share"):
        assert sum(scope.history.last(f"{name}@{layer}") for layer in LAYERS) == pytest.approx(1, abs=1e-6)


def test_flips_are_counted_behind_the_layer_that_ran_before_the_gate() -> None:
    _, x, y, batches = setting()
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    start, scope = copy.deepcopy(net), Scope(net, (x, y), budget=math.inf, strict=True)
    train(net, batches, scope)
    for layer in (0, 2):
        before, after = (one[: layer + 1](x) > 0 for one in (start, net))
        flips = float((before != after).double().mean())
        assert flips > 0
        assert scope.history.last(f"layer_flips@{layer}") == pytest.approx(flips)
    assert "layer_flips@4" not in scope.history.scalars


class Backwards(nn.Module):
    """Layers that run in another order than they were made in; the last one has the weights of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.second(self.first(x).relu()))


def test_layers_come_in_forward_order_and_shared_weights_once() -> None:
    net = Backwards()
    found = find_blocks(net, torch.randn(2, 4), [name for name, _ in net.named_parameters()])
    assert [block.name for block in found.blocks] == ["first", "second", "again"]
    names = [name for block in found.blocks for name in block.parameters]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    assert found.gate_layers == ("first",)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_entries_without_gradient_do_not_count_as_motion() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(8, 2))
    words, y = torch.randint(0, 5, (40, 2)), torch.arange(40) % 2
    start = net[0].weight.detach().clone()
    scope = Scope(net, (words, y), budget=math.inf, strict=True)
    with torch.no_grad():
        net[0].weight[:5] *= 1.5
    scope.step(1)
    assert not torch.equal(start, net[0].weight)
    assert scope.history.last("layer_motion@0") == pytest.approx(0.5, rel=1e-5)


def test_many_layers_are_measured_in_few_blocks_with_few_products(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(40) for part in (nn.Linear(6, 6), nn.Tanh())], nn.Linear(6, 2))
    x, y = torch.randn(64, 6), torch.arange(64) % 2
    scope = Scope(net, (x, y), budget=math.inf, strict=True)
    calls, plain = [], jacobian.jvp_at

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        calls.append(len(arguments[1]))
        return plain(*arguments, **options)

    monkeypatch.setattr(jacobian, "jvp_at", counted)
    train(net, [(x, y)] * 1, scope)
    assert len(calls) == MOST_BLOCKS + 1  # and one of all parameters together
    measurements = scope._session.measurements
    assert len(measurements.start.tangent_parts) == MOST_BLOCKS
    assert not measurements._tangents.parts
    assert "41 layers are measured in 16 blocks of layers in a row" in scope.history.notes
    said = str(scope.verdict())
    assert "Layers by expected cost of freezing them, the highest first:" in said
    assert "8 more layers: scope.layers()" in said
    assert len(scope.layers().lines) == MOST_BLOCKS


# --- frozen and linear -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 5])
def test_a_frozen_layer_gives_the_loss_of_a_loop_written_by_hand(when: int) -> None:
    scope, start, x, y, batches = watched()
    table = scope.layers(
        make_adam, F.cross_entropy, batches=batches, frozen_from=when, experiments=("frozen",), say=lambda text: None
    )
    plain = float(F.cross_entropy(scope.model(x), y).detach())
    for line in table.lines:
        net = copy.deepcopy(start)
        optimiser = make_adam(list(net.parameters()))
        for step, (some, targets) in enumerate(batches):
            if step == when:
                net.get_submodule(line.name).requires_grad_(False)
            optimiser.zero_grad()
            F.cross_entropy(net(some), targets).backward()
            optimiser.step()
        assert line.frozen_cost == pytest.approx(float(F.cross_entropy(net(x), y).detach()) - plain, abs=1e-9)
        assert line.linear_cost is None
        assert f"frozen from step {when}" in line.says


def test_a_linear_layer_gives_the_loss_of_a_loop_written_by_hand() -> None:
    scope, start, x, y, batches = watched()
    table = scope.layers(make_adam, F.cross_entropy, batches=batches, experiments=("linear",), say=lambda text: None)
    plain = float(F.cross_entropy(scope.model(x), y).detach())
    first = {name: p.detach() for name, p in start.named_parameters()}
    for line in table.lines:
        theta = {name: nn.Parameter(p.clone()) for name, p in first.items()}
        fixed = own(line.name, first)

        def outputs(some: Tensor, theta=theta, fixed=fixed) -> Tensor:  # type: ignore[no-untyped-def]
            others = {name: p for name, p in theta.items() if name not in fixed}
            moves = {name: theta[name] - value for name, value in fixed.items()}
            before, moved = jvp(lambda at: functional_call(start, {**others, **at}, some), (fixed,), (moves,))
            return before + moved

        optimiser = make_adam(list(theta.values()))
        for some, targets in batches:
            optimiser.zero_grad()
            F.cross_entropy(outputs(some), targets).backward()
            optimiser.step()
        assert line.linear_cost == pytest.approx(float(F.cross_entropy(outputs(x), y).detach()) - plain, abs=1e-9)
    assert table.lines[-1].linear_cost == pytest.approx(0, abs=1e-9)  # outputs are linear in the last layer


def test_single_effects_and_their_remainder_give_the_effect_of_all_layers() -> None:
    scope, start, x, y, batches = watched()
    told: list[str] = []
    table = scope.layers(make_adam, F.cross_entropy, batches=batches, say=told.append)
    assert "8 trainings of 12 steps take about" in told[0]
    rise = float((F.cross_entropy(start(x), y) - F.cross_entropy(scope.model(x), y)).detach())
    assert table.fall == pytest.approx(rise)
    assert table.frozen_remainder is not None
    assert sum(line.frozen_cost for line in table.lines) + table.frozen_remainder == pytest.approx(rise)
    assert "Effects do not add up" in str(table)
    costs = [line.frozen_cost for line in table.lines]
    assert table.lines[int(np.argmax(costs))].rank == 1


def test_a_later_experiment_replaces_the_earlier_ones() -> None:
    scope, _, _, _, batches = watched()
    scope.layers(make_adam, F.cross_entropy, batches=batches, say=lambda text: None)
    table = scope.layers(make_adam, F.cross_entropy, batches=batches, only=["2"], frozen_from=3, say=lambda text: None)
    assert [line.trained for line in table.lines] == [False, True, False]
    assert table.frozen_remainder is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["9"]}, "there is no layer '9'; there are 0, 2, 4"),
        ({"frozen_from": 12}, "below the 12 batches, got 12"),
        ({"experiments": ("thawed",)}, "experiments are frozen and linear"),
        ({"held": torch.randn(3, 4)}, "held= needs inputs and targets"),
    ],
)
def test_what_cannot_be_trained_is_refused(options: dict[str, object], message: str) -> None:
    scope, _, _, _, batches = watched()
    with pytest.raises(InputError, match=message):
        scope.layers(make_adam, F.cross_entropy, batches=batches, say=lambda text: None, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs loss= and batches="):
        scope.layers(make_adam)


def test_training_has_the_same_bits_with_and_without() -> None:
    scope, start, _, _, batches = watched()
    train(start, batches)
    scope.layers(make_adam, F.cross_entropy, batches=batches, say=lambda text: None)
    scope.samples()
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), scope.model.parameters(), strict=True))


# --- table and verdict -------------------------------------------------------------------------------------------------------


def test_layers_and_samples_go_through_json_and_the_run_folder(tmp_path: Path) -> None:
    scope, _, _, _, batches = watched(tmp_path / "run")
    table = scope.layers(make_adam, F.cross_entropy, batches=batches, say=lambda text: None)
    scope.finish()
    written = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert [line["name"] for line in written["layers"]["lines"]] == list(LAYERS)
    assert written["layers"] == table.to_dict()
    again = judge(History.from_run(Run(tmp_path / "run")))
    assert again.layers is not None
    assert [line.says for line in again.layers.lines] == [line.says for line in table.lines]
    assert again.samples is not None
    assert again.samples.to_dict() == written["samples"]
    assert html.escape(table.lines[0].says) in again._repr_html_()
    assert str(again).count("frozen from step 0") >= 3


def test_words_are_given_only_where_the_rule_may_speak() -> None:
    history = History()
    cheap, dear = {"reset_cost": 0.001, "layer_error": 0.9}, {"reset_cost": 0.5, "layer_error": 0.01}
    history.add(0, {"loss": 1.0}, {})
    numbers = {f"{name}@{layer}": value for layer, row in (("a", cheap), ("b", dear)) for name, value in row.items()}
    history.add(9, {"loss": 0.2, "layer_motion@a": 0.1, "layer_motion@b": 0.1} | numbers, {})
    rule = LayerRule("reset_cost", 1.0, 0.02, 0.1, True, True, True, "")
    spoken, silent = (
        layer_table(history, one) for one in (rule, LayerRule(*list(vars(rule).values())[:4], False, False, True, ""))
    )
    assert spoken is not None
    assert [line.word for line in spoken.lines] == ["could be frozen", "only rescales"]
    assert spoken.lines[0].frozen_cost == pytest.approx(0.02 * 0.8)
    assert "could be frozen from step 0 (expected loss +0.016 at most); rank 2 of 2" in spoken.lines[0].says
    assert silent is not None
    assert [(line.word, line.rank) for line in silent.lines] == [("", 2), ("", 1)]


# --- samples -----------------------------------------------------------------------------------------------------------------


def test_samples_that_stand_out_are_those_of_a_plain_loop() -> None:
    scope, start, x, y, _ = watched()
    found, kernel = scope.samples(), scope.history.array("tangent")
    with torch.no_grad():
        losses = [float(F.cross_entropy(scope.model(x[i : i + 1]), y[i : i + 1])) for i in range(len(x))]
        moves = [float((scope.model(x[i]) - start(x[i])).norm()) for i in range(len(x))]
    assert [one.sample for one in found.hardest] == sorted(range(40), key=lambda i: -losses[i])[:5]
    assert [one.sample for one in found.easiest] == sorted(range(40), key=lambda i: losses[i])[:5]
    assert [one.sample for one in found.moved] == sorted(range(40), key=lambda i: -moves[i])[:5]
    assert found.hardest[0].value == pytest.approx(max(losses))
    assert kernel is not None
    sums = [sum(abs(kernel[i, j]) for j in range(40) if j != i) for i in range(40)]
    assert found.influential[0].sample == int(np.argmax(sums))
    assert found.influential[0].value == pytest.approx(max(sums) / np.mean(sums), rel=1e-5)
    i, j = max(((i, j) for i in range(40) for j in range(i + 1, 40)), key=lambda pair: abs(kernel[pair]))
    assert (found.pairs[0].first, found.pairs[0].second) == (i, j)
    assert found.pairs[0].value == pytest.approx(kernel[i, j] / np.mean(np.diagonal(kernel)), rel=1e-5)
    assert f"hardest {found.hardest[0].sample}" in str(scope.verdict())
