"""The theorems study: its measurements have teeth, falsified tables flip verdicts, figures show the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from repository import ROOT
from unlazy import build, plots
from unlazy.claims.rule import judge_claim
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace import theorems_identities as identities
from unlazy.studies.halfspace.circle_checkpoints import CircleNetworks, read_curve
from unlazy.studies.halfspace.circle_networks import PRESETS
from unlazy.studies.halfspace.theorems import EXACT, FLOOR, SCALES, STUDY, load_members_at, measured_epochs
from unlazy.studies.halfspace.theorems_identities import KINDS, SIZES, Size, jumping_net, random_spec, two_part_net
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Results
from unlazy.studies.table import Table
from unlazy.theory.regions import circle_pieces, count_path_parts

CLAIMS = ["C1", "C2", "C3", "C4", "C5", "C6", "C26"]
SIZE = Size(2, 3, 3)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("theorems")
    request = Request("theorems", "smoke", folder / "runs", folder / "results")
    made = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert (made.failed, made.not_drawn) == ({}, {})
    table = Table.read(request.folder / "table.csv")
    return request.with_table(table)


# --- the run ---------------------------------------------------------------------------------------


def test_every_network_is_measured_and_every_figure_drawn(smoke: Results) -> None:
    assert [claim.id for claim in STUDY.claims] == CLAIMS
    for kind in KINDS:
        found = smoke.table.select("path_sum_error", kind=kind, seeds=smoke.seeds)
        assert np.isfinite(found).all()
    for figure in STUDY.figures:
        assert (smoke.folder / f"{figure.name}.png").is_file()


def test_random_networks_are_numbered_by_seed_then_size() -> None:
    numbers: dict[int, tuple[int, Size]] = {}
    for case in STUDY.cases(SCALES["paper"], STUDY.seeds_of("paper")):
        if case.subject == "random networks":
            numbers |= {n: (n // len(case.sizes), case.size) for n in case.numbers}
    assert numbers == {n: (n // 5, SIZES[n % 5]) for n in range(100)}


def test_networks_are_those_of_the_checkpoint(smoke: Results) -> None:
    """The float64 networks that are counted have the losses that training wrote down."""
    trained = [case for case in smoke.cases() if case.subject == "trained networks"]
    assert len(trained) == 4
    for case in trained:
        nets = CircleNetworks(case.preset, case.arm, case.seeds, case.epochs, case.width, case.depth)
        data, run = PRESETS[case.preset].circle.dataset(torch.float64), nets.train(smoke.work)
        epochs, losses = read_curve(nets, run, "loss")
        for epoch in (0, 3):
            found = [
                float((net(data.x) - data.y).square().mean().detach()) for net in load_members_at(nets, run, epoch)
            ]
            assert found == pytest.approx(losses[epochs == epoch][0].tolist(), rel=1e-5)


def test_networks_are_measured_at_the_usual_epochs_and_the_last() -> None:
    assert measured_epochs((0, 3, 30), 200) == [0, 3, 30, 200]
    assert measured_epochs((0, 3, 30), 10) == [0, 3, 10]
    assert measured_epochs((0, 3, 30), 3) == [0, 3]


# --- measurements with teeth -----------------------------------------------------------------------


def network(kind: str, seed: int = 0) -> tuple[GatedNet, torch.Tensor]:
    x = identities.random_points(SIZE, seed, 40)
    return identities.random_network(kind, SIZE, seed, x), x


def test_random_networks_are_alive() -> None:
    for seed in range(20):
        x = identities.random_points(Size(2, 2, 2), seed, 24)
        net = identities.random_network("relu", Size(2, 2, 2), seed, x)
        assert (net(x) != 0).double().mean() >= 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_identities_notice_another_network(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the path sums of a network with one other weight, every error is far above rounding."""
    net, x = network(kind)
    assert identities.path_sum_error(net, x) < EXACT
    assert identities.hidden_sum_error(net, x) < EXACT
    other = build(net.spec(), dtype=torch.float64)
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        other.value_layers[0].weight[net.gates(x)[0].sum(0).argmax()] *= 1.1
    whole, partial = identities.path_sum, identities.hidden_sum
    monkeypatch.setattr(identities, "path_sum", lambda _, x: whole(other, x))
    monkeypatch.setattr(identities, "hidden_sum", lambda _, x, layer: partial(other, x, layer))
    assert identities.path_sum_error(net, x) > 1e-4
    assert identities.hidden_sum_error(net, x) > 1e-4


