"""The files of the built page, and the page as one file with everything inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from unlazy.runtime import StoreError

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
}
SCRIPT = '<script defer src="./studio.js"></script>'
STYLE = '<link rel="stylesheet" href="./studio.css">'
POLICY = "<!--unlazy:policy-->"
# hash of the style element that Observable Plot puts into every chart; a page test fails when it changes
CHART_STYLE = "'sha256-jSYQUrW7J0b3jPqhZP9C2Xh1PyJKHKXd4s0fpGGKrww='"


@cache
def page_files() -> dict[str, bytes]:
    """The files of the page by name; empty where the page was not built."""
    folder = files("unlazy.studio") / "static" / "studio"
    if not folder.is_dir():
        return {}
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if Path(entry.name).suffix in MEDIA_TYPES}


def inline_hash(text: str) -> str:
    """The hash of an inline script or style, as a content security policy writes it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def script_hashes(page: str) -> list[str]:
    """The hashes of all inline scripts of a page."""
    return [inline_hash(text) for text in re.findall(r"<script(?![^>]*\bsrc=)[^>]*>(.*?)</script>", page, re.DOTALL)]


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element: `<`, `>`, `&` and non-ASCII characters are escaped."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def single_file_page(title: str, content: dict[str, Any]) -> str:
    """The page as one HTML file with style, script and ``content`` inside; it makes no requests."""
    parts = page_files()
    if not {"index.html", "studio.js", "studio.css"} <= parts.keys():
        raise StoreError("the page of the studio was not built; `make frontend` builds it.")
    page, script, style = (parts[name].decode() for name in ("index.html", "studio.js", "studio.css"))
    if any(page.count(mark) != 1 for mark in (SCRIPT, STYLE, POLICY)):
        raise StoreError("index.html of the studio is not the one this version of unlazy knows; build it again.")
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    styles = f"{inline_hash(style)} {CHART_STYLE}"
    policy = f"default-src 'none'; img-src data: blob:; style-src {styles}; script-src {inline_hash(script)}"
    inserts = {
        POLICY: f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        STYLE: f"<style>{style}</style>",
        SCRIPT: f'<script type="application/json" id="unlazy-inline">{script_json(content)}</script>\n'
        f"<script>{script}</script>",
    }
    marks = "|".join(re.escape(mark) for mark in inserts)
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{escape(title)}</title>", page, count=1, flags=re.DOTALL)
    return re.sub(marks, lambda found: inserts[found[0]], page)  # one pass: inserted text is not searched again
