"""Fresh experts under copied gates: the same gates give the same losses, better gates better ones; foreign chains too."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cases
import mechanisms
from unlazy import Circle, Dataset, InputError, Member, Recipe, Unsupported, build, fit
from unlazy.kernels.flow import ridge_loss
from unlazy.kernels.overlap import free_path_kernel, overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build_stack
from unlazy.models.gates import HardGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.store import Run
from unlazy.studies.halfspace.circle_checkpoints import (
    CircleNetworks,
    NetworkSettings,
    plateau_epochs,
    read_curve,
    stack_at,
)
from unlazy.studies.halfspace.features_finished import STUDY, Settings, losses_by_copy
from unlazy.studies.study import Results
from unlazy.studies.table import Table
from unlazy.training.feature_freeze import (
    KERNELS,
    Retraining,
    copy_gates,
    features_finished,
    find_finish_time,
    kernel_losses,
    retrain_experts,
    summarise_retraining,
    to_gated_net,
)

CIRCLE = Circle(n=40, bottom=3.0).dataset(torch.float64)
QUICK = Retraining(epochs=8, batch=8, lr=1e-2, kernel_samples=20)


# --- the rule ----------------------------------------------------------------------------------------


def test_finished_means_good_from_then_on() -> None:
    times = [0, 1, 10, 100]
    losses = np.array([[1.0, 0.3, 0.1, 0.1], [0.1, 0.3, 0.1, 0.3], [1.0, 0.15, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]])
    assert find_finish_time(times, losses, 2.0, 0.0).tolist() == [100, 10, 0, 10]
    assert find_finish_time(times, losses, 2.0, 0.5).tolist() == [100, 0, 0, 0]  # below what counts as learned
    assert find_finish_time(times, losses, 20.0, 0.0).tolist() == [0, 0, 0, 0]


# --- exactness of the replay -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "dlgn", "pwc", "pwc-no-bias", "quadratic", "linear"])
def test_own_gates_with_own_experts_are_the_network(name: str) -> None:
    net, x = cases.net(name), cases.points(name)
    gates = [gate[0] for gate in copy_gates(net, x, "as trained")]
    assert torch.equal(net.value(x, gates), net(x))
    hard = [gate[0] for gate in copy_gates(net, x, "hard")]
    assert torch.equal(net.value(x, hard), net.hard()(x))
    assert set(torch.cat(hard).unique().tolist()) <= {0.0, 1.0}


def chain(widths: tuple[int, ...] = (2, 7, 4, 5, 1)) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b).double(), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_a_foreign_chain_becomes_one_of_ours() -> None:
    """Layers of different widths are filled up with units that change nothing: function, tangents, paths."""
    model, x = chain(), CIRCLE.x
    twin = to_gated_net(model, x)
    assert twin.settings.width == 7
    assert torch.allclose(twin(x), model(x), rtol=0, atol=1e-14)
    assert torch.allclose(tangent_kernel(twin, x), tangent_kernel(model, x), rtol=1e-10)
    assert torch.equal(overlap_kernel(twin, x), overlap_kernel(model, x))
    assert to_gated_net(twin, x) is twin


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)) + x)


@pytest.mark.parametrize(
    "model",
    [
        Skip(),
        nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(),
        nn.Sequential(nn.Linear(2, 1)).double(),
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3, eps=1.0), nn.Linear(3, 1)).double().eval(),
        nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1)).double(),
    ],
    ids=["skip", "tanh", "one layer", "batch norm", "some biases"],
)
def test_what_is_no_chain_is_refused(model: nn.Module) -> None:
    with pytest.raises(Unsupported, match=r"chain|does more|bias"):
        features_finished({0: model, 1: model}, CIRCLE, QUICK)


# --- retraining --------------------------------------------------------------------------------------


def test_retraining_is_training_under_a_frozen_gating_network(tmp_path: Path) -> None:
    """Two copies of a stack in one run: the same losses as frozen gating networks trained apart."""
    spec = NetSpec(2, experts="constant", width=4, depth=2)
    copies = [build_stack(spec, seeds, dtype=torch.float64) for seeds in ((0, 1), (2, 3))]
    together = retrain_experts(copies, CIRCLE, QUICK, tmp_path / "together")
    frozen = NetSpec(2, experts="constant", width=4, depth=2, train_gates=False)
    for index, copy in enumerate(copies):
        members = (Member(1000, 1e-2), Member(1001, 1e-2))
        start = {f"model/{name}": value.numpy() for name, value in copy.state_dict().items() if "gate" in name}
        apart = fit(
            Recipe(frozen, members, 8, batch=8, dtype="float64"), CIRCLE, [], tmp_path / f"{index}", start=start
        )
        net = build_stack(frozen, [0, 1], dtype=torch.float64)
        kept = apart.last_checkpoint()[1]
        net.load_state_dict({name: torch.from_numpy(kept[f"model/{name}"]) for name in net.state_dict()})
        loss = (net(CIRCLE.x) - CIRCLE.y).square().mean((1, 2)).detach().numpy()
        assert np.allclose(together.scalars("loss")[1][-1].reshape(2, 2)[index], loss, rtol=1e-12)


def test_losses_are_the_last_tenth_and_times_first_crossings() -> None:
    class Pretend(Run):
        def __init__(self) -> None:
            pass

        def scalars(self, name: str) -> Any:
            losses = np.full((21, 4), 0.5)
            losses[7:, 1] = 0.001
            losses[19:, 2], losses[20, 2] = 0.3, 0.1
            return np.arange(21), losses

    data = Dataset("flat", CIRCLE.x, torch.ones_like(CIRCLE.y))
    loss, epochs = summarise_retraining(Pretend(), data, Retraining(epochs=20), copies=2)
    assert np.allclose(loss, [[0.5, 0.001], [0.2, 0.5]])
    assert epochs.tolist() == [[np.inf, 7], [np.inf, np.inf]]


def test_frozen_gates_are_finished_at_once() -> None:
    """Only the experts differ between the copies, and they are drawn anew: every number of the gates is the same."""
    copies = {}
    for time in (0, 5, 9):
        net = build(NetSpec(2, experts="constant", width=4, depth=2), seed=0, dtype=torch.float64)
        other = build(net.settings, seed=time, dtype=torch.float64)
        net.value_layers.load_state_dict(other.value_layers.state_dict())
        copies[time] = net
    found = features_finished(copies, CIRCLE, QUICK)
    assert found.at.tolist() == [0]
    assert np.ptp(found.retrained) == 0
    assert np.ptp(found.kernels["overlap"]) == 0
    assert np.ptp(found.kernels["tangent"]) > 0


def test_a_lazy_network_is_finished_at_once(tmp_path: Path) -> None:
    """Wide, large outputs, trained to a fit: hardly a gate moves, so the first gates serve as well as the last."""
    spec = relu_spec(2, width=512, depth=1, init=Init("he", 2.0))
    plan = Recipe(spec, (Member(0, 1e-3),), epochs=60, batch=8, dtype="float64", checkpoints_at=(4,))
    run = fit(plan, CIRCLE, [], tmp_path / "run")
    copies: dict[float, nn.Module] = {}
    for epoch in (0, 4, 60):
        copies[epoch] = build_stack(spec, [0], dtype=torch.float64)
        kept = run.checkpoint(epoch * 5)
        copies[epoch].load_state_dict(
            {name: torch.from_numpy(kept[f"model/{name}"]) for name in copies[epoch].state_dict()}
        )
    before, after = (copy_gates(copies[epoch], CIRCLE.x, "hard")[0] for epoch in (0, 60))
    loss = (copies[60](CIRCLE.x) - CIRCLE.y).square().mean().detach()
    assert float(loss) < 0.1 * float(CIRCLE.y.square().mean())
    assert 0 < float((before != after).double().mean()) < 0.01
    assert features_finished(copies, CIRCLE, Retraining(epochs=60, batch=8, lr=1e-3)).at.tolist() == [0]


def with_gates(turned: bool) -> GatedNet:
    """Gates that are always open, or half-spaces on both sides of x = 0."""
    net = build(NetSpec(1, width=4, depth=1, gate=HardGate(None), value_bias=False), seed=0, dtype=torch.float64)
    with torch.no_grad():
        net.gate_layers[0].weight[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0]) if turned else 0.0
        net.gate_layers[0].bias.fill_(0.0 if turned else 1.0)
    return net


def test_features_that_come_late_are_seen_late() -> None:
    """|x| needs gates on both sides of zero; they appear at time 3."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    settings = Retraining(epochs=150, batch=8, lr=1e-2, kernel_samples=40)
    copies = {0: with_gates(False), 1: with_gates(False), 3: with_gates(True), 8: with_gates(True)}
    found = features_finished(copies, (x, x[:, 0].abs()), settings)
    assert found.at.tolist() == [3]
    assert found.retrained[:, 0] == pytest.approx([1 / 3, 1 / 3, 0, 0], abs=0.03)
    assert found.kernels["free_paths"][:, 0] == pytest.approx([1 / 3, 1 / 3, 0, 0], abs=0.03)
    assert np.isinf(found.epochs_to_learn[:2]).all()
    assert (found.epochs_to_learn[2:] < 150).all()
    text = str(found)
    assert text.startswith("Features are finished at time 3:")
    assert len(text.splitlines()) == 2 + 4


