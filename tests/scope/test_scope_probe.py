"""What a scope looks at: targets, groups and outputs of every kind, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scope_nets import measurements_of
from unlazy import InputError, Scope, tangent_kernel
from unlazy.scope.probe_set import ProbeSet, parse_probe_set
from unlazy.scope.user_model import find_predictions, select_output
from unlazy.studio.run_facts import run_facts
from unlazy.studio.run_reader import open_run_folder


def test_one_class_leaves_alignment_out(mlp) -> None:
    net, x, _ = mlp
    measurements = measurements_of(net.eval(), x, torch.zeros(len(x), dtype=torch.long))
    first = measurements.measure_start()
    assert not any("alignment" in name for name in first)
    assert "same" in measurements.left_out["alignment"]
    assert "tangent_distance" in first


def test_targets_of_every_kind() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3)
    labels = torch.arange(8) % 2
    one, two = nn.Linear(3, 1), nn.Linear(3, 2)
    out1, out2 = one(x).detach(), two(x).detach()
    for net, y, loss, accuracy in [
        (two, labels, F.cross_entropy(out2, labels), (out2.argmax(1) == labels)),
        (two, labels.int(), F.cross_entropy(out2, labels), (out2.argmax(1) == labels)),
        (two, F.one_hot(labels).float(), (out2 - F.one_hot(labels)).square().mean(), out2.argmax(1) == labels),
        (one, labels, F.binary_cross_entropy_with_logits(out1[:, 0], labels.float()), (out1[:, 0] > 0) == labels),
        (
            one,
            labels.float(),
            F.binary_cross_entropy_with_logits(out1[:, 0], labels.float()),
            (out1[:, 0] > 0) == labels,
        ),
        (one, x[:, :1], (out1 - x[:, :1]).square().mean(), None),
    ]:
        first = measurements_of(net, x, y).measure_start()
        assert float(first["loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert ("accuracy" in first) == (accuracy is not None)
        if accuracy is not None:
            assert float(first["accuracy"]) == float(accuracy.double().mean())


def test_a_loss_of_ones_own(mlp) -> None:
    net, x, y = mlp
    measurements = measurements_of(net.eval(), x, y, loss=lambda out, y: out[:, 0].square() + y)
    first = measurements.measure_start()
    with torch.no_grad():
        out = net(x)
    assert float(first["loss"]) == pytest.approx(float((out[:, 0].square() + y).mean()))
    assert float(first["loss_2"]) == pytest.approx(float((out[:, 0].square() + y)[y == 2].mean()))


def test_groups_by_mask_and_by_number(mlp) -> None:
    net, x, y = mlp
    measurements = measurements_of(net.eval(), x, y, groups={"odd": y % 2 == 1, "first": [0, 1, 2]})
    first = measurements.measure_start()
    assert {"loss_odd", "loss_first", "tangent_mass_first"} <= first.keys()
    assert "loss_0" not in first
    whole = tangent_kernel(net, x).diagonal()
    assert float(first["tangent_mass_first"]) == pytest.approx(float(whole[:3].sum() / whole.sum()))


def test_what_is_no_pair_is_refused_with_the_way_to_one(mlp) -> None:
    _, x, y = mlp
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    with pytest.raises(InputError, match=r"got DataLoader; of a loader, next\(iter\(loader\)\)"):
        parse_probe_set(loader)
    assert len(parse_probe_set(next(iter(loader)))) == 8
    assert len(parse_probe_set((x.numpy(), y.numpy()))) == len(x)


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        (lambda x, y: (x, y[:-1]), "30 samples but targets of shape"),
        (lambda x, y: (x, y + 1), "must be 0 to 2"),
        (lambda x, y: (x, torch.randn(len(x), 2)), "3 outputs a sample, the targets have 2"),
        (lambda x, y: (x, torch.stack([y, y], 1)), r"class numbers must be \[n\]"),
        (lambda x, y: (x * float("nan"), y), "NaN"),
        (lambda x, y: (x[:1], y[:1]), "at least 2 samples"),
        (lambda x, y: ((x, x[:3]), y), "equal first axis"),
        (lambda x, y: (x[:0], y[:0]), "no samples"),
    ],
)
def test_probes_that_do_not_fit_are_refused_with_the_reason(mlp, probe, says: str) -> None:
    net, x, y = mlp
    with pytest.raises(InputError, match=says):
        measurements_of(net, *probe(x, y))


@pytest.mark.parametrize(
    ("groups", "says"),
    [({"a": [99]}, "between 0 and 29"), ({"a": [True] * 3}, r"\[30\]"), ({"a": [False] * 30}, "no sample")],
)
def test_groups_that_do_not_fit_are_refused(mlp, groups: dict[str, object], says: str) -> None:
    net, x, y = mlp
    with pytest.raises(InputError, match=says):
        measurements_of(net, x, y, groups=groups)


def test_the_tensor_that_counts_is_found_or_asked_for() -> None:
    wanted, other = torch.zeros(2, 3), torch.ones(2, 3)

    class Output:
        logits = wanted

    assert find_predictions({"z": other, "logits": wanted}) is wanted
    assert find_predictions(Output()) is wanted
    assert find_predictions((wanted, None)) is wanted
    assert find_predictions({"scores": wanted, "n": 3}) is wanted
    with pytest.raises(InputError, match="say which tensor counts"):
        find_predictions((wanted, other))
    with pytest.raises(InputError, match="dict"):
        find_predictions({"a": wanted, "b": other})


def test_an_answer_at_every_position_needs_a_choice() -> None:
    net, x, y = nn.Linear(3, 4), torch.randn(6, 5, 3), torch.arange(6) % 4
    probe = parse_probe_set((x, y))
    with pytest.raises(InputError, match="output=lambda out"):
        select_output(net, probe, None)
    assert select_output(net, probe, lambda out: out[:, -1])(x).shape == (6, 4)


def test_the_first_samples_of_the_order_are_balanced() -> None:
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 45)
    probe = ProbeSet(torch.zeros(100, 1), labels, labels=labels)
    order = probe.balanced_order(3)
    assert sorted(order.tolist()) == list(range(100))
    assert labels[order[:15]].bincount().tolist() == [5, 5, 5]
    assert torch.equal(order, probe.balanced_order(3))
    assert not torch.equal(order, probe.balanced_order(4))


def test_texts_of_samples_come_back_cut_and_wrong_ones_are_refused(tmp_path):
    x, y = torch.randint(0, 9, (4, 3)), torch.tensor([0, 1, 0, 1])
    texts = ["", "ä ö", "nul\0l", "long " * 100]
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    with Scope(net, (x, y), tmp_path / "run", texts=texts) as scope:
        scope.step(1)
    probe = run_facts(open_run_folder(tmp_path / "run"))["probe"]
    assert probe["texts"][:3] == ["", "ä ö", "nul l"]
    assert probe["texts"][3] == ("long " * 100)[:300] + "…"
    for wrong in ("abcd", ["one"]):
        with pytest.raises(InputError, match="texts must be"):
            Scope(net, (x, y), texts=wrong)
