"""What the emergence studies measure, one seed at a time: the right network at the right step, labels, rows held apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from unlazy.data.patterns import Patterns, check_assumptions
from unlazy.data.planted import Planted
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.spec import relu_spec
from unlazy.studies.emergence import clusters, fixed_features, lemmas, teacher_student, weights, zoo
from unlazy.studies.emergence.common import (
    accuracy,
    networks_of_first_steps,
    patterns_of,
    schedule_gamma,
    start_network,
    training_phases,
)
from unlazy.studies.emergence.fixed_features_methods import scaled_inputs, train_ordinary_network
from unlazy.studies.study import Work, make_cases
from unlazy.studies.table import Rows, Table
from unlazy.theory.emergence import decompose
from unlazy.training.recursive_features import recursive_features

SMALL = {"inputs": 30, "patterns": 20, "relevant": 3, "pairs": 40, "samples": 4000, "tests": 1000}


def measured(module: Any, case: Any) -> Table:
    """One case, with all digits."""
    return table_of(module.measure(case, Work("a study", "smoke", Path("nowhere"))))


def table_of(rows: Rows) -> Table:
    return Table.from_rows([{"seed": 0, **row} for row in rows.entries], digits=17)


def one(table: Table, quantity: str, at: int | str | None = None, **where: Any) -> float:
    (value,) = table.select(quantity, at, **where)
    return float(value)


@pytest.fixture
def drawn_parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the samples that were drawn, in order."""
    parts: list[str] = []
    draw = Patterns.draw

    def noting(self: Patterns, n: int, part: str = "train") -> Any:
        parts.append(part)
        return draw(self, n, part)

    monkeypatch.setattr(Patterns, "draw", noting)
    return parts


def test_the_ratios_are_those_of_the_networks_before_steps_one_and_two() -> None:
    (case,) = make_cases([{"seed": 1}], lemmas.Settings(**SMALL, exact_patterns=10, formula_rows=50))
    table = measured(lemmas, case)
    patterns = Patterns(30, 20, 3, seed=1)
    sample, schedule = patterns.draw(4000), training_phases(40, patterns)
    nets = networks_of_first_steps(40, patterns, sample)
    for number in (1, 2):
        found = decompose(nets[number - 1], sample, patterns.is_relevant(), schedule[number - 1].noise)
        assert one(table, "ratio", number, data="sample") == float(found.ratio.median())
        assert one(table, "floor", number, data="sample") == float(found.floor.median())
        beta = float(found.signal.median()) * patterns.deviation / 0.25
        assert one(table, "beta", number, data="sample") == pytest.approx(beta)
    assert one(table, "ratio", 2, data="population") < 1e-9 < one(table, "ratio", 1, data="population")
    assert one(table, "lemma4_inside") <= 1


def test_step_one_is_blind_by_its_length_and_step_two_sees() -> None:
    settings = weights.Settings(**SMALL, fewer=(200,), readout_steps=400, readout_early=2)
    table = measured(weights, *make_cases([{"seed": 0}], settings))
    assert one(table, "readout", 1, variant="main") < 0.6
    assert one(table, "readout", 1, variant="stretched") > 0.97
    assert one(table, "readout", 2, variant="main") > 0.97
    assert one(table, "readout", 2, variant="early") < one(table, "readout", 2, variant="main")
    assert one(table, "norm", 1) < 1e-5 < one(table, "norm", 2)
    assert one(table, "cosine_least", 2, variant="200 samples") < one(table, "cosine_least", 2, variant="main")


def test_a_readout_begins_at_zero_and_leaves_the_neurons_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = make_cases([{"seed": 0}], weights.SCALES["smoke"])
    patterns = patterns_of(case)
    net, sample = start_network(case.pairs, patterns), patterns.draw(300)
    seen: list[Any] = []
    train = weights.train

    def noting(start: Any, schedule: Any, batches: Any) -> Any:
        seen.extend((start, train(start, schedule, batches)))
        return seen[-1]

    monkeypatch.setattr(weights, "train", noting)
    weights.readout_accuracy(case, net, sample, patterns.draw(100, "test"), 20)
    start, end = seen
    assert torch.count_nonzero(start.a) == 0
    assert torch.count_nonzero(end.a) > 0
    assert torch.equal(end.w, net.w)
    assert torch.equal(end.b, net.b)


