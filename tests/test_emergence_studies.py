"""Studies of the emergence paper: their methods against slow twins, plumbing at smoke scale, falsified tables flip verdicts."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy.claims.catalogue import CATALOGUE
from unlazy.data.patterns import Patterns
from unlazy.models.truncated import TruncatedNet, mirrored_start
from unlazy.runtime import InputError, stream
from unlazy.studies.emergence import clusters, common, lemmas, teacher_student, weights
from unlazy.studies.emergence.common import Job, accuracy, code_behind, left_out, run_jobs
from unlazy.studies.emergence.fixed_features import measure, methods, study
from unlazy.studies.registry import find_studies, settings_of

STUDIES = {
    "lemmas": lemmas,
    "weights": weights,
    "fixed-features": study,
    "clusters": clusters,
    "teacher-student": teacher_student,
}
CLAIMS = {
    "lemmas": ["B1", "B2", "B3", "B4"],
    "weights": ["B5", "B6"],
    "fixed-features": ["B7", "B8", "B9", "B10"],
    "clusters": ["B11"],
    "teacher-student": ["B12"],
}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("emergence")
    told: list[tuple[str, int, int]] = []
    tables = {
        name: module.reproduce(
            "smoke", runs=folder / "runs", results=folder, progress=lambda *event: told.append(event)
        )
        for name, module in STUDIES.items()
    }
    assert {what for what, _, _ in told} == {"measuring", "drawing"}
    assert all(0 <= done <= total for _, done, total in told)
    return folder, tables


def normal(*shape: int, key: str = "x") -> torch.Tensor:
    return torch.randn(*shape, generator=stream(0, key), dtype=torch.float64)


# --- plumbing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_results_are_written_and_smoke_judges_nothing(smoke, name: str) -> None:
    folder, tables = smoke
    table = tables[name]
    assert json.loads((folder / name / "smoke.json").read_text()) == table
    assert [row["id"] for row in table["claims"]] == CLAIMS[name]
    assert {claim.id for claim in CATALOGUE if claim.study == name} == set(CLAIMS[name])
    assert {row["verdict"] for row in table["claims"]} == {"cannot tell"}
    figures = {path.name for path in (folder / name / "smoke").iterdir()}
    assert figures
    assert all(path.endswith((".png", ".pdf")) for path in figures)


def test_kept_measurements_are_not_made_again(smoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call reads the same files; more seeds only add to them; other settings are other files."""
    folder, tables = smoke
    settings = lemmas.SCALES["smoke"]
    job = Job(lemmas.lemmas, settings, {"seed": 0}, folder / "runs" / "lemmas")
    assert job.path.exists()
    monkeypatch.setattr(lemmas, "decompose", None)  # would fail if it were computed
    values, _ = run_jobs([job], 1, lambda *event: None)
    assert values[0] == tables["lemmas"]["seeds"][0]
    more = Job(lemmas.lemmas, settings_of(lemmas.SCALES, "smoke", 7), {"seed": 0}, job.folder)
    assert more.path == job.path
    other = Job(lemmas.lemmas, lemmas.SCALES["desk"], {"seed": 0}, job.folder)
    assert other.path != job.path
    with pytest.raises(InputError, match="seeds must be at least 1"):
        settings_of(lemmas.SCALES, "smoke", 0)


