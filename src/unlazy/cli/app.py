"""The commands of ``unlazy``. Each imports what it needs inside, so that ``unlazy --help`` does not load torch."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unlazy.runtime import UnlazyError, __version__, data_folder, require, runs_folder

app = typer.Typer(
    help="See what a neural network learns while it trains.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class RunsGroup(TyperGroup):
    """Takes a first word that is no command as a folder: ``unlazy runs FOLDER`` lists it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command of the first word, or ``list`` with all words."""
        known = args and args[0] in self.commands
        return super().resolve_command(ctx, args if known else ["list", *args])


runs_app = typer.Typer(cls=RunsGroup, invoke_without_command=True)
app.add_typer(runs_app, name="runs")
bench_app = typer.Typer(help="Measure how long computations take on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
data_app = typer.Typer(invoke_without_command=True)
app.add_typer(data_app, name="data")

INTERRUPTED = 130  # the exit code typer gives Ctrl-C

ScaleOption = Annotated[
    str, typer.Option(help="smoke (seconds), desk (under two minutes) or paper (the paper's length).")
]
SeedsOption = Annotated[int | None, typer.Option(help="Number of seeds, instead of the scale's own.")]
WorkersOption = Annotated[int, typer.Option(help="Number of cases measured at the same time; 0: one per core.")]


def main() -> None:
    """Run the command line. An ``UnlazyError`` becomes one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without these letters shows question marks
    try:
        app()
    except UnlazyError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            typer.echo("interrupted: run the same command again to resume.", err=True)
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
    """Train and measure the circle study, judge the paper's claims, and write one HTML page."""
    from unlazy.cli.studies import available_cores, make_request, print_rows, run_study, write_demo_page
    from unlazy.studies.request import ExecutionOptions

    require(workers >= 0, f"workers must be 0 (one per core) or more, got {workers}.")
    request = make_request("circle", scale, out / "runs", out / "results", seeds, (), "cpu", None)
    found = run_study(request, ExecutionOptions(workers or available_cores()))
    page = write_demo_page(out / "page.html", request)
    print_rows(found.results["claims"])
    typer.echo(f"\nfigures (PNG and PDF): {found.folder}")
    typer.echo(f"page: {page.resolve()}")
    typer.echo("Open the page in a browser and press space.")


@app.command()
def reproduce(
    study: Annotated[str, typer.Argument(help="A study, a paper (all its studies), or a Python file of your own.")],
    scale: ScaleOption = "desk",
    seeds: SeedsOption = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting: seed=0..99, width=32; beta=4,10,30 sweeps over it. May be repeated."
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Only cases that match, such as 'resnet-34,*' or 'author,pwc'.")] = "",
    workers: WorkersOption = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    cluster: Annotated[str | None, typer.Option(help="A Dask scheduler, such as tls://host:8786. Trust it.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Start no case that would end after so many seconds.")] = None,
    retries: Annotated[int, typer.Option(help="How often a failed case is tried again.", min=0)] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print which cases would run, and how long they took before.")
    ] = False,
    measure_only: Annotated[
        bool, typer.Option("--measure-only", help="Write the table; skip claims and figures.")
    ] = False,
    judge_only: Annotated[
        bool, typer.Option("--judge-only", help="Judge and draw the existing table; measure nothing.")
    ] = False,
    accept: Annotated[
        bool,
        typer.Option("--accept-findings", help="Mark the findings as written for the current table."),
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets (default: UNLAZY_DATA).")] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder for runs (default: UNLAZY_RUNS, or ./runs).")] = None,
    results: Annotated[Path, typer.Option(help="Folder for tables, verdicts and figures.")] = Path("results"),
) -> None:
    """Run a study: measure its cases, judge its claims, draw its figures. An interrupted study resumes."""
    from unlazy.cli.studies import (
        accept_findings,
        available_cores,
        make_request,
        print_parts,
        print_plan,
        print_rows,
        run_study,
    )
    from unlazy.studies.registry import find_studies
    from unlazy.studies.request import ExecutionOptions

    require(workers >= 0, f"workers must be 0 (one per core) or more, got {workers}.")
    require(not (measure_only and judge_only), "--measure-only and --judge-only exclude each other.")
    require(not (only and judge_only), "--only chooses cases to measure; --judge-only measures none. Give one of them.")
    require(seconds is None or seconds > 0, f"--seconds must be above 0, got {seconds}.")
    how = ExecutionOptions(workers or available_cores(), cluster, retries, seconds, only)
    failed = False
    for reference in find_studies(study):
        request = make_request(reference, scale, runs or runs_folder(), results, seeds, changes or (), device, data)
        if dry_run:
            print_plan(request, how)
            continue
        if accept:
            accept_findings(request)
        found = run_study(request, how, measure=not judge_only, judge=not measure_only)
        failed = failed or bool(found.failed)
        if found.results:
            print_rows(found.results["claims"])
            if request.own_file is not None:
                print_parts(found.results["claims"])
        typer.echo(f"\ntable: {found.folder / 'table.csv'}" if request.sweep else f"\nresults: {found.folder}")
    if failed:
        raise typer.Exit(1)