def test_the_third_phase_begins_where_the_second_step_ended() -> None:
    case = fixed_features.cases(fixed_features.SCALES["smoke"], [0])[0]
    patterns = patterns_of(case)
    sample = patterns.draw(case.samples)
    wanted = networks_of_first_steps(case.pairs, patterns, sample)
    third = training_phases(case.pairs, patterns, steps=3, outer_rate=0.1)[2]
    seen = {}
    end = fixed_features.train_third_phase(
        case, wanted, sample, third, case.batch, lambda step, net: seen.update({step: net})
    )
    assert sorted(seen) == list(range(6))
    for step in range(3):
        assert torch.equal(seen[step].w, wanted[step].w.float())
        assert torch.equal(seen[step].a, wanted[step].a.float())
    assert torch.equal(seen[5].a, end.a)
    assert not torch.equal(seen[2].a, end.a)


@pytest.mark.parametrize("method", ["linearised", "random", "infinite"])
def test_ridges_are_chosen_on_rows_of_their_own(method: str, drawn_parts: list[str]) -> None:
    tried = [case for case in fixed_features.cases(fixed_features.SCALES["smoke"], [0]) if case.method == method]
    assert len(tried) == (8 if method == "random" else 2)  # random features also on two other label rules
    for case in tried:
        drawn_parts.clear()
        measured(fixed_features, case)
        assert drawn_parts == ["train", "test", "validation"]