def test_a_foreign_network_is_timed_and_its_fill_stays_out(tmp_path: Path) -> None:
    late = chain((2, 7, 4, 5, 1))
    early = nn.Sequential(
        *(nn.Linear(m.in_features, m.out_features).double() if isinstance(m, nn.Linear) else m for m in late)
    )
    found = features_finished({0: early, 2: late}, CIRCLE, QUICK, folder=tmp_path / "kept")
    assert found.retrained.shape == (2, 1)
    run = Run(tmp_path / "kept")
    first, last = run.checkpoint(0), run.last_checkpoint()[1]
    second = "model/value_layers.1.weight"  # [members, 7, 7], of which 4 x 7 are real
    assert np.array_equal(first[second][:, 4:], last[second][:, 4:])
    assert not np.array_equal(first[second][:, :4], last[second][:, :4])
    third = np.abs(first["model/value_layers.2.weight"]).max()  # drawn for 4 inputs, not for 7
    assert 7**-0.5 < third <= 4**-0.5


# --- kernels beside it -------------------------------------------------------------------------------


def test_ridge_loss_is_that_of_ridge_regression() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 8, 5, generator=random, dtype=torch.float64)
    y = torch.randn(8, 2, generator=random, dtype=torch.float64)
    kernel = rows @ rows.mT
    for index, ridge in enumerate((1e-6, 1e-2, 1.0)):
        penalty = ridge * float(kernel[index].diagonal().mean())
        square = rows[index].T @ rows[index] + penalty * torch.eye(5, dtype=torch.float64)
        left = y - rows[index] @ torch.linalg.solve(square, rows[index].T @ y)
        assert float(ridge_loss(kernel, y, ridge)[index]) == pytest.approx(float(left.square().mean()), rel=1e-8)
    with pytest.raises(InputError, match="ridge"):
        ridge_loss(kernel, y, 0.0)


