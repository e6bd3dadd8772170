"""The one-file report: the studio's page with the answers of a few runs inside.

Every answer is the one the server would give, for one member of each run (renamed member 0) and so many steps that the file
stays small enough to send; the page says what was left out.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from unlazy.runtime import StoreError, provenance, require
from unlazy.store import write_file
from unlazy.studio.answers import Answer, NotHere, address, plain
from unlazy.studio.bundle import one_file
from unlazy.studio.embedding import evenly
from unlazy.studio.levels import LARGEST_SIDE
from unlazy.studio.openrun import OpenRun
from unlazy.studio.payload import Payload
from unlazy.studio.runfacts import run_facts
from unlazy.studio.shelf import Shelf

MOST_STEPS = 60
MAP_BYTES = 24_000_000  # of all heat maps together
EXACT_BYTES = 6_000_000  # of all their exact numbers; above that the page has the levels alone
ARRAY_BYTES = 4_000_000  # of one quantity over all steps
LEAST_SIDE = 64


@dataclass(frozen=True)
class Scene:
    """A run in the report: which one, under what name, which member, and what to look for."""

    key: str
    title: str | None = None
    note: str = ""
    member: int | None = None


@dataclass(frozen=True)
class Picture:
    """A figure made elsewhere; ``id`` is what a claim's ``figure`` names."""

    id: str
    title: str
    caption: str
    png: bytes

    def __post_init__(self) -> None:
        require(self.png.startswith(b"\x89PNG"), f"figure {self.id}: not a PNG.")


@dataclass(frozen=True)
class Report:
    """What stands around the runs."""

    title: str
    lead: str
    scenes: tuple[Scene, ...]
    story: tuple[tuple[str, str], ...] = ()
    figures: tuple[Picture, ...] = ()
    claims: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


class Omissions:
    """What a page does not hold, in sentences."""

    def __init__(self, most_steps: int) -> None:
        self.most_steps = most_steps
        self.longest = 0  # stored steps of the run that has most
        self.others: list[str] = []

    def notice(self) -> str | None:
        """All of it, each sentence once; ``None`` if everything is there."""
        thinned = self.longest > self.most_steps
        first = [f"{self.most_steps} of {self.longest} stored steps are in this page."] if thinned else []
        return " ".join(dict.fromkeys(first + self.others)) or None


def write_report(payload: Payload, report: Report, path: str | os.PathLike[str], most_steps: int = MOST_STEPS) -> str:
    """Write the page, whole or not at all; returns the notice of what was left out (empty: nothing)."""
    content = report_content(payload, report, most_steps)
    write_file(Path(path), one_file(report.title, content).encode())
    return content["notice"] or ""


def write_run_report(folders: Sequence[Path], path: Path, *, most_steps: int = MOST_STEPS) -> tuple[Path, str]:
    """Some runs as one page, with what they are as its story; returns the file and the notice."""
    require(len(folders) > 0, "a report needs at least one run.")
    resolved = [Path(folder).resolve() for folder in folders]
    shelf = Shelf(os.path.commonpath([folder.parent for folder in resolved]), only=resolved)
    keys = list(dict.fromkeys(folder.relative_to(shelf.root).as_posix() for folder in resolved))
    opened = shelf.open(keys[0])
    report = Report(
        title=opened.title if len(keys) == 1 else f"{opened.title} and {len(keys) - 1} more",
        lead="Scrub through training and see paths, tangents and neurons move together.",
        scenes=tuple(map(Scene, keys)),
        provenance=opened.header["provenance"] | {"written by": provenance("float32")["unlazy"]},
    )
    return path, write_report(Payload(shelf), report, path, most_steps)


def report_content(payload: Payload, report: Report, most_steps: int = MOST_STEPS) -> dict[str, Any]:
    """The JSON that the page finds inside itself."""
    require(most_steps >= 2, f"a report needs at least two steps, got {most_steps}.")
    opened = [payload.shelf.open(scene.key) for scene in report.scenes]
    members = [_member_of(scene, run) for scene, run in zip(report.scenes, opened, strict=True)]
    facts = [run_facts(run) for run in opened]
    maps = _maps(facts, most_steps)
    responses: dict[str, Any] = {}
    left_out = Omissions(most_steps)
    for run, member, fact in zip(opened, members, facts, strict=True):
        responses |= _run_responses(payload, run, member, fact, maps, left_out)
    for first, second in permutations(zip(opened, facts, strict=True), 2):
        responses |= _pair_responses(payload, *first, *second)
    cards = [payload.shelf.card(run.key) | {"members": 1} for run in opened]
    responses["/api/runs"] = plain({"root": "", "runs": cards, "broken": []})
    responses["/api/claims"] = plain(list(report.claims))
    scenes = [
        {"key": scene.key, "title": scene.title or run.title, "note": scene.note, "member": 0}
        for scene, run in zip(report.scenes, opened, strict=True)
    ]
    return {
        "entry": f"#/run/{quote(report.scenes[0].key, safe='')}",
        "title": report.title,
        "lead": report.lead,
        "story": [list(part) for part in report.story],
        "figures": [
            {"id": one.id, "title": one.title, "caption": one.caption, "png": _base64(one.png)}
            for one in report.figures
        ],
        "claims": plain(list(report.claims)),
        "provenance": plain(dict(report.provenance)),
        "scenes": scenes,
        "notice": left_out.notice(),
        "responses": responses,
    }


