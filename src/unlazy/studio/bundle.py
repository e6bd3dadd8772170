"""The files of the built page: as one file with everything inside, or as files of a static site."""

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
    page, script, style = _page_parts()
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    styles = f"{inline_hash(style)} {CHART_STYLE}"
    return _fill_page(
        page,
        title,
        f"default-src 'none'; img-src data: blob:; style-src {styles}; script-src {inline_hash(script)}",
        f"<style>{style}</style>",
        f"{_content_element(content)}<script>{script}</script>",
    )


def site_page(content: dict[str, Any]) -> dict[str, bytes]:
    """The files of a page with ``content`` inside that asks for further answers in files beside it."""
    page, script, style = _page_parts()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; "
        f"style-src 'self' {CHART_STYLE}; script-src 'self'"
    )
    index = _fill_page(page, "unlazy runs", policy, STYLE, f"{_content_element(content)}{SCRIPT}")
    return {"studio.js": script.encode(), "studio.css": style.encode(), "index.html": index.encode()}


def _page_parts() -> tuple[str, str, str]:
    """Page, script and style as they were built; raises ``StoreError`` where they were not."""
    parts = page_files()
    if not {"index.html", "studio.js", "studio.css"} <= parts.keys():
        raise StoreError("the page of the studio was not built; `make frontend` builds it.")
    page, script, style = (parts[name].decode() for name in ("index.html", "studio.js", "studio.css"))
    if any(page.count(mark) != 1 for mark in (SCRIPT, STYLE, POLICY)):
        raise StoreError("index.html of the studio is not the one this version of unlazy knows; build it again.")
    return page, script, style


def _content_element(content: dict[str, Any]) -> str:
    return f'<script type="application/json" id="unlazy-inline">{script_json(content)}</script>\n'


def _fill_page(page: str, title: str, policy: str, style: str, script: str) -> str:
    """The page with its title, content policy, style and script in their places."""
    inserts = {
        POLICY: f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        STYLE: style,
        SCRIPT: script,
    }
    marks = "|".join(re.escape(mark) for mark in inserts)
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{escape(title)}</title>", page, count=1, flags=re.DOTALL)
    return re.sub(marks, lambda found: inserts[found[0]], page)  # one pass: inserted text is not searched again
