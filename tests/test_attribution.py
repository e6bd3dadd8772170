"""Gates of one moment with weights of another: exact kernels, shares that add up, a study whose verdict can flip."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cases
from unlazy import InputError, Unsupported, build, build_stack, plots, tangent_kernel
from unlazy.kernels.replay import ChangeShares, attribute_change, change_shares, gated_value_kernel
from unlazy.models.net import GatedNet
from unlazy.store import Run
from unlazy.studies.halfspace.attribution import figures
from unlazy.studies.halfspace.attribution.study import SCALES, claims, reproduce
from unlazy.studies.halfspace.moments import stack_at

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


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("attribution")
    return folder, reproduce("smoke", runs=folder / "runs", results=folder, progress=lambda *_: None)


def test_smoke_measures_everything_and_judges_nothing(smoke: tuple[Path, dict[str, Any]]) -> None:
    folder, table = smoke
    assert json.loads((folder / "kernel-attribution" / "smoke.json").read_text()) == table
    assert list(table["networks"]) == ["author-pwc", "author-relu"]
    assert [row["verdict"] for row in table["claims"]] == ["cannot tell"]
    assert (folder / "kernel-attribution" / "smoke" / "shares.png").exists()


def test_measured_shares_are_those_of_the_kept_networks(smoke: tuple[Path, dict[str, Any]]) -> None:
    """The whole kernel's split exchanges gating networks; for the value parameters that is the same as replaying gates."""
    folder, table = smoke
    nets = SCALES["smoke"].networks()[0]
    run = Run(nets.folder(folder / "runs"))
    start, end = (stack_at(nets, run, epoch).double() for epoch in (0, nets.epochs))
    x = nets.data().x[::25].double()
    swapped = stack_at(nets, run, 0).double()
    swapped.gate_layers.load_state_dict(end.gate_layers.state_dict())
    back = stack_at(nets, run, nets.epochs).double()
    back.gate_layers.load_state_dict(start.gate_layers.state_dict())
    for parameters, quantity in (("value", "gates_end"), ("trainable", "whole_gates_end")):
        kernels = [tangent_kernel(net, x, parameters=parameters) for net in (start, swapped, back, end)]
        shares = change_shares(*kernels)
        assert table["networks"]["author-pwc"]["values"][quantity] == pytest.approx(shares.gates.tolist(), rel=1e-3)


def table_with(share: float, scale: str = "paper") -> dict[str, Any]:
    values = {f"gates_{moment}": list(share + np.linspace(-0.02, 0.02, 10)) for moment in ("plateau", "200", "end")}
    entry = {"label": "a network", "arm": "relu", "values": values}
    return {"scale": scale, "settings": {}, "provenance": {}, "networks": {"author-relu": entry}}


@pytest.mark.parametrize(("share", "verdict"), [(0.6, "holds"), (0.505, "partly"), (0.4, "fails")])
def test_a_falsified_table_flips_the_verdict(share: float, verdict: str) -> None:
    (row,) = claims(table_with(share))
    assert row["id"] == "C28"
    assert row["verdict"] == verdict
    assert len(row["parts"]) == 2
    assert claims(table_with(share, "smoke"))[0]["verdict"] == "cannot tell"


def test_a_large_start_is_no_part_of_the_claim() -> None:
    table = table_with(0.1)
    table["networks"]["author-relu"]["arm"] = "relu-large"
    assert claims(table)[0]["parts"] == []


def test_bars_add_up_to_the_whole(smoke: tuple[Path, dict[str, Any]]) -> None:
    with plots.style():
        axes = figures.shares(smoke[1]).axes
    axis = next(axis for axis in axes if "to the end" in axis.get_title(loc="left"))
    for place in (0, 1):
        widths = [bar.get_width() for bar in axis.patches if abs(bar.get_y() + bar.get_height() / 2 - place) < 0.1]
        assert len(widths) == 3
        assert sum(widths) == pytest.approx(1, abs=1e-3)


def test_seeds_must_be_positive() -> None:
    with pytest.raises(InputError, match="at least 1"):
        reproduce("smoke", runs=Path("x"), results=Path("x"), seeds=0, progress=lambda *_: None)


def test_committed_rows_follow_from_the_committed_table() -> None:
    table = json.loads((Path(__file__).parent.parent / "results" / "kernel-attribution" / "paper.json").read_text())
    assert claims(table) == table["claims"]
