"""Suggests the nearest known name for a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to ``name``, in any case; ``None`` if none is similar.

    >>> nearest("cirle", ["circle", "swap"]), nearest("c9", ["C9", "C10"]), nearest("square", ["circle", "swap"])
    ('circle', 'C9', None)
    """
    by_lower_case = {each.lower(): each for each in known}
    found = get_close_matches(name.strip().lower(), by_lower_case, n=1)
    return by_lower_case[found[0]] if found else None
