"""The table of a study at one scale. One row holds one number: its quantity, moment, seed, the columns of its case, its value.

``pandas.read_csv(path)`` reads the file. Arrays lie beside the table; a row names their file in the column ``file``.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unlazy.runtime import InputError, StoreError, require
from unlazy.store import write_file

LAST_COLUMNS = ("seed", "at", "quantity", "value")
DIGITS = 6
Row = dict[str, Any]
Vector = NDArray[np.float64]


class Rows:
    """Collects the rows of one case while it is measured. ``columns``: columns that all its rows share.

    >>> rows = Rows(seed=0)
    >>> rows.add("loss", 0.25, at=3)
    >>> rows.add("share", [[0.1, 0.2], [0.3, 0.4]], seed=[0, 1], layer=[1, 2])
    >>> len(rows.entries), rows.entries[-1]
    (5, {'seed': 1, 'layer': 2, 'quantity': 'share', 'value': 0.4})
    """

    def __init__(self, **columns: Any) -> None:
        self.columns, self.entries = columns, list[Row]()

    def add(self, quantity: str, value: ArrayLike | None, **columns: Any) -> None:
        """Add one number, or an array with one axis for every column that is given as a sequence, in their order.

        The entries of such a sequence may be dictionaries (the members of a stack: seed, beta, ...): each then fills the columns
        that it names.
        """
        axes = {name: list(entry) for name, entry in columns.items() if _is_axis(entry)}
        numbers = np.asarray(np.nan if value is None else value, dtype=np.float64)
        shape = tuple(len(axis) for axis in axes.values())
        require(
            numbers.shape == shape,
            f"{quantity} has shape {numbers.shape}, its columns {', '.join(axes) or '(none)'} have {shape}.",
        )
        fixed = self.columns | {name: entry for name, entry in columns.items() if name not in axes}
        for place, number in zip(product(*axes.values()), numbers.reshape(-1).tolist(), strict=True):
            own: Row = {}
            for name, entry in zip(axes, place, strict=True):
                own |= entry if isinstance(entry, Mapping) else {name: entry}
            self.entries.append({**fixed, **own, "quantity": quantity, "value": number})

    def add_all(self, values: Mapping[str, Any], **columns: Any) -> None:
        """Add several quantities, values by name, with the same columns."""
        for quantity, value in values.items():
            self.add(quantity, value, **columns)


@dataclass(frozen=True)
class Column:
    """Texts of a column, each kept once: row ``i`` has ``words[codes[i]]``."""

    words: tuple[str, ...]
    codes: NDArray[np.int32]

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> Column:
        """The column with these texts, one a row."""
        numbers: dict[str, int] = {}
        codes = np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int32, len(texts))
        return cls(tuple(numbers), codes)

    def texts(self) -> list[str]:
        """The text of every row."""
        return [self.words[code] for code in self.codes.tolist()]

    def unique(self) -> list[str]:
        """The texts that occur, in order of appearance."""
        return [self.words[code] for code in dict.fromkeys(self.codes.tolist())]

    def matches(self, wanted: set[str]) -> NDArray[np.bool_]:
        """Which rows have one of these texts."""
        return np.isin(self.codes, [code for code, word in enumerate(self.words) if word in wanted])


class Table:
    """The rows of a study. Columns hold texts, empty where a row has no such column; values are numbers."""

    def __init__(self, columns: Mapping[str, Column], values: ArrayLike) -> None:
        self.columns, self.values = dict(columns), np.asarray(values, dtype=np.float64)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], first: Sequence[str] = (), digits: int = DIGITS) -> Table:
        """The table of these rows. ``first``: columns that come first. ``digits``: significant digits of a value."""
        rows = list(rows)
        names = dict.fromkeys((*first, *(name for row in rows for name in row)))
        ordered = (*(name for name in names if name not in LAST_COLUMNS), *LAST_COLUMNS[:-1])
        columns = {name: Column.from_texts([as_text(row.get(name)) for row in rows]) for name in ordered}
        return cls(columns, [_round(row["value"], digits) for row in rows])

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a CSV file."""
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, InputError) as error:
            raise StoreError(f"{path} is not a table of a study ({error}); run the study again.") from error

    @classmethod
    def parse(cls, text: str) -> Table:
        """The table in the text of a CSV file."""
        header, *lines = csv.reader(io.StringIO(text))
        require(header[-1] == "value" and "quantity" in header, "its columns are others.")
        *texts, numbers = list(zip(*lines, strict=True)) or [() for _ in header]
        values = [float(entry) if entry else np.nan for entry in numbers]
        return cls({name: Column.from_texts(entries) for name, entries in zip(header[:-1], texts, strict=True)}, values)

    def to_bytes(self) -> bytes:
        """The content of the CSV file."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.columns, "value"])
        texts = [column.texts() for column in self.columns.values()]
        writer.writerows(zip(*texts, map(as_text, self.values.tolist()), strict=True))
        return text.getvalue().encode()

    def write(self, path: Path) -> None:
        """Write the CSV file."""
        write_file(path, self.to_bytes())

    @cached_property
    def sha256(self) -> str:
        """Hash of the sorted rows: two tables with the same rows in another order have the same hash."""
        header, *lines = self.to_bytes().splitlines()
        return hashlib.sha256(b"\n".join([header, *sorted(lines)])).hexdigest()

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> Iterator[Row]:
        """Every row as a dictionary, without its empty columns."""
        texts = [column.texts() for column in self.columns.values()]
        for *entries, value in zip(*texts, self.values.tolist(), strict=True):
            yield {**{name: text for name, text in zip(self.columns, entries, strict=True) if text}, "value": value}

    def where(self, **columns: Any) -> Table:
        """The rows with these values in these columns; a list means any of its entries."""
        return self._take(self._matching(np.arange(len(self)), columns))

    def without(self, **columns: Any) -> Table:
        """The rows that :meth:`where` leaves out."""
        return self._take(np.setdiff1d(np.arange(len(self)), self._matching(np.arange(len(self)), columns)))

    def unique(self, column: str, **where: Any) -> list[str]:
        """The values of a column, in order of appearance, among the rows that match ``where``."""
        if column not in self.columns:
            return []
        part = self.where(**where) if where else self
        return [text for text in part.columns[column].unique() if text]

    def select(self, quantity: str, at: Any = None, *, seeds: Sequence[int] | None = None, **where: Any) -> Vector:
        """One number for each of ``seeds`` (by default, all seeds that have one, in their order); NaN where there is none.

        Raises ``InputError`` if a seed has several such numbers: then ``where`` has to name another column.
        """
        chosen = self._matching(self._rows_of(quantity), where if at is None else {**where, "at": at})
        seed_column = self.columns["seed"]
        owners = [seed_column.words[code] for code in seed_column.codes[chosen].tolist()]
        found = dict(zip(owners, self.values[chosen].tolist(), strict=True))
        if len(found) < len(chosen):
            self._raise_ambiguous(quantity, chosen)
        in_order = sorted(found, key=lambda text: _parse_number(text) or 0.0)
        wanted = in_order if seeds is None else [as_text(seed) for seed in seeds]
        return np.array([found.get(seed, np.nan) for seed in wanted], dtype=np.float64)

    def series(
        self, quantity: str, *, over: str = "at", seeds: Sequence[int] | None = None, **where: Any
    ) -> tuple[Vector, NDArray[np.float64]]:
        """A quantity along the column ``over``, which holds numbers: places ``[T]`` and values ``[T, seeds]``."""
        part = self._take(self._matching(self._rows_of(quantity), where))
        places = sorted({_parse_number(text) for text in part.columns[over].unique()} - {None}, key=float)  # type: ignore[arg-type]
        lines = [part.select(quantity, seeds=seeds, **{over: place}) for place in places]
        return np.array(places, dtype=np.float64), np.array(lines)

    @cached_property
    def _row_numbers(self) -> dict[str, NDArray[np.int64]]:
        """The row numbers of every quantity."""
        column = self.columns["quantity"]
        order = np.argsort(column.codes, kind="stable")
        ends = np.searchsorted(column.codes[order], np.arange(len(column.words) + 1))
        return {word: order[ends[code] : ends[code + 1]] for code, word in enumerate(column.words)}

    def _rows_of(self, quantity: str) -> NDArray[np.int64]:
        return self._row_numbers.get(quantity, np.array([], dtype=int))

    def _matching(self, rows: NDArray[Any], columns: Mapping[str, Any]) -> NDArray[np.int64]:
        """Those of these row numbers whose columns have the wanted values."""
        for name, wanted in columns.items():
            texts = {as_text(one) for one in (wanted if isinstance(wanted, list | tuple | set) else [wanted])}
            if name in self.columns:
                column = self.columns[name]
                rows = rows[Column(column.words, column.codes[rows]).matches(texts)]
            elif "" not in texts:
                return np.array([], dtype=int)
        return rows

    def _take(self, rows: NDArray[Any]) -> Table:
        """The table of these row numbers."""
        columns = {name: Column(column.words, column.codes[rows]) for name, column in self.columns.items()}
        return Table(columns, self.values[rows])

    def _raise_ambiguous(self, quantity: str, rows: NDArray[np.int64]) -> None:
        part = self._take(rows)
        differ = [name for name, column in part.columns.items() if name != "seed" and len(column.unique()) > 1]
        raise InputError(
            f"{quantity!r} has several numbers for one seed; say which by {', '.join(differ) or 'removing double rows'}."
        )


def as_text(entry: Any) -> str:
    """How a setting is written in a column: 3 and 3.0 alike, ``None`` as an empty text.

    >>> [as_text(entry) for entry in (3, 3.0, 0.1, "end", None, True)]
    ['3', '3', '0.1', 'end', '', 'true']
    """
    if entry is None:
        return ""
    if isinstance(entry, bool | np.bool_):
        return str(bool(entry)).lower()
    if isinstance(entry, float | np.floating):
        return str(int(entry)) if float(entry).is_integer() else repr(float(entry))
    return str(entry)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_axis(entry: Any) -> bool:
    """Whether a column is given as a sequence, with one entry for every place on an axis."""
    return isinstance(entry, list | tuple | range | np.ndarray)


def _round(value: Any, digits: int) -> float:
    """To so many significant digits; ``None`` is NaN."""
    number = float("nan") if value is None else float(value)
    return float(f"{number:.{digits}g}") if np.isfinite(number) else number