def test_other_code_measures_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The key follows the modules a measurement computes with, near and far, and not those that judge or draw."""
    module = lemmas.__name__
    package = Path(common.runtime.__file__).parent
    copied = shutil.copytree(package, tmp_path / "unlazy", ignore=shutil.ignore_patterns("*.pyc", "static"))

    def key() -> str:
        code_behind.cache_clear()
        return code_behind(module)

    before = key()
    monkeypatch.setattr(common.runtime, "__file__", str(copied / "runtime.py"))
    assert key() == before  # the same text elsewhere
    for name, counts in (
        ("studies/emergence/lemmas.py", True),
        ("models/truncated.py", True),
        ("theory/emergence.py", True),
        ("plots.py", False),
        ("claims/verdict.py", False),
        ("kernels/overlap.py", False),
    ):
        path = copied / name
        text = path.read_text()
        path.write_text(text + "\n# another line\n")
        assert (key() != before) == counts, name
        path.write_text(text)
    code_behind.cache_clear()


def test_absent_images_are_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNLAZY_DATA", str(tmp_path))
    told: list[str] = []
    found = left_out(["digits", "mnist", "cifar-10"], lambda what, done, total: told.append(what))
    assert set(found) == {"mnist", "cifar-10"}
    assert told == [f"leaving out {name}: its files are missing in the data folder" for name in ("mnist", "cifar-10")]
    for module in (clusters, teacher_student):
        with pytest.raises(InputError, match="none of the image sets is here"):
            module.reproduce("desk", runs=tmp_path, results=tmp_path, progress=lambda *event: None)


def test_every_emergence_study_is_listed() -> None:
    assert {entry.name for entry in find_studies("emergence")} == {*STUDIES, "zoo"}


def test_the_paper_scale_has_the_papers_size() -> None:
    for scales in (lemmas.SCALES, weights.SCALES, measure.SCALES):
        paper = scales["paper"]
        assert (paper.inputs, paper.patterns, paper.relevant, paper.pairs) == (500, 100, 5, 300)
        assert paper.seeds >= 10


# --- methods ---------------------------------------------------------------------------------------


def test_linearised_kernel_is_the_product_of_gradients() -> None:
    patterns = Patterns(inputs=12, patterns=10, relevant=3)
    net = mirrored_start(10, 4, relevant=3, gamma=0.25, deviation=patterns.deviation)
    phi, other = patterns.draw(6).phi, patterns.draw(5, "test").phi

    def gradient(point: torch.Tensor) -> torch.Tensor:
        leaves = [value.clone().requires_grad_() for value in (net.w, net.b, net.a)]
        output = (torch.clamp(point @ leaves[0].T + leaves[1], 0, 1) * leaves[2]).sum()
        return torch.cat([part.flatten() for part in torch.autograd.grad(output, leaves)])

    rows, columns = (torch.stack([gradient(point) for point in points]) for points in (phi, other))
    assert torch.allclose(methods.linearised_kernel(net, phi, other), rows @ columns.T, atol=1e-12)


@pytest.mark.parametrize("count", [5, 40])
def test_ridge_through_either_matrix_is_least_squares(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against augmented least squares with an intercept that is not penalised."""
    monkeypatch.setattr(methods, "RIDGES", (0.3,))
    features, test = normal(20, count), normal(9, count, key="test")
    y = torch.sign(normal(20, key="y"))
    split = methods.Split(y, torch.sign(normal(9, key="v")), torch.sign(normal(9, key="t")))
    found = methods.ridge_on_features(features, test, test, split)
    centred = features - features.mean(0)
    shift = 0.3 * centred.square().sum().item() / 20
    tall = torch.cat([centred, shift**0.5 * torch.eye(count, dtype=torch.float64)])
    target = torch.cat([y - y.mean(), torch.zeros(count, dtype=torch.float64)])
    readout = torch.linalg.lstsq(tall, target[:, None]).solution[:, 0]
    assert torch.allclose(found.output, (test - features.mean(0)) @ readout + y.mean(), atol=1e-10)
    kernel = methods.ridge_on_kernel(features @ features.T, test @ features.T, test @ features.T, split)
    shift = 0.3 * features.square().sum().item() / 20
    dual = torch.linalg.solve(features @ features.T + shift * torch.eye(20, dtype=torch.float64), y)
    assert torch.allclose(kernel.output, test @ features.T @ dual, atol=1e-10)


def test_the_ridge_is_chosen_on_the_validation_rows() -> None:
    features = normal(30, 3)
    y = torch.sign(features[:, 0])
    split = methods.Split(y, torch.sign(normal(30, 3, key="v")[:, 0]), -torch.ones(4, dtype=torch.float64))
    fit = methods.ridge_on_features(features, normal(30, 3, key="v"), normal(4, 3, key="t"), split)
    tried = []
    for ridge in methods.RIDGES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(methods, "RIDGES", (ridge,))
            on_validation = methods.ridge_on_features(
                features, features[:2], normal(30, 3, key="v"), methods.Split(y, y[:2], split.validation)
            )
            tried.append((on_validation.test, ridge))
    assert fit.ridge == max(tried, key=lambda pair: pair[0])[1]


