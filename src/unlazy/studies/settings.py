"""What the settings of studies share: how they are written down, and checks that teach."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from unlazy.runtime import require


def plain_settings(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of those inside it, as plain JSON values."""
    return {name: _listed(value) for name, value in asdict(settings).items()}


def _listed(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {name: _listed(value) for name, value in entry.items()}
    return [_listed(one) for one in entry] if isinstance(entry, tuple) else entry


def at_least_one(settings: Any, *names: str) -> None:
    """Refuse settings that have one of these numbers below one."""
    for name in names:
        require(getattr(settings, name) >= 1, f"{name} must be at least 1, got {getattr(settings, name)!r}.")


def all_known(what: str, entries: Iterable[str], known: Iterable[str]) -> None:
    """Refuse settings that ask for something nobody has made, and name what there is."""
    unknown = [entry for entry in entries if entry not in known]
    require(not unknown, f"unknown {what}: {', '.join(unknown)}; there are {', '.join(known)}.")