@dataclass(frozen=True)
class Maps:
    """How heat maps go into a page: points a side, and whether their exact numbers come along."""

    side: int
    exact: bool


def _maps(facts: Sequence[Mapping[str, Any]], most_steps: int) -> Maps:
    """As fine as fits, given all maps of all runs."""
    pictures, numbers = 0, 0
    for fact in facts:
        steps = min(most_steps, len(fact["steps"]))
        pictures += steps * len(fact["maps"])
        numbers += steps * sum(int(np.prod(fact["arrays"][name]["shape"][1:])) for name in fact["maps"])
    side = int(np.clip((MAP_BYTES / max(1, pictures)) ** 0.5, LEAST_SIDE, LARGEST_SIDE))
    return Maps(side, exact=4 * numbers <= EXACT_BYTES)


def _member_of(scene: Scene, run: OpenRun) -> int:
    member = scene.member if scene.member is not None else run.own_member or 0
    require(0 <= member < run.members, f"{run.key} has {run.members} members; {member} is not one of them.")
    return member


def _run_responses(
    payload: Payload,
    run: OpenRun,
    member: int,
    facts: dict[str, Any],
    maps: Maps,
    left_out: Omissions,
) -> dict[str, Any]:
    """All answers about one member of one run, under the addresses the page will ask for."""
    responses: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, fact in facts["arrays"].items():
        every = run.steps(name, member) or fact["steps"]
        steps = [every[place] for place in evenly(len(every), left_out.most_steps)]
        left_out.longest = max(left_out.longest, len(every))
        size = int(np.prod(fact["shape"][1:], dtype=np.int64)) * 4 * len(steps)
        if name not in facts["maps"] and size > ARRAY_BYTES:
            left_out.others.append(f"{run.title}: {name} is too large for a page of one file.")
            continue
        kept = []
        for step in steps:
            try:
                if name in facts["maps"]:
                    answer = payload.levels_of(run, name, step, member, True, maps.side)
                    responses[address("levels", run.key, name, step, member=0, scale="all")] = _packed(answer)
                    if answer.headers["X-Stride"] != "1":
                        left_out.others.append(f"Heat maps are averaged to at most {maps.side} points a side.")
                if name not in facts["maps"] or maps.exact:
                    answer = payload.answer(["array", *run.key.split("/"), name, str(step)], {"member": str(member)})
                    responses[address("array", run.key, name, step, member=0)] = _packed(answer)
                kept.append(step)
            except (StoreError, NotHere) as error:
                left_out.others.append(f"{run.title}: {error}")
        arrays[name] = {"steps": kept, "shape": [1, *fact["shape"][1:]], "dtype": fact["dtype"]}
    for kind, names in (("spectrum", facts["maps"]), ("embedding", facts["embeddings"])):
        for name in names:
            try:
                answer = payload.answer([kind, *run.key.split("/"), name], {"member": str(member)})
                responses[address(kind, run.key, name, member=0)] = json.loads(answer.body)
            except NotHere as error:
                left_out.others.append(f"{run.title}: {error}")
    if run.members > 1:
        left_out.others.append("One member of each run is in this page.")
    responses[address("run", run.key)] = plain(_single(facts, member, arrays))
    return responses


def _pair_responses(
    payload: Payload, run: OpenRun, facts: Mapping[str, Any], other: OpenRun, other_facts: Mapping[str, Any]
) -> dict[str, Any]:
    """What the comparison of two runs asks: which samples are the same, and which kernels are over the same ones."""
    asked: list[tuple[str, ...]] = [("matched", run.key)]
    asked += [("alike", run.key, name) for name in facts["maps"] if name in other_facts["maps"]]
    found = {}
    for parts in asked:
        with suppress(StoreError, NotHere):  # a damaged array, which its own run tells of
            answer = payload.answer("/".join(parts).split("/"), {"other": other.key})
            found[address(*parts, other=other.key)] = json.loads(answer.body)
    return found


def _single(facts: dict[str, Any], member: int, arrays: dict[str, Any]) -> dict[str, Any]:
    """The facts of a run as if it had one member."""
    steps = sorted({step for fact in arrays.values() for step in fact["steps"]}) or facts["steps"]
    members = facts["header"]["members"]
    recipe = facts["header"]["recipe"]
    header = facts["header"] | {"members": members[member : member + 1]}
    if isinstance(recipe, Mapping):
        header["recipe"] = {key: value for key, value in recipe.items() if key not in ("members", "measures")}
    scalars = {
        name: {"steps": curve["steps"], "values": [_one(values, member) for values in curve["values"]]}
        for name, curve in facts["scalars"].items()
    }
    own = {"header": header, "scalars": scalars, "arrays": arrays, "steps": steps, "default_member": 0, "live": False}
    return facts | own


def _one(values: list[Any], member: int) -> list[Any]:
    return [values[member if member < len(values) else 0]] if values else [None]


def _packed(answer: Answer) -> dict[str, Any]:
    return {"base64": _base64(answer.body), "headers": {"Content-Type": answer.media, **answer.headers}}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
