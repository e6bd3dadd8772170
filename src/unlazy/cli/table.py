"""A table of texts that fits the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHORTEST = 16  # characters left to the column that is cut


def fit_table(
    names: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    width: int | None,
    *,
    right: Sequence[str] = (),
    droppable: Sequence[str] = (),
    cut: str,
) -> list[str]:
    """A line of names, then one line a row, none longer than ``width`` (``None``: any length).

    First the column ``cut`` loses the beginnings of its texts, then columns of ``droppable`` are left out, in that order.
    ``right``: columns aligned on the right.

    >>> fit_table(["a", "path"], [{"a": "1", "path": "runs/some/where/far/away"}], 22, cut="path")
    ['a  path', '1  …/where/far/away']
    """
    kept = list(names)
    wide = {name: max([len(name), *(len(row[name]) for row in rows)]) for name in kept}
    for name in (None, *droppable):
        if name in kept:
            kept.remove(name)
        others = sum(wide[other] for other in kept if other != cut) + 2 * (len(kept) - 1)
        room = wide[cut] if width is None else width - others
        if room >= min(wide[cut], SHORTEST):
            break
    lines = []
    for row in [{name: name for name in kept}, *rows]:
        texts = [
            _cut_start(row[name], room) if name == cut else f"{row[name]:{'>' if name in right else '<'}{wide[name]}}"
            for name in kept
        ]
        line = "  ".join(texts).rstrip()
        lines.append(line if width is None or len(line) <= width else f"{line[: max(0, width - 1)]}…")
    return lines


def _cut_start(text: str, room: int) -> str:
    """The text, or its end behind an ellipsis; a path is cut at a slash where there is one."""
    if len(text) <= room:
        return text
    end = text[-max(1, room - 1) :]
    at = end.find("/")
    return f"…{end[at:] if 0 <= at < len(end) // 2 else end}"