def test_features_stay_in_their_range() -> None:
    phi = normal(200, 12)
    neurons, cosines = methods.random_neurons(12, 50, 3)(phi), methods.random_cosines(12, 50)(phi)
    assert neurons.min() >= 0
    assert neurons.max() <= 1
    assert cosines.abs().max() <= 1
    assert cosines.min() < -0.9


def test_the_ball_is_certified_from_both_sides() -> None:
    """Reached and certified meet; no random readout of that norm does better; with a large ball the labels are fitted."""
    features, y = torch.tanh(normal(80, 6)), torch.sign(normal(80, key="y"))
    found = methods.least_hinge_in_ball(features, y, 2.0, steps=4000, smoothing=0.005)
    assert found.certified <= found.reached
    assert found.reached - found.certified < 0.01
    for number in range(200):
        readout = normal(6, key=f"readout {number}")
        readout = 2 * readout / readout.norm()
        assert float((1 - y * (features @ readout)).clamp_min(0).mean()) >= found.certified
    easy = methods.least_hinge_in_ball(features, torch.sign(features[:, 0]), 1000.0, steps=2000)
    assert easy.reached < 0.1


def test_linearised_descent_starts_at_zero_and_follows_the_gradient() -> None:
    """One step against automatic differentiation of the linearised function, through Adam's first move (a sign)."""
    patterns = Patterns(inputs=12, patterns=10, relevant=3)
    net = mirrored_start(10, 4, relevant=3, gamma=0.25, deviation=patterns.deviation)
    sample = patterns.draw(50)
    seen: dict[int, torch.Tensor] = {}

    def watch(step: int, function: Any) -> None:
        seen[step] = function(sample.phi)

    methods.descend_linearised(net, lambda _: (sample.phi, sample.y), 1, 0.01, watch)
    kernel_features = []
    for point in sample.phi:
        leaves = [value.clone().requires_grad_() for value in (net.w, net.b, net.a)]
        output = (torch.clamp(point @ leaves[0].T + leaves[1], 0, 1) * leaves[2]).sum()
        kernel_features.append(torch.cat([part.flatten() for part in torch.autograd.grad(output, leaves)]))
    features = torch.stack(kernel_features)
    gradient = -(features * sample.y[:, None]).mean(0)
    moved = -0.01 * gradient / (gradient.abs() + 1e-8)
    assert torch.count_nonzero(seen[0]) == 0
    assert torch.allclose(seen[1], features @ moved, atol=1e-8)


def test_accuracy_counts_silence_as_half() -> None:
    assert accuracy(torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])) == 0.625


def test_the_counting_rule_is_right_on_27_of_32() -> None:
    """Exactly, on the population: majority of five against parity of five, half the inputs all equal."""
    patterns = Patterns(inputs=8, patterns=8, relevant=5)
    people = patterns.population()
    majority = torch.sign(people.phi[:, patterns.is_relevant()].sum(1))
    assert float(people.weights[majority == people.y].sum()) == pytest.approx(27 / 32)


def test_unit_vectors_embed_with_their_distances() -> None:
    units = normal(6, 2)
    units = units / units.norm(dim=1, keepdim=True)
    places = weights.embedding(units)
    wanted = torch.cdist(units, units).numpy()
    found = np.linalg.norm(places[:, None] - places[None], axis=2)
    assert np.allclose(found, wanted, atol=1e-7)


