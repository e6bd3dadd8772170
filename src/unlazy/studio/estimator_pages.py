"""Pages of saved estimators in the studio: what one weighs, its half-spaces in words, and the rules of any row.

Plain HTML without scripts or styles of its own, so that the content policy of the studio holds for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unlazy.runtime import InputError
from unlazy.studio.answers import BadRequest, NotFound

SHOWN_RULES = 10
SHOWN_COLUMNS = 20
SHOWN_SPACES = 16  # half-spaces of the first layer of the first member


def saved_estimators(root: Path) -> list[str]:
    """The estimator files in the folder of runs and its folders, by name; checkpoints of runs lie deeper and are not opened."""
    from safetensors import SafetensorError, safe_open

    found = []
    for path in sorted([*root.glob("*.safetensors"), *root.glob("*/*.safetensors")]):
        if not path.resolve().is_relative_to(root.resolve()) or not path.is_file():
            continue  # a link to a file outside, or a pipe
        try:
            with safe_open(str(path), framework="numpy") as file:
                if "unlazy_estimator" in (file.metadata() or {}):
                    found.append(path.relative_to(root).as_posix())
        except (SafetensorError, OSError):
            continue
    return found


def list_page(root: Path) -> str:
    """The page with a link to every saved estimator."""
    links = [f"<li><a href='/estimators/{quote(name)}'>{escape(name)}</a></li>" for name in saved_estimators(root)]
    body = (
        f"<ul>{''.join(links)}</ul>"
        if links
        else "<p>There is none here; <code>estimator.save(path)</code> writes one.</p>"
    )
    return _page("Saved estimators", body)


def estimator_page(root: Path, name: str, row: str | None) -> str:
    """The page of one saved estimator; ``row``: numbers with commas between them, whose prediction is explained."""
    if name not in saved_estimators(root):
        raise NotFound(f"there is no saved estimator {name[:100]!r} in this folder.")
    from unlazy.estimators.half_space import load_estimator

    estimator = load_estimator(root / name)
    model = estimator.path_sum_
    facts = [
        ("kind", type(estimator).__name__),
        ("half-spaces", f"{model.members} networks x {model.layers} layers x {model.units} units"),
        ("columns", estimator.n_features_in_),
        ("classes", ", ".join(map(str, estimator.classes_)) if hasattr(estimator, "classes_") else "none: a regressor"),
        ("passes over the training rows", estimator.n_iter_),
        ("settings", json.dumps(estimator.get_params(deep=False), default=str)),
    ]
    body = _table(["", ""], facts)
    if model.beta is not None:
        return _page(name, body + "<p>Its gates are soft, so there are no half-spaces to show.</p>")
    shares, spaces = estimator.feature_importances_, estimator.half_spaces_
    order = sorted(range(len(shares)), key=lambda column: -shares[column])[:SHOWN_COLUMNS]
    rows = [(spaces.feature_names[column], _bar(shares[column]), f"{shares[column]:.1%}") for column in order]
    body += f"<h2>What matters</h2>{_table(['column', '', 'importance'], rows, raw={1})}" + _explained(estimator, row)
    words = [(unit + 1, spaces.in_words(0, 0, unit)) for unit in range(min(model.units, SHOWN_SPACES))]
    return _page(name, body + f"<h2>First half-spaces</h2>{_table(['', 'holds a row if'], words)}")


def _explained(estimator: Any, row: str | None) -> str:
    """The rules of one row; without a row, how to ask for them."""
    size = estimator.n_features_in_
    if row is None:
        return (
            f"<h2>One row</h2><p>Add <code>?row=</code> and {size} numbers with commas between them to the address.</p>"
        )
    try:
        numbers = [float(part) for part in row.split(",")]
        output = None if hasattr(estimator, "classes_") or len(estimator.path_sum_.intercept) == 1 else 0
        explanation = estimator.paths(numbers, top=SHOWN_RULES, output=output)
    except (ValueError, InputError) as error:
        raise BadRequest(f"row must hold {size} numbers with commas between them: {error}") from error
    lines = [(f"{value:+.4g}", words) for words, value in explanation.lines()]
    return (
        f"<h2>One row: {escape(explanation.prediction)}</h2><p>Score of {escape(explanation.output)}: {explanation.score:.6g}, "
        f"the sum of</p>{_table(['', ''], lines)}<p>The listed paths make up {explanation.share:.1%} of the sum of all "
        "|contributions|.</p>"
    )


def _bar(share: float) -> str:
    return f"<meter min='0' max='1' value='{share:.4f}'></meter>"


def _table(head: list[str], rows: Iterable[tuple[Any, ...]], raw: frozenset[int] | set[int] = frozenset()) -> str:
    """An HTML table; the cells of the columns ``raw`` are HTML already."""
    lines = [
        "".join(f"<td>{cell if number in raw else escape(str(cell))}</td>" for number, cell in enumerate(row))
        for row in rows
    ]
    top = "".join(f"<th>{escape(one)}</th>" for one in head)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"


def _page(title: str, body: str) -> str:
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title></head><body>"
        f"<p><a href='/'>runs</a> | <a href='/estimators'>saved estimators</a></p><h1>{escape(title)}</h1>{body}</body></html>"
    )
