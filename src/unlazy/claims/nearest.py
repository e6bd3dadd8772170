"""Did you mean? One answer for everything that is called by a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like this one, whatever its case; ``None`` where none does.

    >>> nearest("cirle", ["circle", "swap"]), nearest("c9", ["C9", "C10"]), nearest("square", ["circle", "swap"])
    ('circle', 'C9', None)
    """
    by_look = {each.lower(): each for each in known}
    found = get_close_matches(name.strip().lower(), by_look, n=1)
    return by_look[found[0]] if found else None
