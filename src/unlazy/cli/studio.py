"""``unlazy studio``, ``unlazy report`` and ``unlazy export``: serves the page, or writes it as one file or as a static site."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path

import typer

from unlazy.runtime import InputError, require, studio_token


def studio_command(runs: Path, *, host: str, port: int, token: str | None, browser: bool) -> None:
    """Serve the page until Ctrl-C."""
    from unlazy.studio.server import serve

    def announce(address: str) -> None:
        """Print the address and open a browser."""
        typer.echo(f"runs below {runs.resolve()}")
        typer.echo(f"open {address}   (Ctrl-C ends it)")
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(runs, host=host, port=port, token=token, ready=announce)


def read_token(given: str | None, file: Path | None) -> str | None:
    """The secret: as given (``new`` makes one), from the first line of a file, or from ``UNLAZY_TOKEN``; ``None`` for none."""
    require(given is None or file is None, "give --token or --token-file, not both.")
    if file is not None:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the token cannot be read from {file} ({error}).") from error
        require(bool(lines) and bool(lines[0].strip()), f"the first line of {file} is empty; it should be the token.")
        return lines[0].strip()
    return secrets.token_urlsafe(18) if given == "new" else given or studio_token()


def report_command(names: list[str], out: Path, root: Path, steps: int) -> None:
    """Write one or more runs as one HTML file."""
    from unlazy.cli.runs import find_run
    from unlazy.studio.report import write_run_report

    require(not out.is_dir(), f"{out} is a folder; name a file for the page.")
    require(out.parent.is_dir(), f"{out.parent} is not a folder, so {out.name} cannot be written there. Make it first.")
    page_like = out.suffix.lower() in (".html", ".htm")
    require(page_like, f"the page is HTML, so its name must end in .html; got {out}. A browser prints it as PDF.")
    page, notice = write_run_report([find_run(name, root).folder for name in names], out, most_steps=steps)
    if notice:
        typer.echo(notice)
    typer.echo(f"page: {page.resolve()} ({page.stat().st_size / 1e6:.1f} MB); it opens without a server")


def export_command(runs: Path, out: Path, steps: int) -> None:
    """Write all runs below a folder as a static site."""
    from unlazy.cli.progress import report_progress
    from unlazy.studio.site import export_site

    with report_progress() as report:
        export = export_site(runs, out, most_steps=steps, progress=partial(report, "runs"))
    for key, reason in export.broken:
        typer.echo(f"left out: {key}: {reason}", err=True)
    typer.echo(f"{export.runs} runs in {export.page.resolve()} ({export.size / 1e6:.1f} MB)")
    typer.echo(f"look at it: python -m http.server --directory {out}; any web server or GitHub Pages serves the folder")
