"""Doses of hard labels: the labels themselves, pairs with halves exchanged, ranks with ties, and verdicts that can flip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from repository import RESULTS
from unlazy.claims.rule import judge_claim
from unlazy.data.images import load_images
from unlazy.data.relabelling import redraw_labels
from unlazy.runtime import InputError
from unlazy.store import Run
from unlazy.studies.engine import reproduce
from unlazy.studies.halfspace.label_hardness import DOSES, SCALES, STUDY, DoseStack, load_clustered_images, read_halves
from unlazy.studies.ranks import rank_correlation
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.study import Results, Work
from unlazy.studies.table import Table
from unlazy.studies.trainings import open_run

pytest.importorskip("sklearn")


def smoke_case(net: str = "relu", seeds: tuple[int, ...] = (0, 1)) -> DoseStack:
    return next(case for case in STUDY.cases(SCALES["smoke"], seeds) if (case.setup, case.net) == ("paper", net))


# --- labels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_hard_labels_is_drawn_by_lot(share: float) -> None:
    images, hard = load_images("digits"), (5, 6, 7, 8, 9)
    drawn = redraw_labels(images, hard, share, seed=3)
    is_hard = torch.isin(images.labels, torch.tensor(hard))
    assert torch.equal(drawn.labels[~is_hard], images.labels[~is_hard])
    assert set(drawn.labels[is_hard].tolist()) <= set(hard)
    changed = float((drawn.labels != images.labels)[is_hard].double().mean())
    assert changed == pytest.approx(share * 4 / 5, abs=4 * np.sqrt(0.25 / int(is_hard.sum())))
    assert torch.equal(drawn.labels, redraw_labels(images, hard, share, seed=3).labels)
    with pytest.raises(InputError, match="share"):
        redraw_labels(images, hard, 1.5)


def test_each_dose_leaves_the_easy_half_alone() -> None:
    images = load_clustered_images(smoke_case(), None)
    for dose, easy, seed in smoke_case().members():
        for split in ("train", "test"):
            own = getattr(images, split).labels
            new, is_easy = images.labelled(split, dose, easy, seed).labels, torch.isin(own, torch.tensor(easy))
            assert torch.equal(new[is_easy], own[is_easy])
            assert not torch.isin(new[~is_easy], torch.tensor(easy)).any()
            assert not torch.equal(new, own)


# --- numbers ---------------------------------------------------------------------------------------------------


def test_rank_correlation_with_ties_is_that_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    for _ in range(20):
        one, other = random.integers(0, 4, 12), random.normal(size=12)
        assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
    assert np.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))


def run_with(values: np.ndarray, folder: Path) -> Run:
    """A run with one array."""
    case = smoke_case()
    members = case.recipe(64).members
    with open_run(folder, Work("label-hardness", "smoke", folder), members, recipe={}, model={}, data={}) as writer:
        writer.record(7, {}, {"test_accuracy": values})
        writer.finish()
    return Run(folder)


def test_halves_are_means_over_both_choices_of_the_easy_half(tmp_path: Path) -> None:
    """Against a loop over members; what is due to the images alone cancels."""
    case = smoke_case()
    values = np.random.default_rng(1).normal(size=(len(case.members()), 10))
    easy, hard = read_halves(case, run_with(values, tmp_path / "random"), "test_accuracy", [7])
    for place, dose in enumerate(DOSES):
        for seed in case.seeds:
            pair = [row for row, (d, _, s) in enumerate(case.members()) if (d, s) == (dose, seed)]
            gaps = []
            for row in pair:
                inside = np.isin(np.arange(10), case.members()[row][1])
                gaps.append(values[row, inside].mean() - values[row, ~inside].mean())
            assert (easy - hard)[0, place, seed] == pytest.approx(np.mean(gaps))
    same_images = np.tile(np.arange(10.0), (len(values), 1))
    easy, hard = read_halves(case, run_with(same_images, tmp_path / "images"), "test_accuracy", [7])
    assert np.allclose(easy, hard)


# --- the study -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("hardness")
    request = Request("label-hardness", "smoke", folder / "runs", folder / "results")
    done = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert not done.failed
    assert not done.not_drawn
    return request.with_table(Table.read(request.folder / "table.csv"))


def test_a_dose_trains_as_it_would_alone(smoke: Results, tmp_path: Path) -> None:
    """The same start and the same batches for all doses of a seed: a stack of one seed gives the same numbers."""
    work = Work("label-hardness", "smoke", tmp_path)
    alone = replace(smoke_case(), seeds=(1,))
    run = alone.training(work).run(work)
    assert isinstance(run, Run)
    easy, hard = read_halves(alone, run, "test_accuracy", run.array_steps("test_accuracy")[-1:])
    found = smoke.table.select("hardness", "end", setup="paper", net="relu", dose="half by lot", seeds=[1])
    assert found[0] == pytest.approx((easy - hard)[0, list(DOSES).index("half by lot"), 0], abs=1e-6)


@pytest.mark.parametrize(("sign", "verdict"), [(1.0, "holds"), (-1.0, "fails")])
def test_verdicts_can_flip(sign: float, verdict: str) -> None:
    table = Table.read(RESULTS / "label-hardness" / "desk" / "table.csv")
    (claim,), seeds = STUDY.claims, STUDY.seeds_of("desk")
    made = Table.from_rows([{**row, "value": sign * (0.51 + abs(row["value"]))} for row in table.rows()], digits=17)
    assert {part["verdict"] for part in judge_claim(claim, made, seeds)["parts"]} == {verdict}
    nothing = judge_claim(claim, table.without(setup="paper", net="pwc"), seeds)
    assert [part["verdict"] for part in nothing["parts"]][3:] == ["not measured"] * 3
