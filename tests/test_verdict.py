"""The verdict: intervals against slow twins, every way to keep silent, and what it looks like."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from unlazy.kernels.compare import centered_alignment, kernel_distance, relative_change
from unlazy.runtime import InputError
from unlazy.scope import readings as reading_rules
from unlazy.scope.history import History
from unlazy.scope.readings import MEASURES, Reading, Readings, readings
from unlazy.scope.thresholds import Threshold, Thresholds, thresholds
from unlazy.scope.verdict import LABELS, MEANINGS, Verdict, judge

LIMITS = Thresholds(
    {
        "linearisation_error": Threshold(0.1, 0.5, 0.2),
        "tangent_change": Threshold(0.05, 0.5, 0.4),
        "gate_flips": Threshold(0.01, 0.2, 0.5),
    },
    lazy_gap=0.1,
    rich_gap=0.5,
    spread=0.3,
    margin=0.05,
    disagreement=1.0,
    source={"text": "a test"},
)


def seen(scale: float = 1.0, **changes: object) -> Readings:
    """Readings right at the lazy thresholds, times ``scale``."""
    measures = {name: Reading(scale * limit.lazy_below) for name, limit in LIMITS.measures.items()}
    start = Readings(measures, (1.0, 0.1, 0.2), samples=128, measurements=12)
    return replace(start, **changes)  # type: ignore[arg-type]


# --- labels --------------------------------------------------------------------------------------------------


def test_far_from_the_borders_the_word_is_clear() -> None:
    assert judge(seen(0.3), LIMITS).label == "lazy"
    middle = {name: Reading(math.sqrt(one.lazy_below * one.rich_above)) for name, one in LIMITS.measures.items()}
    assert judge(seen(measures=middle), LIMITS).label == "mixed"
    assert judge(seen(60.0), LIMITS).label == "rich"


def test_the_estimated_gap_is_exact_at_the_thresholds() -> None:
    """All measures at their lazy (rich) thresholds: the gap is the border itself, and the verdict keeps silent."""
    for border, pick in ((0.1, "lazy_below"), (0.5, "rich_above")):
        at = {name: Reading(getattr(limit, pick)) for name, limit in LIMITS.measures.items()}
        verdict = judge(seen(measures=at), LIMITS)
        assert verdict.gap == pytest.approx(border)
        assert verdict.gap_range == pytest.approx((border * math.exp(-0.3), border * math.exp(0.3)))
        assert verdict.label == "cannot tell"
        assert "border" in verdict.reasons[0]


def test_growing_measures_never_make_it_lazier() -> None:
    order = {"lazy": 0, "cannot tell": None, "mixed": 1, "rich": 2}
    labels = [judge(seen(scale), LIMITS).label for scale in np.geomspace(0.1, 100, 60)]
    ranks = [order[label] for label in labels if order[label] is not None]
    assert ranks == sorted(ranks)
    assert set(labels) == set(LABELS)
    gaps = [judge(seen(scale), LIMITS).gap for scale in np.geomspace(0.1, 100, 60)]
    assert gaps == sorted(gaps)


def test_a_wide_interval_over_samples_silences_it() -> None:
    sure = {
        name: Reading(0.5 * one.lazy_below, (0.45 * one.lazy_below, 0.55 * one.lazy_below))
        for name, one in LIMITS.measures.items()
    }
    unsure = {name: Reading(one.value, (0.1 * one.value, 10 * one.value)) for name, one in sure.items()}
    assert judge(seen(measures=sure), LIMITS).label == "lazy"
    assert judge(seen(measures=unsure), LIMITS).label == "cannot tell"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"measurements": 1}, "one at the start and one later"),
        ({"samples": 16}, "too small"),
        ({"losses": (1.0, 0.98, 0.98)}, "did not fall"),
        ({"losses": (1.0, 0.2, math.nan)}, "broke down"),
        ({"measures": {"gate_flips": Reading(0.001)}, "left_out": {"tangent": "no memory"}}, "tangent: no memory"),
        ({"measures": {}}, "Neither tangent kernel nor linearisation"),
    ],
)
def test_reasons_to_keep_silent(changes: dict[str, object], reason: str) -> None:
    assert judge(seen(0.3), LIMITS).label == "lazy"
    verdict = judge(seen(0.3, **changes), LIMITS)
    assert verdict.label == "cannot tell"
    assert any(reason in one for one in verdict.reasons), verdict.reasons


def test_a_run_without_losses_is_judged_by_its_measures() -> None:
    assert judge(seen(0.3, losses=None), LIMITS).label == "lazy"


def test_disagreement() -> None:
    against = {"linearisation_error": Reading(0.01), "tangent_change": Reading(5.0)}
    verdict = judge(seen(measures=against), LIMITS)
    assert verdict.label == "cannot tell"
    assert "disagree" in verdict.reasons[0]
    assert [one.says for one in verdict.evidence] == ["lazy", "rich"]
    assert judge(seen(measures=against), replace(LIMITS, disagreement=10.0)).label != "cannot tell"


def test_the_better_measure_weighs_more() -> None:
    against = {"linearisation_error": Reading(0.1), "gate_flips": Reading(0.2)}
    assert judge(seen(measures=against), LIMITS).gap < math.sqrt(0.1 * 0.5)


def test_a_network_that_did_not_move_is_not_resampled() -> None:
    """Its outputs differ by rounding, and so do those of its tangent: their ratio means nothing."""
    rounding = np.float32(1) + np.random.default_rng(0).choice([-1e-7, 0, 1e-7], (3, 40, 2)).astype(np.float32)
    history = History()
    history.add(0, {"linearisation_error": 0.0}, {"output": rounding[0]})
    history.add(5, {"linearisation_error": 0.0}, {"output": rounding[1], "linear": rounding[2]})
    assert readings(history).measures["linearisation_error"] == Reading(0.0)
    history.add(9, {"linearisation_error": 0.5}, {"output": rounding[1] + 1, "linear": rounding[2] + 1.5})
    assert readings(history).measures["linearisation_error"].interval is not None


def test_evidence_says_what_its_interval_says() -> None:
    spans = {"linearisation_error": Reading(0.1, (0.09, 0.11)), "tangent_change": Reading(0.04, (0.03, 0.045))}
    first, second = judge(seen(measures=spans), LIMITS).evidence
    assert (first.says, second.says) == ("lazy or mixed", "lazy")
    assert (first.lazy_below, first.rich_above, first.source) == (0.1, 0.5, "a test")


def test_when_it_left_the_lazy_regime() -> None:
    curves = {
        "linearisation_error": {0: 0.0, 1: 0.01, 4: 0.2, 16: 0.9},
        "gate_flips": {0: 0.0, 1: 0.001, 4: 0.005, 16: 0.3},
    }
    when = judge(seen(60.0, curves=curves), LIMITS).when
    assert when["linearisation_error"] == 4
    assert when["gate_flips"] == 16
    assert when["network"] in (4, 16)
    still = {"linearisation_error": {0: 0.0, 1: 0.01}}
    assert judge(seen(0.3, curves=still), LIMITS).when == {"network": None, "linearisation_error": None}
    assert "never left" in str(judge(seen(0.3, curves=still), LIMITS))


def test_it_says_between_which_steps_it_left_the_lazy_regime() -> None:
    """Nobody looked between two measurements, so no step between them is told."""

    def crossing(*steps: int) -> Verdict:
        curve = dict.fromkeys(steps[:-1], 0.01) | {steps[-1]: 0.9}
        return judge(seen(60.0, curves={"linearisation_error": curve}), LIMITS)

    assert crossing(0, 16, 500).when_text() == "It left the lazy regime between step 16 and step 500."
    assert crossing(0, 16, 500).when_after == {"network": 16, "linearisation_error": 16}
    assert crossing(0, 16, 17).when_text() == "It left the lazy regime at step 17."
    assert crossing(3).when_text() == "It left the lazy regime by step 3."
    assert crossing(3).when_after == {"network": None, "linearisation_error": None}
    unsure = replace(crossing(0, 16, 500), label="cannot tell")
    assert unsure.when_text() == "The estimate passed the lazy border between step 16 and step 500."
    back = judge(seen(0.3, curves={"linearisation_error": {0: 0.0, 8: 0.9, 20: 0.01}}), LIMITS)
    assert "beyond the lazy border at step 8, but came back" in back.when_text()
    assert back.when_after["network"] == 0
    never = judge(seen(0.3, curves={"linearisation_error": {0: 0.0, 8: 0.01}}), LIMITS)
    assert never.when_after == {"network": None, "linearisation_error": None}


def test_a_measure_that_is_not_a_number_is_no_look_at_the_network() -> None:
    """Steps at which nothing could be pooled are none of those between which it left."""
    curves = {"linearisation_error": {0: 0.0, 4: math.nan, 9: 0.9}}
    verdict = judge(seen(60.0, curves=curves), LIMITS)
    assert (verdict.when_after["network"], verdict.when["network"]) == (0, 9)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 60.0])
def test_every_verdict_says_which_twin_its_gap_is_about(scale: float) -> None:
    verdict = judge(seen(scale), LIMITS)
    before, _, after = str(verdict).partition("Estimated gap to its linearised twin (")
    assert after
    assert "a linear model on" in before
    assert "(its linearised twin)" in before


def test_the_written_words_are_those_that_are_printed() -> None:
    curves = {"linearisation_error": {0: 0.0, 16: 0.01, 500: 0.9}}
    for verdict in (judge(replace(grouped(), curves=curves), LIMITS), judge(seen(1.0), LIMITS)):
        words = verdict.to_dict()["words"]
        assert list(words) == ["meaning", "gap", "when", "groups"]
        assert all(sentence in str(verdict) for sentence in words.values())
        assert words["meaning"] == MEANINGS[verdict.label]
        assert words["gap"].startswith("Estimated gap to its linearised twin")
    assert words["when"] == words["groups"] == ""  # nothing is known of either
    assert "between step 16 and step 500" in judge(replace(grouped(), curves=curves), LIMITS).to_dict()["words"]["when"]


def test_thresholds_must_grow_and_go_through_json() -> None:
    with pytest.raises(InputError, match="must grow"):
        Threshold(0.5, 0.1, 0.3)
    again = Thresholds.from_dict(json.loads(json.dumps(LIMITS.to_dict())))
    assert again == LIMITS
    with pytest.raises(InputError, match="format 1"):
        Thresholds.from_dict({"format": 2})


def test_the_shipped_thresholds_are_whole() -> None:
    shipped = thresholds()
    assert set(shipped.measures) <= set(MEASURES)
    assert "linearisation_error" in shipped.measures
    assert (shipped.lazy_gap, shipped.rich_gap) == (0.1, 0.5)
    assert shipped.source["study"] == "calibration"


# --- readings ------------------------------------------------------------------------------------------------


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


def test_readings_hold_every_measure_inside_its_interval() -> None:
    found = readings(random_history())
    assert set(found.measures) == set(MEASURES)
    assert (found.losses, found.samples, found.measurements) == ((1.0, pytest.approx(0.3), pytest.approx(0.3)), 40, 2)
    for name, one in found.measures.items():
        if name == "parameter_motion":
            assert one.interval is None
        else:
            assert one.interval is not None
            assert one.interval[0] < one.value < one.interval[1], name
    again = Readings.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found


def test_more_samples_give_narrower_intervals() -> None:
    few, many = readings(random_history(40)), readings(random_history(320))
    for name in ("linearisation_error", "tangent_distance", "tangent_change", "gate_flips"):
        widths = [found.measures[name].interval[1] - found.measures[name].interval[0] for found in (few, many)]  # type: ignore[index]
        assert widths[1] < 0.75 * widths[0], name


def test_resampled_kernels_against_sums_over_pairs() -> None:
    """Weighted formulas against loops over every pair of drawn samples, a sample meeting itself once per draw."""
    history, random = random_history(9), np.random.default_rng(1)
    before, after = (history.array("tangent", first=first) for first in (True, False))
    assert before is not None
    assert after is not None
    counts = random.multinomial(9, np.full(9, 1 / 9), 3).astype(float)
    for row in counts:
        both = old = new = 0.0
        for i in range(9):
            for j in range(9):
                pairs = row[i] * row[j] if i != j else row[i]
                both += pairs * before[i, j] * after[i, j]
                old += pairs * before[i, j] ** 2
                new += pairs * after[i, j] ** 2
        trace_before, trace_after = (sum(row[i] * k[i, i] for i in range(9)) for k in (before, after))
        distance = 1 - both / math.sqrt(old * new)
        scale = trace_before / trace_after
        change = math.sqrt((scale**2 * new - 2 * scale * both + old) / old)
        assert reading_rules._distances(row[None], before, after)[0] == pytest.approx(distance, rel=1e-10)
        assert reading_rules._changes(row[None], before, after)[0] == pytest.approx(change, rel=1e-10)
    once = np.ones((1, 9))
    kernels = torch.from_numpy(after), torch.from_numpy(before)
    assert reading_rules._distances(once, before, after)[0] == pytest.approx(float(kernel_distance(*kernels)), rel=1e-9)
    assert reading_rules._changes(once, before, after)[0] == pytest.approx(float(relative_change(*kernels)), rel=1e-9)


def test_measures_without_arrays_have_no_interval() -> None:
    bare = History()
    for step, value in ((0, 0.0), (3, 0.2)):
        bare.add(step, {"linearisation_error": value, "tangent_distance": value, "loss": 1 - value}, {})
    found = readings(bare)
    assert {name: one.interval for name, one in found.measures.items()} == {
        "linearisation_error": None,
        "tangent_distance": None,
    }
    assert found.samples == 0


def test_a_measure_that_is_not_a_number_is_no_evidence() -> None:
    broken = History()
    broken.add(0, {"linearisation_error": 0.0, "loss": 1.0}, {})
    broken.add(2, {"linearisation_error": math.nan, "loss": math.nan}, {})
    assert readings(broken).measures == {}
    assert judge(broken, LIMITS).label == "cannot tell"


# --- groups and dress ----------------------------------------------------------------------------------------


def grouped() -> Readings:
    groups = {
        "<b>cats": {"share": 0.5, "mass_first": 0.4, "mass_last": 0.6, "paths_first": -0.1, "paths_last": 0.3},
        "dogs": {"share": 0.25, "mass_first": 0.3, "mass_last": 0.15},
        "fish": {"share": 0.25, "mass_first": 0.3, "mass_last": 0.29},
    }
    return seen(60.0, groups=groups)


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
    view = readings(random_history(40, 4)).groups
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
