"""The commands. Nothing heavy is imported here: ``unlazy --help`` answers at once, without torch."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unlazy.cli.progress import reporting
from unlazy.runtime import UnlazyError, __version__, data_folder, require, runs_folder
from unlazy.studies.registry import STUDIES, check_scale, find_studies

app = typer.Typer(
    help="See what a neural network learns while it trains.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
runs_app = typer.Typer(help="List, show and compare runs.", invoke_without_command=True)
app.add_typer(runs_app, name="runs")
bench_app = typer.Typer(help="What things cost here, beside what others take.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
data_app = typer.Typer(
    help="Image data: list, fetch, verify, or take files from a folder.", invoke_without_command=True
)
app.add_typer(data_app, name="data")

INTERRUPTED = 130  # the exit code typer gives Ctrl-C

ScaleOption = Annotated[
    str, typer.Option(help="smoke (seconds), desk (under two minutes) or paper (the paper's length).")
]
SeedsOption = Annotated[int | None, typer.Option(help="Number of seeds, instead of the scale's own.")]
WorkersOption = Annotated[int, typer.Option(help="Trainings at once; 0: one per core.")]


def main() -> None:
    """The entry point: deliberate errors become one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows few letters gets question marks
    try:
        app()
    except UnlazyError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            typer.echo("interrupted: the same command goes on where it stopped.", err=True)
        raise


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """See what a neural network learns while it trains."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page, the figures and the runs.")] = Path("unlazy-demo"),
    scale: ScaleOption = "desk",
    seeds: SeedsOption = None,
    workers: WorkersOption = 0,
) -> None:
    """Train the circle study, measure it, judge the paper's claims, and write a page to look at."""
    table = _reproduce("circle", scale, seeds, workers, out / "runs", out / "results")
    from unlazy.studio.circle_page import write_circle_page

    page = write_circle_page(out / "page.html", out / "results", out / "runs", scale, seeds)
    _print_rows(table["claims"])
    typer.echo(f"\nfigures (PNG and PDF): {out / 'results' / 'circle' / scale}")
    typer.echo(f"page: {page.resolve()}")
    typer.echo("Open the page in a browser and press space.")


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(help="A study, or a paper (all its studies).")],
    scale: ScaleOption = "desk",
    seeds: SeedsOption = None,
    workers: WorkersOption = 0,
    runs: Annotated[Path | None, typer.Option(help="Where runs are kept (default: UNLAZY_RUNS, or ./runs).")] = None,
    results: Annotated[
        Path, typer.Option(help="Where tables and figures go; what a study wrote there at this scale is replaced.")
    ] = Path("results"),
) -> None:
    """Run a study of a paper: train, measure, judge its claims, draw its figures. Interrupted work goes on."""
    for entry in find_studies(study):
        table = _reproduce(entry.name, scale, seeds, workers, runs or runs_folder(), results)
        _print_rows(table["claims"])
        typer.echo(f"\nresults: {results / entry.name / f'{scale}.json'}")


@app.command()
def studies() -> None:
    """The studies there are."""
    wide = max(len(entry.name) for entry in STUDIES)
    for entry in STUDIES:
        typer.echo(f"{entry.name:{wide}}  {entry.paper:10}  {entry.help}")


@app.command()
def claims(
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="Result files (default: ./results, or the shipped ones).")
    ] = None,
) -> None:
    """The scorecard: every numbered claim of the papers, what they say, what we measured, the verdict."""
    from unlazy.claims.scorecard import load_results, results_folder, scorecard

    folder = results or results_folder()
    require(folder.is_dir(), f"{folder} is not a folder of results; `unlazy reproduce` writes one.")
    rows = scorecard(load_results(folder))
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        _print_rows(rows)
        typer.echo(f"\nfrom {folder}; the headline number is that of each claim's first part")


