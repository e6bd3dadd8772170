"""The one-file report: the studio's page with the answers for a few runs inside.

The file holds the same answers that the server would give, for one member of each run (as member 0). It holds at most so many
steps that the file stays small; the page says what was left out.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from unlazy.runtime import StoreError, provenance, require
from unlazy.store import write_file
from unlazy.studies.request import Request
from unlazy.studio.answers import Answer, NotFound, address, to_strict_json
from unlazy.studio.api import StudioApi
from unlazy.studio.bundle import single_file_page
from unlazy.studio.heatmap_encoding import LARGEST_SIDE
from unlazy.studio.run_facts import run_facts
from unlazy.studio.run_index import RunIndex
from unlazy.studio.run_reader import MOST_STEPS, RunReader, even_indices

MAP_BYTES = 24_000_000  # of all heat maps of a report
EXACT_BYTES = 6_000_000  # of their exact numbers; beyond this the report has the colours only
ARRAY_BYTES = 4_000_000  # of one quantity over all its steps
LEAST_SIDE = 64


@dataclass(frozen=True)
class Scene:
    """A run in the report: its key, title, member, a note that says what to watch for, and what kind of network it is."""

    key: str
    title: str | None = None
    note: str = ""
    member: int | None = None
    meaning: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure of a study as PNG; ``id``: the name by which a claim refers to it."""

    id: str
    title: str
    caption: str
    png: bytes

    def __post_init__(self) -> None:
        require(self.png.startswith(b"\x89PNG"), f"figure {self.id}: not a PNG.")


@dataclass(frozen=True)
class Report:
    """The content of a report: runs (``scenes``), story, figures, judged claims and provenance."""

    title: str
    lead: str
    scenes: tuple[Scene, ...]
    story: tuple[tuple[str, str], ...] = ()
    figures: tuple[Picture, ...] = ()
    claims: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


class Omissions:
    """Collects sentences about what a report leaves out."""

    def __init__(self, most_steps: int) -> None:
        self.most_steps = most_steps
        self.longest = 0  # stored steps of the longest run
        self.others: list[str] = []

    def notice(self) -> str | None:
        """All sentences, each once; ``None`` if nothing was left out."""
        thinned = self.longest > self.most_steps
        first = [f"{self.most_steps} of {self.longest} stored steps are in this page."] if thinned else []
        return " ".join(dict.fromkeys(first + self.others)) or None


def write_report(api: StudioApi, report: Report, path: str | os.PathLike[str], most_steps: int = MOST_STEPS) -> str:
    """Write a report as one file; returns the sentences about what was left out (empty: nothing)."""
    content = report_content(api, report, most_steps)
    write_file(Path(path), single_file_page(report.title, content).encode())
    return content["notice"] or ""


def write_run_report(folders: Sequence[Path], path: Path, *, most_steps: int = MOST_STEPS) -> tuple[Path, str]:
    """Write some runs as one page; returns the file and the sentences about what was left out."""
    require(len(folders) > 0, "a report needs at least one run.")
    resolved = [Path(folder).resolve() for folder in folders]
    run_index = RunIndex(os.path.commonpath([folder.parent for folder in resolved]), only=resolved)
    keys = list(dict.fromkeys(folder.relative_to(run_index.root).as_posix() for folder in resolved))
    reader = run_index.open(keys[0])
    report = Report(
        title=reader.title if len(keys) == 1 else f"{reader.title} and {len(keys) - 1} more",
        lead="Scrub through training and see paths, tangents and neurons move together.",
        scenes=tuple(map(Scene, keys)),
        provenance=reader.header["provenance"] | {"written by": provenance("float32")["unlazy"]},
    )
    return path, write_report(StudioApi(run_index), report, path, most_steps)


