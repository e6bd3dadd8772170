"""Accessibility of an open page: names, roles, structure, contrast, and what the keyboard reaches.

The rules are those of axe-core that this page could break, written down in ``accessibility.js``; the Python side presses Tab.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

RULES = Path(__file__).with_suffix(".js").read_text()
MOST_TABS = 400
FOCUSED = """() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const style = getComputedStyle(e);
  const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
  window.reached = (window.reached ?? new Set()).add(e);
  const place = e.getBoundingClientRect();
  return {
    ring: ring || style.boxShadow !== 'none',
    hidden: place.width < 1 || place.height < 1,
    name: `<${e.tagName.toLowerCase()}> ${(e.getAttribute('aria-label') ?? e.textContent).trim().slice(0, 40)}`,
    first: e === window.first || !(window.first ??= e),
  };
}"""
MISSED = """() => [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [role=slider]')]
  .filter(e => e.checkVisibility({ checkVisibilityCSS: true }) && !e.disabled && e.tabIndex >= 0)
  .filter(e => !e.closest('dialog:not([open])') && !window.reached?.has(e) && !(e.type === 'radio' && e.name))
  .map(e => `<${e.tagName.toLowerCase()}> ${(e.getAttribute('aria-label') ?? e.textContent).trim().slice(0, 40)}`)"""


def violations(page: Any) -> list[str]:
    """What breaks a rule on the page as it is now, one sentence each."""
    return list(page.evaluate(f"({RULES.split(chr(10), 1)[1]})()"))


def keyboard_violations(page: Any) -> list[str]:
    """Controls that Tab does not reach, and stops whose focus cannot be seen."""
    page.evaluate("() => { window.reached = new Set(); window.first = null; document.activeElement?.blur(); }")
    found: list[str] = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        stop = page.evaluate(FOCUSED)
        if stop is None or (stop["first"] and page.evaluate("window.reached.size") > 1):
            break
        if not stop["ring"] or stop["hidden"]:
            found.append(f"focus cannot be seen: {stop['name']}")
    return [*dict.fromkeys(found), *(f"Tab does not reach {name}" for name in page.evaluate(MISSED))]