@pytest.mark.parametrize("name", ["pwc", "pwc-no-bias", "dlgn-hard"])
def test_kernel_losses_are_regressions_on_path_and_tangent_features(name: str) -> None:
    net, x = cases.net(name), cases.points(name, 12)
    data = Dataset("points", x, x[:, :1].sin())
    found = kernel_losses(net, data, QUICK)
    gates = [gate[0] for gate in copy_gates(net, x, "as trained")]
    paths = torch.stack(
        [
            torch.stack([gate[:, unit] for gate, unit in zip(gates, path, strict=True)]).prod(0)
            for path in itertools.product(range(3), repeat=3)
        ],
        dim=1,
    )
    assert float(found["overlap"][0]) == pytest.approx(float(ridge_loss(paths @ paths.T, data.y, QUICK.ridge)))
    tangent = tangent_kernel(net, x)
    assert float(found["tangent"][0]) == pytest.approx(float(ridge_loss(tangent, data.y, QUICK.ridge)))
    left = data.y - net(x).detach()
    assert float(found["linearised"][0]) == pytest.approx(float(ridge_loss(tangent, left, QUICK.ridge)))
    start = torch.ones(12, 12, dtype=torch.float64) if net.settings.experts == "constant" else x @ x.T
    free = ridge_loss(free_path_kernel(gates, start, net.settings.value_bias), data.y, QUICK.ridge)
    assert float(found["free_paths"][0]) == pytest.approx(float(free))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Retraining(gates="soft"), "as trained, hard"),
        (lambda: Retraining(factor=0.5), "factor"),
        (lambda: Retraining(learned=1.0), "share"),
        (lambda: features_finished({0: cases.net("pwc")}, CIRCLE), "at least two"),
        (lambda: features_finished({0: cases.net("pwc"), 1: cases.net("dlgn-frozen")}, CIRCLE, QUICK), "one network"),
        (lambda: features_finished({0: chain((2, 3, 2, 1)), 1: chain((2, 2, 3, 1))}, CIRCLE, QUICK), "have widths"),
        (lambda: NetworkSettings(epochs=1, arms=("square",)), "unknown arms"),
        (lambda: NetworkSettings(epochs=0), "at least 1"),
        (lambda: Settings(epochs=10, retrain_epochs=1), "before the last epoch"),
    ],
)
def test_bad_requests_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


# --- the study ---------------------------------------------------------------------------------------

SOFT = {"preset": "author", "arm": "pwc", "gates": "as trained"}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results, made = mechanisms.run_smoke(STUDY, tmp_path_factory.mktemp("finished"))
    assert [row["verdict"] for row in made.results["claims"]] == ["cannot tell"]
    return results