def write_study_report(
    path: Path,
    request: Request,
    *,
    title: str,
    lead: str,
    scenes: Sequence[tuple[Path, str, str, str, int]],
    story: tuple[tuple[str, str], ...],
) -> None:
    """Write a measured study as one page: some of its runs, a story, its figures and its judged claims.

    ``scenes``: run folder, title, meaning, note and member of every run to show. ``story``: title and text of every paragraph.
    """
    results = json.loads((request.folder / "results.json").read_text())
    report = Report(
        title=title,
        lead=lead,
        scenes=tuple(
            Scene(folder.relative_to(request.runs).as_posix(), name, note, member, meaning)
            for folder, name, meaning, note, member in scenes
        ),
        figures=tuple(
            Picture(figure.name, figure.title, figure.caption, (request.folder / f"{figure.name}.png").read_bytes())
            for figure in request.study.figures
        ),
        claims=tuple(results["claims"]),
        story=story,
        provenance={**results["provenance"], "scale": results["scale"], "seeds": len(results["seeds"])},
    )
    write_report(StudioApi(RunIndex(request.runs), request.results), report, path)


def report_content(api: StudioApi, report: Report, most_steps: int = MOST_STEPS) -> dict[str, Any]:
    """The JSON that is put into the page: the report and all answers by address."""
    require(most_steps >= 2, f"a report needs at least two steps, got {most_steps}.")
    reader = [api.run_index.open(scene.key) for scene in report.scenes]
    members = [shown_member(run, scene.member) for scene, run in zip(report.scenes, reader, strict=True)]
    facts = [run_facts(run) for run in reader]
    maps = choose_detail(facts, most_steps)
    responses: dict[str, Any] = {}
    left_out = Omissions(most_steps)
    for run, member, fact in zip(reader, members, facts, strict=True):
        responses |= run_responses(api, run, member, fact, maps, left_out, lambda kind, name, answer: _inline(answer))
    for first, second in permutations(zip(reader, facts, strict=True), 2):
        responses |= pair_responses(api, *first, *second)
    cards = [api.run_index.card(run.key) | {"members": 1} for run in reader]
    responses["/api/runs"] = to_strict_json({"root": "", "runs": cards, "broken": []})
    responses["/api/claims"] = to_strict_json(list(report.claims))
    scenes = [
        {"key": scene.key, "title": scene.title or run.title, "note": scene.note, "meaning": scene.meaning, "member": 0}
        for scene, run in zip(report.scenes, reader, strict=True)
    ]
    return {
        "entry": f"#/run/{quote(report.scenes[0].key, safe='')}",
        "title": report.title,
        "lead": report.lead,
        "story": [list(part) for part in report.story],
        "figures": [
            {"id": figure.id, "title": figure.title, "caption": figure.caption, "png": _base64(figure.png)}
            for figure in report.figures
        ],
        "claims": to_strict_json(list(report.claims)),
        "provenance": to_strict_json(dict(report.provenance)),
        "scenes": scenes,
        "notice": left_out.notice(),
        "responses": responses,
    }


@dataclass(frozen=True)
class MapDetail:
    """How arrays are kept: points per side of heat maps, whether their exact numbers are included, bytes of other arrays."""

    side: int
    exact: bool
    array_bytes: int = ARRAY_BYTES


def choose_detail(facts: Sequence[Mapping[str, Any]], most_steps: int, share: float = 1.0) -> MapDetail:
    """The finest detail that fits into a share of ``MAP_BYTES`` and ``EXACT_BYTES``, for all heat maps of all runs."""
    pictures, numbers = 0, 0
    for fact in facts:
        steps = min(most_steps, len(fact["steps"]))
        pictures += steps * len(fact["maps"])
        numbers += steps * sum(int(np.prod(fact["arrays"][name]["shape"][1:])) for name in fact["maps"])
    side = int(np.clip((share * MAP_BYTES / max(1, pictures)) ** 0.5, LEAST_SIDE, LARGEST_SIDE))
    return MapDetail(side, exact=4 * numbers <= share * EXACT_BYTES, array_bytes=int(share * ARRAY_BYTES))


def shown_member(run: RunReader, wanted: int | None = None) -> int:
    """The member of a run to keep: ``wanted``, else the one whose arrays are stored at more steps, else the first."""
    member = wanted if wanted is not None else run.scene_member or 0
    require(0 <= member < run.members, f"{run.key} has {run.members} members; {member} is not one of them.")
    return member


