"""The facts of a run for the page: header, status, curves, shapes of arrays, verdict and probe set; no array values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unlazy.run_card import describe_run, read_verdict
from unlazy.run_comparison import latest_scalars
from unlazy.runtime import StoreError, short_hash
from unlazy.studio.probe_set import ProbeSet, probe_set_of
from unlazy.studio.run_reader import RunReader, even_indices

MOST_CURVE_POINTS = 2000


def run_facts(reader: RunReader) -> dict[str, Any]:
    """Everything the page shows of a run but its array values, as JSON."""
    status, probe_set = dict(reader.status), probe_set_of(reader)
    arrays, problems = _array_facts(reader, probe_set)
    curves, thinned = _curves(reader)
    problems = [*reader.problems, *probe_set.problems, *problems]
    if thinned:
        problems.append(f"Curves are thinned to {thinned:,} of {reader.measurements:,} measurements.")
    if not reader.lines:
        problems.append("Nothing has been measured yet.")
    if status["state"] == "failed":
        problems.append(f"The run failed: {status['error']}")
    stored = {step for name in reader.quantities for step in reader.steps(name, reader.scene_member)}
    maps = [name for name, fact in arrays.items() if _is_map(fact["shape"])]
    return {
        **describe_run(reader.run, latest_scalars(reader)),
        "state": status["state"],
        "key": reader.key,
        "title": reader.title,
        "header": reader.header,
        "status": status,
        "live": status["state"] == "running",
        "version": version_of(reader),
        "steps": sorted(stored or {line.step for line in reader.lines}),
        "steps_per_epoch": _steps_per_epoch(reader, probe_set),
        "default_member": reader.scene_member or 0,
        "scalars": curves,
        "arrays": arrays,
        "maps": sorted(maps, key=_map_order),
        "embeddings": [name for name in ("neurons", "normals") if name in arrays][:1],
        "verdict": read_verdict(reader.folder),
        "probe": probe_set.to_json(reader, maps),
        "problems": problems,
    }


def version_of(reader: RunReader) -> str:
    """A hash that changes when stored arrays may have changed: a new run in the folder, or the end of this run."""
    provenance = reader.header.get("provenance")
    started = provenance.get("started") if isinstance(provenance, Mapping) else None
    measurements = reader.measurements if reader.is_finished else None
    return short_hash([reader.run.id, started, reader.status["state"], measurements])


def _array_facts(reader: RunReader, probe_set: ProbeSet) -> tuple[dict[str, Any], list[str]]:
    facts: dict[str, Any] = {}
    problems = []
    for name in reader.quantities:
        steps, own = reader.steps(name), reader.scene_member
        theirs = reader.steps(name, own) if own is not None else steps
        member, at = (0, steps[-1]) if steps else (own or 0, theirs[-1])
        try:
            shape, dtype = reader.find_array(name, at, member).shape()
        except StoreError as error:
            problems.append(str(error))
            continue
        facts[name] = {"steps": steps, "shape": list(shape), "dtype": str(dtype)}
        if theirs != steps:
            facts[name]["own"] = {str(own): theirs}
    for name, values in probe_set.generated.items():
        facts.setdefault(name, {"steps": [0], "shape": [1, *values.shape], "dtype": "float32"})
    return facts, problems


def _is_map(shape: list[int]) -> bool:
    return len(shape) == 3 and shape[1] == shape[2] and shape[1] > 1


def _map_order(name: str) -> tuple[int, str]:
    return ({"overlap": 0, "tangent": 1}.get(name, 2), name)


def _curves(reader: RunReader) -> tuple[dict[str, Any], int]:
    """Steps and values of every scalar, and the number of points of the longest curve if it was thinned (0: not thinned)."""
    curves: dict[str, Any] = {}
    for line in reader.lines:
        for name, values in line.scalars.items():
            curve = curves.setdefault(name, {"steps": [], "values": []})
            curve["steps"].append(line.step)
            curve["values"].append(values if isinstance(values, list) else [values])
    longest = max((len(curve["steps"]) for curve in curves.values()), default=0)
    for curve in curves.values():
        kept = even_indices(len(curve["steps"]), MOST_CURVE_POINTS)
        curve |= {name: [points[index] for index in kept] for name, points in curve.items()}
    thinned = longest > MOST_CURVE_POINTS or reader.measurements > len(reader.lines)
    return curves, min(longest, MOST_CURVE_POINTS) if thinned else 0


def _steps_per_epoch(reader: RunReader, probe_set: ProbeSet) -> int | None:
    recipe = reader.header["recipe"]
    batch = recipe.get("batch") if isinstance(recipe, Mapping) else None
    samples = probe_set.samples
    return -(-samples // batch) if isinstance(batch, int) and batch > 0 and samples else None