def test_path_regions_of_relu_nets_are_noticed() -> None:
    x = torch.linspace(-1, 5, 40, dtype=torch.float64)[:, None]
    assert identities.segments_leaving(two_part_net(), x) > 0.2
    net, x = network("dlgn")
    assert identities.segments_leaving(net, x) == 0
    assert identities.polyhedron_mismatch(net, x) == 0
    assert split_share(net) == 0
    shares = [split_share(network("relu", seed)[0]) for seed in range(10)]
    assert 0 < max(shares) < 1
    assert identities.antipodal_error(*network("dlgn")) == 0
    assert identities.antipodal_error(*network("dlgn-biases")) > 0


def split_share(net: GatedNet) -> float:
    return identities.split_share(count_path_parts(circle_pieces(net)))


def test_overlap_error_sees_a_wrong_count(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network("relu")
    assert identities.overlap_error(net, x) == 0
    correct = identities.overlap_kernel
    monkeypatch.setattr(identities, "overlap_kernel", lambda net, x: correct(net, x) + torch.eye(len(x)))
    assert identities.overlap_error(net, x) > 0.01


def test_jumps_and_steps() -> None:
    assert identities.example_parts() == [0.5, 1.5, 2.5, 3.5]
    assert identities.example_jump(1e-12, linear_gates=False) == pytest.approx(0.25)
    assert identities.example_jump(0.1, linear_gates=True) == pytest.approx(0.0, abs=1e-12)
    net, _ = network("dlgn")
    moved = identities.move_weights(net, 0.01, seed=0)
    for (_, before), (_, after) in zip(net.named_parameters(), moved.named_parameters(), strict=True):
        relative = torch.linalg.matrix_norm(after - before, 2) / torch.linalg.matrix_norm(before, 2)
        assert float(relative.detach()) == pytest.approx(0.01)
    assert 0.1 < identities.normal_movement(net, seed=0) <= 1.01
    assert 0 < identities.region_change(net, seed=0) < 1e-6


def test_a_jumping_region_counts_as_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "move_weights", lambda net, step, seed: jumping_net(-1e-9))
    # the path through relu(-x2) is active on the lower half-plane for eps > 0 and nowhere for eps < 0
    assert identities.region_change(jumping_net(1e-9), seed=0) == pytest.approx(0.5)


def test_patterns_of_a_path() -> None:
    compatible = identities.compatible_patterns(Size(2, 2, 2))
    assert compatible.shape == (4, 16)
    # pattern bits: layer 1 units 0, 1, then layer 2 units 0, 1; path (0, 1) needs bits 0 and 3
    assert np.flatnonzero(compatible[1]).tolist() == [9, 11, 13, 15]
    assert identities.pattern_count_error(SIZE) == 0
    net, x = network("relu")
    right = identities.compatible_patterns(SIZE)
    assert identities.pattern_mismatch(net, x, right) == 0
    assert identities.pattern_mismatch(net, x, np.roll(right, 1, axis=0)) > 0.01


def test_free_experts_and_the_kernel_part_with_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network("dlgn")
    new = identities.random_points(SIZE, 99, 20)
    assert max(identities.regression_errors(net, x, new, seed=0).values()) < 1e-10
    correct = identities.overlap_kernel
    monkeypatch.setattr(identities, "overlap_kernel", lambda *arguments: correct(*arguments) + 1)
    assert min(identities.regression_errors(net, x, new, seed=0).values()) > 1e-4


