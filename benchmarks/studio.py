"""The studio in real Chromium on one machine: how soon a page is ready, how long a picture takes, how many runs a list holds.

ready: 60 steps of three 500 x 500 kernels, from the request for the page (empty cache) to the first three heat maps drawn; median
of several loads. whole: until every step is in the browser's memory. draw: one heat map, bytes to canvas, median while scrubbing
through all steps with the arrow key. list: 1,000 runs of 50 measurements, from the request to a table that counts them all and
shows the first. scrub: ten runs of 200 measurements over each other, six charts; the processor time of the page's main thread
(script, style, layout, paint) for each of 200 presses of an arrow key, median. overlay: how soon these charts stand, beside
TensorBoard (where it is installed) with the same scalars, written by our sink: from the request to the charts in the window (six
here, four there).
The server is started fresh for each part. Limits: ready 2 s, list 1 s, draw 8 ms, scrub 16 ms. Times are by the wall clock unless
said, so the load of the machine is kept beside them.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from unlazy import runtime
from unlazy.scope.sinks import TensorBoardSink
from unlazy.store import Writer, write_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))  # where the page tests keep their browser

from browser import Browser, open_browser, serve_studio, wait_until

STEPS, SIDE, RUNS, LOADS = 60, 500, 1000, 5
OVERLAID, POINTS, SCRUBS = 10, 200, 200
SCALARS = ("loss", "accuracy", "linearisation_error", "tangent_distance", "tangent_change", "tangent_alignment")
# its lines are on canvases nobody can read back; an axis that reaches over the data comes with them
TENSORBOARD_READY = (
    "[...document.querySelectorAll('line-chart')].filter(one => /1,500/.test(one.textContent)).length >= 4"
)
KERNELS = ("overlap", "tangent", "label_kernel")


def header(name: str) -> dict[str, Any]:
    return {
        "kind": "train",
        "study": None,
        "scale": None,
        "recipe": {"name": name},
        "members": [{"seed": 0}],
        "model": None,
        "data": {"name": "made", "options": {}, "fingerprint": "0"},
        "provenance": {"started": "2026-01-01T00:00:00+00:00"},
    }


def write_kernels(folder: Path) -> None:
    """A run of 180 MB: smooth kernels that drift from step to step."""
    random = np.random.default_rng(0)
    factors = {name: random.normal(size=(2, SIDE, 20)) for name in KERNELS}
    with Writer(folder, header("kernels")) as writer:
        for step in range(STEPS):
            mixed = {name: (1 - step / STEPS) * pair[0] + step / STEPS * pair[1] for name, pair in factors.items()}
            arrays = {name: (half @ half.T)[None].astype(np.float32) for name, half in mixed.items()}
            writer.record(step * 10, {"loss": np.array([1 / (1 + step)])}, arrays)
        writer.finish()


def write_list(root: Path) -> None:
    """Runs by hand: nobody needs them to survive."""
    for number in range(RUNS):
        folder = root / f"run-{number:04d}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"format": 1, "id": f"{number:012x}"} | header(str(number))))
        (folder / "status.json").write_text('{"state": "finished", "step": 49, "error": null}')
        line = '{{"step": {}, "time": 0, "scalars": {{"loss": [0.5]}}, "arrays": {{}}, "checkpoint": null}}\n'
        (folder / "metrics.jsonl").write_text("".join(line.format(step) for step in range(50)))


def bench_run(browser: Browser, root: Path) -> dict[str, Any]:
    """Ready, whole and draw."""
    ready = []
    with serve_studio(root) as home:
        time.sleep(5)  # the server imports what it needs while nobody waits
        for load in range(LOADS):
            start = time.perf_counter()
            page = browser.open(f"{home}#/run/kernels?step=0")
            drawn = "argument.every(name => document.querySelector(`[data-map='${name}']`)?.dataset.step === '0')"
            wait_until(page, drawn, list(KERNELS), every=5)
            ready.append(time.perf_counter() - start)
            if load < LOADS - 1:
                page.close()
        wait_until(
            page, "!/loading/.test(document.querySelector('[data-testid=status]')?.innerText ?? '')", seconds=120
        )
        whole = time.perf_counter() - start
        page.evaluate("window.__unlazy.drawTimes.length = 0")
        for step in range(1, STEPS):
            page.keyboard.press("ArrowRight")
            wait_until(
                page, "document.querySelector('[data-map=overlap]').dataset.step === argument", str(step * 10), every=5
            )
        draws = page.evaluate("window.__unlazy.drawTimes")
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        page.close()
    return {
        "first_ready_seconds": ready[0],
        "ready_seconds": statistics.median(ready),
        "best_ready_seconds": min(ready),
        "whole_seconds": whole,
        "draw_milliseconds": statistics.median(draws),
        "draw_milliseconds_p95": float(np.quantile(draws, 0.95)),
        "draws": len(draws),
        "heap_megabytes": heap / 1e6,
    }


def bench_list(browser: Browser, root: Path) -> dict[str, Any]:
    """A thousand runs: a fresh server that knows none of them, then again."""
    seconds = []
    with serve_studio(root) as home:
        for _ in range(2):
            page = browser.open(f"{home}#/runs")
            wait_until(
                page, "document.querySelector('[role=table]')?.ariaRowCount === argument", str(RUNS + 1), every=5
            )
            shown = wait_until(page, "document.querySelector('[data-testid=runs-row]') && performance.now()", every=5)
            seconds.append(shown / 1000)  # the page's own clock begins with the request
            rows = page.evaluate("document.querySelectorAll('[data-testid=runs-row]').length")
            page.close()
    return {"runs": RUNS, "rows_on_screen": rows, "first_seconds": seconds[0], "again_seconds": seconds[1]}


def write_overlay(root: Path, logs: Path) -> None:
    """Ten runs of six scalars, and the same through the sink for TensorBoard where that is installed."""
    random = np.random.default_rng(1)
    for number in range(OVERLAID):
        name = f"run-{number}"
        sink = TensorBoardSink(logs / name) if find_spec("tensorboard") else None
        with Writer(root / name, header(name)) as writer:
            for point in range(POINTS):
                values = {scalar: float(random.random() / (1 + point)) for scalar in SCALARS}
                writer.record(10 * point, {scalar: np.array([value]) for scalar, value in values.items()}, {})
                if sink is not None:
                    sink.write(10 * point, values)
            writer.finish()
        if sink is not None:
            sink.close()


def bench_overlay(browser: Browser, root: Path) -> dict[str, Any]:
    """Ready, and the processor time of a step of the scrubber."""
    drawn = (
        "document.querySelectorAll('[data-testid^=panel-overlay-] svg').length >= 6 && "
        "document.querySelectorAll('[data-testid^=panel-overlay-] g[aria-label=line] path').length >= argument"
    )
    ready, scrubs = [], []
    with serve_studio(root) as home:
        for load in range(LOADS):
            start = time.perf_counter()
            page = browser.open(f"{home}#/overlay")
            wait_until(page, drawn, OVERLAID * len(SCALARS), every=5)
            ready.append(time.perf_counter() - start)
            if load < LOADS - 1:
                page.close()
        metrics = page.context.new_cdp_session(page)
        metrics.send("Performance.enable", {"timeDomain": "threadTicks"})

        def task_seconds() -> float:
            """Processor time of the page's main thread so far."""
            found = metrics.send("Performance.getMetrics")["metrics"]
            return float(next(entry["value"] for entry in found if entry["name"] == "TaskDuration"))

        for scrub in range(SCRUBS):
            before = task_seconds()
            page.keyboard.press("ArrowLeft" if scrub < SCRUBS // 2 else "ArrowRight")
            page.wait_for_timeout(60)  # style, layout and paint follow with the next frames
            scrubs.append(1000 * (task_seconds() - before))
        page.close()
    return {
        "runs": OVERLAID,
        "measurements": POINTS,
        "charts": len(SCALARS),
        "ready_seconds": statistics.median(ready),
        "scrub_milliseconds": statistics.median(scrubs),
        "scrub_milliseconds_p95": float(np.quantile(scrubs, 0.95)),
        "scrubs": SCRUBS,
    }


def bench_tensorboard(browser: Browser, logs: Path) -> dict[str, Any] | None:
    """How soon TensorBoard's charts of the same scalars stand; ``None`` where it is not installed."""
    if not find_spec("tensorboard"):
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(logs),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        time.sleep(10)  # it reads the logs while nobody waits
        ready = []
        for _ in range(LOADS):
            start = time.perf_counter()
            page = browser.open(f"http://127.0.0.1:{port}/#timeseries")
            wait_until(page, TENSORBOARD_READY, seconds=60, every=5)
            ready.append(time.perf_counter() - start)
            page.close()
    finally:
        process.terminate()
        process.wait(20)
    return {"version": version("tensorboard"), "ready_seconds": statistics.median(ready)}


def main() -> None:
    """All parts, printed and kept in results/bench/studio.json."""
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        kernels, many = Path(folder) / "one", Path(folder) / "many"
        kernels.mkdir()
        many.mkdir()
        write_kernels(kernels / "kernels")
        write_list(many)
        over, logs = Path(folder) / "over", Path(folder) / "logs"
        write_overlay(over, logs)
        results: dict[str, Any] = {
            "run": bench_run(browser, kernels),
            "list": bench_list(browser, many),
            "overlay": bench_overlay(browser, over),
            "tensorboard": bench_tensorboard(browser, logs),
        }
    run, listed = results["run"], results["list"]
    busy = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    print(f"load {busy['load']:.1f} on {busy['cores']} cores")
    print(f"{STEPS} steps of three {SIDE} x {SIDE} kernels")
    print(f"  ready {run['ready_seconds']:.2f} s (best {run['best_ready_seconds']:.2f} s)")
    print(f"  whole {run['whole_seconds']:.1f} s")
    print(
        f"  draw {run['draw_milliseconds']:.2f} ms median, {run['draw_milliseconds_p95']:.2f} ms 95 %, {run['draws']} draws"
    )
    print(f"  memory {run['heap_megabytes']:.0f} MB")
    print(f"{RUNS} runs listed in {listed['first_seconds']:.2f} s, again in {listed['again_seconds']:.2f} s")
    overlay, board = results["overlay"], results["tensorboard"]
    print(f"{OVERLAID} runs over each other, {len(SCALARS)} charts: ready {overlay['ready_seconds']:.2f} s")
    print(f"  scrub {overlay['scrub_milliseconds']:.1f} ms median, {overlay['scrub_milliseconds_p95']:.1f} ms 95 %")
    print(f"  TensorBoard {board['ready_seconds']:.2f} s" if board else "  TensorBoard is not installed")
    text = json.dumps(results | {"machine": busy, "provenance": runtime.provenance("float32")}, indent=1) + "\n"
    write_file(Path("results/bench/studio.json"), text.encode())
    late = run["ready_seconds"] > 2 or run["draw_milliseconds"] > 8
    late |= listed["first_seconds"] > 1 or overlay["scrub_milliseconds"] > 16
    sys.exit("slower than it should be" if late else 0)


if __name__ == "__main__":
    main()