def test_stretched_neurons_keep_their_directions() -> None:
    patterns = Patterns(inputs=12, patterns=10, relevant=3)
    net = TruncatedNet(1e-10 * normal(4, 10), normal(4, key="b"), normal(4, key="a"))
    stretched = weights._stretched(net, patterns)
    assert torch.allclose(stretched.w * net.w.norm(dim=1, keepdim=True), net.w)
    assert torch.allclose(stretched.w.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_gathering_sees_two_clusters_and_no_clusters() -> None:
    axis, noise = normal(30), 0.02 * normal(40, 30, key="noise")
    sides = torch.sign(normal(40, key="sides"))
    gathered, smaller, cosines = clusters.gathering(sides[:, None] * axis + noise)
    assert gathered == 1
    assert smaller == float((sides > 0).sum().minimum((sides < 0).sum())) / 40
    assert cosines.abs().min() > 0.99
    one_sided = clusters.gathering(axis + noise)
    assert one_sided[:2] == (1, 0)
    assert clusters.gathering(normal(40, 30, key="noise"))[0] == 0


def test_two_classes_are_normalised_and_shared_between_splits() -> None:
    settings = clusters.SCALES["smoke"]
    x, y = clusters.two_classes(settings, "digits", "train", settings.samples)
    assert x.square().sum(1).mean().item() == pytest.approx(1)
    assert x.mean(0).abs().max() < 1e-12
    assert set(y.tolist()) == {-1, 1}
    test_x, _ = clusters.two_classes(settings, "digits", "test", 50)
    assert test_x.shape == (50, 64)
    assert test_x.mean(0).abs().max() > 1e-3  # centred on the training rows


def test_descent_in_function_space_is_descent_on_features() -> None:
    """With K = F F^T the coefficients are the pulls so far: one batch after another, against weights moved by hand."""
    features, y = normal(30, 5), torch.sign(normal(30, key="y"))
    kernel = features @ features.T
    direction = torch.ones(30, dtype=torch.float64)
    for _ in range(20):  # the method's own estimate of the largest eigenvalue
        direction = kernel @ (direction / direction.norm()) / 30
    rate = 1 / float(direction.norm())
    assert rate == pytest.approx(30 / float(torch.linalg.eigvalsh(kernel)[-1]), rel=0.2)
    order = [torch.arange(10), torch.arange(10, 20), torch.tensor([3, 3, 25])]
    seen: list[torch.Tensor] = []
    methods.descend_in_function_space(
        kernel, y, lambda step: order[step - 1], 3, lambda _, coefficients: seen.append(kernel @ coefficients)
    )
    weight = torch.zeros(5, dtype=torch.float64)
    assert torch.count_nonzero(seen[0]) == 0
    for number, rows in enumerate(order):
        pulled = [row for row in rows.tolist() if y[row] * (features[row] @ weight) < 1]
        for row in pulled:
            weight = weight + rate * (1 - number / 3) / len(rows) * y[row] * features[row]
        assert torch.allclose(seen[number + 1], features @ weight, atol=1e-10)


def test_infinite_kernel_is_that_of_many_neurons() -> None:
    patterns = Patterns(inputs=16, patterns=16, relevant=3)
    phi, other = patterns.draw(9).phi, patterns.draw(6, "test").phi
    found = methods.infinite_kernel(patterns, phi, other, at_once=4)
    net = mirrored_start(16, 50_000, relevant=3, gamma=0.25, deviation=patterns.deviation)
    wide = methods.linearised_kernel(net, phi, other) / net.units
    assert found.shape == (9, 6)
    assert float((found - wide).norm() / wide.norm()) < 0.03


def test_gradient_product_is_that_of_automatic_gradients() -> None:
    net = TruncatedNet(normal(6, 4), normal(6, key="b"), normal(6, key="a"))
    phi = normal(10, 4, key="phi")
    total = torch.zeros(4, 4, dtype=torch.float64)
    for point in phi:
        leaf = point.clone().requires_grad_()
        output = (torch.clamp(leaf @ net.w.T + net.b, 0, 1) * net.a).sum()
        (gradient,) = torch.autograd.grad(output, leaf)
        total += torch.outer(gradient, gradient)
    assert torch.allclose(measure.gradient_product(net, phi), total / 10, atol=1e-12)


def test_students_and_controls_learn_what_they_are_given() -> None:
    """Noise has the images' deviation; the network alone sees as many updates; agreement is with the teacher."""
    settings = teacher_student.SCALES["smoke"]
    x, _ = teacher_student.pictures("digits", "train")
    noise = teacher_student.injected("noise", x, 500, 0, "train")
    assert noise.shape == (500, *x.shape[1:])
    assert noise.std().item() == pytest.approx(x.std().item(), rel=0.05)
    assert not torch.equal(noise, teacher_student.injected("noise", x, 500, 0, "test"))
    first, second = (teacher_student.network(settings, x, 10, 0, who) for who in ("teacher", "student"))
    again = teacher_student.network(settings, x, 10, 0, "teacher")
    states = [torch.cat([value.flatten() for value in net.state_dict().values()]) for net in (first, second, again)]
    assert torch.equal(states[0], states[2])
    assert not torch.equal(states[0], states[1])
    labels = teacher_student.answers(first, x[:50])
    curves = teacher_student.learn(again, x[:50], labels, settings, 0, {"own": (x[:50], labels)})
    assert len(curves["own"]) == settings.epochs
    values = teacher_student.lesson(settings, "digits", "noise", 0)
    assert values["whole"] == pytest.approx((values["images"] + values["injected"]) / 2)
    guess = values["most_common"]["injected"]
    assert values["skills"]["injected"] == pytest.approx((values["injected"] - guess) / (1 - guess))
    assert {len(curve) for curve in values["curves"].values()} == {settings.epochs}


# --- falsified tables ------------------------------------------------------------------------------


def verdicts(module: Any, table: dict[str, Any]) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in module.claims(table)}


