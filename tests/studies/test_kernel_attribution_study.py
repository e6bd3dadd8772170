"""Gates of one moment with weights of another: exact kernels, shares that add up, a study whose verdict can flip."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

import cases
import mechanisms
from unlazy import InputError, Unsupported, build, plots, tangent_kernel
from unlazy.kernels.change_attribution import ChangeShares, attribute_change, change_shares, gated_value_kernel
from unlazy.models.build import build_stack
from unlazy.models.net import GatedNet
from unlazy.store import Run
from unlazy.studies.halfspace.circle_checkpoints import stack_at
from unlazy.studies.halfspace.kernel_attribution import KERNEL_STRIDE, STUDY, VALUE, WHOLE
from unlazy.studies.study import Results

# --- the kernel --------------------------------------------------------------------------------------


def slow_kernel(net: GatedNet, gates: list[Tensor], x: Tensor, pattern: str = "") -> Tensor:
    """One backward pass per sample and output through ``net.value`` with that sample's gates."""
    chosen = [p for name, p in net.branch("value") if pattern in name]
    kernel = torch.zeros(len(x), len(x), dtype=x.dtype)
    for output in range(net.settings.outputs):
        rows = []
        for i in range(len(x)):
            value = net.value(x[i : i + 1], [gate[i : i + 1] for gate in gates])[0, output]
            rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, chosen)]))
        kernel += torch.stack(rows) @ torch.stack(rows).T
    return kernel


def gates_of(net: GatedNet, x: Tensor) -> list[Tensor]:
    return [gate.detach() for gate in net.gates(x)]