@runs_app.callback()
def list_runs(
    context: typer.Context,
    root: Annotated[Path | None, typer.Option(help="Folder to search (default: UNLAZY_RUNS, or ./runs).")] = None,
    study: Annotated[str | None, typer.Option(help="Only runs of this study.")] = None,
    state: Annotated[str | None, typer.Option(help="Only runs in this state: running, interrupted, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        from unlazy.cli.runs import print_list

        require(
            root is None or root.is_dir(), f"{root} is not a folder; `unlazy reproduce circle` or a Scope makes runs."
        )
        print_list(root or runs_folder(), study, state, as_json)


RunArgument = Annotated[str, typer.Argument(help="A run folder, or the beginning of a run's id.")]
RootOption = Annotated[Path | None, typer.Option(help="Where ids are looked up (default: UNLAZY_RUNS, or ./runs).")]


@runs_app.command("show")
def show_run(run: RunArgument, root: RootOption = None) -> None:
    """What a run is, how far it came, and its last measurement."""
    from unlazy.cli.runs import find_run, print_run

    print_run(find_run(run, root or runs_folder()))


@runs_app.command("compare")
def compare_runs(first: RunArgument, second: RunArgument, root: RootOption = None) -> None:
    """Where two runs differ: settings first, then their last common measurements."""
    from unlazy.cli.runs import find_run, print_comparison

    print_comparison(*(find_run(run, root or runs_folder()) for run in (first, second)))


DataFolderOption = Annotated[
    Path | None, typer.Option(help="The data folder (default: UNLAZY_DATA, or the user's cache folder).")
]
DataSetArgument = Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar-10 or cifar-100.")]


@data_app.callback()
def take_data(
    context: typer.Context,
    origin: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Copy the standard files found below DIR; needs no network."),
    ] = None,
    to: DataFolderOption = None,
) -> None:
    command = context.invoked_subcommand
    require(command is None or (origin is None and to is None), f"--from and --to stand alone, not before {command}.")
    require(to is None or origin is not None, "--to says where files go; --from says which, and is missing.")
    if command is None:
        from unlazy.cli.data import print_list, take_from

        if origin is None:
            print_list(data_folder(), as_json=False)
        else:
            take_from(origin, to or data_folder())


@data_app.command("list")
def list_data(
    folder: DataFolderOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """The data sets there are: present, missing, incomplete or damaged, and how large."""
    from unlazy.cli.data import print_list

    print_list(folder or data_folder(), as_json)


@data_app.command("fetch")
def fetch_data(name: DataSetArgument, to: DataFolderOption = None) -> None:
    """Download a data set from its publishers and check it. Interrupted downloads go on where they stopped."""
    from unlazy.cli.data import fetch_one

    fetch_one(name, to or data_folder())


@data_app.command("verify")
def verify_data(
    name: Annotated[str | None, typer.Argument(help="One data set; all that are there if left out.")] = None,
    folder: DataFolderOption = None,
) -> None:
    """Hold every file against its checksum; exit code 1 when one is damaged or missing."""
    from unlazy.cli.data import verify

    verify(name, folder or data_folder())


@app.command()
def studio(
    runs: Annotated[Path | None, typer.Argument(help="Folder of runs (default: UNLAZY_RUNS, or ./runs).")] = None,
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.", min=0, max=65535)] = 8123,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Word that whoever opens the page must know; `new` makes one up.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """The page: scrub through training and see all views move together, live while a run is training."""
    from unlazy.cli.studio import studio_command

    studio_command(runs or runs_folder(), host=host, port=port, token=token, browser=browser)


@app.command()
def report(
    run: Annotated[
        list[str], typer.Argument(help="A run folder, or the beginning of a run's id; several share a page.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("page.html"),
    root: RootOption = None,
    steps: Annotated[int, typer.Option(help="At most so many steps of a run go into the page.", min=2)] = 60,
) -> None:
    """The studio's page with a run inside, as one file that opens without a server or a network."""
    from unlazy.cli.studio import report_command

    report_command(run, out, root or runs_folder(), steps)


@app.command()
def gram(
    model: Annotated[str, typer.Argument(help="A run folder, a JSON model spec, or package.module:function.")],
    data: Annotated[str, typer.Argument(help="A .npy file, or a data set such as digits or cifar-10:test.")],
    out: Annotated[Path, typer.Option(help="The file to write: .npy, or .zarr, which goes on after a crash.")] = Path(
        "kernel.npy"
    ),
    kernel: Annotated[str, typer.Option(help="tangent, overlap or layer-overlap.")] = "tangent",
    memory: Annotated[
        str | None, typer.Option(help="What may be used, such as 2GB (default: half of what is free).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many samples.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of this machine that share the tiles (.zarr).")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="A Dask scheduler whose workers share the tiles, such as tcp://host:8786 (.zarr)."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(help="Only one of several shares, 0/8 to 7/8, for job arrays (.zarr).")
    ] = None,
    tile: Annotated[int | None, typer.Option(help="Samples a side of a tile (default: planned; .zarr).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")] = False,
) -> None:
    """A kernel of a network on a data set, planned first, then written tile by tile (the file may exceed the memory)."""
    from unlazy.cli.gram import Spread, gram_command

    spread = Spread(cluster, workers, shard, tile)
    gram_command(model, data, kernel, out, memory, limit, spread, dry_run=dry_run)


@bench_app.command("kernels")
def bench_kernels(
    rows: Annotated[list[str] | None, typer.Argument(help="Rows such as a:full, or a; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Where the table goes; rows measured again are replaced.")] = Path(
        "bench.json"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan of each row.")] = False,
) -> None:
    """Tangent kernels of five networks against torch.func (where installed also NNGeometry and neural-tangents), on one core."""
    from unlazy.cli.bench import bench_kernels

    bench_kernels(rows or (), out, dry_run=dry_run)


def _reproduce(name: str, scale: str, seeds: int | None, workers: int, runs: Path, results: Path) -> dict[str, Any]:
    check_scale(scale)
    require(workers >= 0, f"workers must be 0 (one per core) or more, got {workers}.")
    for folder in (runs, results):
        require(not folder.exists() or folder.is_dir(), f"{folder} is a file; a folder is needed. Choose another name.")
    (entry,) = [entry for entry in STUDIES if entry.name == name]
    module = entry.load()
    with reporting() as report:
        table: dict[str, Any] = module.reproduce(
            scale, runs=runs, results=results, seeds=seeds, workers=workers or _cores(), progress=report
        )
    made_by = table["provenance"]["code_sha256"]
    if made_by != table["provenance"]["judged_by_code"]:
        typer.echo(f"note: some runs were trained by an earlier version of the code; delete {runs} to train again.")
    return table


def _cores() -> int:
    """The cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _print_rows(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from unlazy.claims.scorecard import ours_text, seeds_text, verdict_text

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("claim", "statement", "paper", "ours (median, 95 %)", "seeds", "verdict", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["id"],
            row["statement"],
            row["paper_value"],
            escape(ours_text(row)),
            seeds_text(row),
            verdict_text(row),
        )
    console.print(table)
