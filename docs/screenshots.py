"""Pictures of every page of the studio for its reference page: ``make screenshots`` runs the demo, then this on its folder."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

from unlazy.store import write_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))  # where the page tests keep their browser

from browser import Browser, open_browser, serve_studio, wait_until

IMAGES = Path(__file__).parent / "images"
DRAWN = "document.querySelector('[data-map^=overlap]')?.dataset.step === argument"
LOADED = "!/loading/.test(document.querySelector('[data-testid=status]')?.innerText ?? '')"
STEP = 446  # epoch 28: the easy half is learned, the hard half begins


def take(page: Any, name: str, pause: float = 900) -> None:
    """One picture, packed well so that the repository stays small."""
    from PIL import Image

    page.wait_for_timeout(pause)
    buffer = io.BytesIO()
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(buffer, "PNG", optimize=True)
    write_file(IMAGES / f"{name}.png", buffer.getvalue())
    page.close()


def run_page(browser: Browser, address: str, step: int, **options: Any) -> Any:
    page = browser.open(f"{address}?step={step}", **options)
    wait_until(page, DRAWN, str(step))
    wait_until(page, LOADED, seconds=60)
    return page


def nearest_step(runs: Path, key: str) -> int:
    """The stored scene nearest to the one we like to show."""
    steps = [int(path.stem) for path in (runs / key / "arrays" / "scene_overlap").glob("*.npy")]
    return min(steps, key=lambda step: abs(step - STEP))


def served(browser: Browser, home: str, runs: Path) -> None:
    """Pages that need the server."""
    folders = {path.parent.name: path.parent.relative_to(runs).as_posix() for path in runs.rglob("run.json")}
    keys = {name: key for folder, key in folders.items() for name in [re.sub(r"-[0-9a-f]{12}$", "", folder)]}
    main, frozen = keys["author-pwc"].replace("/", "%2F"), keys["author-pwc-frozen"].replace("/", "%2F")
    step = nearest_step(runs, keys["author-pwc"])
    page = browser.open(f"{home}#/runs", height=760)
    wait_until(page, "document.querySelectorAll('[data-testid=runs-row]').length > 2")
    take(page, "studio-runs")
    take(run_page(browser, f"{home}#/run/{main}", step, height=1640), "studio-run")
    take(run_page(browser, f"{home}#/run/{main}", step, height=1000, color_scheme="dark"), "studio-dark")
    take(run_page(browser, f"{home}#/run/{main}", step, width=390, height=844), "studio-phone")
    page = browser.open(f"{home}#/compare/{main}/{frozen}?step={step}", height=1200)
    wait_until(page, DRAWN, str(step))
    wait_until(page, LOADED, seconds=60)
    take(page, "studio-compare", pause=2500)
    page = browser.open(f"{home}#/run/{main}/halfspace/4/3?step={step}", height=900)
    wait_until(page, "document.querySelectorAll('section[data-testid^=panel-]').length > 3", seconds=60)
    take(page, "studio-halfspace", pause=2500)
    page = browser.open(f"{home}#/claims", height=900)
    wait_until(page, "document.querySelectorAll('[data-testid=claims-row]').length > 9")
    take(page, "studio-claims")
    page = browser.open(f"{home}#/play?model=pwc&data=spiral&width=24&beta=8&learning_rate=0.01", height=1000)
    page.get_by_test_id("play-start").click()
    wait_until(page, "document.querySelector('main canvas')", seconds=60)
    page.wait_for_timeout(25_000)
    take(page, "studio-playground")


def main() -> None:
    """Into docs/images/, from the folder that ``unlazy demo`` wrote."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "unlazy-demo")
    with open_browser() as browser, serve_studio(folder / "runs") as home:
        served(browser, home, folder / "runs")
        page = browser.open((folder / "page.html").resolve().as_uri())
        wait_until(page, "window.__unlazy?.ready")
        for _ in range(30):
            page.keyboard.press("ArrowRight")
        take(page, "studio-report")
        foreign = [url for url in browser.foreign_requests(home) if not url.startswith("file:")]
        if browser.console_messages or foreign:
            sys.exit("\n".join(browser.console_messages + foreign))


if __name__ == "__main__":
    main()
