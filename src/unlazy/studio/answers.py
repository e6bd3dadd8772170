"""Answers of the studio to the page: bytes with headers, strict JSON, addresses, and two errors (404 and 400)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import quote

import numpy as np

from unlazy.runtime import UnlazyError


class NotFound(UnlazyError):  # noqa: N818
    """Nothing is at an address; the page gets status 404 and the message."""


class BadRequest(UnlazyError):  # noqa: N818
    """An address asks for something impossible; the page gets status 400 and the message."""


@dataclass(frozen=True)
class Answer:
    """Bytes, media type and headers. ``permanent``: the address always gives these bytes, so that browsers may keep them."""

    body: bytes
    media: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    permanent: bool = False

    @cached_property
    def etag(self) -> str:
        """Hash of body and headers, for the ETag header."""
        digest = hashlib.sha256(self.body)
        digest.update(repr(sorted(self.headers.items())).encode())
        return f'"{digest.hexdigest()[:24]}"'


def to_strict_json(value: Any) -> Any:
    """Convert a value to what strict JSON can hold: NaN and infinity become ``None``, numpy numbers plain ones."""
    if isinstance(value, Mapping):
        return {str(key): to_strict_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict_json(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def json_answer(value: Any) -> Answer:
    """A value as an answer in strict JSON."""
    try:
        text = _dumps(value)
    except (ValueError, TypeError):  # NaN, or a type that JSON does not know
        text = _dumps(to_strict_json(value))
    return Answer(text.encode("utf-8", "replace"))


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def parse_whole_number(text: str, name: str) -> int:
    """Parse a whole number from an address; raises ``BadRequest`` with ``name`` in its message."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadRequest(f"{name} must be a whole number, not {text[:40]!r}.")
    return int(text)


UNQUOTED = "~!*'()"


def address(*segments: object, **parameters: object) -> str:
    """The address of an answer: ``/api/SEGMENTS?PARAMETERS``, quoted like encodeURIComponent of the page.

    Slashes inside a segment (a run's key) stay; parameters are sorted by name.
    """
    path = "/api/" + "/".join(quote(str(segment), safe=f"/{UNQUOTED}") for segment in segments)
    query = "&".join(f"{name}={quote(str(value), safe=UNQUOTED)}" for name, value in sorted(parameters.items()))
    return f"{path}?{query}" if query else path
