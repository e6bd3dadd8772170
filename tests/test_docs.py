"""Documentation that cannot drift: the README's code runs, its commands and links exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import unlazy
from unlazy.cli.app import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def run_blocks(page: str) -> dict[str, object]:
    """Run every piece of Python on a page, one after the other."""
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        exec(compile(block, page, "exec"), names)
    return names


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert float(run_blocks("README.md")["moved"]) > 0  # type: ignore[arg-type]


def test_readme_kernel_command_runs_on_the_file_that_its_code_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "spec.json" in block]
    exec(compile(block, "README.md", "exec"), {"ul": unlazy})
    dry, filed = re.findall(r"^unlazy (gram [^#]*)", README, re.M)
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


def test_kernel_page_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks("docs/kernels.md")


def test_readme_commands_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    used = set(re.findall(r"^unlazy (\w+)", README, re.M))
    assert {"reproduce", "claims", "runs", "data", "gram", "bench"} <= used
    assert used <= set(commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert set(re.findall(r"^make ([a-z-]+)", page.read_text(), re.M)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_generated_reference_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "api.md").read_text() == module.api(), "run `make docs`"
    assert (ROOT / "docs" / "kernel_speed.md").read_text() == module.speed(), "run `make docs`"


def test_the_project_speaks_of_itself_alone() -> None:
    words = re.compile(r"/" + r"work/|\bsub" + r"agent|\bhelper session", re.I)
    for path in [*PAGES, *ROOT.glob("src/**/*.py"), *ROOT.glob("tests/*.py"), ROOT / "Makefile"]:
        assert not words.search(path.read_text()), path
