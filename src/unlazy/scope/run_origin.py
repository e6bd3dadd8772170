"""What a run knows about itself: configuration, model summary, git commit of the user's project, versions and seed."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from unlazy.runtime import InputError

MOST_SETTINGS = 100
LONGEST_TEXT = 200  # of a setting, in characters
GIT_SECONDS = 1.0
LIBRARIES = ("torch", "transformers", "lightning", "pytorch_lightning", "skorch", "sklearn", "accelerate", "timm")
SECRET = re.compile(r"(^|[._-])(token|password|passwd|secret|api_?key|credentials?)$", re.IGNORECASE)

Setting = str | int | float | bool | None


def flatten_config(config: Any) -> dict[str, Setting]:
    """Settings as one flat dict of plain values, at most 100 of them; nested names are joined by dots.

    ``config``: a mapping, a dataclass or an ``argparse.Namespace``. Settings whose names end in token, password, secret or key
    of an API are left out: run folders and reports are shared.

    >>> flatten_config({"lr": 0.1, "model": {"width": 64, "act": nn.ReLU}, "hub_token": "hf_..."})
    {'lr': 0.1, 'model.width': 64, 'model.act': 'ReLU'}
    """
    flat: dict[str, Setting] = {}
    for name, value in _settings(_as_mapping(config), ""):
        if len(flat) == MOST_SETTINGS:
            break
        if not SECRET.search(name):
            flat[name] = _plain_value(value)
    return flat


def _as_mapping(config: Any) -> Mapping[Any, Any]:
    if config is None:
        return {}
    if isinstance(config, argparse.Namespace):
        return vars(config)
    if is_dataclass(config) and not isinstance(config, type):
        return {entry.name: getattr(config, entry.name) for entry in fields(config)}
    if isinstance(config, Mapping):
        return config
    raise InputError(
        f"config must be a dict of settings, a dataclass or an argparse.Namespace, got {type(config).__name__}."
    )


def _settings(config: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping | argparse.Namespace) or (is_dataclass(value) and not isinstance(value, type)):
            yield from _settings(_as_mapping(value), f"{name}.")
        else:
            yield name, value


def _plain_value(value: Any) -> Setting:
    """A value that JSON can hold: numbers of NumPy and torch as Python's, other objects as short text."""
    if isinstance(value, bool | str) or value is None:
        return value[:LONGEST_TEXT] if isinstance(value, str) else value
    if not isinstance(value, int | float) and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return _plain_value(value.item())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    name = value.__name__ if isinstance(value, type) or hasattr(value, "__qualname__") else str(value)
    return str(name)[:LONGEST_TEXT]


def add_config(options: Mapping[str, Any], known: Any) -> dict[str, Any]:
    """Options of a ``Scope`` whose ``config`` also holds what a framework ``known``; the user's own settings win."""
    return {**options, "config": {**flatten_config(known), **flatten_config(options.get("config"))}}


def changed_fields(settings: Any, always: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, and those named in ``always``, which come first."""
    defaults = {
        entry.name: entry.default if entry.default_factory is MISSING else entry.default_factory()
        for entry in fields(settings)
    }
    first = {name: getattr(settings, name) for name in always if hasattr(settings, name)}
    changed = {name: getattr(settings, name) for name, usual in defaults.items() if getattr(settings, name) != usual}
    return first | changed


def summarise_model(model: nn.Module) -> str:
    """A network in a few words.

    >>> summarise_model(nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)))
    'Sequential, 2 layers, 50.9k parameters'
    """
    layers = sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())
    every = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    words = f"{type(model).__name__}, {layers} {'layer' if layers == 1 else 'layers'}, {_count_text(every)} parameters"
    return words if trained == every else f"{words} ({_count_text(trained)} trained)"


def _count_text(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}" if count < 1000 * size else f"{count / size:.0f}{letter}"
    return str(count)


def run_origin(model: nn.Module) -> dict[str, Any]:
    """Model summary, git commit, library versions and seed, for ``run.json``."""
    versions = {
        name: str(getattr(sys.modules[name], "__version__", "unknown")) for name in LIBRARIES if name in sys.modules
    }
    return {
        "summary": summarise_model(model),
        "git": git_state(),
        "versions": versions,
        "seed": torch.initial_seed(),
    }


def git_state(folder: str | None = None) -> dict[str, Any] | None:
    """``{commit, dirty}`` of the project in ``folder`` (default: the current one); ``None`` if it is no git repository.

    ``dirty``: whether files that git tracks have changed since that commit; ``None`` if git needed longer than a second.
    """
    head = _ask_git(folder, "rev-parse", "--verify", "HEAD")
    if head is None or not re.fullmatch(r"[0-9a-f]{40,64}", head):
        return None
    changed = _ask_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "dirty": None if changed is None else bool(changed)}


def _ask_git(folder: str | None, *words: str) -> str | None:
    """What git prints, or ``None``. A file monitor named in the repository's settings is not started."""
    try:
        answer = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
