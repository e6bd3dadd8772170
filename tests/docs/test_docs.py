"""Documentation that cannot drift: the README's code runs, its commands and links exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import unlazy
from repository import DOCS, ROOT
from unlazy.cli.app import app
from unlazy.studies.engine import reproduce
from unlazy.studies.request import ExecutionOptions, Request

README = (ROOT / "README.md").read_text()
TOUR = (DOCS / "tutorials" / "tour.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(path for path in DOCS.glob("**/*.md") if "_build" not in path.parts)])


def run_blocks(page: str) -> dict[str, object]:
    """Run every piece of Python on a page, one after the other."""
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        exec(compile(block, page, "exec"), names)
    return names


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert float(run_blocks("README.md")["moved"]) > 0  # type: ignore[arg-type]


def test_kernel_command_runs_on_the_file_that_its_code_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in re.findall(r"```python\n(.*?)```", TOUR, re.S) if "spec.json" in block]
    exec(compile(block, "tour.md", "exec"), {"ul": unlazy})
    dry, filed = re.findall(r"^unlazy (gram [^#]*)", TOUR, re.M)
    answer = CliRunner().invoke(app, dry.split(), catch_exceptions=False)
    assert "1437 x 1437" in answer.stdout
    assert "file: kernel.npy, 8.3 MB" in answer.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]
    pytest.importorskip("zarr")
    assert CliRunner().invoke(app, filed.split(), catch_exceptions=False).exit_code == 0
    assert unlazy.GramFile(tmp_path / "k.zarr").array().shape == (1437, 1437)


def test_benchmarks_that_are_kept_are_written_by_make_alone(tmp_path: Path) -> None:
    kernels = get_command(app).commands["bench"].commands["kernels"]  # type: ignore[attr-defined]
    [out] = [parameter for parameter in kernels.params if parameter.name == "out"]
    assert Path(out.default) == Path("bench.json")
    assert "unlazy bench kernels --out results/bench/kernels.json" in (ROOT / "Makefile").read_text()


RUNNABLE = (
    "tutorials/tour.md",
    "explanation/beyond_training.md",
    "how-to/check_width.md",
    "how-to/clusters.md",
    "how-to/explain_a_table.md",
    "how-to/keep_runs.md",
    "how-to/large_models.md",
    "how-to/read_a_verdict.md",
    "reference/kernels.md",
    "reference/run_folder.md",
)


@pytest.mark.parametrize("page", RUNNABLE)
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gram_file" in (DOCS / page).read_text():
        pytest.importorskip("zarr")
    monkeypatch.chdir(tmp_path)
    assert run_blocks(f"docs/{page}")


@pytest.mark.adapters
@pytest.mark.filterwarnings("ignore")  # of the frameworks
@pytest.mark.parametrize("page", ["how-to/training_loops.md", "how-to/fine_tuning.md"])
def test_code_in_other_peoples_loops_runs_and_leaves_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(f"docs/{page}")
    runs, broken = unlazy.find_runs(tmp_path / "runs")
    assert broken == []
    assert {run.status()["state"] for run in runs} == {"finished"}
    assert len(runs) == (2 if "loops" in page else 1)


def test_commands_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    used = set(re.findall(r"^unlazy (\w+)", README + TOUR, re.M))
    assert {"reproduce", "claims", "runs", "data", "gram", "bench"} <= used
    assert used <= set(commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert set(re.findall(r"^make ([a-z-]+)", page.read_text(), re.M)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_gallery_shows_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    shown = set(re.findall(r"\]\(([^)]+)\)", importlib.import_module("build_pages").gallery_page()))
    kept = [*DOCS.glob("images/*.png"), *ROOT.glob("results/*/paper/*.png")]
    assert {(DOCS / path).resolve() for path in shown} >= {path.resolve() for path in kept}
    assert all((DOCS / path).exists() for path in shown)


def test_the_reference_names_every_command_and_every_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    pages = importlib.import_module("build_pages").pages()
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"## unlazy {name}\n" in pages["reference/command_line.md"]
    for topic in ("unlazy", *unlazy._TOPICS):
        module = unlazy if topic == "unlazy" else getattr(unlazy, topic)
        for name in set(module.__all__) - {"__version__"}:
            assert f":: {module.__name__}.{name}\n" in pages[f"reference/python/{topic}.md"]
    listed = (DOCS / "reference" / "index.md").read_text()
    assert {
        page.removeprefix("reference/").removesuffix(".md") for page in pages if page.startswith("reference")
    } <= set(listed.split())


def test_generated_pages_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    found = importlib.import_module("generate").pages()
    kept = {name: (ROOT / "docs" / name).read_text() for name in found if (ROOT / "docs" / name).exists()}
    assert [name for name in found if kept.get(name) != found[name]] == [], "run `make docs`"
    assert {f"papers/claims/{path.name}" for path in (ROOT / "docs" / "papers" / "claims").glob("*.md")} <= found.keys()


def test_a_claim_page_names_every_commit_that_its_cases_were_measured_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    origin = importlib.import_module("claim_pages")._origin
    made = {"clean": ["False", "True"], "commit": ["a" * 40, "b" * 40]}
    text = "\n".join(origin({"rule_record": None, "command": "unlazy reproduce x", "provenance": made}))
    assert f"from commit {'a' * 12}, {'b' * 12}, a tree with changes and a clean tree." in text
    assert "from a tree that no commit records." in "\n".join(
        origin({"rule_record": None, "command": "", "provenance": None})
    )


def test_the_study_of_the_tutorial_runs(tmp_path: Path) -> None:
    """The pieces of Python on the page, saved as one file, are a study; the commands below them are its options."""
    page = (ROOT / "docs" / "how-to" / "own_study.md").read_text()
    (tmp_path / "mystudy.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", page, re.S)))
    request = Request(str(tmp_path / "mystudy.py"), "smoke", tmp_path / "runs", tmp_path / "results")
    found = reproduce(request, ExecutionOptions(), progress=lambda *_: None)
    assert (found.failed, len(found.results["claims"]), found.results["measured_cases"]) == ({}, 1, 6)
    known = {option for parameter in get_command(app).commands["reproduce"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert set(re.findall(r"--[a-z-]+", page)) <= known


def test_the_project_speaks_of_itself_alone() -> None:
    words = re.compile(r"/" + r"work/|\bsub" + r"agent|\bhelper session", re.I)
    for path in [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("tests/*.py"), ROOT / "Makefile"]:
        assert not words.search(path.read_text()), path