@app.command()
def studies(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List all studies."""
    from unlazy.studies import registry

    if as_json:
        rows = [{"name": entry.name, "paper": entry.paper, "help": entry.help} for entry in registry.studies()]
        typer.echo(json.dumps(rows, indent=1))
        return
    wide = max(len(entry.name) for entry in registry.studies())
    for entry in registry.studies():
        typer.echo(f"{entry.name:{wide}}  {entry.paper:10}  {entry.help}")


@app.command()
def claims(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Claims to show in full, with their parts: C29, B9. Default: all, a line each."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="Folder of results (default: ./results, else the shipped ones).")
    ] = None,
) -> None:
    """Print the scorecard: every claim of the papers, the paper's number, ours, and two verdicts."""
    from unlazy.claims.scorecard import AFTER_DATA, load_results, results_folder, scorecard, shipped_results
    from unlazy.cli.studies import print_parts, print_rows, print_summaries

    folder = results or results_folder()
    require(folder.is_dir(), f"{folder} is not a folder of results; `unlazy reproduce` writes one.")
    rows = scorecard(load_results(folder))
    require(as_json or bool(rows), f"{folder} holds no judged claim; `unlazy reproduce` writes them.")
    shipped = shipped_results()
    others = shipped if results is None and shipped is not None and shipped.resolve() != folder.resolve() else None
    elsewhere = f" The shipped results are in {others}; --results shows them." if others else ""
    unknown = sorted(set(names or ()) - {row["id"] for row in rows})
    require(not unknown, f"there is no claim {', '.join(unknown)} in {folder}; `unlazy claims` lists all.{elsewhere}")
    chosen = [row for row in rows if not names or row["id"] in names]
    print_rows(chosen, as_json=as_json, one_line=not names)
    if names and not as_json:
        print_parts(chosen, shows=False)
    elif not as_json:
        print_summaries(rows)
        example = next((row["id"] for row in rows if len(row["parts"]) > 1), rows[0]["id"])
        typer.echo(
            f"\nfrom {folder}; the number of a claim is that of its first part; `unlazy claims {example}` shows all its parts"
        )
        typer.echo(f"†: {AFTER_DATA}, or findings stale")
        if elsewhere:
            typer.echo(elsewhere.strip())


JsonOption = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
StudyOption = Annotated[str | None, typer.Option(help="Only runs of this study.")]
StateOption = Annotated[
    str | None, typer.Option(help="Only runs in this state: running, finished, failed or interrupted.")
]
ColumnsOption = Annotated[
    str,
    typer.Option(help="Settings to show as columns, such as lr,width (default: four that differ between the runs)."),
]
TagOption = Annotated[str | None, typer.Option(help="Only runs with this tag.")]


@runs_app.callback()
def list_runs(
    context: typer.Context,
    root: Annotated[Path | None, typer.Option(help="Folder to search (default: UNLAZY_RUNS, or ./runs).")] = None,
    study: StudyOption = None,
    state: StateOption = None,
    tag: TagOption = None,
    columns: ColumnsOption = "",
    as_json: JsonOption = False,
) -> None:
    """List, show, compare, label and delete runs: `unlazy runs`, or `unlazy runs FOLDER`."""
    if context.invoked_subcommand is None:
        _list_runs(root, study, state, tag, columns, as_json)


@runs_app.command("list")
def list_folder(
    context: typer.Context,
    folder: Annotated[Path | None, typer.Argument(help="Folder to search (default: UNLAZY_RUNS, or ./runs).")] = None,
    study: StudyOption = None,
    state: StateOption = None,
    tag: TagOption = None,
    columns: ColumnsOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the runs below a folder; `unlazy runs FOLDER` does the same."""
    given = context.parent.params if context.parent is not None else {}
    _list_runs(
        folder or given.get("root"),
        study or given.get("study"),
        state or given.get("state"),
        tag or given.get("tag"),
        columns or str(given.get("columns") or ""),
        as_json or bool(given.get("as_json")),
    )


def _list_runs(
    root: Path | None, study: str | None, state: str | None, tag: str | None, columns: str, as_json: bool
) -> None:
    from unlazy.cli.runs import print_list

    commands = ", ".join(command.name or "" for command in runs_app.registered_commands)
    require(
        root is None or root.is_dir(),
        f"{root} is not a folder; `unlazy reproduce circle` or a Scope makes runs. Commands of `unlazy runs`: {commands}.",
    )
    states = ("running", "finished", "failed", "interrupted")
    require(state is None or state in states, f"--state is one of {', '.join(states)}; got {state}.")
    chosen = [name.strip() for name in columns.split(",") if name.strip()]
    print_list(root or runs_folder(), study, state, as_json, chosen, tag)


RunArgument = Annotated[str, typer.Argument(help="A run folder, or the beginning of a run's id.")]
RunsArgument = Annotated[list[str], typer.Argument(help="Run folders, or beginnings of runs' ids.")]
RootOption = Annotated[Path | None, typer.Option(help="Folder to search for ids (default: UNLAZY_RUNS, or ./runs).")]


@runs_app.command("show")
def show_run(run: RunArgument, root: RootOption = None, as_json: JsonOption = False) -> None:
    """Show one run: its state, settings, verdict, versions and last measurement."""
    from unlazy.cli.runs import find_run, print_run

    print_run(find_run(run, root or runs_folder()), as_json)


@runs_app.command("compare")
def compare_runs(runs: RunsArgument, root: RootOption = None, as_json: JsonOption = False) -> None:
    """Compare runs: their verdicts, the settings that differ, the last values of the scalars that all have."""
    from unlazy.cli.runs import find_run, print_comparison

    print_comparison([find_run(run, root or runs_folder()) for run in runs], as_json)


@runs_app.command("tag")
def tag_run(
    run: RunArgument,
    tags: Annotated[list[str], typer.Argument(help="Tags to add.")],
    remove: Annotated[bool, typer.Option("--remove", help="Remove these tags instead.")] = False,
    root: RootOption = None,
) -> None:
    """Add tags to a run, or remove them."""
    from unlazy.cli.runs import change_labels, find_run

    change_labels(find_run(run, root or runs_folder()), tags=tags, remove=remove)


@runs_app.command("note")
def note_run(
    run: RunArgument,
    text: Annotated[str, typer.Argument(help="The note; it replaces the one before. An empty text removes it.")],
    root: RootOption = None,
) -> None:
    """Write a note on a run."""
    from unlazy.cli.runs import change_labels, find_run

    change_labels(find_run(run, root or runs_folder()), notes=text)


@runs_app.command("delete")
def delete_runs(
    runs: RunsArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RootOption = None,
) -> None:
    """Delete runs, after a question for each. Files that unlazy did not write are kept."""
    from unlazy.cli.runs import delete_run, find_run

    for found in [find_run(run, root or runs_folder()) for run in runs]:
        delete_run(found, ask=not yes)


DataFolderOption = Annotated[
    Path | None, typer.Option(help="The data folder (default: UNLAZY_DATA, or the user's cache folder).")
]
DataSetArgument = Annotated[str, typer.Argument(help="mnist, fashion-mnist, cifar-10 or cifar-100.")]


@data_app.callback()
def list_or_copy_data(
    context: typer.Context,
    origin: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Copy the standard files found below DIR; needs no network."),
    ] = None,
    to: DataFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Image data: list, fetch, verify, or copy files from a folder."""
    command = context.invoked_subcommand
    require(command is None or (origin is None and to is None), f"--from and --to stand alone, not before {command}.")
    require(to is None or origin is not None, "--to says where files go; --from says which, and is missing.")
    if command is None:
        from unlazy.cli.data import copy_from, print_list

        if origin is None:
            print_list(data_folder(), as_json)
        else:
            copy_from(origin, to or data_folder())


@data_app.command("list")
def list_data(
    folder: DataFolderOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the data sets: present, missing, incomplete or damaged, with their sizes."""
    from unlazy.cli.data import print_list

    print_list(folder or data_folder(), as_json)


@data_app.command("fetch")
def fetch_data(name: DataSetArgument, to: DataFolderOption = None) -> None:
    """Download a data set from its publishers and check it. Interrupted downloads resume."""
    from unlazy.cli.data import fetch_data_set

    fetch_data_set(name, to or data_folder())


@data_app.command("verify")
def verify_data(
    name: Annotated[str | None, typer.Argument(help="One data set; all that are there if left out.")] = None,
    folder: DataFolderOption = None,
) -> None:
    """Check every file against its checksum; exit code 1 if one is damaged or missing."""
    from unlazy.cli.data import verify

    verify(name, folder or data_folder())


@app.command()
def studio(
    runs: Annotated[Path | None, typer.Argument(help="Folder of runs (default: UNLAZY_RUNS, or ./runs).")] = None,
    port: Annotated[int, typer.Option(help="Port; 0: any that is free.", min=0, max=65535)] = 8123,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines can reach needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            help="Secret that visitors of the page need; `new` generates one. Better: UNLAZY_TOKEN or --token-file."
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file whose first line is the secret.")] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Serve the studio: a page to scrub through trainings, live while a run is training."""
    from unlazy.cli.studio import read_token, studio_command

    secret = read_token(token, token_file)
    studio_command(runs or runs_folder(), host=host, port=port, token=secret, browser=browser)


@app.command()
def report(
    run: Annotated[
        list[str], typer.Argument(help="A run folder, or the beginning of a run's id; several share a page.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("page.html"),
    root: RootOption = None,
    steps: Annotated[int, typer.Option(help="Largest number of steps of a run in the page.", min=2)] = 60,
) -> None:
    """Write runs as one HTML file that opens without a server or a network."""
    from unlazy.cli.studio import report_command

    report_command(run, out, root or runs_folder(), steps)


@app.command()
def export(
    runs: Annotated[Path | None, typer.Argument(help="Folder of runs (default: UNLAZY_RUNS, or ./runs).")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the site: a new one, or an earlier export.")
    ] = Path("site"),
    steps: Annotated[int, typer.Option(help="Largest number of steps of a run in the site.", min=2)] = 60,
) -> None:
    """Write all runs below a folder as a static site that any web server or GitHub Pages serves."""
    from unlazy.cli.studio import export_command

    export_command(runs or runs_folder(), out, steps)


@app.command()
def gram(
    model: Annotated[
        str, typer.Argument(help="A run folder, a JSON model spec, or mine:Net for Net in mine.py: its code runs.")
    ],
    data: Annotated[str, typer.Argument(help="A .npy file, or a data set such as digits or cifar-10:test.")],
    out: Annotated[Path, typer.Option(help="The file to write: .npy, or .zarr, which resumes after a crash.")] = Path(
        "kernel.npy"
    ),
    kernel: Annotated[str, typer.Option(help="tangent, overlap or layer-overlap.")] = "tangent",
    memory: Annotated[
        str | None, typer.Option(help="Memory limit, such as 2GB (default: half of the free memory).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first so many samples.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Cores to use, with shared features; opens no port (.zarr; default: torch's threads)."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="A Dask scheduler whose workers share the tiles, such as tls://host:8786 (.zarr). Trust it."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(help="Compute one of several shares, 0/8 to 7/8, for job arrays (.zarr).")
    ] = None,
    tile: Annotated[
        int | None, typer.Option(help="Samples per side of a tile (default: chosen by the plan; .zarr).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan.")] = False,
) -> None:
    """Compute a kernel of a network on a data set, tile by tile; the file may be larger than the memory."""
    from unlazy.cli.gram import Spread, gram_command

    spread = Spread(cluster, workers, shard, tile)
    gram_command(model, data, kernel, out, memory, limit, spread, dry_run=dry_run)


@app.command()
def width(
    model: Annotated[
        str, typer.Argument(help="module:function of the width, such as mine:make_model in mine.py. Its code runs.")
    ],
    probe: Annotated[
        str | None,
        typer.Option(help="module:name of a pair (x, y), or of a function that returns one (default: mine:probe)."),
    ] = None,
    widths: Annotated[str, typer.Option(help="Widths to compare.")] = "64,128,256,512",
    optimiser: Annotated[
        str, typer.Option(help="sgd, adam, adamw, or module:function of the parameters or of (model, width).")
    ] = "sgd",
    rate: Annotated[float, typer.Option(help="Learning rate of sgd, adam or adamw.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Updates of each network.", min=1)] = 10,
    seeds: Annotated[int, typer.Option(help="Networks of each width.", min=1)] = 3,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the sizes against the width into this .png (and .pdf).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Check how a model scales with its width: exponents by layer, NTK-like or maximal-update-like, and better rates."""
    from unlazy.cli.width import width_command

    width_command(model, probe, widths, optimiser, rate, steps, seeds, figure, as_json=as_json)


@bench_app.command("kernels")
def bench_kernels(
    rows: Annotated[list[str] | None, typer.Argument(help="Rows such as a:full, or a; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="The table to write; rows measured again are replaced.")] = Path(
        "bench.json"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan of each row.")] = False,
) -> None:
    """Time tangent kernels against torch.func, and NNGeometry and neural-tangents where installed, on one core."""
    from unlazy.cli.bench import bench_kernels

    bench_kernels(rows or (), out, dry_run=dry_run)
