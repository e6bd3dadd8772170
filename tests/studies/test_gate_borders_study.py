"""The study of borders: curves mark the jumps of the target that is trained on."""

from __future__ import annotations

import pytest
import torch

from unlazy.studies.beyond import gate_borders
from unlazy.studies.study import Work


def case(target: str, network: str = "dlgn") -> gate_borders.Stack:
    return gate_borders.Stack(target, network, (0, 1), (0, 2), 500, 6, 2, 3)


@pytest.mark.parametrize("target", ["circle", "wave"])
def test_marked_steps_are_where_the_wave_changes_its_sign(target: str) -> None:
    data, curves = gate_borders.make_target(case(target))
    places = curves.jumps[0].nonzero()[:, 0]
    assert len(places) == 6
    share = (places + 1).double() / gate_borders.FINE  # of the circle; samples are 500
    sign = data.y[:, 0].sign()
    after = torch.arange(500).roll(-1)
    changes = (sign != sign[after]).nonzero()[:, 0]
    inner = [one for one in changes.tolist() if 250 <= one < 499]
    assert inner == [round(float(one) * 500) - 1 for one in share[1:-1]]
    if target == "circle":
        assert set(data.y[data.groups["bottom"], 0].tolist()) == {-1.0, 1.0}


def test_segments_of_a_tree_jump_where_its_label_does() -> None:
    curves = gate_borders.tree_curves(gate_borders.TREE)
    labels = gate_borders.TREE.labels(curves.x.flatten(0, 1)).reshape(curves.x.shape[:2])
    assert torch.equal(curves.jumps, labels[:, 1:] != labels[:, :-1])
    lengths = (curves.x[:, 1] - curves.x[:, 0]).norm(dim=-1)
    assert torch.allclose(lengths, torch.full_like(lengths, curves.step))


def test_a_network_whose_borders_are_the_splits_is_found_at_jumps() -> None:
    """A layer of gates made of the tree's own splits: most crossings near a jump, many times chance."""
    from unlazy.models.build import build_stack
    from unlazy.models.spec import NetSpec
    from unlazy.probes.borders import mean_on_borders, random_rotation
    from unlazy.runtime import stream

    normals, thresholds = gate_borders.TREE.splits()
    net = build_stack(NetSpec(4, width=7, depth=1), [0], dtype=torch.float64)
    with torch.no_grad():
        net.gate_layers[0].weight.copy_(normals[None])
        net.gate_layers[0].bias.copy_(-thresholds[None])
    curves = gate_borders.tree_curves(gate_borders.TREE)
    net = net.float()
    near = (curves.distance() <= gate_borders.NEAR).double()
    own = mean_on_borders(gate_borders.crossings_by_layer(net, curves, None)[0], near)
    turned = gate_borders.crossings_by_layer(net, curves, random_rotation(4, stream(0)))
    assert own[0] > 2 * mean_on_borders(turned[0], near)[0]


def test_measured_rows_have_every_layer_and_moment(tmp_path) -> None:
    rows = gate_borders.measure(case("circle", "relu"), Work("gate-borders", "smoke", tmp_path)).entries
    places = {(row["at"], row.get("layer")) for row in rows if row["quantity"] == "at_jumps"}
    assert places == {(at, layer) for at in (0, "end") for layer in ("all", "1", "2")}
