"""Everything the page knows of a run but the numbers in its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unlazy.runtime import StoreError, short_hash
from unlazy.studio.openrun import OpenRun
from unlazy.studio.probe import Probe, probe_of
from unlazy.studio.shelf import read_verdict

MOST_CURVE_POINTS = 2000


def run_facts(opened: OpenRun) -> dict[str, Any]:
    """Everything the page knows of a run but its arrays."""
    status, probe = dict(opened.status), probe_of(opened)
    arrays, problems = _array_facts(opened, probe)
    curves, thinned = _curves(opened)
    problems = [*opened.problems, *probe.problems, *problems]
    if thinned:
        problems.append(f"Curves are thinned to every {thinned}-th of {len(opened.lines)} measurements.")
    if not opened.lines:
        problems.append("Nothing has been measured yet.")
    if status["state"] == "failed":
        problems.append(f"The run failed: {status['error']}")
    stored = {step for name in opened.quantities for step in opened.steps(name, opened.own_member)}
    maps = [name for name, fact in arrays.items() if _is_map(fact["shape"])]
    return {
        "key": opened.key,
        "title": opened.title,
        "header": opened.header,
        "status": status,
        "live": status["state"] == "running",
        "version": version_of(opened),
        "steps": sorted(stored or {line.step for line in opened.lines}),
        "steps_per_epoch": _steps_per_epoch(opened, probe),
        "default_member": opened.own_member or 0,
        "scalars": curves,
        "arrays": arrays,
        "maps": sorted(maps, key=_map_order),
        "embeddings": [name for name in ("neurons", "normals") if name in arrays][:1],
        "verdict": read_verdict(opened.folder),
        "probe": probe.facts(opened, maps),
        "problems": problems,
    }


def version_of(opened: OpenRun) -> str:
    """Changes when arrays already seen may have changed: another run in the folder, or the end of this one."""
    provenance = opened.header.get("provenance")
    started = provenance.get("started") if isinstance(provenance, Mapping) else None
    settled = len(opened.lines) if opened.finished else None
    return short_hash([opened.run.id, started, opened.status["state"], settled])


def _array_facts(opened: OpenRun, probe: Probe) -> tuple[dict[str, Any], list[str]]:
    facts: dict[str, Any] = {}
    problems = []
    for name in opened.quantities:
        steps, own = opened.steps(name), opened.own_member
        theirs = opened.steps(name, own) if own is not None else steps
        member, at = (0, steps[-1]) if steps else (own or 0, theirs[-1])
        try:
            shape, dtype = opened.stored(name, at, member).shape()
        except StoreError as error:
            problems.append(str(error))
            continue
        facts[name] = {"steps": steps, "shape": list(shape), "dtype": str(dtype)}
        if theirs != steps:
            facts[name]["own"] = {str(own): theirs}
    for name, values in probe.made.items():
        facts.setdefault(name, {"steps": [0], "shape": [1, *values.shape], "dtype": "float32"})
    return facts, problems


def _is_map(shape: list[int]) -> bool:
    return len(shape) == 3 and shape[1] == shape[2] and shape[1] > 1


def _map_order(name: str) -> tuple[int, str]:
    return ({"overlap": 0, "tangent": 1}.get(name, 2), name)


def _curves(opened: OpenRun) -> tuple[dict[str, Any], int]:
    """Every scalar's steps and values, thinned if there are many; the second number is the thinning, 0 for none."""
    stride = -(-len(opened.lines) // MOST_CURVE_POINTS)
    kept = opened.lines[::stride] if stride > 1 else opened.lines
    if stride > 1 and kept[-1] is not opened.lines[-1]:
        kept = [*kept, opened.lines[-1]]
    curves: dict[str, Any] = {}
    for line in kept:
        for name, values in line.scalars.items():
            curve = curves.setdefault(name, {"steps": [], "values": []})
            curve["steps"].append(line.step)
            curve["values"].append(values if isinstance(values, list) else [values])
    return curves, stride if stride > 1 else 0


def _steps_per_epoch(opened: OpenRun, probe: Probe) -> int | None:
    recipe = opened.header["recipe"]
    batch = recipe.get("batch") if isinstance(recipe, Mapping) else None
    samples = probe.samples
    return -(-samples // batch) if isinstance(batch, int) and batch > 0 and samples else None