def repeated(rows: list[dict[str, Any]], changes: dict[str, float], count: int = 10) -> list[dict[str, Any]]:
    return [rows[0] | changes for _ in range(count)]


def test_lemma_claims_flip(smoke) -> None:
    table = copy.deepcopy(smoke[1]["lemmas"]) | {"scale": "desk"}
    good = {
        "lemma4_error": 1e-13, "lemma4_loss": 1e-13, "lemma4_outer": 1.0, "lemma4_bias_low": 0.5, "lemma4_bias_high": 0.4,
        "lemma4_inside": 0.3, "start_output": 0.0, "formula_error": 1e-14, "unevenness_1": 0.02, "ratio_1": 0.05, "ratio_2": 0.03,
        "exact_ratio_1": 0.02, "exact_ratio_2": 0.001,
    }  # fmt: skip
    table["seeds"] = repeated(table["seeds"], good)
    assert verdicts(lemmas, table) == dict.fromkeys(CLAIMS["lemmas"], "holds")
    for bad, claim in (
        ({"lemma4_loss": 1e-3}, "B1"),
        ({"lemma4_outer": 1.01}, "B1"),
        ({"lemma4_bias_low": 1.01}, "B1"),
        ({"lemma4_inside": 1.01}, "B1"),
        ({"start_output": 1e-16}, "B2"),
        ({"formula_error": 1e-6}, "B2"),
        ({"unevenness_1": 0.2}, "B3"),
        ({"ratio_1": 0.2}, "B3"),
        ({"ratio_2": 0.06}, "B4"),
        ({"exact_ratio_2": 0.03}, "B4"),
    ):
        found = verdicts(lemmas, table | {"seeds": repeated(table["seeds"], bad)})
        assert found[claim] == "partly", bad
        others = {name: verdict for name, verdict in found.items() if name != claim}
        assert set(others.values()) == {"holds"}


def test_weight_claims_flip(smoke) -> None:
    table = copy.deepcopy(smoke[1]["weights"]) | {"scale": "desk"}
    table["seeds"] = repeated(table["seeds"], {"step_2_least": 0.995, "raw_1": 0.52, "raw_2": 0.999})
    assert verdicts(weights, table) == {"B5": "holds", "B6": "holds"}
    low = table | {"seeds": repeated(table["seeds"], {"step_2_least": 0.985, "raw_1": 0.9, "raw_2": 0.9})}
    assert verdicts(weights, low) == {"B5": "fails", "B6": "fails"}
    half = table | {"seeds": repeated(table["seeds"], {"raw_1": 0.9})}
    assert verdicts(weights, half) == {"B5": "holds", "B6": "partly"}


