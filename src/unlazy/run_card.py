"""What lists, pages and notebooks say about one run: verdict, settings, labels, model. Reads plain files, computes nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from unlazy.curves import WORD_COLOURS

LARGEST_SEED = (
    2**53 - 1
)  # a page reads whole numbers up to this one exactly; torch draws larger ones if nobody sets a seed


class RunFolder(Protocol):
    """What a card needs of a run."""

    folder: Path
    header: dict[str, Any]

    @property
    def labels(self) -> dict[str, Any]: ...


def describe_run(run: RunFolder, latest: Mapping[str, Any]) -> dict[str, Any]:
    """``{model, config, tags, notes, verdict, reason, gap, phases, broke_down, git, seed}`` of a run.

    ``latest``: its last numbers. ``reason``: why there is no word. ``broke_down``: whether the last loss of
    every member is not a finite number.
    """
    verdict = read_verdict(run.folder) or {}
    loss = latest.get("loss")
    values = loss if isinstance(loss, list) else [loss]
    phases, gap, reasons = verdict.get("phases"), verdict.get("gap"), verdict.get("reasons")
    provenance = run.header.get("provenance")
    origin = provenance if isinstance(provenance, Mapping) else {}
    git, seed, config = origin.get("git"), origin.get("seed"), run.header.get("config")
    return {
        "model": model_words(run.header),
        "config": dict(config) if isinstance(config, Mapping) else {},
        **run.labels,
        "verdict": verdict.get("label"),
        "reason": " ".join(map(str, reasons)) if isinstance(reasons, list) and reasons else None,
        "gap": gap if isinstance(gap, int | float) else None,
        "phases": list(phases) if isinstance(phases, list) else [],
        "broke_down": "loss" in latest and all(value is None for value in values),
        "git": dict(git) if isinstance(git, Mapping) else None,
        "seed": seed if isinstance(seed, int) and abs(seed) <= LARGEST_SEED else None,
    }


def read_verdict(folder: Path) -> dict[str, Any] | None:
    """The content of verdict.json, which a scope writes; ``None`` if it is missing or damaged."""
    try:
        verdict = json.loads((folder / "verdict.json").read_bytes())
    except (OSError, ValueError):
        return None
    return verdict if isinstance(verdict, dict) else None


def model_words(header: Mapping[str, Any]) -> str:
    """A network in a few words: "DLGN, constant experts, 5 x 16", or "Sequential, 2 layers, 50.9k parameters"."""
    spec = header.get("model")
    if not isinstance(spec, Mapping):
        recipe = header.get("recipe")
        name = header.get("summary") or spec or (recipe.get("model") if isinstance(recipe, Mapping) else None)
        return str(name).split("\n")[0].rstrip("( ")[:60] if name else "unknown"
    kinds = {"own": "ReLU net", "open": "deep linear net", "quadratic": "quadratically gated net"}
    words = [kinds.get(str(spec.get("gating")), "DLGN")]
    if spec.get("experts") == "constant":
        words.append("constant experts")
    if spec.get("train_gates") is False:
        words.append("frozen gates")
    if spec.get("depth") and spec.get("width"):
        words.append(f"{spec['depth']} x {spec['width']}")
    return ", ".join(words)


def html_card(title: str, word: str | None, rows: Sequence[tuple[str, object]]) -> str:
    """A small card without style sheets or scripts: a title, the word of a verdict in its colour, and a table."""
    cell = "padding:2px 10px 2px 0;text-align:left;border:0"
    shown = "".join(
        f'<tr><td style="{cell};opacity:.75">{html.escape(name)}</td><td style="{cell}">{html.escape(str(value))}</td></tr>'
        for name, value in rows
    )
    colour = WORD_COLOURS.get(str(word), "inherit")
    said = f' <span style="color:{colour}">{html.escape(str(word))}</span>' if word else ""
    return (
        '<div style="font:13px/1.5 system-ui,sans-serif;color:inherit;border:1px solid rgba(127,127,127,.4);'
        f'border-radius:8px;padding:10px 14px;max-width:46em"><div style="font-size:16px;font-weight:600">{html.escape(title)}'
        f'{said}</div><table style="border-collapse:collapse;margin:6px 0;color:inherit;font:inherit">{shown}</table></div>'
    )