def test_as_many_random_features_as_pairs_are_the_networks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest are drawn afresh, as many as asked for."""
    asked: list[int] = []
    draw = fixed_features.random_neurons

    def noting(size: int, count: int, *rest: int) -> Any:
        asked.append(count)
        return draw(size, count, *rest)

    monkeypatch.setattr(fixed_features, "random_neurons", noting)
    settings = fixed_features.SCALES["smoke"]
    for case in fixed_features.cases(settings, [0]):
        if case.method == "random" and case.data == "structured":
            steps, _ = measured(fixed_features, case).series("accuracy", fit="descent")
            assert steps.tolist() == ([0, 10, 20] if case.features == settings.pairs else [])
    assert asked == [50, 500]


def test_a_case_without_structure_has_none() -> None:
    """Kinds of data reach the sampler: without structure every input is uniform."""
    cases = fixed_features.cases(fixed_features.SCALES["smoke"], [0])
    uniform = {}
    for case in cases:
        if case.method == "network" and case.data != "bound":
            uniform[case.data] = float(fixed_features.draw_data(case)[1].uniform.double().mean())
    assert uniform["unstructured"] == 1
    assert uniform["structured"] == pytest.approx(0.5, abs=0.1)


def test_other_label_rules_reach_the_sampler() -> None:
    """Labels by the count of relevant patterns; A0 and A1 hold on a sample; an interval has neither none nor all of them."""
    cases = {case.data: case for case in fixed_features.cases(fixed_features.SCALES["smoke"], [0])}
    wanted = {"threshold": {3, 4, 5}, "interval": {2, 3, 4}}
    for data, positive in wanted.items():
        patterns = fixed_features.distribution(cases[data])
        sample = patterns.draw(20_000)
        counts = sample.indicators[:, patterns.relevant_set()].sum(1)
        assert set(counts[sample.y > 0].tolist()) == positive
        report = check_assumptions(sample.indicators, sample.y, patterns.relevant_set())
        assert (report["a0"], report["a1"]) == (True, True)
        assert report["gamma_mean"].contains(patterns.gamma)
        assert schedule_gamma(patterns) == patterns.gamma
    fewer = fixed_features.distribution(cases["unstructured, 2 relevant"])
    assert (fewer.relevant, fewer.structured, schedule_gamma(fewer)) == (2, False, 0.25)


def test_an_ordinary_network_learns_an_easy_parity_and_sees_new_samples() -> None:
    patterns = Patterns.unstructured(8, 8, 2)
    test = patterns.draw(500, "test")
    inputs = scaled_inputs(patterns, test)
    assert set(inputs.abs().flatten().tolist()) == {1.0}
    trained = dict(train_ordinary_network(patterns, 100, 400, 50))
    assert list(trained) == list(range(401))
    assert accuracy(trained[400](inputs)[:, 0].detach(), test.y) > 0.99


def test_the_constant_multiplies_the_rate_of_the_third_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {}
    follow = fixed_features.train_third_phase

    def noting(case: Any, nets: Any, sample: Any, phase: Any, *rest: Any) -> Any:
        rates[case.constant] = phase.rate
        assert phase.outer_rate is None
        return follow(case, nets, sample, phase, *rest)

    monkeypatch.setattr(fixed_features, "train_third_phase", noting)
    for case in fixed_features.cases(fixed_features.SCALES["smoke"], [0]):
        if case.method == "plain":
            measured(fixed_features, case)
    assert {constant: rate / rates[1] for constant, rate in rates.items()} == pytest.approx(
        {1: 1, 10: 10, 100: 100, 1000: 1000}
    )


def test_shuffled_labels_are_the_same_images_with_other_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in clusters.cases(clusters.SCALES["smoke"], [0]) if case.start == "small"]
    rows: list[Any] = []
    train = clusters.train

    def noting(net: Any, schedule: Any, batches: Any, watch: Any) -> Any:
        rows.append(batches(1))
        return train(net, schedule, batches, watch)

    monkeypatch.setattr(clusters, "train", noting)
    assert [case.labels for case in cases] == ["true", "shuffled"]
    for case in cases:
        measured(clusters, case)
    (x, y, _), (other_x, other_y, _) = rows
    assert torch.equal(x, other_x)
    assert not torch.equal(y, other_y)
    assert torch.equal(y.sort().values, other_y.sort().values)


def test_a_student_is_taught_by_the_teacher_on_images_it_did_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    case = teacher_student.cases(teacher_student.SCALES["smoke"], [0])[0]
    lessons: list[Any] = []
    learn = teacher_student.train_network

    def noting(net: Any, x: Any, labels: Any, used: Any, watch: Any, epochs: int) -> Any:
        curves = learn(net, x, labels, used, watch, epochs)
        lessons.append((net, x, labels, epochs, watch))
        return curves

    monkeypatch.setattr(teacher_student, "train_network", noting)
    measured(teacher_student, case)
    (teacher, own, _, _, _), (_, mixture, taught, epochs, watch), (_, alone, given, longer, _) = lessons
    assert torch.equal(taught, teacher_student.predicted_classes(teacher, mixture))
    assert torch.equal(given, teacher_student.predicted_classes(teacher, alone))
    assert len(mixture) == 2 * len(own) == 2 * len(alone)
    assert torch.equal(mixture[: len(alone)], alone)
    assert longer == 2 * epochs
    images = {tuple(row.tolist()) for row in own.flatten(1)}
    assert sum(tuple(row.tolist()) in images for row in alone.flatten(1)) < 5  # a few digits are alike
    for points, labels in watch.values():
        assert torch.equal(labels, teacher_student.predicted_classes(teacher, points))


# --- the zoo ---------------------------------------------------------------------------------------


def test_rows_to_learn_from_choose_with_and_judge_on_are_three_samples() -> None:
    sample = zoo.Sample.draw(Planted("single-index", 6, 1), 100, 50, 100)
    rows = torch.cat([sample.x, sample.held_x, sample.test_x])
    assert len(torch.unique(rows, dim=0)) == len(rows)


def test_the_linearised_networks_ridge_is_the_best_on_held_rows() -> None:
    data = Planted("patterns", 20, 5, seed=1)
    sample, net = zoo.Sample.draw(data, 60, 400, 400), build(relu_spec(20, width=32, depth=2), seed=0)
    rows = Rows()
    zoo.measure_linearised(net, sample, rows)
    found = one(table_of(rows), "accuracy", learner="linearised")
    kernel, start = tangent_kernel(net, sample.x).double(), net(sample.x)[:, 0].detach().double()
    tried = []
    for ridge in zoo.RIDGES:
        shifted = kernel + ridge * kernel.trace() / 60 * torch.eye(60, dtype=torch.float64)
        line = zoo.linearised_solution(net, sample.x, torch.linalg.solve(shifted, sample.y.double() - start).float())
        tried.append(
            tuple(
                accuracy(line(x)[:, 0].detach(), y)
                for x, y in ((sample.held_x, sample.held_y), (sample.test_x, sample.test_y))
            )
        )
    best = max(right for right, _ in tried)
    assert best not in (tried[0][0], tried[-1][0])  # neither the first ridge nor the last
    assert min(abs(test - found) for right, test in tried if right == best) < 0.006


def test_the_feature_machines_round_is_the_best_on_held_rows() -> None:
    chosen = set()
    for seed in range(4):
        data = Planted("parity", 10, 4, seed=seed)
        sample = zoo.Sample.draw(data, 60, 400, 400)
        rows = Rows()
        zoo.measure_feature_machine(4, sample, rows)
        table = table_of(rows)
        best = int(one(table, "round", learner="machine"))
        machines = list(recursive_features(sample.x, sample.y[:, None], rounds=4))
        held = [accuracy(machine(sample.held_x)[:, 0], sample.held_y) for machine in machines]
        assert held[best] == max(held)
        for learner, number in (("machine", best), ("laplace", 0)):
            test = accuracy(machines[number](sample.test_x)[:, 0], sample.test_y)
            assert one(table, "accuracy", learner=learner) == test
        chosen.add(best)
    assert chosen != {4}  # the last round is not always the best
