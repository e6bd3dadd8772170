"""The answers to every address of the page, from the runs of a ``RunIndex``. The server sends them, a report inlines them."""

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
from unlazy.studio import heatmap_encoding, neuron_layout, spectra
from unlazy.studio.answers import Answer, BadRequest, NotFound, address, json_answer, parse_whole_number
from unlazy.studio.figures import panels, render
from unlazy.studio.heatmap_encoding import LARGEST_SIDE
from unlazy.studio.probe_set import probe_set_of
from unlazy.studio.result_cache import ResultCache
from unlazy.studio.run_facts import run_facts, version_of
from unlazy.studio.run_index import RunIndex
from unlazy.studio.run_reader import RunReader
from unlazy.studio.same_samples import compare_kernel_samples, match_samples

Parameters = Mapping[str, str]
OCTETS = "application/octet-stream"
MOST_FRAMES = 64
LARGEST_BATCH = 4 << 20  # bytes after which a batch is closed


class StudioApi:
    """Answers the addresses below ``/api/``, for the runs of an index and the claims of a results folder."""

    def __init__(self, run_index: RunIndex, results: Path | None = None) -> None:
        self.run_index = run_index
        self._results = results
        self._analyses, self._map_facts, self._eigenvalues = ResultCache(64), ResultCache(20_000), ResultCache(4000)
        self._drawing_lock = Lock()  # matplotlib has one style for the whole process
        self._analysis_lock = Lock()  # one long computation at a time, so that heat maps stay fast

    @property
    def results(self) -> Path:
        """The folder of judged results."""
        return self._results or results_folder()

    def answer(self, segments: Sequence[str], parameters: Parameters) -> Answer:
        """What ``/api/SEGMENTS?PARAMETERS`` returns."""
        routes: dict[str, Callable[[list[str], Parameters], Answer]] = {
            "runs": self.runs,
            "run": self.run,
            "array": self.array,
            "levels": self.levels,
            "frames": self.frames,
            "kernel-samples": self.kernel_samples,
            "sample-match": self.sample_match,
            "difference": self.difference,
            "embedding": self.embedding,
            "spectrum": self.spectrum,
            "figure": self.figure,
            "code": self.code,
            "claims": self.claims,
            "claim-figure": self.claim_figure,
        }
        if not segments or segments[0] not in routes:
            raise NotFound(f"there is nothing at /api/{'/'.join(segments)}.")
        try:
            return routes[segments[0]](list(segments[1:]), parameters)
        except StoreError as error:
            raise NotFound(str(error)) from error

    # --- lists and runs ---

    def runs(self, rest: list[str], parameters: Parameters) -> Answer:
        """One card per run, and the folders that cannot be read."""
        _require_no_more(rest)
        cards, broken = self.run_index.cards()
        return json_answer({"root": str(self.run_index.root), "runs": cards, "broken": broken})

    def run(self, rest: list[str], parameters: Parameters) -> Answer:
        """Everything about one run but its arrays."""
        key = "/".join(rest)
        try:
            return json_answer(run_facts(self.run_index.open(key)))
        except (StoreError, NotFound):
            raise
        except Exception as error:  # a damaged file may raise anything; the page shows the message
            raise NotFound(f"{key} is damaged ({error!r}).") from error

    # --- arrays ---

    def array(self, rest: list[str], parameters: Parameters) -> Answer:
        """One member's array as little-endian float32; as a file with ``format=npy`` or ``format=csv``."""
        reader, quantity, step = self._parse_array_address(rest)
        values = self._read_array(reader, quantity, step, _member_number(parameters))
        permanent = _is_permanent(reader, parameters)
        if parameters.get("format", "raw") != "raw":
            return _download(values, f"{reader.title}-{quantity}-{step}", parameters, permanent)
        return Answer(_float32_bytes(values), OCTETS, _array_headers(values), permanent)

    def frames(self, rest: list[str], parameters: Parameters) -> Answer:
        """Several steps of an array or (``kind=levels``) of a heat map in one answer, to save requests.

        First the length of a JSON text (four bytes, little-endian), then the text: ``[{"step", "bytes", "headers"}]``, or
        ``{"step", "error"}`` for a step that cannot be read, filled with spaces to a multiple of four; then all bodies, each
        filled to a multiple of four.
        """
        reader, quantity = self._parse_quantity_address(rest)
        steps = [parse_whole_number(step, "steps") for step in parameters.get("steps", "").split(",")[:MOST_FRAMES]]
        kind, member = parameters.get("kind", "array"), _member_number(parameters)
        over = parameters.get("scale", "all")
        if kind not in ("array", "levels") or over not in ("all", "step"):
            raise BadRequest("frames are of kind array or levels, on scale all or step.")
        heads: list[dict[str, Any]] = []
        bodies: list[bytes] = []
        for step in steps:
            if sum(map(len, bodies)) > LARGEST_BATCH:
                break  # the page asks again for the rest
            try:
                if kind == "levels":
                    answer = self.encode_heat_map(reader, quantity, step, member, over == "all")
                else:
                    values = self._read_array(reader, quantity, step, member)
                    answer = Answer(_float32_bytes(values), OCTETS, _array_headers(values))
            except (StoreError, NotFound, BadRequest, ValueError) as error:
                heads.append({"step": step, "error": str(error)})
                continue
            heads.append({"step": step, "bytes": len(answer.body), "headers": dict(answer.headers)})
            bodies.append(answer.body + bytes(-len(answer.body) % 4))
        head = json_answer(heads).body
        head += b" " * (-len(head) % 4)
        permanent = _is_permanent(reader, parameters) and (reader.is_finished or kind == "array" or over == "step")
        return Answer(b"".join([len(head).to_bytes(4, "little"), head, *bodies]), OCTETS, {}, permanent)

    def levels(self, rest: list[str], parameters: Parameters) -> Answer:
        """A heat map as bytes; ``scale=all``: one colour scale for all steps of the member, ``scale=step``: its own."""
        reader, quantity, step = self._parse_array_address(rest)
        over = parameters.get("scale", "all")
        if over not in ("all", "step"):
            raise BadRequest(f"scale is all or step, not {over!r}.")
        answer = self.encode_heat_map(reader, quantity, step, _member_number(parameters), over == "all")
        return replace(answer, permanent=_is_permanent(reader, parameters) and (reader.is_finished or over == "step"))

    def encode_heat_map(
        self, reader: RunReader, quantity: str, step: int, member: int, over_all: bool, most: int = LARGEST_SIDE
    ) -> Answer:
        """A heat map as bytes, of an open run; more than ``most`` points per side are averaged in blocks."""
        values = self._read_array(reader, quantity, step, member)
        if values.ndim != 2:
            raise BadRequest(f"{quantity} has shape {values.shape}; only tables become heat maps.")
        own = heatmap_encoding.map_facts(quantity, values)
        scale = self._scale(reader, quantity, member) if over_all else heatmap_encoding.common_scale(quantity, [own])
        shown, stride = heatmap_encoding.average_blocks(values, most)
        code = heatmap_encoding.encode(shown, own.unit, scale)
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

    def _scale(self, reader: RunReader, quantity: str, member: int) -> heatmap_encoding.Scale:
        """One colour scale for all steps of a member; computed once per reader."""
        key = ("scale", quantity, member)
        if key not in reader.cache:
            facts = [self._facts_at(reader, quantity, step, member) for step in reader.steps(quantity, member)]
            reader.cache[key] = heatmap_encoding.common_scale(quantity, [entry for entry in facts if entry is not None])
        known: heatmap_encoding.Scale = reader.cache[key]
        return known

    def _facts_at(self, reader: RunReader, quantity: str, step: int, member: int) -> heatmap_encoding.MapFacts | None:
        """What the colour scale needs of one step; ``None`` where the file cannot be read (the run page lists such files)."""
        try:
            stored = reader.find_array(quantity, step, member)
            known: heatmap_encoding.MapFacts = self._map_facts(
                stored.stamp(), lambda: heatmap_encoding.map_facts(quantity, stored.read())
            )
            return known
        except (StoreError, ValueError):
            return None

    def _read_array(self, reader: RunReader, quantity: str, step: int, member: int) -> NDArray[Any]:
        if quantity not in reader.quantities and quantity in probe_set_of(reader).generated:
            if step != 0:
                raise NotFound(f"{quantity} is stored at step 0 only.")
            return probe_set_of(reader).generated[quantity]
        return reader.find_array(quantity, step, member).read()

    def _parse_array_address(self, rest: list[str]) -> tuple[RunReader, str, int]:
        if len(rest) < 3:
            raise NotFound("an array is named by run, quantity and step.")
        *key, quantity, step = rest
        return self.run_index.open("/".join(key)), quantity, parse_whole_number(step, "step")

    # --- computed from arrays ---

    def embedding(self, rest: list[str], parameters: Parameters) -> Answer:
        """Neurons as points of a plane, at every step."""
        return self._analysis("embedding", neuron_layout.layouts_json, rest, parameters)

    def spectrum(self, rest: list[str], parameters: Parameters) -> Answer:
        """Leading eigenvalues over the trace, and centred alignment with the targets, at every step."""
        return self._analysis("spectrum", partial(spectra.spectrum_json, cache=self._eigenvalues), rest, parameters)

    def _analysis(
        self, kind: str, make: Callable[[RunReader, str, int], dict[str, Any]], rest: list[str], parameters: Parameters
    ) -> Answer:
        reader, quantity = self._parse_quantity_address(rest)
        member = _member_number(parameters)
        key = (kind, reader.key, version_of(reader), reader.measurements, quantity, member)

        def compute() -> Answer:
            with self._analysis_lock:
                return json_answer(make(reader, quantity, member))

        answer: Answer = self._analyses(key, compute)
        return answer

    def _parse_quantity_address(self, rest: list[str]) -> tuple[RunReader, str]:
        if len(rest) < 2:
            raise NotFound("name a run and a quantity.")
        *key, quantity = rest
        return self.run_index.open("/".join(key)), quantity

    # --- figures, code, claims ---

    def figure(self, rest: list[str], parameters: Parameters) -> Answer:
        """A panel as a figure for print."""
        reader, name = self._parse_quantity_address(rest)
        panel, _, form = name.rpartition(".")
        if form not in render.FORMATS:
            raise NotFound(f"a figure ends in {', '.join(render.FORMATS)}; this is {name!r}.")
        request = self._figure_request(reader, panel, parameters)
        for name in request.names if request.kind in render.READ_BY_STORED_NAME else ():
            reader.check_links(name)
        with self._drawing_lock:
            body = render.render(render.draw(reader.run, request), form)
        return Answer(body, render.FORMATS[form])

    def code(self, rest: list[str], parameters: Parameters) -> Answer:
        """The Python code that draws the figure."""
        reader, name = self._parse_quantity_address(rest)
        request = self._figure_request(reader, name, parameters)
        return Answer(render.code(reader.folder, request).encode(), "text/plain; charset=utf-8")

    def _figure_request(self, reader: RunReader, panel: str, parameters: Parameters) -> render.FigureRequest:
        other = self.run_index.open(parameters["other"]) if parameters.get("other") else None
        given = {
            name: parse_whole_number(parameters[name], name)
            for name in panels.NUMBER_PARAMETERS
            if parameters.get(name)
        }
        return panels.figure_request(reader, panel, given, other)

    def kernel_samples(self, rest: list[str], parameters: Parameters) -> Answer:
        """Whether a kernel is over the same samples as that of another run, with the reason."""
        reader, quantity = self._parse_quantity_address(rest)
        return json_answer(
            asdict(compare_kernel_samples(reader, self.run_index.open(parameters.get("other", "")), quantity))
        )

    def sample_match(self, rest: list[str], parameters: Parameters) -> Answer:
        """Whether two runs have the same samples, and in which order."""
        first, second = self.run_index.open("/".join(rest)), self.run_index.open(parameters.get("other", ""))
        return json_answer(asdict(match_samples(first, second)))

    def difference(self, rest: list[str], parameters: Parameters) -> Answer:
        """A kernel minus that of another run, each over its mean diagonal, as .npy or .csv."""
        reader, quantity, step = self._parse_array_address(rest)
        other = self.run_index.open(parameters.get("other", ""))
        values = [
            self._read_array(run, quantity, panels.shown_step(run, quantity, step, member), member).astype(np.float64)
            for run, member in (
                (reader, _member_number(parameters)),
                (other, parse_whole_number(parameters.get("member2") or "0", "member2")),
            )
        ]
        if values[0].shape != values[1].shape or values[0].ndim != 2:
            raise BadRequest(f"{values[0].shape} and {values[1].shape} cannot be subtracted.")
        panels.check_same_samples(reader, other, quantity)
        first, second = (kernel / (np.diagonal(kernel).mean() or 1) for kernel in values)
        return _download(first - second, f"{reader.title}-minus-{other.title}-{quantity}-{step}", parameters, False)

    def claims(self, rest: list[str], parameters: Parameters) -> Answer:
        """The scorecard; each row has the address of its figure and the keys of its runs, where these exist."""
        _require_no_more(rest)
        return json_answer(self._claim_rows())

    def _claim_rows(self) -> list[dict[str, Any]]:
        folder = self.results
        rows = scorecard(load_results(folder)) if folder.is_dir() else []
        runs: dict[tuple[Any, Any], list[str]] = {}
        for card in self.run_index.cards()[0]:
            runs.setdefault((card["study"], card["scale"]), []).append(card["key"])
        return [self._claim_row(row, runs.get((row["study"], row["scale"]), [])) for row in rows]

    def _claim_row(self, row: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        figure = Path(row["figure"]).name if row.get("figure") else None
        there = figure and (self.results / str(row["study"]) / str(row["scale"]) / figure).is_file()
        url = address("claim-figure", row["study"], row["scale"], figure) if there else None
        return row | {"figure_url": url, "run_keys": keys[:20]}

    def claim_figure(self, rest: list[str], parameters: Parameters) -> Answer:
        """A figure of a study's results; compares names with those in the folder, so that no path is built from an address."""
        if len(rest) != 3 or rest[1] not in SCALE_ORDER:
            raise NotFound("a claim's figure is named by study, scale and file.")
        folder = self.results
        for study in folder.iterdir() if folder.is_dir() else ():
            pictures = study / rest[1]
            if study.name == rest[0] and pictures.is_dir():
                for path in pictures.glob("*.png"):
                    if path.name == rest[2] and path.resolve().is_relative_to(folder.resolve()):
                        return Answer(path.read_bytes(), "image/png")
        raise NotFound(f"there is no figure {'/'.join(rest)}.")


# --- helpers ---------------------------------------------------------------------------------


def _is_permanent(reader: RunReader, parameters: Parameters) -> bool:
    return parameters.get("v") == version_of(reader)


def _member_number(parameters: Parameters) -> int:
    return parse_whole_number(parameters.get("member") or "0", "member")


def _shape_text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def _float32_bytes(values: NDArray[Any]) -> bytes:
    return values.astype("<f4").tobytes()


def _array_headers(values: NDArray[Any]) -> dict[str, str]:
    return {"X-Shape": _shape_text(values.shape), "X-Dtype": "float32"}


def _download(values: NDArray[Any], name: str, parameters: Parameters, permanent: bool) -> Answer:
    """An array as a file to download: .npy or .csv, by the parameter ``format``."""
    form = parameters.get("format", "npy")
    if form == "npy":
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        return Answer(buffer.getvalue(), OCTETS, _attachment(f"{name}.npy"), permanent)
    if form != "csv":
        raise BadRequest(f"format is raw, npy or csv, not {form!r}.")
    rows = values.reshape(values.shape[0], -1) if values.ndim else values.reshape(1, 1)
    text = io.StringIO()
    np.savetxt(text, rows, fmt="%.9g", delimiter=",")
    return Answer(text.getvalue().encode(), "text/csv; charset=utf-8", _attachment(f"{name}.csv"), permanent)


def _attachment(name: str) -> dict[str, str]:
    safe = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "_" for letter in name)
    return {"Content-Disposition": f'attachment; filename="{safe}"'}


def _require_no_more(rest: list[str]) -> None:
    if rest:
        raise NotFound(f"there is nothing below this address ({'/'.join(rest)}).")
