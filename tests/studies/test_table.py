"""The tidy table: what goes in comes out, questions get one number a seed, and ambiguous questions are refused."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlazy.runtime import InputError, StoreError
from unlazy.studies.table import Rows, Table, as_text


def small() -> Table:
    rows = Rows(preset="author")
    members = [{"seed": 0, "beta": 4.0}, {"seed": 1, "beta": 4.0}, {"seed": 0, "beta": 10.0}]
    rows.add("loss", [0.1, 0.2, 0.3], members=members, at=3)
    rows.add("share", np.arange(6).reshape(3, 2), members=members, layer=[1, 2], at="end")
    rows.add("epochs_to_reach", float("inf"), seed=0, beta=4.0)
    rows.add("nothing", None, seed=0)
    return Table.from_rows(rows.entries, first=("preset",))


def test_one_number_a_seed() -> None:
    table = small()
    assert table.select("loss", 3, beta=4).tolist() == [0.1, 0.2]
    assert table.select("loss", 3, seeds=(1, 0, 7), beta=4.0)[:2].tolist() == [0.2, 0.1]
    assert np.isnan(table.select("loss", 3, seeds=(7,), beta=4.0))
    assert table.select("share", "end", beta=10, layer=2).tolist() == [5.0]
    assert table.select("epochs_to_reach", beta=4.0).tolist() == [float("inf")]
    assert table.select("unheard", seeds=(0, 1)).shape == (2,)
    assert len(table.select("loss", 3, unheard="x")) == 0


def test_a_question_with_several_answers_names_what_is_missing() -> None:
    with pytest.raises(InputError, match="say which by beta"):
        small().select("loss", 3)
    with pytest.raises(InputError, match="layer"):
        small().select("share", beta=4.0)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    table = small()
    table.write(tmp_path / "table.csv")
    again = Table.read(tmp_path / "table.csv")
    assert again.to_bytes() == table.to_bytes()
    assert again.sha256 == table.sha256
    with (tmp_path / "table.csv").open() as file:
        header, *lines = csv.reader(file)
    assert header == ["preset", "beta", "layer", "seed", "at", "quantity", "value"]
    assert len(lines) == len(table) == 11


def test_pandas_opens_it_in_one_line(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    small().write(tmp_path / "table.csv")
    frame = pandas.read_csv(tmp_path / "table.csv")
    assert frame[frame.quantity == "loss"].value.tolist() == [0.1, 0.2, 0.3]


def test_the_hash_is_of_the_numbers_not_of_their_order() -> None:
    rows = list(small().rows())
    assert (
        Table.from_rows(rows[::-1], first=("preset", "beta", "layer")).sha256
        == Table.from_rows(rows, first=("preset", "beta", "layer")).sha256
    )
    rows[0]["value"] += 0.1
    assert Table.from_rows(rows, first=("preset",)).sha256 != small().sha256


def test_rows_can_be_chosen_and_left_out() -> None:
    table = small()
    assert len(table.where(quantity="loss")) + len(table.without(quantity="loss")) == len(table)
    assert len(table.where(quantity=["loss", "share"], beta=10)) == 3
    assert table.unique("beta") == ["4", "10"]
    assert table.unique("layer", quantity="loss") == []


def test_a_series_has_places_and_seeds() -> None:
    rows = Rows()
    rows.add("loss", [[1.0, 2.0], [0.5, 0.7], [0.1, 0.2]], at=[10, 2, 30], seed=[0, 1])
    places, values = Table.from_rows(rows.entries).series("loss")
    assert places.tolist() == [2, 10, 30]
    assert values.tolist() == [[0.5, 0.7], [1.0, 2.0], [0.1, 0.2]]


def test_arrays_need_columns_for_their_axes() -> None:
    with pytest.raises(InputError, match=r"loss has shape \(2,\)"):
        Rows().add("loss", [1.0, 2.0])


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "quantity,value\nx\n", "quantity,value\nx,y\n"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(StoreError, match=r"table\.csv is not a table of a study"):
        Table.read(tmp_path / "table.csv")


@given(st.lists(st.tuples(st.sampled_from(["", "a,b", 'c"d', "é"]), st.floats(allow_nan=False))))
def test_any_text_and_number_survives_the_file(entries: list[tuple[str, float]]) -> None:
    table = Table.from_rows([{"arm": arm, "quantity": "q", "value": value} for arm, value in entries], digits=17)
    again = Table.parse(table.to_bytes().decode())
    assert again.values.tolist() == table.values.tolist()
    assert [row.get("arm", "") for row in again.rows()] == [arm for arm, _ in entries]


def test_settings_read_alike_however_they_are_written() -> None:
    assert as_text(4) == as_text(4.0) == as_text(np.float64(4)) == "4"
    assert as_text(1e-3) == "0.001"
    assert as_text(None) == ""