@pytest.mark.parametrize(
    "name", ["relu", "relu-no-bias", "dlgn", "pwc", "pwc-no-bias", "pwc-one", "quadratic", "linear"]
)
def test_own_gates_give_the_tangent_kernel_of_the_value_parameters(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    wanted = tangent_kernel(net, x, parameters="value")
    assert torch.allclose(gated_value_kernel(net, gates_of(net, x), x), wanted, rtol=1e-10)


@pytest.mark.parametrize("name", ["relu", "dlgn", "pwc", "pwc-no-bias"])
def test_gates_of_another_network_are_replayed_exactly(name: str) -> None:
    net, other, x = cases.net(name), cases.net(name, seed=5), cases.points(name)
    gates = gates_of(other, x)
    assert torch.allclose(gated_value_kernel(net, gates, x), slow_kernel(net, gates, x), rtol=1e-10)
    assert not torch.allclose(gated_value_kernel(net, gates, x), tangent_kernel(net, x, parameters="value"), rtol=0.1)
    weights = slow_kernel(net, gates, x, "weight")
    assert torch.allclose(gated_value_kernel(net, gates, x, biases=False), weights, rtol=1e-10)


def test_a_stack_is_its_members() -> None:
    spec, x = cases.SPECS["dlgn"], cases.points("dlgn")
    stack, other = (build_stack(spec, seeds, dtype=torch.float64) for seeds in ((0, 1), (7, 8)))
    kernels = gated_value_kernel(stack, gates_of(other, x), x)
    for index, (a, b) in enumerate(((0, 7), (1, 8))):
        net, donor = (build(spec, seed=seed, dtype=torch.float64) for seed in (a, b))
        assert torch.allclose(kernels[index], gated_value_kernel(net, gates_of(donor, x), x), rtol=1e-10)
    with pytest.raises(InputError, match="3 layers of gates"):
        gated_value_kernel(stack, gates_of(other, x)[:2], x)


def test_other_layers_are_refused() -> None:
    net = cases.net("relu")
    net.value_layers[1] = torch.nn.Identity()
    with pytest.raises(Unsupported, match="not plain dense"):
        gated_value_kernel(net, gates_of(cases.net("relu"), cases.points("relu")), cases.points("relu"))


# --- the shares --------------------------------------------------------------------------------------


def positive(seed: int, n: int = 6) -> Tensor:
    rows = torch.randn(2, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows @ rows.mT


def test_shares_add_up_to_one() -> None:
    shares = change_shares(positive(0), positive(1), positive(2), positive(3))
    assert torch.allclose(shares.gates + shares.weights, torch.ones(2, dtype=torch.float64))
    alone = shares.gates_alone + shares.weights_alone + shares.interaction
    assert torch.allclose(alone, torch.ones(2, dtype=torch.float64))
    assert torch.allclose(shares.gates, shares.gates_alone + shares.interaction / 2)
    assert ((shares.size_gates + shares.size_weights + shares.size_interaction) >= 1).all()


def test_shares_of_kernels_whose_parts_are_known() -> None:
    """Two orthogonal changes without trace, 3 and 1 long, and none that needs both: 9/10 and 1/10."""
    start = 5 * torch.eye(4, dtype=torch.float64)[None]
    by_gates, by_weights = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    by_gates[0, 0, 1] = by_gates[0, 1, 0] = 3.0
    by_weights[0, 2, 3] = by_weights[0, 3, 2] = 1.0
    shares = change_shares(start, start + by_gates, start + by_weights, start + by_gates + by_weights)
    wanted = {"gates": 0.9, "weights": 0.1, "gates_alone": 0.9, "weights_alone": 0.1, "interaction": 0.0}
    wanted |= {"size_gates": 0.9**0.5, "size_weights": 0.1**0.5, "size_interaction": 0.0}
    wanted["change"] = 20**0.5 / 10
    assert {field.name: float(getattr(shares, field.name)[0]) for field in fields(ChangeShares)} == pytest.approx(
        wanted
    )
    louder = change_shares(start, 7 * (start + by_gates), start + by_weights, 3 * (start + by_gates + by_weights))
    assert float(louder.gates[0]) == pytest.approx(0.9)  # scale does not count


def mixed(name: str, gates_seed: int, values_seed: int) -> GatedNet:
    net = cases.net(name, gates_seed)
    other = cases.net(name, values_seed)
    net.value_layers.load_state_dict(other.value_layers.state_dict())
    net.readout.load_state_dict(other.readout.state_dict())
    return net


def test_what_did_not_move_has_no_share() -> None:
    x = cases.points("dlgn", 9)
    only_weights = attribute_change(mixed("dlgn", 0, 0), mixed("dlgn", 0, 1), x)
    assert float(only_weights.gates) == pytest.approx(0, abs=1e-12)
    assert float(only_weights.weights_alone) == pytest.approx(1)
    only_gates = attribute_change(mixed("dlgn", 0, 0), mixed("dlgn", 1, 0), x)
    assert float(only_gates.weights) == pytest.approx(0, abs=1e-12)
    assert float(only_gates.size_gates) == pytest.approx(1)
    hard = attribute_change(mixed("dlgn", 0, 0), mixed("dlgn", 1, 0), x, hard=True)
    assert float(hard.change) != pytest.approx(float(only_gates.change))


# --- the study ---------------------------------------------------------------------------------------

AUTHOR_RELU = {"preset": "author", "arm": "relu", "kernel": VALUE}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results, made = mechanisms.run_smoke(STUDY, tmp_path_factory.mktemp("attribution"))
    assert [row["verdict"] for row in made.results["claims"]] == ["cannot tell"]
    return results


@pytest.fixture(scope="module")
def paper() -> Results:
    return mechanisms.committed_results(STUDY)


def test_smoke_measures_and_draws_everything(smoke: Results) -> None:
    assert smoke.table.unique("arm") == ["pwc", "relu"]
    assert len(smoke.table.unique("kernel", arm="pwc")) == 4
    assert len(smoke.table.unique("kernel", arm="relu")) == 2  # a ReLU net has no gating network of its own
    assert (smoke.folder / "shares.png").exists()


def test_measured_shares_are_those_of_the_checkpointed_networks(smoke: Results) -> None:
    """The whole kernel's split exchanges gating networks; for the value parameters that is the same as replaying gates."""
    nets = smoke.cases()[0]
    run = Run(nets.folder(smoke.work))
    start, end = (stack_at(nets, run, epoch).double() for epoch in (0, nets.epochs))
    x = nets.data().x[::KERNEL_STRIDE].double()
    swapped = stack_at(nets, run, 0).double()
    swapped.gate_layers.load_state_dict(end.gate_layers.state_dict())
    back = stack_at(nets, run, nets.epochs).double()
    back.gate_layers.load_state_dict(start.gate_layers.state_dict())
    for parameters, kernel in (("value", VALUE), ("trainable", WHOLE)):
        kernels = [tangent_kernel(net, x, parameters=parameters) for net in (start, swapped, back, end)]
        shares = change_shares(*kernels)
        found = smoke.table.select("gates", "end", arm="pwc", kernel=kernel)
        assert found == pytest.approx(shares.gates.numpy(), rel=1e-3)


@pytest.mark.parametrize(("share", "verdict"), [(0.6, "holds"), (0.505, "cannot tell"), (0.4, "fails")])
def test_a_falsified_table_flips_the_parts(paper: Results, share: float, verdict: str) -> None:
    moved = share + np.linspace(-0.02, 0.02, 20)
    table = paper.table
    for moment in ("plateau", "end"):
        table = mechanisms.changed(table, moved, quantity="gates", at=moment, **AUTHOR_RELU)
    before, after = (mechanisms.judged(STUDY, one, paper.seeds) for one in (paper.table, table))
    assert after["id"] == "C28"
    assert [part["verdict"] for part in before["parts"] if "ReLU" in part["name"]] == ["fails"] * 2
    assert [part["verdict"] for part in after["parts"] if "ReLU" in part["name"]] == [verdict] * 2


def test_author_is_judged_pilot_is_control_and_large_starts_are_shown() -> None:
    (claim,) = STUDY.claims
    assert [part.says.split(",")[0] for part in claim.parts] == ["author"] * 6
    assert [part.says.split(",")[0] for part in claim.controls] == ["pilot"] * 6
    assert not any("large start" in part.says for part in (*claim.parts, *claim.controls))
    assert any("large start" in shown.says for shown in claim.shows)


def test_bars_add_up_to_the_whole(smoke: Results) -> None:
    with plots.style():
        axes = STUDY.figures[0].draw(smoke).axes
    axis = next(axis for axis in axes if "to the end" in axis.get_title(loc="left"))
    for place in (0, 1):
        widths = [bar.get_width() for bar in axis.patches if abs(bar.get_y() + bar.get_height() / 2 - place) < 0.1]
        assert len(widths) == 3
        assert sum(widths) == pytest.approx(1, abs=1e-3)


def test_committed_verdicts_follow_from_the_committed_table(paper: Results) -> None:
    mechanisms.check_committed(STUDY)
    mechanisms.check_missing_numbers_help_nobody(STUDY, paper.table, paper.seeds)