def test_fixed_feature_claims_flip(smoke) -> None:
    table = copy.deepcopy(smoke[1]["fixed-features"]) | {"scale": "desk"}
    fixed = {"linearised": 0.8, "random": 0.8, "random_50": 0.84}
    table["network_structured"] = repeated(table["network_structured"], {"accuracy": 0.998})
    table["fixed_structured"] = repeated(table["fixed_structured"], fixed)
    table["network_unstructured"] = repeated(table["network_unstructured"], {"accuracy": 0.503})
    table["fixed_unstructured"] = repeated(table["fixed_unstructured"], dict.fromkeys(fixed, 0.5))
    table["infinite_structured"] = repeated(table["infinite_structured"], {"infinite": 0.8})
    table["infinite_unstructured"] = repeated(table["infinite_unstructured"], {"infinite": 0.5})
    certified = {"bound": 0.415, "certified_neurons": 0.45, "certified_cosines": 0.46}
    table["ball"] = repeated(table["ball"], certified)
    assert verdicts(study, table) == dict.fromkeys(CLAIMS["fixed-features"], "holds")

    def changed(name: str, changes: dict[str, float]) -> dict[str, str]:
        return verdicts(study, table | {name: repeated(table[name], changes)})

    assert changed("network_structured", {"accuracy": 0.98})["B7"] == "fails"
    assert changed("network_structured", {"accuracy": 0.85})["B8"] == "fails"
    assert changed("fixed_structured", {"random_50": 0.95})["B8"] == "partly"
    assert changed("infinite_structured", {"infinite": 0.95})["B8"] == "partly"
    assert changed("infinite_unstructured", {"infinite": 0.6})["B9"] == "partly"
    assert changed("network_unstructured", {"accuracy": 0.6})["B9"] == "partly"
    assert changed("fixed_unstructured", dict.fromkeys(fixed, 0.55))["B9"] == "partly"
    assert changed("ball", {"certified_neurons": 0.40})["B10"] == "partly"
    one_bad = [*table["ball"][1:], table["ball"][0] | {"certified_neurons": 0.40}]
    assert verdicts(study, table | {"ball": one_bad})["B10"] == "partly"  # never means never
    unbound = changed("ball", {"bound": 0.1})
    assert unbound["B10"] == "cannot tell"  # judged only where the bound binds


def test_cluster_claim_flips(smoke) -> None:
    table = copy.deepcopy(smoke[1]["clusters"]) | {"scale": "desk"}
    rows = table["images"]["digits"]

    def judged(**changes: dict[str, float]) -> dict[str, str]:
        changed = {name: repeated(rows[name], changes.get(name, {})) for name in rows}
        return verdicts(clusters, table | {"images": {"digits": changed}})

    good, bad = {"gathered_4": 0.98, "smaller_4": 0.4}, {"gathered_4": 0.1, "smaller_4": 0.0}
    assert judged(small_true=good, default_true=good) == {"B11": "holds"}
    assert judged(small_true=good, default_true=good | {"gathered_4": 0.1}) == {"B11": "partly"}
    assert judged(small_true=bad, default_true=bad) == {"B11": "fails"}
    assert judged(small_true=good, default_true=good, small_shuffled=bad) == {"B11": "holds"}  # a control


def test_other_image_sets_do_not_judge(smoke) -> None:
    """The claim is about the first image set; a second one stands beside it as controls."""
    table = copy.deepcopy(smoke[1]["clusters"]) | {"scale": "desk"}
    good = {"gathered_4": 0.98, "smaller_4": 0.4}
    rows = {name: repeated(values, good) for name, values in table["images"]["digits"].items()}
    bad = {name: repeated(values, {"gathered_4": 0.0, "smaller_4": 0.0}) for name, values in rows.items()}
    both = table | {"images": {"digits": rows, "others": bad}}
    (row,) = clusters.claims(both)
    assert row["verdict"] == "holds"
    assert any(control["name"].startswith("others") for control in row["controls"])


def test_teacher_claim_flips(smoke) -> None:
    table = copy.deepcopy(smoke[1]["teacher-student"]) | {"scale": "desk"}
    rows = table["lessons"]["digits/noise"]

    def judged(**changes: float) -> dict[str, str]:
        return verdicts(teacher_student, table | {"lessons": {"digits/noise": repeated(rows, changes)}})

    good = {"images": 0.9, "injected": 0.5, "whole": 0.7, "direct": 0.88}
    assert judged(**good) == {"B12": "holds"}
    assert judged(**(good | {"injected": 0.95})) == {"B12": "partly"}
    assert judged(**(good | {"direct": 0.6})) == {"B12": "partly"}
    assert judged(**(good | {"injected": 0.95, "direct": 0.6})) == {"B12": "fails"}
    natural = table | {"lessons": {"digits/others": repeated(rows, good | {"injected": 0.95})}}
    assert verdicts(teacher_student, natural) == {"B12": "cannot tell"}  # only noise judges
