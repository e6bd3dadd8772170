"""The studies of the adaptive tangent paper: they run small, and a falsified table flips each verdict."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unlazy import InputError
from unlazy.store import Run
from unlazy.studies.tangent import adaptive, penalties
from unlazy.studies.tangent.direct import least_over_factors, least_over_transformations
from unlazy.studies.tangent.images import twos_and_threes
from unlazy.studies.tangent.label_alignment import study as label_alignment
from unlazy.studies.tangent.label_alignment.measure import measure, near_over_far, rank_correlation
from unlazy.studies.tangent.label_alignment.train import (
    MOMENTUM,
    RATE,
    Schedule,
    Settings,
    descend,
    smooth_targets,
    train,
)
from unlazy.training.ensemble import Member, batch_order

FRAME: dict[str, Any] = {"scale": "desk", "settings": {}, "provenance": {}, "run": "0"}


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["id"]: row["verdict"] for row in rows}


@pytest.mark.parametrize(
    ("study", "name", "ids", "figures"),
    [
        (penalties, "penalties", {"L4", "L11"}, {"figure-2", "exponents"}),
        (adaptive, "adaptive", {"L1", "L2", "L3", "L5", "L7"}, {"ranks", "difficulty"}),
        (label_alignment, "label-alignment", {"L6", "L8", "L9"}, {"figure-1", "figure-3", "linearisation"}),
    ],
    ids=["penalties", "adaptive", "label-alignment"],
)
def test_smoke_scale_runs_writes_and_judges_nothing(
    study: Any, name: str, ids: set[str], figures: set[str], tmp_path: Path
) -> None:
    table = study.reproduce("smoke", runs=tmp_path / "runs", results=tmp_path / "results", progress=quiet)
    assert verdicts(table["claims"]) == dict.fromkeys(ids, "cannot tell")
    assert json.loads((tmp_path / "results" / name / "smoke.json").read_text())["study"] == name
    written = {path.stem for path in (tmp_path / "results" / name / "smoke").glob("*.png")}
    assert written == figures
    with pytest.raises(InputError, match="scale"):
        study.reproduce("huge", runs=tmp_path, results=tmp_path, progress=quiet)


# --- verdicts ----------------------------------------------------------------------------------------


def penalty_table(**changes: Any) -> dict[str, Any]:
    one = {"near_zero": 1 - 1e-4, "exponent": 1.0, "far": 0.01, "read": [0.7], "published": [0.7]}
    case = {"penalty": "p", "predicted": 0.5, "fitted": changes.pop("fitted", 0.5001)}
    return FRAME | {"figure_2": dict.fromkeys("abc", one | changes), "exponents": [case] * 6}


def test_penalty_claims_flip() -> None:
    assert verdicts(penalties.claims(penalty_table())) == {"L4": "holds", "L11": "holds"}
    assert verdicts(penalties.claims(penalty_table(fitted=0.51)))["L11"] == "fails"
    for change in ({"near_zero": 0.9}, {"exponent": 2.1}, {"read": [0.71]}):
        assert verdicts(penalties.claims(penalty_table(**change)))["L4"] == "partly"  # one of three parts
    everything = penalty_table(near_zero=0.9, exponent=2.1, read=[0.71])
    assert verdicts(penalties.claims(everything))["L4"] == "fails"


def adaptive_table(**changes: Any) -> dict[str, Any]:
    seeds = 6
    values: dict[str, Any] = {
        "theorem_1": [1e-9] * seeds,
        "theorem_2": [1e-9] * seeds,
        "function_change": [1e-10] * seeds,
        "rank_fixed": [[8.0, 6.0]] * seeds,
        "rank_adapted": [[3.0, 5.0]] * seeds,
        "rank_one_sided": [[4.0, 5.5]] * seeds,
        "sizes": [[1.0, 3.0, 2.0]] * seeds,
        "stretches": [[1.1, 1.4, 1.2]] * seeds,
        "gap": [1e-9] * seeds,
        "stationarity": [1e-5] * seeds,
        "starts_apart": [1e-9] * seeds,
        "rises": [0.0] * seeds,
        "error_fixed": [0.1] * seeds,
        "error_adapted": [0.1] * seeds,
    }
    adaptive_flipped = {name: [value] * seeds for name, value in changes.items()}
    return FRAME | {"values": values | adaptive_flipped}


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("L1", {"theorem_1": 1e-5}),
        ("L2", {"function_change": 1e-3}),
        ("L3", {"theorem_2": 1e-5}),
        ("L5", {"rank_adapted": [3.0, 6.5]}),
        ("L7", {"stretches": [1.1, 1.2, 1.3]}),
    ],
)
def test_adaptive_claims_flip(claim: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "FLIPPED", (0.0, 0.1, 0.2))
    assert set(verdicts(adaptive.claims(adaptive_table())).values()) == {"holds"}
    turned = verdicts(adaptive.claims(adaptive_table(**change)))
    assert turned.pop(claim) == "fails"
    assert set(turned.values()) == {"holds"}


def label_table(**changes: float) -> dict[str, Any]:
    values = {
        "similarity": (0.2, 0.4),
        "similarity_centred": (0.2, 0.4),
        "similarity_start": (0.1, 0.1),
        "similarity_end": (0.2, 0.4),
        "near_over_far": (1.1, 3.0),
        "nearest_over_far": (1.1, 4.0),
        "near_over_far_relative": (1.1, 3.0),
        "near_over_far_start": (1.0, 1.0),
        "rank_correlation": (-0.1, -0.8),
        "snr_mean": (40.0, 40.0),
        "snr_best_single": (20.0, 15.0),
        "fit": (0.0, 0.0),
    }
    columns = {
        f"{name}_{task}": value
        for name, pair in values.items()
        for task, value in zip(("smooth", "sign"), pair, strict=True)
    }
    return FRAME | {"values": {name: [value] * 5 for name, value in (columns | changes).items()}}


def test_label_claims_flip() -> None:
    assert verdicts(label_alignment.claims(label_table())) == {"L6": "holds", "L8": "holds", "L9": "holds"}
    assert verdicts(label_alignment.claims(label_table(similarity_sign=0.1)))["L6"] == "fails"
    assert verdicts(label_alignment.claims(label_table(near_over_far_sign=0.9)))["L8"] == "partly"
    both = label_table(near_over_far_sign=0.9, rank_correlation_sign=0.2)
    assert verdicts(label_alignment.claims(both))["L8"] == "fails"
    assert verdicts(label_alignment.claims(label_table(snr_mean_sign=20.0, snr_mean_smooth=25.0)))["L9"] == "fails"
    assert verdicts(label_alignment.claims(label_table(snr_mean_sign=20.0)))["L9"] == "partly"
    mixed = copy.deepcopy(label_table())
    mixed["values"]["similarity_sign"][0] = 0.1  # one seed of five is not 90 %
    assert verdicts(label_alignment.claims(mixed))["L6"] == "partly"


# --- parts -------------------------------------------------------------------------------------------


def test_direct_searches_know_the_easy_answers() -> None:
    """Nothing to learn costs nothing; one row and one entry have the closed form z^3 (z - 1) = v^2."""
    from unlazy.theory.penalties import Power, effective_penalty

    assert least_over_factors(torch.zeros(2, 2, dtype=torch.float64), 0) == pytest.approx(0, abs=1e-9)
    row = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    wanted = float(effective_penalty(Power(2), torch.tensor(3.0, dtype=torch.float64)))
    assert least_over_transformations(row, torch.tensor([3.0], dtype=torch.float64), 0) == pytest.approx(
        wanted, rel=1e-7
    )


def test_near_over_far_and_rank_correlation_by_hand() -> None:
    distance = np.arange(10.0)
    diagonal = np.array([6.0, 9, 9, 9, 9, 2, 2, 2, 2, 2])
    assert near_over_far(diagonal, distance) == 3
    assert near_over_far(diagonal, distance, 0.5) == 4.2
    assert rank_correlation(-(distance**3), distance) == pytest.approx(-1)


SMALL = Settings(
    seeds=2,
    data="digits",
    images=30,
    looked_at=10,
    width=6,
    epochs=3,
    readout_epochs=3,
    readout_cycle=2,
    batch=8,
    points=4,
)


def test_images_are_centred_unit_twos_and_threes() -> None:
    x, labels = twos_and_threes(SMALL.data, SMALL.images)
    assert torch.allclose(x.mean(1), torch.zeros(30), atol=1e-6)
    assert torch.allclose(x.norm(dim=1), torch.ones(30), atol=1e-5)
    assert set(labels.tolist()) == {-1.0, 1.0}
    with pytest.raises(InputError, match="twos and threes"):
        twos_and_threes("digits", 9999)
    with pytest.raises(InputError, match="looked at"):
        Settings(seeds=1, images=10, looked_at=11)


def test_descent_is_torch_sgd_with_momentum() -> None:
    """One member against torch.optim.SGD on the same batches; the stack gives each member what it gets alone."""
    x, labels = twos_and_threes(SMALL.data, SMALL.images)
    targets = labels[None, :, None].expand(2, -1, -1)
    start = torch.randn(2, x.shape[1], 1, generator=torch.Generator().manual_seed(0)) / 8
    together = start.clone().requires_grad_()
    told: list[torch.Tensor] = []
    schedule = Schedule(range(SMALL.epochs), lambda epoch: 0.1 / (1 + epoch), lambda done, now: told.append(now()))
    descend(lambda some: x[some] @ together, [together], targets, [4, 5], SMALL.batch, schedule)
    assert len(told) == SMALL.epochs
    losses = told[-1]
    for member, seed in enumerate((4, 5)):
        weights = start[member].clone().requires_grad_()
        sgd = torch.optim.SGD([weights], lr=0.1, momentum=MOMENTUM)
        for epoch in range(SMALL.epochs):
            sgd.param_groups[0]["lr"] = 0.1 / (1 + epoch)
            for some in batch_order([Member(seed, RATE)], epoch, 30)[0].split(SMALL.batch):
                sgd.zero_grad()
                (x[some] @ weights - labels[some, None]).square().mean().backward()
                sgd.step()
        assert torch.allclose(together[member], weights, atol=1e-5)
        with torch.no_grad():
            assert float(losses[member]) == pytest.approx(
                float((x @ weights - labels[:, None]).square().mean()), rel=1e-4
            )


def test_runs_are_kept_and_targets_differ_by_seed(tmp_path: Path) -> None:
    run = train(SMALL, tmp_path, "smoke", quiet)
    assert run.status()["state"] == "finished"
    smooth = run.array("smooth", 0)
    assert smooth.shape == (2, 30, 1)
    assert not np.allclose(smooth[0], smooth[1])
    x, labels = twos_and_threes(SMALL.data, SMALL.images)
    assert np.allclose(smooth, smooth_targets(SMALL, x, labels, [0, 1]).numpy(), atol=1e-6)
    start, end = run.checkpoint(0), run.checkpoint(SMALL.epochs)
    first = "model/value_layers.0.weight"
    assert np.array_equal(start[first][0], start[first][2])  # the same start for both tasks of a seed
    assert not np.array_equal(end[first][0], end[first][2])
    before = (run.folder / "metrics.jsonl").read_bytes()
    assert train(SMALL, tmp_path, "smoke", quiet).id == run.id
    assert (Run(run.folder).folder / "metrics.jsonl").read_bytes() == before


def test_a_training_cut_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """Killed after its third epoch, once with and once without a checkpoint there to go on from."""

    class KilledError(Exception):
        pass

    settings = replace(SMALL, epochs=6)
    assert settings.trajectory() == [0, 1, 2, 4, 6]
    whole = train(settings, tmp_path / "whole", "smoke", quiet)
    for last in (2, 3):

        def kill(what: str, done: int, total: int, last: int = last) -> None:
            if done == last + 1:
                raise KilledError

        with pytest.raises(KilledError):
            train(settings, tmp_path / str(last), "smoke", kill)
        seen: list[int] = []
        resumed = train(settings, tmp_path / str(last), "smoke", lambda what, done, total, seen=seen: seen.append(done))
        assert seen[0] == 3  # epochs 1 and 2 are kept, 3 is not
        for epoch in settings.trajectory():
            before, after = whole.checkpoint(epoch), resumed.checkpoint(epoch)
            assert all(np.array_equal(before[name], after[name]) for name in before)
        assert [line.scalars for line in whole.lines] == [line.scalars for line in resumed.lines]


def test_trajectory_kernel_is_measured_beside_the_line(tmp_path: Path) -> None:
    settings = replace(SMALL, points=48)
    values, _ = measure(settings, train(settings, tmp_path, "smoke", quiet), quiet)
    for task in ("smooth", "sign"):
        assert min(values[f"way_over_line_{task}"]) >= 1  # no way is shorter than the straight one
        assert max(values[f"kernels_agree_{task}"]) <= 1 + 1e-6
        gained = np.array(values[f"snr_trajectory_{task}"]) - np.array(values[f"snr_best_single_{task}"])
        assert gained.min() > 10