@pytest.fixture(scope="module")
def paper() -> Results:
    return mechanisms.committed_results(STUDY)


def test_smoke_measures_and_draws_everything(smoke: Results) -> None:
    assert all((smoke.folder / f"{name}.png").exists() for name in ("copies", "finished"))
    kinds = {(arm, kind) for arm in ("pwc", "relu") for kind in smoke.table.unique("gates", arm=arm)}
    assert kinds == {("pwc", "as trained"), ("pwc", "hard"), ("relu", "as trained")}
    for quantity in ("retrained", "network", "epochs_to_learn", *KERNELS):
        assert smoke.table.unique("at", quantity=quantity, gates="hard") == ["0", "1", "3", "plateau", "end"]


def networks(results: Results) -> tuple[CircleNetworks, Run]:
    case = results.cases()[0]
    return case, Run(case.folder(results.work))


def test_checkpointed_networks_are_those_of_the_run(smoke: Results) -> None:
    nets, run = networks(smoke)
    data, (_, losses) = nets.data(), read_curve(nets, run, "loss")
    mixed = stack_at(nets, run, [1, 3])
    found = (mixed(data.x) - data.y).square().mean((1, 2))
    assert found.tolist() == pytest.approx([losses[1, 0], losses[3, 1]], rel=1e-5)
    assert smoke.table.select("network", 3, **SOFT) == pytest.approx(losses[3], rel=1e-4)
    never = stack_at(nets, run, [np.inf, 4])
    assert all(torch.equal(a, b) for a, b in zip(never.parameters(), stack_at(nets, run, 4).parameters(), strict=True))


def test_the_plateau_is_the_first_checkpointed_epoch_below_it(smoke: Results) -> None:
    class Pretend(Run):
        def scalars(self, name: str) -> Any:
            steps = super().scalars(name)[0]
            return steps, np.where((steps >= 32)[:, None] & (np.arange(2) == 0), 0.2, 0.3)

    nets, run = networks(smoke)
    assert plateau_epochs(nets, Pretend(run.folder)).tolist() == [2, np.inf]


def first_part(table: Table, seeds: tuple[int, ...]) -> dict[str, Any]:
    row = mechanisms.judged(STUDY, table, seeds)
    assert row["id"] == "C27"
    return dict(row["parts"][0])


@pytest.mark.parametrize(
    ("plateau", "end", "agree"),
    [(0.05, 0.04, 20), (0.05, 0.02, 0), (0.009, 0.0001, 20), (0.025, 0.0001, 0), (0.0195, 0.0001, 15)],
)
def test_a_falsified_table_flips_the_part(paper: Results, plateau: float, end: float, agree: int) -> None:
    """Fresh experts reach given losses, with a little spread over seeds; losses below 0.01 count as 0.01."""
    spread = np.linspace(0.95, 1.05, 20)
    table = mechanisms.changed(paper.table, plateau * spread, quantity="retrained", at="plateau", **SOFT)
    table = mechanisms.changed(table, end * spread, quantity="retrained", at="end", **SOFT)
    part = first_part(table, paper.seeds)
    assert part["agree"] == agree
    assert part["verdict"] == {20: "holds", 0: "fails", 15: "cannot tell"}[agree]
    assert first_part(paper.table, paper.seeds)["verdict"] == "fails"


def test_author_parts_fail_and_the_pilots_nets_are_controls(paper: Results) -> None:
    row = mechanisms.judged(STUDY, paper.table, paper.seeds)
    assert [part["verdict"] for part in row["parts"]] == ["fails"] * 3
    assert all(part["name"].startswith("author") for part in row["parts"])
    assert [part["name"].split(",")[0] for part in row["controls"]] == ["pilot"] * 3


def test_seeds_without_a_plateau_do_not_count(paper: Results) -> None:
    spread = np.where(np.arange(20) < 10, np.nan, 0.01)
    table = mechanisms.changed(paper.table, spread, quantity="retrained", at="plateau", **SOFT)
    part = first_part(table, paper.seeds)
    assert part["agree"] == 10
    assert part["verdict"] == "not measured"


def test_the_figure_draws_the_medians(smoke: Results) -> None:
    axis = STUDY.figures[0].draw(smoke).axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    drawn = lines["fresh experts under its gates of then"]
    assert np.allclose(drawn.get_ydata(), np.median(losses_by_copy(smoke, "retrained", **SOFT), axis=1))
    assert np.allclose(drawn.get_xdata(), [0.5, 1, 3, 4])


def test_committed_verdicts_follow_from_the_committed_table(paper: Results) -> None:
    mechanisms.check_committed(STUDY)
    mechanisms.check_missing_numbers_help_nobody(STUDY, paper.table, paper.seeds)
