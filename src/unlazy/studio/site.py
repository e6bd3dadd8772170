"""The static site: the studio's page over a folder of runs, as files that any web server can send.

The page finds its answers as in a one-file report (``report.py``); here they are in files beside it, so that a visitor loads only
the runs that are opened. All addresses are relative: the site works below any path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any

from unlazy.runtime import InputError, StoreError, UnlazyError, __version__, require, short_hash
from unlazy.store import write_file
from unlazy.studio.answers import Answer, address, json_answer, to_strict_json
from unlazy.studio.api import StudioApi
from unlazy.studio.bundle import site_page
from unlazy.studio.report import Omissions, choose_detail, pair_responses, run_responses, shown_member
from unlazy.studio.run_facts import run_facts
from unlazy.studio.run_index import RunIndex
from unlazy.studio.run_reader import MOST_STEPS, RunReader
from unlazy.studio.same_samples import sample_identity

MANIFEST = "unlazy-export.json"  # names every file of an export; a folder without it is not ours to write into
SITE_BYTES = 500_000_000  # of all heat maps together, so that the site fits where sites of 1 GB are the limit
MOST_PROBE_SETS = 24  # different probe sets that are compared with each other, pair by pair


@dataclass(frozen=True)
class Export:
    """What was written: the page, the number of runs, all bytes, and the runs that could not be read, with the reason."""

    page: Path
    runs: int
    size: int
    broken: tuple[tuple[str, str], ...]


def export_site(
    runs: str | Path,
    out: str | Path,
    *,
    most_steps: int = MOST_STEPS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Export:
    """Write all runs below a folder as a static site; replaces the files of an earlier export in ``out``, and no other file."""
    require(Path(runs).is_dir(), f"{runs} is not a folder of runs.")
    require(most_steps >= 2, f"a page needs at least two steps, got {most_steps}.")
    folder = Path(out)
    before = _files_of_export(folder)
    api = StudioApi(RunIndex(runs))
    cards, unreadable = api.run_index.cards()
    broken = [(entry["folder"], entry["error"]) for entry in unreadable]
    stamps = [[card["key"], card["id"], card["state"], card["step"], card["tags"], card["notes"]] for card in cards]
    data = f"data-{short_hash([__version__, most_steps, stamps])}"
    writer = _SiteWriter(folder, api, most_steps, share=min(1.0, SITE_BYTES / (len(cards) or 1) / 24e6))
    kept = []
    for place, card in enumerate(cards):
        progress(place, len(cards))
        try:
            writer.write_run(card["key"], f"{data}/{place}")
            kept.append(card | {"members": 1})
        except (UnlazyError, ValueError, TypeError, KeyError) as error:
            broken.append((card["key"], str(error)))
    require(bool(kept), f"there is no run below {runs} that can be shown; nothing was written.")
    answers = {"/api/runs": to_strict_json({"root": Path(runs).resolve().name, "runs": kept, "broken": []})}
    content = {
        "site": {"runs": writer.folders, "samples": writer.representatives()},
        "responses": answers | writer.pairs(),
    }
    for name, page_file in site_page(content).items():
        writer.write(name, page_file)
    files = sorted(writer.sizes)
    write_file(folder / MANIFEST, json.dumps({"format": 1, "unlazy": __version__, "files": files}, indent=1).encode())
    _delete(folder, before - set(files))
    progress(len(cards), len(cards))
    return Export(folder / "index.html", len(kept), sum(writer.sizes.values()), tuple(broken))


class _SiteWriter:
    """Writes the files of a site and remembers their sizes, and which runs have the same samples."""

    def __init__(self, folder: Path, api: StudioApi, most_steps: int, share: float) -> None:
        self.folder, self.api, self.most_steps, self.share = folder, api, most_steps, share
        self.folders: dict[str, str] = {}  # of every run, by its key
        self.sizes: dict[str, int] = {}
        self.probe_sets: dict[str, list[str]] = {}  # keys of runs over the same samples
        self.maps: dict[str, list[str]] = {}

    def write(self, name: str, data: bytes) -> None:
        """Write one file of the site."""
        write_file(self.folder / name, data)
        self.sizes[name] = len(data)

    def write_run(self, key: str, place: str) -> None:
        """Write the facts of a run, its arrays (one file a quantity), and the list of answers that point into these."""
        run = self.api.run_index.open(key)
        facts, member, left_out = run_facts(run), shown_member(run), Omissions(self.most_steps)
        bodies: dict[tuple[str, str], list[bytes]] = {}

        def pack(kind: str, quantity: str, answer: Answer) -> dict[str, Any]:
            """Append the bytes to the file of their quantity; returns where they are."""
            own = bodies.setdefault((kind, quantity), [])
            at = sum(map(len, own))
            own.append(answer.body + bytes(-len(answer.body) % 4))
            number = list(bodies).index((kind, quantity))
            return {"file": f"{place}/{number}.bin", "at": at, "bytes": len(answer.body), "headers": answer.headers}

        detail = choose_detail([facts], self.most_steps, self.share)
        responses = run_responses(self.api, run, member, facts, detail, left_out, pack)
        shown = responses.pop(address("run", key)) | {"notice": left_out.notice()}
        for number, parts in enumerate(bodies.values()):
            self.write(f"{place}/{number}.bin", b"".join(parts))
        self.write(f"{place}/answers.json", json_answer(responses).body)
        self.write(f"{place}/facts.json", json_answer(shown).body)
        self.folders[key] = place
        self.maps[key] = list(facts["maps"])
        self.probe_sets.setdefault(_identity(run, self.maps[key]), []).append(key)

    def representatives(self) -> dict[str, list[str]]:
        """For every run the first two runs over the same samples (one of them twice, if alone): their answers are its answers."""
        return {key: [keys[0], keys[1 % len(keys)]] for keys in self.probe_sets.values() for key in keys}

    def pairs(self) -> dict[str, Any]:
        """Answers about the samples of two runs, for one pair of runs of every two probe sets."""
        answers: dict[str, Any] = {}
        for first, second in product(list(self.probe_sets.values())[:MOST_PROBE_SETS], repeat=2):
            pair = (first[0], second[0]) if first is not second else (first[0], first[1 % len(first)])
            run, other = (self.api.run_index.open(key) for key in pair)
            maps = ({"maps": self.maps[key]} for key in pair)
            answers |= pair_responses(self.api, run, next(maps), other, next(maps))
        return answers


def _identity(run: RunReader, maps: Sequence[str]) -> str:
    """A hash that two runs share if every question about their samples has the same answer; without inputs to read, their own."""
    try:
        return sample_identity(run, maps)
    except (StoreError, ValueError):
        return run.key


def _files_of_export(folder: Path) -> set[str]:
    """The files that an earlier export wrote into a folder; raises ``InputError`` if the folder holds anything else."""
    if not folder.exists():
        return set()
    require(folder.is_dir(), f"{folder} is a file; name a folder for the site.")
    if not any(folder.iterdir()):
        return set()
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {str(name) for name in manifest["files"]} if isinstance(manifest, Mapping) else None
    except (OSError, ValueError, KeyError, TypeError):
        files = None
    if files is None:
        raise InputError(
            f"{folder} is not empty and not an export of unlazy (it has no readable {MANIFEST}); "
            "name a new folder, so that nothing of yours is overwritten."
        )
    return files


def _delete(folder: Path, names: set[str]) -> None:
    """Delete files of an earlier export, and folders that are empty then; nothing outside ``folder``, nothing behind a link."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not (folder / path).resolve().is_relative_to(folder.resolve()):
            continue
        with suppress(OSError):
            (folder / path).unlink()
        for parent in list(path.parents)[:-1]:
            with suppress(OSError):
                (folder / parent).rmdir()