def test_independent_rows_are_independent() -> None:
    features = torch.tensor([[1.0, 0, 0], [2, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.float64)
    assert identities.independent_rows(features).tolist() == [0, 2, 5]


def test_kinds_are_what_their_names_say() -> None:
    for kind in KINDS:
        spec = random_spec(kind, SIZE)
        assert (spec.inputs, spec.width, spec.depth) == SIZE
        assert spec.value_bias == spec.gate_bias == kind.endswith("-biases")
        assert spec.experts == ("constant" if kind.startswith("pwc") else "linear")
    assert random_spec("dlgn-soft", SIZE) == NetSpec(2, width=3, depth=3, gate_bias=False, value_bias=False)


# --- verdicts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed() -> Table:
    return Table.read(ROOT / "results" / "theorems" / "paper" / "table.csv")


def changed(table: Table, value: float, quantity: str, **where: str) -> Table:
    """The table with another value in the rows of a quantity with these columns."""
    wanted = {"quantity": quantity, **where}
    rows = list(table.rows())
    hit = [all(row.get(name) == text for name, text in wanted.items()) for row in rows]
    assert any(hit)
    return Table.from_rows(
        [row | {"value": value} if here else row for row, here in zip(rows, hit, strict=True)], digits=17
    )


def outcomes(table: Table) -> dict[str, set[str]]:
    """The verdicts of the parts and controls of every claim."""
    judged = {claim.id: judge_claim(claim, table, STUDY.seeds_of("paper")) for claim in STUDY.claims}
    return {name: {part["verdict"] for part in (*row["parts"], *row["controls"])} for name, row in judged.items()}


ALL_HOLD = {claim: {"holds"} for claim in CLAIMS}
WRONG_NETWORKS = {
    "C1": [("path_sum_error", "relu")],
    "C2": [("path_sum_error", kind) for kind in ("dlgn", "pwc", "linear")],
    "C3": [("overlap_error", kind) for kind in ("relu", "dlgn", "relu-biases", "dlgn-biases")],
    "C4": [(name, kind) for name in ("segments_leaving", "polyhedron_mismatch") for kind in ("dlgn", "dlgn-biases")],
    "C5": [("normal_movement", "dlgn")],
    "C6": [("pattern_mismatch", kind) for kind in ("relu", "dlgn", "relu-biases", "dlgn-biases")],
    "C26": [(name, kind) for name in ("ridge_error", "ridgeless_error") for kind in ("dlgn", "relu")],
}
WRONG_EXAMPLES = [
    ("C4", "parts", {}, 1.0),
    ("C4", "end", {"place": "3"}, 2.4),
    ("C5", "jump", {"kind": "relu"}, 0.01),
    ("C6", "pattern_count_error", {"size": "2x3x3"}, 0.5),
]


def test_every_claim_holds_on_the_committed_table(committed: Table) -> None:
    assert outcomes(committed) == ALL_HOLD


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_falsified_table_flips_the_verdict(committed: Table, claim: str) -> None:
    wrong = committed
    for quantity, kind in WRONG_NETWORKS[claim]:
        wrong = changed(wrong, 2.0, quantity, kind=kind)
    for owner, quantity, where, value in WRONG_EXAMPLES:
        if owner == claim:
            wrong = changed(wrong, value, quantity, **where)
    assert outcomes(wrong) == ALL_HOLD | {claim: {"fails"}}


@pytest.mark.parametrize(
    ("claim", "quantity", "kind"), [(claim, *one) for claim, wrong in WRONG_NETWORKS.items() for one in wrong]
)
def test_one_exception_in_a_hundred_is_enough(committed: Table, claim: str, quantity: str, kind: str) -> None:
    """Exact claims have no exceptions: the nine-in-ten rule must not let one pass, nor a missing network."""
    wrong = outcomes(changed(committed, 2.0, quantity, kind=kind, seed="99"))
    assert "fails" in wrong[claim]
    assert wrong == ALL_HOLD | {claim: wrong[claim]}
    missing = outcomes(committed.without(quantity=quantity, kind=kind, seed=99))
    assert "not measured" in missing[claim]


@pytest.mark.parametrize(("claim", "quantity", "where", "value"), WRONG_EXAMPLES)
def test_a_wrong_example_is_enough(
    committed: Table, claim: str, quantity: str, where: dict[str, str], value: float
) -> None:
    assert outcomes(changed(committed, value, quantity, **where)) == ALL_HOLD | {claim: {"fails", "holds"}}
    assert "not measured" in outcomes(committed.without(quantity=quantity, **where))[claim]


# --- figures ---------------------------------------------------------------------------------------


def drawn(name: str, results: Results) -> list[Any]:
    (figure,) = [figure for figure in STUDY.figures if figure.name == name]
    with plots.style():
        return figure.draw(results).axes


def by_title(axes: list[Any], start: str) -> Any:
    (found,) = [axis for axis in axes if axis.get_title(loc="left").startswith(start)]
    return found


def test_figure_1_shades_the_regions(smoke: Results) -> None:
    axes = drawn("fig01_examples", smoke)
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in by_title(axes, "ReLU net").patches]
    assert spans == [(0.5, 1.5), (2.5, 3.5)]
    relu, dlgn = by_title(axes, "circle gained").get_lines()
    assert relu.get_ydata() == pytest.approx(0.25)
    assert dlgn.get_ydata() == pytest.approx(0.0)
    regions = [axis for axis in axes if not axis.get_xticks().size and axis.collections]
    areas = [sum(_area(path.vertices) for path in axis.collections[0].get_paths()) for axis in regions]
    assert sorted(areas) == pytest.approx([1, 1, 1, 2], abs=0.03)


def _area(corners: Any) -> float:
    x, y = corners.T
    return abs(float(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1]))) / 2