def run_responses(
    api: StudioApi,
    run: RunReader,
    member: int,
    facts: dict[str, Any],
    maps: MapDetail,
    left_out: Omissions,
    pack: Callable[[str, str, Answer], Any],
) -> dict[str, Any]:
    """All answers about one member of one run, by the addresses that the page asks for.

    ``pack(kind, quantity, answer)``: the JSON that stands for an answer of bytes; a report inlines it, a site names a file.
    """
    responses: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, fact in facts["arrays"].items():
        every = run.steps(name, member) or fact["steps"]
        steps = [every[place] for place in even_indices(len(every), left_out.most_steps)]
        left_out.longest = max(left_out.longest, len(every))
        size = int(np.prod(fact["shape"][1:], dtype=np.int64)) * 4 * len(steps)
        if name not in facts["maps"] and size > maps.array_bytes:
            left_out.others.append(f"{run.title}: {name} is too large for this page.")
            continue
        stored = []
        for step in steps:
            try:
                if name in facts["maps"]:
                    answer = api.encode_heat_map(run, name, step, member, True, maps.side)
                    responses[address("levels", run.key, name, step, member=0, scale="all")] = pack(
                        "levels", name, answer
                    )
                    if answer.headers["X-Stride"] != "1":
                        left_out.others.append(f"Heat maps are averaged to at most {maps.side} points a side.")
                if name not in facts["maps"] or maps.exact:
                    answer = api.answer(["array", *run.key.split("/"), name, str(step)], {"member": str(member)})
                    responses[address("array", run.key, name, step, member=0)] = pack("array", name, answer)
                stored.append(step)
            except (StoreError, NotFound) as error:
                left_out.others.append(f"{run.title}: {error}")
        arrays[name] = {"steps": stored, "shape": [1, *fact["shape"][1:]], "dtype": fact["dtype"]}
    for kind, names in (("spectrum", facts["maps"]), ("embedding", facts["embeddings"])):
        for name in names:
            try:
                answer = api.answer([kind, *run.key.split("/"), name], {"member": str(member)})
                responses[address(kind, run.key, name, member=0)] = json.loads(answer.body)
            except NotFound as error:
                left_out.others.append(f"{run.title}: {error}")
    if run.members > 1:
        left_out.others.append("One member of each run is in this page.")
    responses[address("run", run.key)] = to_strict_json(_facts_of_member(facts, member, arrays))
    return responses


def pair_responses(
    api: StudioApi, run: RunReader, facts: Mapping[str, Any], other: RunReader, other_facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The answers that a comparison of two runs needs: matching samples, and kernels over the same samples."""
    asked: list[tuple[str, ...]] = [("sample-match", run.key)]
    asked += [("kernel-samples", run.key, name) for name in facts["maps"] if name in other_facts["maps"]]
    found = {}
    for parts in asked:
        with suppress(StoreError, NotFound):  # a damaged array; its own run reports it
            answer = api.answer("/".join(parts).split("/"), {"other": other.key})
            found[address(*parts, other=other.key)] = json.loads(answer.body)
    return found


def _facts_of_member(facts: dict[str, Any], member: int, arrays: dict[str, Any]) -> dict[str, Any]:
    """The facts of a run, reduced to one member."""
    steps = sorted({step for fact in arrays.values() for step in fact["steps"]}) or facts["steps"]
    members = facts["header"]["members"]
    recipe = facts["header"]["recipe"]
    header = facts["header"] | {"members": members[member : member + 1]}
    if isinstance(recipe, Mapping):
        header["recipe"] = {key: value for key, value in recipe.items() if key not in ("members", "measures")}
    scalars = {
        name: {"steps": curve["steps"], "values": [_member_value(values, member) for values in curve["values"]]}
        for name, curve in facts["scalars"].items()
    }
    own = {"header": header, "scalars": scalars, "arrays": arrays, "steps": steps, "default_member": 0, "live": False}
    return facts | own


def _member_value(values: list[Any], member: int) -> list[Any]:
    return [values[member if member < len(values) else 0]] if values else [None]


def _inline(answer: Answer) -> dict[str, Any]:
    """An answer as JSON: base64 of its body, and its headers."""
    return {"base64": _base64(answer.body), "headers": {"Content-Type": answer.media, **answer.headers}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
