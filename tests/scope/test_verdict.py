"""The verdict: the estimate and its range, the twin in its place, phases, every way to keep silent, and what it looks like."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from unlazy.kernels.compare import centered_alignment, kernel_distance, relative_change
from unlazy.runtime import InputError
from unlazy.scope.history import History
from unlazy.scope.lazy_thresholds import LEAST_GAP, MOST_GAP, Thresholds, load_thresholds
from unlazy.scope.summary import MEASURES, TrainingSummary, TwinSummary, summarise
from unlazy.scope.verdict import LABELS, MEANINGS, judge

LIMITS = Thresholds(
    errors=(0.001, 0.1, 0.5, 2.0),
    gaps=(0.002, 0.2, 0.5, 1.0),
    lazy_gap=0.1,
    rich_gap=0.5,
    margin=1.1,
    estimates=(0.01, 1.0),
    lowest=(0.25, 0.5),
    highest=(4.0, 1.5),
    source={"text": "a test"},
)


def seen(error: float = 0.02, **changes: object) -> TrainingSummary:
    """A training that learned something, with this linearisation error at its end."""
    measures = {"linearisation_error": error, "gate_flips": 0.3}
    start = TrainingSummary(measures, (1.0, 0.1, 0.2), samples=128, measurements=12)
    return replace(start, **changes)  # type: ignore[arg-type]


def curve(**by_step: float) -> dict[str, dict[int, float]]:
    """The curve of the linearisation error: values by step, given as s4=0.1."""
    return {"linearisation_error": {int(step[1:]): value for step, value in by_step.items()}}


# --- labels --------------------------------------------------------------------------------------------------


def test_far_from_the_borders_the_word_is_clear() -> None:
    assert [judge(seen(error), LIMITS).label for error in (0.01, 0.2, 0.9)] == ["lazy", "mixed", "rich"]


def test_the_gap_is_read_off_the_calibrated_curve() -> None:
    for error, gap in (
        (0.001, 0.002),
        (0.1, 0.2),
        (0.5, 0.5),
        (2.0, 1.0),
        (math.sqrt(0.1 * 0.5), math.sqrt(0.2 * 0.5)),
    ):
        assert LIMITS.gap(error) == pytest.approx(gap)
        assert LIMITS.error_at(gap) == pytest.approx(error)
    assert LIMITS.gap(0.0) == LEAST_GAP
    assert LIMITS.gap(1e6) == MOST_GAP
    gaps = [LIMITS.gap(error) for error in np.geomspace(1e-5, 10, 80)]
    assert all(a <= b for a, b in pairwise(gaps))


def test_the_range_is_the_error_on_unseen_trainings() -> None:
    verdict = judge(seen(2.0), LIMITS)
    assert verdict.gap == pytest.approx(1.0)
    assert verdict.gap_range == pytest.approx((0.5, 1.5))
    low, high = LIMITS.gap_range(0.1)  # half way, in logarithms
    assert (low / 0.1, high / 0.1) == pytest.approx((math.sqrt(0.25 * 0.5), math.sqrt(4 * 1.5)))
    assert judge(seen(0.0), LIMITS).gap_range == (0.0, pytest.approx(4 * LEAST_GAP))  # nothing is known below


def test_near_a_border_there_is_neither_word_nor_range() -> None:
    for border in (0.1, 0.5):
        verdict = judge(seen(LIMITS.error_at(border * 1.05)), LIMITS)
        assert (verdict.label, verdict.gap_range) == ("cannot tell", None)
        assert "too near the border" in verdict.reasons[0]
        assert "range" not in verdict.gap_text()
    assert judge(seen(LIMITS.error_at(0.5 * 1.15)), LIMITS).label == "rich"


def test_a_growing_error_never_makes_it_lazier() -> None:
    order = {"lazy": 0, "mixed": 1, "rich": 2}
    labels = [judge(seen(error), LIMITS).label for error in np.geomspace(0.001, 2, 60)]
    ranks = [order[label] for label in labels if label in order]
    assert ranks == sorted(ranks)
    assert set(labels) == set(LABELS)


def test_other_measures_have_no_vote() -> None:
    plain = judge(seen(0.9), LIMITS)
    others = {"tangent_change": 1e-6, "alignment_gain": -0.4, "parameter_motion": 1e-9, "gate_flips": 0.0}
    against = judge(seen(0.9, measures={"linearisation_error": 0.9} | others), LIMITS)
    assert (against.label, against.gap, against.reasons) == (plain.label, plain.gap, ())
    assert against.measures == others
    assert "alignment_gain -0.4" in str(against)


def test_a_wide_interval_over_samples_silences_it() -> None:
    assert judge(seen(0.03, interval=(0.025, 0.035)), LIMITS).label == "lazy"
    assert judge(seen(0.03, interval=(0.008, 0.12)), LIMITS).label == "cannot tell"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"measurements": 1}, "one at the start and one later"),
        ({"samples": 16}, "too small"),
        ({"losses": (1.0, 0.98, 0.98)}, "hardly fell"),
        ({"losses": (1.0, 0.2, math.nan)}, "broke down"),
        ({"measures": {"gate_flips": 0.001}, "left_out": {"linear": "no memory"}}, "linear: no memory"),
        ({"measures": {}}, "linearisation could not be measured"),
    ],
)
def test_reasons_to_keep_silent(changes: dict[str, object], reason: str) -> None:
    assert judge(seen(), LIMITS).label == "lazy"
    verdict = judge(seen(**changes), LIMITS)  # type: ignore[arg-type]
    assert verdict.label == "cannot tell"
    assert verdict.gap_range is None
    assert any(reason in one for one in verdict.reasons), verdict.reasons


def test_a_scope_that_stopped_says_up_to_where_it_saw() -> None:
    verdict = judge(seen(curves=curve(s0=0.0, s57=0.02)), LIMITS, stopped="parameters were added")
    assert verdict.label == "cannot tell"
    assert verdict.reasons == (
        "It was lazy up to step 57; not seen since.",
        "The scope stopped measuring: parameters were added",
    )


def test_a_run_without_losses_is_judged_by_its_measures() -> None:
    assert judge(seen(losses=None), LIMITS).label == "lazy"


# --- the twin ------------------------------------------------------------------------------------------------


def test_a_trained_twin_takes_the_place_of_the_estimate() -> None:
    twin = TwinSummary({5: 0.02, 50: 0.2, 300: 0.501}, 0.46, 1.08)
    verdict = judge(seen(0.01, curves=curve(s5=0.01, s300=0.01), twin=twin), LIMITS)
    assert (verdict.label, verdict.gap, verdict.gap_range) == ("rich", 0.501, None)  # the truth needs no margin
    assert "Loss on the same samples 0.46; this network linearised at its start, with the same optimiser" in str(
        verdict
    )
    assert "is at 1.08." in str(verdict)
    assert verdict.when == {"network": 50}
    assert verdict.evidence[0].measure == "twin_gap"
    simulated = judge(seen(twin=replace(twin, simulated=True)), LIMITS)
    assert "would be at about 1.08" in simulated.gap_text()
    assert "Loss" not in judge(seen(twin=replace(twin, loss=math.nan)), LIMITS).gap_text()


def test_a_twin_that_was_compared_once_does_not_invent_phases() -> None:
    errors = curve(s0=0.0, s10=0.01, s100=0.9)
    agrees = judge(seen(0.9, curves=errors, twin=TwinSummary({100: 0.8}, math.nan, math.nan)), LIMITS)
    assert agrees.when == {"network": 100}
    contradicts = judge(seen(0.9, curves=errors, twin=TwinSummary({100: 0.3}, math.nan, math.nan)), LIMITS)
    assert (contradicts.label, contradicts.phases, contradicts.when) == ("mixed", (), {})


def test_a_twin_that_stopped_early_does_not_decide() -> None:
    history = random_history()
    last = history.steps[-1]
    history.add(last - 1, {"twin_gap": 0.01, "twin_loss": 1.0, "twin_network_loss": 1.0, "twin_simulated": 0.0}, {})
    found = summarise(history)
    assert found.twin is None
    assert f"the twin was trained up to step {last - 1} only" in found.notes[-1]
    history.add(last, {"twin_gap": 0.7, "twin_loss": 1.0, "twin_network_loss": 0.5, "twin_simulated": 0.0}, {})
    assert summarise(history).twin == TwinSummary({last - 1: 0.01, last: 0.7}, 0.5, 1.0, False)


def test_a_gap_of_zero_is_a_gap() -> None:
    """A learning rate of zero at first, or a network that left the numbers behind."""
    twin = TwinSummary({1: 0.0, 5: 0.0, 9: 0.3, 20: 0.8}, math.nan, math.nan)
    verdict = judge(seen(0.9, curves=curve(s1=0.0, s20=0.9), twin=twin), LIMITS)
    assert [phase.word for phase in verdict.phases] == ["lazy", "mixed", "rich"]


def test_a_border_between_distant_measurements_is_not_interpolated() -> None:
    verdict = judge(seen(0.9, curves=curve(s1=0.001, s5=0.001, s200=0.9)), LIMITS)
    assert verdict.when_text() == "Lazy until some step between 5 and 200, rich since."


def test_numbers_of_the_start_are_not_those_of_the_end() -> None:
    history = random_history()
    history.scalars["tangent_distance"] = {0: 0.0}
    assert "tangent_distance" not in summarise(history).measures


def test_an_interval_belongs_to_its_value() -> None:
    """With batch-norm, outputs and linearised outputs are taken under different statistics."""
    history = random_history()
    history.scalars["linearisation_error"][history.steps[-1]] *= 1.5
    assert summarise(history).interval is None


def test_a_twin_goes_through_a_history() -> None:
    history = random_history()
    assert summarise(history).twin is None
    history.add(5, {"twin_gap": 0.3, "twin_loss": 1.0, "twin_network_loss": 0.5, "twin_simulated": 0.0}, {})
    assert summarise(history).twin == TwinSummary({5: 0.3}, 0.5, 1.0, False)


# --- phases --------------------------------------------------------------------------------------------------


def test_phases_and_when_they_ended() -> None:
    errors = curve(s0=0.0, s1=0.005, s4=0.01, s16=0.1, s64=0.9, s200=1.2)
    verdict = judge(seen(1.2, curves=errors), LIMITS)
    assert [(p.word, p.first, p.last) for p in verdict.phases] == [("lazy", 1, 4), ("mixed", 16, 16), ("rich", 64, 200)]
    first, second = verdict.phases[0].until, verdict.phases[1].until
    assert first is not None
    assert second is not None
    gap = LIMITS.gap(0.01), LIMITS.gap(0.1)  # the crossing of 0.1 between steps 4 and 16, in logarithms
    share = math.log(0.1 / gap[0]) / math.log(gap[1] / gap[0])
    assert first == pytest.approx(4 * (16 / 4) ** share, rel=0.06)
    assert 16 <= second <= 64
    assert verdict.when_text() == f"Lazy until about step {first}, mixed until about step {second}, rich since."
    assert (verdict.when, verdict.when_after) == ({"network": 16}, {"network": 4})


def test_wobbling_around_a_border_is_no_new_phase() -> None:
    at = LIMITS.error_at(0.1)
    verdict = judge(
        seen(0.5 * at, curves=curve(s1=0.5 * at, s2=1.03 * at, s3=0.5 * at, s4=1.04 * at, s9=0.5 * at)), LIMITS
    )
    assert [phase.word for phase in verdict.phases] == ["lazy"]
    assert verdict.when_text() == ""


def test_a_training_that_comes_back_is_told_so() -> None:
    verdict = judge(seen(0.01, curves=curve(s0=0.0, s2=0.9, s30=0.01, s90=0.01)), LIMITS)
    assert verdict.label == "lazy"
    assert re.fullmatch(r"Rich until some step between 2 and 30, lazy since\.", verdict.when_text())


def test_a_measure_that_is_not_a_number_is_no_measurement() -> None:
    verdict = judge(seen(0.9, curves=curve(s0=0.0, s2=0.01, s4=math.nan, s9=0.9)), LIMITS)
    assert (verdict.when_after["network"], verdict.when["network"]) == (2, 9)


# --- words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0.01, 0.2, 0.9])
def test_every_verdict_says_which_twin_its_gap_is_about(error: float) -> None:
    text = str(judge(seen(error), LIMITS))
    assert "(its linearised twin)" in text.partition("Gap to that linear model")[0]
    assert "scope.twin(...) measures it" in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize("ends", [(0.2, 0.4), (0.05, 0.4), (0.2, 0.9), (0.05, 0.9)])
def test_a_range_that_holds_another_word_says_so(ends: tuple[float, float]) -> None:
    text = replace(judge(seen(0.3), LIMITS), label="mixed", gap_range=ends).gap_text()
    assert ("so it may be" in text) == (ends != (0.2, 0.4))
    assert ("lazy" in text) == (ends[0] < 0.1)
    assert ("rich" in text) == (ends[1] > 0.5)


def test_the_written_words_are_those_that_are_printed() -> None:
    for verdict in (judge(replace(grouped(), curves=curve(s1=0.01, s9=0.9)), LIMITS), judge(seen(0.05), LIMITS)):
        words = verdict.to_dict()["words"]
        assert list(words) == ["meaning", "gap", "when", "groups", "layers", "samples", "advice"]
        assert all(sentence in str(verdict) for sentence in words.values())
        assert words["meaning"] == MEANINGS[verdict.label]


def test_thresholds_must_grow_and_go_through_json() -> None:
    with pytest.raises(InputError, match="gaps must grow"):
        replace(LIMITS, gaps=(0.1, 0.05, 0.5, 1.0))
    with pytest.raises(InputError, match="at least 1"):
        replace(LIMITS, margin=0.1)
    assert Thresholds.from_dict(json.loads(json.dumps(LIMITS.to_dict()))) == LIMITS
    with pytest.raises(InputError, match="format 2"):
        Thresholds.from_dict({"format": 1})


def test_the_shipped_thresholds_are_whole() -> None:
    shipped = load_thresholds()
    assert (shipped.lazy_gap, shipped.rich_gap) == (0.1, 0.5)
    assert shipped.source["study"] == "calibration"
    for gap in np.geomspace(0.005, 1.2, 20):
        low, high = shipped.gap_range(gap)
        assert low < gap < high


# --- summaries -----------------------------------------------------------------------------------------------


def random_history(n: int = 40, groups: int = 2) -> History:
    random = np.random.default_rng(3)
    history = History(groups={str(g): list(range(g, n, groups)) for g in range(groups)})
    features = random.normal(size=(n, 6))
    targets = np.eye(groups)[np.arange(n) % groups]
    output = random.normal(size=(n, 2))
    for step, moved in ((0, 0.0), (5, 0.7)):
        rows = np.concatenate([features, moved * random.normal(size=(n, 3)), 2 * moved * targets], axis=1)
        kernel = torch.from_numpy(rows @ rows.T)
        if step == 0:
            start = kernel
        out = output + moved * random.normal(size=(n, 2))
        linear = out + 0.3 * moved * random.normal(size=(n, 2))
        flips = moved * random.random(n)
        went = np.linalg.norm(out - output)
        scalars = {
            "loss": 1.0 - moved,
            "tangent_distance": float(kernel_distance(kernel, start)),
            "tangent_change": float(relative_change(kernel, start)),
            "tangent_alignment": float(centered_alignment(kernel, torch.from_numpy(targets))),
            "linearisation_error": float(np.linalg.norm(out - linear) / went) if went else 0.0,
            "gate_flips": float(flips.mean()),
            "parameter_motion": moved / 10,
        }
        mass = kernel.diagonal().numpy() / float(kernel.trace())
        scalars |= {f"tangent_mass_{name}": float(mass[inside].sum()) for name, inside in history.groups.items()}
        history.add(step, scalars, {"output": out, "linear": linear, "flips": flips, "tangent": kernel.numpy()})
    return history


def test_a_summary_holds_every_measure_at_the_end() -> None:
    found = summarise(random_history())
    assert set(found.measures) == set(MEASURES)
    assert (found.losses, found.samples, found.measurements) == ((1.0, pytest.approx(0.3), pytest.approx(0.3)), 40, 2)
    assert found.interval is not None
    assert found.interval[0] < found.measures["linearisation_error"] < found.interval[1]


def test_more_samples_give_narrower_intervals() -> None:
    few, many = (summarise(random_history(n)).interval for n in (40, 320))
    assert few is not None
    assert many is not None
    assert many[1] - many[0] < 0.75 * (few[1] - few[0])


def test_a_network_that_did_not_move_is_not_resampled() -> None:
    """Its outputs differ by rounding, and so do those of its tangent: their ratio means nothing."""
    rounding = np.float32(1) + np.random.default_rng(0).choice([-1e-7, 0, 1e-7], (3, 40, 2)).astype(np.float32)
    history = History()
    history.add(0, {"linearisation_error": 0.0}, {"output": rounding[0]})
    history.add(5, {"linearisation_error": 0.0}, {"output": rounding[1], "linear": rounding[2]})
    assert summarise(history).interval is None
    history.add(9, {"linearisation_error": 0.5}, {"output": rounding[1] + 1, "linear": rounding[2] + 1.5})
    assert summarise(history).interval is not None


def test_a_training_that_broke_down_has_no_evidence() -> None:
    broken = History()
    broken.add(0, {"linearisation_error": 0.0, "loss": 1.0}, {})
    broken.add(2, {"linearisation_error": math.nan, "loss": math.nan}, {})
    assert summarise(broken).measures == {}
    assert judge(broken, LIMITS).label == "cannot tell"


# --- groups and dress ----------------------------------------------------------------------------------------


def grouped() -> TrainingSummary:
    groups = {
        "<b>cats": {"share": 0.5, "mass_first": 0.4, "mass_last": 0.6, "paths_first": -0.1, "paths_last": 0.3},
        "dogs": {"share": 0.25, "mass_first": 0.3, "mass_last": 0.15},
        "fish": {"share": 0.25, "mass_first": 0.3, "mass_last": 0.29},
    }
    return seen(0.9, groups=groups)


def test_groups_against_their_start() -> None:
    verdict = judge(grouped(), LIMITS)
    assert {name: about["verdict"] for name, about in verdict.groups.items()} == {
        "<b>cats": "gains",
        "dogs": "starved",
        "fish": "keeps",
    }
    assert "dogs (0.5 times)" in str(verdict)
    assert verdict.groups["<b>cats"]["mass_per_share"] == pytest.approx(1.2)
    assert verdict.groups["<b>cats"]["paths_gain"] == pytest.approx(0.4)


def test_group_shares_come_from_the_history() -> None:
    view = summarise(random_history(40, 4)).groups
    assert all(about["share"] == 0.25 for about in view.values())
    assert sum(about["mass_last"] for about in view.values()) == pytest.approx(1.0)


def test_it_goes_through_json_and_into_a_page() -> None:
    verdict = judge(grouped(), LIMITS)
    plain = verdict.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert {"label", "when", "evidence", "groups", "reasons"} <= plain.keys()
    assert set(plain["evidence"][0]) == {"measure", "value", "interval", "lazy_below", "rich_above", "says", "source"}
    page = verdict._repr_html_()
    assert "<b>cats" not in page
    assert "&lt;b&gt;cats" in page
    assert not re.search(r"https?://|<script|<link|url\(", page)
    assert page.count("<div") == page.count("</div>")
    assert len(page) < 10_000
    assert str(verdict).startswith("Verdict: rich.")
