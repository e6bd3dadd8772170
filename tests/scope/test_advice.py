"""Advice: which sentences a word gets, what they quote, and that none is without its count."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from unlazy.runtime import StoreError
from unlazy.scope import advice
from unlazy.scope.advice import (
    ACTIONS,
    AIMS,
    FEWEST_TRAININGS,
    LEAST_SHARE,
    UNKNOWN,
    advise,
    load_counts,
    share_interval,
)
from unlazy.scope.summary import TrainingSummary
from unlazy.scope.verdict import LABELS, Verdict, judge


def count(trainings: int = 20, moved: int = 20, factor: float = 2.0, fell: int = 5, rose: int = 9) -> dict[str, Any]:
    return {"trainings": trainings, "pairs": 12, "moved": moved, "factor": factor, "fell": fell, "rose": rose}


def counts(
    label: str = "lazy", twin: dict[str, Any] | None = None, **turns: tuple[str, dict[str, Any]]
) -> dict[str, Any]:
    made = {name.replace("_", "-"): {"aim": aim, label: about} for name, (aim, about) in turns.items()}
    return {"turns": made, "twin": {} if twin is None else {label: twin}}


def verdict_of(error: float) -> Verdict:
    return judge(TrainingSummary({"linearisation_error": error}, (1.0, 0.1, 0.1), 128, 9))


# --- the rule ------------------------------------------------------------------------------------------------


def test_a_turn_that_moved_eight_of_ten_gets_a_sentence_with_its_numbers() -> None:
    (sentence,) = advise("lazy", counts(rate_up=("richer", count(moved=16, factor=2.34))))
    assert sentence.startswith("To learn more features: raise the learning rate 4 times. ")
    low, high = share_interval(16, 20, 12)
    assert f"grew in 16 of 20 lazy trainings (interval {100 * low:.0f} to {100 * high:.0f} %)" in sentence
    assert "to 2.3 times at the median" in sentence
    assert "held-out loss fell in 5 and rose in 9" in sentence


@pytest.mark.parametrize(
    "about", [count(moved=15), count(trainings=FEWEST_TRAININGS - 1, moved=FEWEST_TRAININGS - 1), count(moved=0)]
)
def test_without_enough_support_we_do_not_know(about: dict[str, Any]) -> None:
    assert advise("lazy", counts(rate_up=("richer", about))) == (UNKNOWN,)


def test_only_turns_towards_what_the_word_lacks_and_only_counts_of_the_same_word() -> None:
    assert advise("lazy", counts(rate_down=("lazier", count()))) == (UNKNOWN,)
    assert advise("rich", counts("lazy", rate_down=("lazier", count()))) == (UNKNOWN,)
    (sentence,) = advise("rich", counts("rich", rate_down=("lazier", count(factor=0.3))))
    assert "The gap shrank in 20 of 20 rich trainings" in sentence
    both = advise("mixed", counts("mixed", rate_down=("lazier", count()), rate_up=("richer", count())))
    assert ["richer" in one or "features" in one for one in both] == [True, False]


def test_the_surest_turns_come_first_then_those_that_move_most_and_never_more_than_three() -> None:
    turns = {
        "rate_up": ("richer", count(moved=18)),
        "scale_down": ("richer", count(factor=2.0)),
        "start_down": ("richer", count(factor=5.0)),
        "width_down": ("richer", count(fell=20, rose=0, moved=3)),
    }
    found = advise("lazy", counts(twin=count(), **turns))
    assert len(found) == 3
    assert [ACTIONS["start-down"] in found[0], ACTIONS["scale-down"] in found[1]] == [True, True]
    assert found[2].startswith("To lower the held-out loss: make the layers 4 times narrower. It fell in 20 of 20 lazy")


def test_loss_is_advised_only_where_it_fell_in_eight_of_ten() -> None:
    assert advise("rich", counts("rich", rate_up=("richer", count(fell=15)))) == (UNKNOWN,)
    (sentence,) = advise("rich", counts("rich", rate_up=("richer", count(fell=16))))
    assert sentence.startswith("To lower the held-out loss")


def test_a_good_twin_is_a_sentence_about_lazy_trainings_alone() -> None:
    (sentence,) = advise("lazy", counts(twin=count(moved=19)))
    assert "at most 5 % above the network's in 19 of 20 lazy trainings" in sentence
    assert advise("rich", counts("rich", twin=count())) == (UNKNOWN,)
    assert advise("lazy", counts(twin=count(moved=10))) == (UNKNOWN,)


def test_turns_that_a_scope_cannot_know_to_apply_get_no_sentence() -> None:
    assert advise("lazy", counts(unfreeze=("richer", count()), mup=("richer", count()))) == (UNKNOWN,)


def test_cannot_tell_gets_no_advice() -> None:
    assert advise("cannot tell") == ()
    assert {label for label in LABELS if label not in AIMS} == {"cannot tell"}


@pytest.mark.parametrize(("passed", "trainings"), [(0, 10), (5, 10), (10, 10), (30, 60)])
def test_the_interval_holds_the_share_and_is_wider_with_fewer_pairs(passed: int, trainings: int) -> None:
    wide, narrow = share_interval(passed, trainings, 5), share_interval(passed, trainings, 50)
    for low, high in (wide, narrow):
        assert 0 <= low <= passed / trainings <= high <= 1
    assert wide[1] - wide[0] > narrow[1] - narrow[0]
    # Wilson's ends are where the score test just rejects: |share - end| = z sqrt(end (1 - end) / n)
    low, high = narrow
    for end in (low, high):
        if 0 < end < 1:
            assert abs(passed / trainings - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / 50), rel=1e-6)


# --- as shipped ----------------------------------------------------------------------------------------------


def test_every_shipped_sentence_has_its_count_in_the_file() -> None:
    turns = load_counts()["turns"]
    assert set(ACTIONS) <= set(turns)
    for label in AIMS:
        sentences = advise(label)
        assert 1 <= len(sentences) <= 3
        for sentence in sentences:
            if sentence == UNKNOWN:
                continue
            found = re.search(rf"in (\d+) of (\d+) {label} trainings \(interval", sentence)
            assert found is not None
            assert int(found[1]) >= LEAST_SHARE * int(found[2])
            assert int(found[2]) >= FEWEST_TRAININGS


@pytest.mark.parametrize("error", [0.01, 0.25, 1.2])
def test_verdicts_print_write_and_show_their_advice(error: float) -> None:
    verdict = verdict_of(error)
    assert verdict.advice == advise(verdict.label)
    assert "What to do:" in str(verdict)
    plain = json.loads(json.dumps(verdict.to_dict()))
    for sentence in verdict.advice if verdict.label != "rich" else ["verdict.advice says how"]:
        assert sentence in str(verdict)
        assert sentence in plain["words"]["advice"]
    assert verdict._repr_html_().count("What to do:") == 1


def test_without_a_verdict_nothing_is_advised() -> None:
    silent = judge(TrainingSummary({"linearisation_error": 0.9}, (1.0, 1.0, 1.0), 128, 9))
    assert silent.label == "cannot tell"
    assert "What to do" not in str(silent)
    assert silent.to_dict()["words"]["advice"] == ""


@pytest.mark.parametrize("content", [None, "{", '{"format": 0}'])
def test_a_missing_or_damaged_file_says_so(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "advice.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(advice, "FILE", path)
    load_counts.cache_clear()
    try:
        with pytest.raises(StoreError, match=r"advice\.json is missing or damaged"):
            load_counts()
    finally:
        load_counts.cache_clear()
