"""What every address of the page returns, from the runs on a shelf. The server sends it, a report inlines it."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unlazy.claims.scorecard import SCALE_ORDER, load_results, results_folder, scorecard
from unlazy.runtime import StoreError
from unlazy.studio import analysis, figures, levels, panels
from unlazy.studio.alike import alike, matched
from unlazy.studio.analysis import Once
from unlazy.studio.answers import Answer, BadRequest, NotHere, address, as_json, whole
from unlazy.studio.levels import LARGEST_SIDE
from unlazy.studio.openrun import OpenRun
from unlazy.studio.probe import probe_of
from unlazy.studio.runfacts import run_facts, version_of
from unlazy.studio.shelf import Shelf

Parameters = Mapping[str, str]
OCTETS = "application/octet-stream"
MOST_FRAMES = 64
LARGEST_BATCH = 4 << 20  # bytes after which a batch is closed


class Payload:
    """The answers, over one shelf of runs and one folder of results."""

    def __init__(self, shelf: Shelf, results: Path | None = None) -> None:
        self.shelf = shelf
        self._results = results
        self._long, self._facts_of, self._eigenvalues = Once(64), Once(20_000), Once(4000)
        self._drawing = Lock()  # the style of a figure is one for the whole process
        self._analysing = Lock()  # one long computation at a time: pictures come first

    @property
    def results(self) -> Path:
        return self._results or results_folder()

    def answer(self, segments: Sequence[str], parameters: Parameters) -> Answer:
        """What ``/api/SEGMENTS?PARAMETERS`` returns."""
        routes: dict[str, Callable[[list[str], Parameters], Answer]] = {
            "runs": self.runs,
            "run": self.run,
            "array": self.array,
            "levels": self.levels,
            "frames": self.frames,
            "alike": self.alike,
            "matched": self.matched,
            "difference": self.difference,
            "embedding": self.embedding,
            "spectrum": self.spectrum,
            "figure": self.figure,
            "code": self.code,
            "claims": self.claims,
            "claim-figure": self.claim_figure,
        }
        if not segments or segments[0] not in routes:
            raise NotHere(f"there is nothing at /api/{'/'.join(segments)}.")
        try:
            return routes[segments[0]](list(segments[1:]), parameters)
        except StoreError as error:
            raise NotHere(str(error)) from error

    # --- lists and runs ---

    def runs(self, rest: list[str], parameters: Parameters) -> Answer:
        _nothing_more(rest)
        cards, broken = self.shelf.cards()
        return as_json({"root": str(self.shelf.root), "runs": cards, "broken": broken})

    def run(self, rest: list[str], parameters: Parameters) -> Answer:
        key = "/".join(rest)
        try:
            return as_json(run_facts(self.shelf.open(key)))
        except (StoreError, NotHere):
            raise
        except Exception as error:  # whatever a damaged file holds, the page says so and goes on
            raise NotHere(f"{key} is damaged ({error!r}).") from error

    # --- arrays ---

    def array(self, rest: list[str], parameters: Parameters) -> Answer:
        """Little-endian float32 of one member; ``format=npy`` and ``format=csv`` for programs and people."""
        opened, quantity, step = self._addressed(rest)
        values = self._read(opened, quantity, step, _member(parameters))
        lasting = _lasting(opened, parameters)
        if parameters.get("format", "raw") != "raw":
            return _file(values, f"{opened.title}-{quantity}-{step}", parameters, lasting)
        return Answer(_raw(values), OCTETS, _array_headers(values), lasting)

    def frames(self, rest: list[str], parameters: Parameters) -> Answer:
        """Several steps at once, of an array or (``kind=levels``) of a heat map: what the single addresses answer, in a row.

        First the length of a JSON text (four bytes, little-endian), then the text: ``[{"step", "bytes", "headers"}]``, or
        ``{"step", "error"}`` for a step that cannot be read, filled with spaces to a multiple of four; then all bodies, each
        filled to a multiple of four.
        """
        opened, quantity = self._named(rest)
        steps = [whole(step, "steps") for step in parameters.get("steps", "").split(",")[:MOST_FRAMES]]
        kind, member = parameters.get("kind", "array"), _member(parameters)
        over = parameters.get("scale", "all")
        if kind not in ("array", "levels") or over not in ("all", "step"):
            raise BadRequest("frames are of kind array or levels, on scale all or step.")
        heads: list[dict[str, Any]] = []
        bodies: list[bytes] = []
        for step in steps:
            if sum(map(len, bodies)) > LARGEST_BATCH:
                break  # the reader asks again for what is missing
            try:
                if kind == "levels":
                    one = self.levels_of(opened, quantity, step, member, over == "all")
                else:
                    values = self._read(opened, quantity, step, member)
                    one = Answer(_raw(values), OCTETS, _array_headers(values))
            except (StoreError, NotHere, BadRequest, ValueError) as error:
                heads.append({"step": step, "error": str(error)})
                continue
            heads.append({"step": step, "bytes": len(one.body), "headers": dict(one.headers)})
            bodies.append(one.body + bytes(-len(one.body) % 4))
        head = as_json(heads).body
        head += b" " * (-len(head) % 4)
        lasting = _lasting(opened, parameters) and (opened.finished or kind == "array" or over == "step")
        return Answer(b"".join([len(head).to_bytes(4, "little"), head, *bodies]), OCTETS, {}, lasting)

    def levels(self, rest: list[str], parameters: Parameters) -> Answer:
        """A heat map as bytes, on one scale for all steps of the member or on its own."""
        opened, quantity, step = self._addressed(rest)
        over = parameters.get("scale", "all")
        if over not in ("all", "step"):
            raise BadRequest(f"scale is all or step, not {over!r}.")
        answer = self.levels_of(opened, quantity, step, _member(parameters), over == "all")
        return replace(answer, lasting=_lasting(opened, parameters) and (opened.finished or over == "step"))

    def levels_of(
        self, opened: OpenRun, quantity: str, step: int, member: int, over_all: bool, most: int = LARGEST_SIDE
    ) -> Answer:
        """The same for callers that have the run; ``most``: points a side, more are averaged in blocks."""
        values = self._read(opened, quantity, step, member)
        if values.ndim != 2:
            raise BadRequest(f"{quantity} has shape {values.shape}; only tables become heat maps.")
        own = levels.facts(quantity, values)
        scale = self._scale(opened, quantity, member) if over_all else levels.scale_of(quantity, [own])
        shown, stride = levels.coarse(values, most)
        code = levels.levels(shown, own.unit, scale)
        headers = {
            "X-Shape": _shape_text(code.shape),
            "X-Dtype": "uint8",
            "X-Top": f"{scale.top:.9g}",
            "X-Unit": f"{own.unit:.9g}",
            "X-Signed": str(int(scale.signed)),
            "X-Clipped": str(int(scale.clipped)),
            "X-Stride": str(stride),
            "X-Bad": str(int((~np.isfinite(values)).sum())),
        }
        return Answer(code.tobytes(), OCTETS, headers)

    def _scale(self, opened: OpenRun, quantity: str, member: int) -> levels.Scale:
        """One scale for all steps of a member, worked out once for the run as it is now."""
        key = ("scale", quantity, member)
        if key not in opened.memory:
            seen = [self._facts(opened, quantity, step, member) for step in opened.steps(quantity, member)]
            opened.memory[key] = levels.scale_of(quantity, [entry for entry in seen if entry is not None])
        known: levels.Scale = opened.memory[key]
        return known

    def _facts(self, opened: OpenRun, quantity: str, step: int, member: int) -> levels.Facts | None:
        """What the scale needs of one step; ``None`` where the file cannot be read, which the run page names."""
        try:
            stored = opened.stored(quantity, step, member)
            known: levels.Facts = self._facts_of(stored.stamp(), lambda: levels.facts(quantity, stored.read()))
            return known
        except (StoreError, ValueError):
            return None

    def _read(self, opened: OpenRun, quantity: str, step: int, member: int) -> NDArray[Any]:
        if quantity not in opened.quantities and quantity in probe_of(opened).made:
            if step != 0:
                raise NotHere(f"{quantity} is there at step 0 only.")
            return probe_of(opened).made[quantity]
        return opened.stored(quantity, step, member).read()

    def _addressed(self, rest: list[str]) -> tuple[OpenRun, str, int]:
        if len(rest) < 3:
            raise NotHere("an array is named by run, quantity and step.")
        *key, quantity, step = rest
        return self.shelf.open("/".join(key)), quantity, whole(step, "step")

    # --- what is computed ---

    def embedding(self, rest: list[str], parameters: Parameters) -> Answer:
        """Neurons on a plane at every step, without jumps."""
        return self._analysis("embedding", analysis.embedding, rest, parameters)

    def spectrum(self, rest: list[str], parameters: Parameters) -> Answer:
        """Leading eigenvalues over the trace, and centred alignment with the targets, at every step."""
        return self._analysis("spectrum", partial(analysis.spectrum, known=self._eigenvalues), rest, parameters)

    def _analysis(
        self, kind: str, make: Callable[[OpenRun, str, int], dict[str, Any]], rest: list[str], parameters: Parameters
    ) -> Answer:
        opened, quantity = self._named(rest)
        member = _member(parameters)
        key = (kind, opened.key, version_of(opened), len(opened.lines), quantity, member)

        def work() -> Answer:
            with self._analysing:
                return as_json(make(opened, quantity, member))

        answer: Answer = self._long(key, work)
        return answer

    def _named(self, rest: list[str]) -> tuple[OpenRun, str]:
        if len(rest) < 2:
            raise NotHere("name a run and a quantity.")
        *key, quantity = rest
        return self.shelf.open("/".join(key)), quantity

    # --- figures, code, claims ---

    def figure(self, rest: list[str], parameters: Parameters) -> Answer:
        """A panel as a figure for print."""
        opened, name = self._named(rest)
        panel, _, form = name.rpartition(".")
        if form not in figures.FORMATS:
            raise NotHere(f"a figure ends in {', '.join(figures.FORMATS)}; this is {name!r}.")
        request = self._panel(opened, panel, parameters)
        for name in request.names if request.kind in figures.OF_FOLDERS else ():
            opened.check(name)
        with self._drawing:
            body = figures.render(figures.draw(opened.run, request), form)
        return Answer(body, figures.FORMATS[form])

    def code(self, rest: list[str], parameters: Parameters) -> Answer:
        """Python that makes the figure."""
        opened, name = self._named(rest)
        request = self._panel(opened, name, parameters)
        return Answer(figures.code(opened.folder, request).encode(), "text/plain; charset=utf-8")

    def _panel(self, opened: OpenRun, panel: str, parameters: Parameters) -> figures.Request:
        other = self.shelf.open(parameters["other"]) if parameters.get("other") else None
        given = {name: whole(parameters[name], name) for name in panels.NUMBERS if parameters.get(name)}
        return panels.request(opened, panel, given, other)

    def alike(self, rest: list[str], parameters: Parameters) -> Answer:
        """Whether a kernel is over the same samples as that of another run, and how one knows."""
        opened, quantity = self._named(rest)
        return as_json(asdict(alike(opened, self.shelf.open(parameters.get("other", "")), quantity)))

    def matched(self, rest: list[str], parameters: Parameters) -> Answer:
        """Whether two runs hold the same samples, and in which order."""
        first, second = self.shelf.open("/".join(rest)), self.shelf.open(parameters.get("other", ""))
        return as_json(asdict(matched(first, second)))

    def difference(self, rest: list[str], parameters: Parameters) -> Answer:
        """A kernel minus that of another run, each over its mean diagonal, as the page draws it; as npy or csv."""
        opened, quantity, step = self._addressed(rest)
        other = self.shelf.open(parameters.get("other", ""))
        values = [
            self._read(run, quantity, panels.shown_step(run, quantity, step, member), member).astype(np.float64)
            for run, member in (
                (opened, _member(parameters)),
                (other, whole(parameters.get("member2") or "0", "member2")),
            )
        ]
        if values[0].shape != values[1].shape or values[0].ndim != 2:
            raise BadRequest(f"{values[0].shape} and {values[1].shape} cannot be subtracted.")
        panels.check_alike(opened, other, quantity)
        first, second = (one / (np.diagonal(one).mean() or 1) for one in values)
        return _file(first - second, f"{opened.title}-minus-{other.title}-{quantity}-{step}", parameters, False)

    def claims(self, rest: list[str], parameters: Parameters) -> Answer:
        """The scorecard, each row with the address of its figure and the runs it came from, where they are here."""
        _nothing_more(rest)
        return as_json(self.claim_rows())

    def claim_rows(self) -> list[dict[str, Any]]:
        folder = self.results
        rows = scorecard(load_results(folder)) if folder.is_dir() else []
        made: dict[tuple[Any, Any], list[str]] = {}
        for card in self.shelf.cards()[0]:
            made.setdefault((card["study"], card["scale"]), []).append(card["key"])
        return [self._claim_row(row, made.get((row["study"], row["scale"]), [])) for row in rows]

    def _claim_row(self, row: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        figure = Path(row["figure"]).name if row.get("figure") else None
        there = figure and (self.results / str(row["study"]) / str(row["scale"]) / figure).is_file()
        url = address("claim-figure", row["study"], row["scale"], figure) if there else None
        return row | {"figure_url": url, "run_keys": keys[:20]}

    def claim_figure(self, rest: list[str], parameters: Parameters) -> Answer:
        """A study's committed figure; only names that are really in the folder are looked up."""
        if len(rest) != 3 or rest[1] not in SCALE_ORDER:
            raise NotHere("a claim's figure is named by study, scale and file.")
        folder = self.results
        for study in folder.iterdir() if folder.is_dir() else ():
            pictures = study / rest[1]
            if study.name == rest[0] and pictures.is_dir():
                for path in pictures.glob("*.png"):
                    if path.name == rest[2] and path.resolve().is_relative_to(folder.resolve()):
                        return Answer(path.read_bytes(), "image/png")
        raise NotHere(f"there is no figure {'/'.join(rest)}.")


