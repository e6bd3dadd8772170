"""The one-file page: a `Page` of scenes, story, figures and claims in, one HTML text out.

The page asks for nothing but itself: style, script, pictures and numbers are all inside, so it can be mailed,
archived or opened from a disk without a network.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from unlazy.claims.scorecard import MARKS
from unlazy.store import write_file

Array = np.ndarray[Any, np.dtype[Any]]

SHAPES = {  # field of a scene: its axes; F frames, n points, k points of the kernels
    **dict.fromkeys(("epochs", "loss", "loss_top", "loss_bottom"), "F"),
    **dict.fromkeys(("angles", "target"), "n"),
    **dict.fromkeys(("output", "paths"), "F n"),
    **dict.fromkeys(("overlap", "tangent"), "F k k"),
    "normals": "F layers width 2",
    "offsets": "F layers width",
    "picked": "k",
}
FLOATS = [name for name in SHAPES if name not in ("epochs", "overlap", "tangent", "picked")]


@dataclass(frozen=True)
class Scene:
    """One network, one seed, seen at F moments of training on n points of the circle.

    Half-space of unit (l, i): { x : normals[l, i] . x + offsets[l, i] >= 0 }; both are None for networks
    whose units are no half-spaces (ReLU). `overlap` and `tangent` are symmetric, trace-normalised
    (mean diagonal 1) kernels on k of the points, ordered by angle; `picked` says which
    (default: every (n // k)-th).
    """

    name: str
    preset: str
    note: str  # one sentence: what to look for
    seed: int
    epochs: Array  # [F] increasing, 0 = before training
    loss: Array  # [F] mean squared error on all points
    loss_top: Array  # [F] the same on 0 <= angle < pi
    loss_bottom: Array  # [F] the same on pi <= angle < 2 pi
    angles: Array  # [n] radians, increasing
    target: Array  # [n]
    output: Array  # [F, n]
    normals: Array | None  # [F, layers, width, 2]
    offsets: Array | None  # [F, layers, width]
    paths: Array  # [F, n] active paths
    overlap: Array  # [F, k, k]
    tangent: Array  # [F, k, k]
    picked: Array | None = None  # [k] indices into angles

    def __post_init__(self) -> None:
        sizes = {"2": 2}
        for name, axes in SHAPES.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._array(name, axes.split(), sizes))
        if self.picked is None:
            object.__setattr__(self, "picked", np.arange(sizes["k"]) * (sizes["n"] // sizes["k"]))
        if (self.normals is None) != (self.offsets is None):
            raise ValueError(f"{self.name}: give both normals and offsets, or neither")
        self._check_values()

    def _array(self, name: str, axes: list[str], sizes: dict[str, int]) -> Array:
        """The field as an array whose axes have the sizes seen so far; new sizes are noted."""
        value = np.asarray(getattr(self, name))
        same = value.ndim == len(axes) and value.size > 0
        if not same or any(sizes.setdefault(axis, size) != size for axis, size in zip(axes, value.shape, strict=True)):
            wanted = ", ".join(f"{axis} = {sizes[axis]}" if axis in sizes else axis for axis in axes)
            raise ValueError(f"{self.name}: {name} should have shape [{wanted}], has {value.shape}")
        if not np.isfinite(value).all():
            raise ValueError(f"{self.name}: {name} holds values that are not finite; leave those frames out")
        return value

    def _check_values(self) -> None:
        for name, high in {"epochs": np.inf, "angles": 2 * np.pi, "picked": self.angles.size}.items():
            value = getattr(self, name)
            if (np.diff(value) <= 0).any() or value[0] < 0 or value[-1] >= high:
                raise ValueError(f"{self.name}: {name} must increase within [0, {high:.4g})")
        if (self.paths < 0).any():
            raise ValueError(f"{self.name}: a number of paths cannot be negative")
        for name in ("overlap", "tangent"):
            kernel = getattr(self, name)
            if not np.allclose(kernel, kernel.swapaxes(1, 2), rtol=1e-3, atol=1e-4 * np.abs(kernel).max()):
                raise ValueError(f"{self.name}: {name} is not symmetric")


@dataclass(frozen=True)
class Figure:
    """A picture made elsewhere; `id` is what a claim's `figure` names."""

    id: str
    title: str
    caption: str
    png: bytes

    def __post_init__(self) -> None:
        if not self.png.startswith(b"\x89PNG"):
            raise ValueError(f"figure {self.id}: not a PNG")


@dataclass(frozen=True)
class Page:
    """Everything the page shows. `claims` are plain scorecard rows; `story` is (heading, paragraph) pairs."""

    title: str
    lead: str
    scenes: tuple[Scene, ...] = ()
    figures: tuple[Figure, ...] = ()
    claims: tuple[dict[str, Any], ...] = ()
    story: tuple[tuple[str, str], ...] = ()
    provenance: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for row in self.claims:
            for verdict in (row["verdict"], *(part.get("verdict") for part in row.get("parts") or ())):
                if verdict is not None and verdict not in MARKS:
                    raise ValueError(f"claim {row.get('id')}: verdict {verdict!r} is none of {', '.join(MARKS)}")


def page_html(page: Page) -> str:
    """The whole page as one text."""
    static = files("unlazy.studio") / "static"
    sections = _story(page.story) + _figures(page.figures) + _scorecard(page) + _provenance(page.provenance)
    parts = {
        "title": escape(page.title),
        "lead": escape(page.lead),
        "style": (static / "page.css").read_text("utf-8"),
        "script": (static / "page.js").read_text("utf-8"),
        "data": script_json({"scenes": [_scene(scene) for scene in page.scenes]}),
        "sections": sections,
    }
    template = (static / "page.html").read_text("utf-8")
    return re.sub(r"@@(\w+)@@", lambda token: parts[token[1]], template)  # one pass: content is never re-read


def write_page(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write the page, whole or not at all."""
    write_file(Path(path), page_html(page).encode())
    return Path(path)


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: `<`, `>`, `&` and all but ASCII are escaped."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def quantise(kernel: Array, signed: bool = False, top_quantile: float = 1.0) -> dict[str, Any]:
    """Kernels [F, k, k] as bytes of their upper triangles, with one scale for all frames.

    level = sqrt(min(|K| / top, 1)): a square root, because the entries span orders of magnitude. `top` is
    a quantile of all diagonal entries (1: the largest; less, so that one spike does not darken a whole
    training); what lies above is shown as "top or more".
    Unsigned: byte = 255 level. Signed: byte = 128 + 127 sign(K) level.
    """
    rows, columns = np.triu_indices(kernel.shape[-1])
    values = kernel[:, rows, columns].astype(np.float64)  # [F, k (k + 1) / 2]
    largest = float(np.abs(values).max())
    top = float(np.quantile(np.abs(values[:, rows == columns]), top_quantile)) or largest or 1.0
    level = np.sqrt(np.minimum(np.abs(values) / top, 1))
    code = np.rint(128 + 127 * np.sign(values) * level if signed else 255 * level)
    return {"top": top, "clipped": largest > top, "signed": signed, "bytes": _base64(code.astype(np.uint8))}


def _scene(scene: Scene) -> dict[str, Any]:
    assert scene.picked is not None  # set in __post_init__
    top = scene.angles[scene.picked] < np.pi
    diagonal = np.diagonal(scene.tangent, axis1=1, axis2=2)  # [F, k]
    share = diagonal[:, top].sum(1) / np.maximum(diagonal.sum(1), np.finfo(float).tiny)
    shape = (0, 0) if scene.normals is None else scene.normals.shape[1:3]
    numbers = {name: getattr(scene, name) for name in FLOATS} | {"share": share}
    return {
        **{name: getattr(scene, name) for name in ("name", "preset", "note")},
        "seed": int(scene.seed),
        "epochs": scene.epochs.tolist(),
        "picked": scene.picked.tolist(),
        "layers": int(shape[0]),
        "width": int(shape[1]),
        "floats": {name: _base64(value.astype("<f4")) for name, value in numbers.items() if value is not None},
        "overlap": quantise(scene.overlap),
        "tangent": quantise(scene.tangent, bool(scene.tangent.min() < -1e-3 * scene.tangent.max()), 0.98),
    }


def _base64(value: Array | bytes) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes()).decode()


def _story(story: Iterable[tuple[str, str]]) -> str:
    told = "".join(f"<section><h2>{escape(head)}</h2><p>{escape(text)}</p></section>" for head, text in story)
    return f'<article id="story" class="story">{told}</article>' if told else ""


def _figures(figures: Iterable[Figure]) -> str:
    shown = "".join(
        f'<figure id="figure-{escape(f.id)}"><button type="button" aria-label="Enlarge: {escape(f.title)}">'
        f'<img alt="{escape(f.title)}" src="data:image/png;base64,{_base64(f.png)}"></button>'
        f"<figcaption><strong>{escape(f.title)}</strong> {escape(f.caption)}</figcaption></figure>"
        for f in figures
    )
    return f'<section id="figures"><h2>Figures</h2><div class="gallery">{shown}</div></section>' if shown else ""


def _scorecard(page: Page) -> str:
    if not page.claims:
        return ""
    count = Counter(row["verdict"] for row in page.claims)
    summary = " \u00b7 ".join(f"{_verdict(word)} {count[word]}" for word in MARKS if count[word])
    known = {figure.id for figure in page.figures}
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Verdict", "Claim", "Paper", "Measured", "Seeds"))
    body = "".join(_claim(row, known) for row in page.claims)
    return (
        f'<section id="scorecard"><h2>Scorecard</h2><p class="tally">{summary}</p>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{body}</table></div></section>'
    )


def _claim(row: Mapping[str, Any], figures: set[str]) -> str:
    place = " \u00b7 ".join(escape(str(row[key])) for key in ("id", "where", "scale") if row.get(key))
    judged = row["verdict"] != "not run yet"
    seeds = f"{row['agree']} of {row['seeds']} agree" if judged and row.get("agree") is not None else None
    held = sum(part.get("verdict") == "holds" for part in row.get("parts") or ())
    count = f"{held} of {len(row['parts'])} parts hold" if judged and row.get("parts") else "too short to tell"
    more = f"<p>{escape(str(row['why']))}</p>" if row.get("why") else ""
    if parts := row.get("parts"):
        lines = "".join(
            f"<tr><td>{_verdict(part.get('verdict'))}</td><td>{escape(str(part.get('name', '')))}</td>"
            f"<td>{_measured(part)}</td></tr>"
            for part in parts
        )
        more += f'<table class="parts">{lines}</table>'
    figure = Path(row.get("figure") or "").stem
    if figure in figures:
        more += f'<p><a href="#figure-{escape(figure)}">See the figure</a></p>'
    more += f"<p><code>{escape(str(row['command']))}</code></p>" if row.get("command") else ""
    details = f"<details><summary>{count}: parts and reasons</summary>{more}</details>" if more else ""
    return (
        f"<tbody><tr><td>{_verdict(row['verdict'])}</td>"
        f'<td>{escape(str(row.get("statement", "")))}<div class="place">{place}</div>{details}</td>'
        f"<td>{_number(row.get('paper_value'))}</td><td>{_measured(row) if judged else _number(None)}</td>"
        f"<td>{_number(seeds)}</td></tr></tbody>"
    )


def _verdict(word: str | None) -> str:
    if word is None:
        return ""
    name = word.replace(" ", "-")
    return f'<span class="verdict {name}"><span aria-hidden="true">{MARKS[word]}</span> {word}</span>'


def _measured(row: Mapping[str, Any]) -> str:
    """`value unit`, its interval below; a dash where nothing was measured, "never" where a time has no end."""
    interval = row.get("interval")
    if not interval:
        return _number(None)
    missing = "never" if row.get("unit") in ("epochs", "times") else _number(None)
    value, low, high = (missing if number is None else _number(number) for number in (row.get("value"), *interval))
    unit = f" {escape(str(row['unit']))}" if row.get("unit") and value != missing else ""
    return f'{value}{unit}<div class="place">{low} to {high}</div>'


def _number(value: Any) -> str:
    if isinstance(value, float | np.floating):
        number = float(value)
        value = f"{number:,.0f}" if 1000 <= abs(number) < 1e7 else f"{number:.3g}"
    return "\u2013" if value in (None, "", "nan") else escape(str(value))


def _provenance(facts: Mapping[str, Any] | None) -> str:
    if not facts:
        return ""
    rows = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    return f'<details id="provenance"><summary>How this page was made</summary><dl>{rows}</dl></details>'