def test_identity_dots_are_the_networks(smoke: Results) -> None:
    (axis,) = drawn("identities", smoke)
    labels = [label.get_text() for label in axis.get_yticklabels()]
    row = labels.index("paths = output: deep linear net")
    dots = [line for line in axis.get_lines() if line.get_marker() == "." and abs(line.get_ydata().mean() - row) < 0.01]
    assert dots[0].get_xdata() == pytest.approx(np.maximum(smoke.table.select("path_sum_error", kind="linear"), FLOOR))


def test_region_lines_are_medians(smoke: Results) -> None:
    axes = drawn("regions_over_training", smoke)
    lines = {line.get_label(): line.get_ydata() for line in axes[0].get_lines()}

    def counted(quantity: str, preset: str, arm: str) -> np.ndarray[Any, Any]:
        return smoke.table.series(quantity, preset=preset, arm=arm)[1]

    assert lines["ReLU net"] == pytest.approx(np.median(counted("cells", "author", "relu"), axis=1))
    assert lines["ReLU net, seen by the data"] == pytest.approx(
        np.median(counted("cells_seen", "author", "relu"), axis=1)
    )
    assert lines["DLGN"] == pytest.approx(np.median(counted("cells", "author", "pwc"), axis=1))
    assert len(counted("split_share", "author", "relu")) == 0  # with biases, parts of the circle are not of the plane
    units = SCALES["smoke"].width * SCALES["smoke"].depth
    assert counted("cells", "pilot", "pwc").tolist() == [[2 * units] * 2] * 2
    for preset in ("author", "pilot"):
        for arm in ("relu", "pwc"):
            assert (counted("cells_seen", preset, arm) <= counted("cells", preset, arm)).all()


def test_law_figure_shows_ratios_and_entries(smoke: Results) -> None:
    axes = drawn("value_kernel_law", smoke)
    ratio = by_title(axes, "averaged trace")
    points = [container.lines[0].get_ydata() for container in ratio.containers]
    assert np.array(points) == pytest.approx(smoke.table.series("trace_ratio")[1])
    entry = by_title(axes, "entries").get_lines()[0]
    assert entry.get_xdata() == pytest.approx(smoke.table.where(quantity="entry_law").values)
    assert entry.get_ydata() == pytest.approx(smoke.table.where(quantity="entry_averaged").values)
    assert len(entry.get_xdata()) == 6 * 7 / 2
