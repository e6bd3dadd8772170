"""What all studies share: plain numbers and settings, checks that teach, and how a study ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from unlazy import InputError, plots
from unlazy.studies.results import conclude, numbers, plain, table_of
from unlazy.studies.settings import all_known, at_least_one, plain_settings


@dataclass(frozen=True)
class Inner:
    sizes: tuple[tuple[str, int], ...] = (("a", 1), ("b", 2))


@dataclass(frozen=True)
class Settings:
    seeds: int = 2
    arms: tuple[str, ...] = ("relu", "pwc")
    inner: Inner = Inner()


def test_settings_are_written_as_json_reads_them() -> None:
    written = plain_settings(Settings())
    assert written == {"seeds": 2, "arms": ["relu", "pwc"], "inner": {"sizes": [["a", 1], ["b", 2]]}}
    assert json.loads(json.dumps(written)) == written


def test_settings_that_cannot_be_are_refused_by_name() -> None:
    at_least_one(Settings(), "seeds")
    with pytest.raises(InputError, match="seeds must be at least 1, got 0"):
        at_least_one(Settings(seeds=0), "seeds")
    all_known("arms", Settings().arms, {"relu": 1, "pwc": 2})
    with pytest.raises(InputError, match="unknown arms: pwc; there are relu"):
        all_known("arms", Settings().arms, ["relu"])


def test_numbers_are_plain_and_come_back() -> None:
    table = {"curve": np.array([[1.234567, np.nan], [np.inf, 2]], dtype=np.float32), "count": 3, "word": "one"}
    assert plain(table) == {"curve": [[1.2346, None], [None, 2.0]], "count": 3, "word": "one"}
    assert plain((0.123456789, -np.inf), digits=6) == [0.123457, None]
    whole = plain(np.array([1, 2]))
    assert whole == [1, 2]
    assert all(type(value) is float for value in whole)
    assert np.array_equal(numbers([[1.5, None]]), [[1.5, np.nan]], equal_nan=True)


def test_a_study_ends_judged_drawn_and_saved(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    size = plots.STYLE["font.size"]

    def draw(table: dict[str, Any]) -> dict[str, Any]:
        assert table["claims"] == [{"id": "from 5"}]
        assert matplotlib.rcParams["font.size"] == size
        return {"one": plots.grid(1, 1, (1, 1))[0]}

    table = table_of("mine", "smoke", {}, {}) | {"value": 5}
    made = conclude(
        table, lambda table: [{"id": f"from {table['value']}"}], draw, tmp_path, lambda *at: told.append(at)
    )
    assert json.loads((tmp_path / "mine" / "smoke.json").read_text()) == made
    assert (tmp_path / "mine" / "smoke" / "one.png").is_file()
    assert told == [("drawing", 0, 1), ("drawing", 1, 1)]