# --- small parts ---------------------------------------------------------------------------------


def _lasting(opened: OpenRun, parameters: Parameters) -> bool:
    return parameters.get("v") == version_of(opened)


def _member(parameters: Parameters) -> int:
    return whole(parameters.get("member") or "0", "member")


def _shape_text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def _raw(values: NDArray[Any]) -> bytes:
    return values.astype("<f4").tobytes()


def _array_headers(values: NDArray[Any]) -> dict[str, str]:
    return {"X-Shape": _shape_text(values.shape), "X-Dtype": "float32"}


def _file(values: NDArray[Any], name: str, parameters: Parameters, lasting: bool) -> Answer:
    """Numbers for programs (npy) and people (csv)."""
    form = parameters.get("format", "npy")
    if form == "npy":
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        return Answer(buffer.getvalue(), OCTETS, _attachment(f"{name}.npy"), lasting)
    if form != "csv":
        raise BadRequest(f"format is raw, npy or csv, not {form!r}.")
    rows = values.reshape(values.shape[0], -1) if values.ndim else values.reshape(1, 1)
    text = io.StringIO()
    np.savetxt(text, rows, fmt="%.9g", delimiter=",")
    return Answer(text.getvalue().encode(), "text/csv; charset=utf-8", _attachment(f"{name}.csv"), lasting)


def _attachment(name: str) -> dict[str, str]:
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "_" for letter in name)
    return {"Content-Disposition": f'attachment; filename="{safe}"'}


def _nothing_more(rest: list[str]) -> None:
    if rest:
        raise NotHere(f"there is nothing below this address ({'/'.join(rest)}).")
