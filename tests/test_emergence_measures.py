"""What the emergence studies measure, one seed at a time: the right network at the right step, labels, rows held apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from unlazy.data.patterns import Patterns
from unlazy.data.planted import Planted
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.spec import relu_spec
from unlazy.studies.emergence import clusters, lemmas, teacher_student, weights
from unlazy.studies.emergence.common import accuracy, first_steps
from unlazy.studies.emergence.fixed_features import measure
from unlazy.studies.emergence.zoo import measure as zoo
from unlazy.theory.emergence import decompose
from unlazy.training.recursive_features import recursive_features

SMALL = {"seeds": 1, "inputs": 30, "patterns": 20, "relevant": 3, "pairs": 40, "samples": 4000, "tests": 1000}


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
    settings = lemmas.Settings(**SMALL, exact_patterns=10, formula_rows=50)
    values = lemmas.lemmas(settings, seed=1)
    patterns = settings.data(1)
    sample, schedule = patterns.draw(4000), settings.schedule(patterns)
    nets = first_steps(settings.start(patterns, 1), schedule, sample)
    for number in (1, 2):
        found = decompose(nets[number - 1], sample, patterns.is_relevant(), schedule[number - 1].noise)
        assert values[f"ratio_{number}"] == float(found.ratio.median())
        assert values[f"floor_{number}"] == float(found.floor.median())
        assert values[f"beta_{number}"] == pytest.approx(float(found.signal.median()) * patterns.deviation / 0.25)
    assert values["exact_ratio_2"] < 1e-9 < values["exact_ratio_1"]
    assert values["lemma4_inside"] <= 1


def test_step_one_is_blind_by_its_length_and_step_two_sees() -> None:
    settings = weights.Settings(**SMALL, fewer=(200,), readout_steps=400, readout_early=2)
    values = weights.weights(settings, seed=0)
    assert values["raw_1"] < 0.6
    assert values["scaled_1"] > 0.97
    assert values["raw_2"] > 0.97
    assert values["early_2"] < values["raw_2"]
    assert values["norm_1"] < 1e-5 < values["norm_2"]
    assert values["fewer_200_least"] < values["step_2_least"]


def test_a_readout_begins_at_zero_and_leaves_the_neurons_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = weights.SCALES["smoke"]
    patterns = settings.data(0)
    net, sample = settings.start(patterns, 0), patterns.draw(300)
    seen: list[Any] = []
    train = weights.train

    def noting(start: Any, schedule: Any, batches: Any) -> Any:
        seen.extend((start, train(start, schedule, batches)))
        return seen[-1]

    monkeypatch.setattr(weights, "train", noting)
    weights._readout(settings, net, sample, patterns.draw(100, "test"), 0)
    start, end = seen
    assert torch.count_nonzero(start.a) == 0
    assert torch.count_nonzero(end.a) > 0
    assert torch.equal(end.w, net.w)
    assert torch.equal(end.b, net.b)


def test_the_third_phase_begins_where_the_second_step_ended() -> None:
    settings = measure.SCALES["smoke"]
    patterns = settings.data(0)
    sample = patterns.draw(settings.samples)
    wanted = first_steps(settings.start(patterns, 0), settings.schedule(patterns), sample)
    third = settings.schedule(patterns, steps=3, outer_rate=0.1)[2]
    seen = {}
    end = measure._train_on(settings, patterns, sample, 0, third, lambda step, net: seen.update({step: net}))
    assert sorted(seen) == list(range(6))
    for step in range(3):
        assert torch.equal(seen[step].w, wanted[step].w.float())
        assert torch.equal(seen[step].a, wanted[step].a.float())
    assert torch.equal(seen[5].a, end.a)
    assert not torch.equal(seen[2].a, end.a)


def test_ridges_are_chosen_on_rows_of_their_own(drawn_parts: list[str]) -> None:
    settings = measure.SCALES["smoke"]
    for method in (measure.fixed, measure.wide, measure.infinite):
        drawn_parts.clear()
        method(settings, "structured", 0)
        assert drawn_parts == ["train", "test", "validation"]


def test_shuffled_labels_are_the_same_images_with_other_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = clusters.SCALES["smoke"]
    rows: list[Any] = []
    train = clusters.train

    def noting(net: Any, schedule: Any, batches: Any, watch: Any) -> Any:
        rows.append(batches(1))
        return train(net, schedule, batches, watch)

    monkeypatch.setattr(clusters, "train", noting)
    for labels in ("true", "shuffled"):
        clusters.clusters(settings, "digits", "small", labels, 0)
    (x, y, _), (other_x, other_y, _) = rows
    assert torch.equal(x, other_x)
    assert not torch.equal(y, other_y)
    assert torch.equal(y.sort().values, other_y.sort().values)


def test_a_student_is_taught_by_the_teacher_on_images_it_did_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = teacher_student.SCALES["smoke"]
    lessons: list[Any] = []
    learn = teacher_student.learn

    def noting(net: Any, x: Any, labels: Any, used: Any, seed: int, watch: Any) -> Any:
        curves = learn(net, x, labels, used, seed, watch)
        lessons.append((net, x, labels, used.epochs, watch))
        return curves

    monkeypatch.setattr(teacher_student, "learn", noting)
    teacher_student.lesson(settings, "digits", "noise", 0)
    (teacher, own, _, _, _), (_, mixture, taught, epochs, watch), (_, alone, given, longer, _) = lessons
    assert torch.equal(taught, teacher_student.answers(teacher, mixture))
    assert torch.equal(given, teacher_student.answers(teacher, alone))
    assert len(mixture) == 2 * len(own) == 2 * len(alone)
    assert torch.equal(mixture[: len(alone)], alone)
    assert longer == 2 * epochs
    images = {tuple(row.tolist()) for row in own.flatten(1)}
    assert sum(tuple(row.tolist()) in images for row in alone.flatten(1)) < 5  # a few digits are alike
    for points, labels in watch.values():
        assert torch.equal(labels, teacher_student.answers(teacher, points))


# --- the zoo ---------------------------------------------------------------------------------------


def test_rows_to_learn_from_choose_with_and_judge_on_are_three_samples() -> None:
    sample = zoo.Sample.of(Planted("single-index", 6, 1), 100, zoo.SCALES["smoke"])
    rows = torch.cat([sample.x, sample.held_x, sample.test_x])
    assert len(torch.unique(rows, dim=0)) == len(rows)


def test_the_linearised_networks_ridge_is_the_best_on_held_rows() -> None:
    settings = replace(zoo.SCALES["smoke"], held=400, tests=400)
    data = Planted("patterns", 20, 5, seed=1)
    sample, net = zoo.Sample.of(data, 60, settings), build(relu_spec(20, width=32, depth=2), seed=0)
    found = zoo._linearised(net, sample, data.directions())["linearised_accuracy"]
    kernel, start = tangent_kernel(net, sample.x).double(), net(sample.x)[:, 0].detach().double()
    tried = []
    for ridge in zoo.RIDGES:
        shifted = kernel + ridge * kernel.trace() / 60 * torch.eye(60, dtype=torch.float64)
        line = zoo.moved_along(net, sample.x, torch.linalg.solve(shifted, sample.y.double() - start).float())
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
    settings = replace(zoo.SCALES["smoke"], rounds=4, held=400, tests=400)
    chosen = set()
    for seed in range(4):
        data = Planted("parity", 10, 4, seed=seed)
        sample = zoo.Sample.of(data, 60, settings)
        found = zoo._machines(settings, sample, data.directions())
        machines = list(recursive_features(sample.x, sample.y[:, None], rounds=4))
        held = [accuracy(machine(sample.held_x)[:, 0], sample.held_y) for machine in machines]
        assert held[found["machine_round"]] == max(held)
        test = accuracy(machines[found["machine_round"]](sample.test_x)[:, 0], sample.test_y)
        assert found["machine_accuracy"] == test
        assert found["laplace_accuracy"] == accuracy(machines[0](sample.test_x)[:, 0], sample.test_y)
        chosen.add(found["machine_round"])
    assert chosen != {4}  # the last round is not always the best
