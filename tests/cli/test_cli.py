"""The command line: quick help, one clear line for a mistake, and lists that stay readable when a run is damaged."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import unlazy
from repository import ROOT
from store_runs import timeless
from unlazy import Circle, Dataset, HardGate, InputError, Member, NetSpec, Recipe, Run, Scope, SoftGate, StoreError, fit
from unlazy.cli import app as cli
from unlazy.cli import studies as study_commands
from unlazy.cli.runs import find_run
from unlazy.probes import standard
from unlazy.run_comparison import CELL, shorten_values
from unlazy.studies.registry import load_study, studies
from unlazy.studies.request import Request
from unlazy.studio.run_index import RunIndex
from unlazy.training.recorder import FixedSteps, Measure

ROW_KEYS = {
    *(
        "id",
        "paper",
        "where",
        "statement",
        "paper_value",
        "study",
        "scale",
        "value",
        "unit",
        "interval",
        "seeds",
        "agree",
    ),
    *("verdict", "outcome", "survives", "survives_outcome", "identity", "rule", "rule_sha256", "rule_record", "parts"),
    *("controls", "shows", "why", "stale", "figure", "command", "settings", "provenance", "table_sha256"),
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def unlazy_main(tmp_path, monkeypatch, capsys):
    """Calls the real entry point in an empty folder; gives exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNLAZY_RUNS", raising=False)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["unlazy", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return call


def assert_one_clear_line(answer: tuple[int, str, str], *words: str) -> None:
    code, out, err = answer
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def invoke(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)


# --- quick to start ------------------------------------------------------------------------------

HEAVY = {"torch", "numpy", "matplotlib", "scipy", "safetensors", "starlette", "uvicorn"}


def imported_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has imported after ``code``."""
    code += "\nimport sys\nprint('modules', *{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_importing_the_package_imports_nothing_heavy():
    modules = imported_by("import unlazy; dir(unlazy)")
    assert "unlazy" in modules
    assert not modules & HEAVY


def test_help_imports_nothing_heavy():
    start = "import sys; sys.argv = ['unlazy', '--help']\nfrom unlazy.cli.app import main\n"
    modules = imported_by(start + "try: main()\nexcept SystemExit as stop: assert not stop.code")
    assert "typer" in modules
    assert not modules & HEAVY


def test_public_names_load_on_first_use():
    assert "torch" in imported_by("import unlazy; unlazy.DLGN")


@pytest.mark.parametrize("words", [["--help"], ["reproduce", "--help"], ["demo", "--help"], ["runs", "--help"]])
def test_help_answers(words):
    answer = invoke(*words)
    assert answer.exit_code == 0
    assert "Usage" in answer.output


def test_the_installed_command_is_this_one(tmp_path):
    command = [str(Path(sys.executable).with_name("unlazy")), "studies"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("circle")


def test_version(unlazy_main):
    assert unlazy_main("--version") == (0, f"{unlazy.__version__}\n", "")


# --- mistakes get one clear line -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["reproduce", "qqq"], ["qqq", "circle", "table2"]),
        (
            ["reproduce", "cirle"],
            ["there is no study or paper 'cirle'; did you mean circle? `unlazy studies` lists all."],
        ),
        (["runs", "--root", "nowhere"], ["nowhere is not a folder", "Scope"]),
        (["report", "nowhere", "-o", "mine.pdf"], ["must end in .html", "mine.pdf"]),
        (["reproduce", "circle", "--scale", "huge"], ["huge", "smoke, desk, paper"]),
        (["demo", "--scale", "huge"], ["huge", "smoke, desk, paper"]),
        (["reproduce", "circle", "--scale", "smoke", "--seeds", "0"], ["seeds", "at least 1", "0"]),
        (["reproduce", "circle", "--scale", "smoke", "--seeds", "-3"], ["seeds", "at least 1", "-3"]),
        (["reproduce", "circle", "--scale", "smoke", "--workers", "-1"], ["workers", "-1"]),
        (["runs", "show", "nowhere"], ["nowhere is not a run"]),
        (["runs", "show", "."], ["is not a run", "run.json"]),
        (["runs", "compare", "nowhere", "."], ["nowhere is not a run"]),
        (["claims", "--results", "nowhere"], ["nowhere"]),
        (["claims", "--results", "."], ["holds no judged claim", "unlazy reproduce"]),
        (["reproduce", "circle", "--seconds", "0"], ["--seconds must be above 0"]),
        (["reproduce", "circle", "--device", "gpu"], ["cpu or cuda", "gpu"]),
        (["reproduce", "circle", "--data", "nowhere"], ["--data nowhere is not a folder"]),
        (["reproduce", "circle", "--seeds", "3", "--set", "seed=0..9"], ["--seeds 3", "seed=0..9"]),
        (["reproduce", "circle", "--set", "width=2.5"], ["width takes a value like", "2.5"]),
        (["reproduce", "circle", "--only", "author,*", "--judge-only"], ["--only", "--judge-only"]),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(tmp_path, unlazy_main, words, expected):
    assert_one_clear_line(unlazy_main(*words), *expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--out", "file"],
        ["demo", "--out", "file/below"],
        ["reproduce", "circle", "--runs", "file"],
        ["reproduce", "circle", "--runs", "runs", "--results", "file"],
    ],
)
def test_a_file_in_the_way_of_a_folder_gets_one_line_before_any_training(tmp_path, unlazy_main, words):
    (tmp_path / "file").write_text("mine")
    assert_one_clear_line(unlazy_main(*words, "--scale", "smoke", "--workers", 1), "file")
    assert files(tmp_path) == {"file": b"mine"}


def smoke_folders(tmp_path: Path) -> list[Path]:
    request = Request("circle", "smoke", tmp_path / "runs", tmp_path / "results")
    return [case.training().folder(request.work.runs) for case in request.cases]


def test_a_runs_folder_that_is_somebody_elses_is_named_and_stays_as_it_is(tmp_path, unlazy_main):
    for folder in smoke_folders(tmp_path):
        folder.mkdir(parents=True)
        (folder / "thesis.tex").write_text("theirs")
    before = files(tmp_path / "runs")
    code, _, err = unlazy_main("reproduce", "circle", "--scale", "smoke", "--workers", 1)
    assert code == 2
    assert "thesis.tex" in err
    assert "Choose another folder" in err
    assert files(tmp_path / "runs") == before


def test_a_damaged_last_checkpoint_costs_what_came_after_the_one_before(tmp_path, unlazy_main):
    request = Request("circle", "smoke", tmp_path / "runs", tmp_path / "results")
    training = request.cases[1].training()
    folder = training.run(request.work).folder
    before = files(folder)
    (folder / "status.json").write_text('{"state": "running", "step": 64, "error": null}')
    last = max((folder / "checkpoints").iterdir())
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.warns(UserWarning, match=f"{last.name} is damaged"):
        code, _, _ = unlazy_main("reproduce", "circle", "--scale", "smoke", "--workers", 1, "--only", "author,pwc")
    assert code == 0
    after = files(folder)
    assert timeless(after.pop("metrics.jsonl")) == timeless(before.pop("metrics.jsonl"))
    assert after == before


def test_an_interrupt_says_that_work_goes_on_later(unlazy_main, monkeypatch):
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("unlazy.studies.registry.find_studies", interrupt)
    code, _, err = unlazy_main("reproduce", "circle")
    assert code == 130
    assert "run the same command again to resume" in err


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_data_that_is_not_finite_is_refused(bad, where):
    x, y = torch.zeros(3, 2), torch.zeros(3, 1)
    (x if where == "inputs" else y)[1, 0] = bad
    with pytest.raises(InputError, match=f"'mine': 1 of the {where} are NaN or infinite"):
        Dataset("mine", x, y)


@pytest.mark.parametrize("size", ["width", "depth", "inputs", "outputs"])
@pytest.mark.parametrize("bad", [0, -1])
def test_a_network_without_units_is_refused(size, bad):
    with pytest.raises(InputError, match=f"{size} must be a whole number of at least 1, got {bad}"):
        NetSpec(**({"inputs": 2} | {size: bad}))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "rule", [SoftGate, HardGate, lambda beta: Member(0, 1e-3, beta)], ids=["soft", "hard", "member"]
)
def test_a_slope_that_is_not_positive_is_refused(rule, bad):
    with pytest.raises(InputError, match=f"beta must be a positive number, got {bad}"):
        rule(bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_learning_rate_that_is_not_positive_is_refused(bad):
    with pytest.raises(InputError, match=f"learning rate must be positive, got {bad}"):
        Member(0, bad)


# --- claims --------------------------------------------------------------------------------------


def declared_claims() -> set[str]:
    """The ids of all claims of all studies."""
    return {claim.id for entry in studies() for claim in load_study(entry.name).claims}


def test_claims_as_json_has_one_full_row_per_claim(unlazy_main):
    code, out, err = unlazy_main("claims", "--json", "--results", ROOT / "results")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert {row["id"] for row in rows} == declared_claims()
    assert len(rows) == len(declared_claims())
    for row in rows:
        assert row.keys() == ROW_KEYS


def test_claims_as_a_table_names_every_claim_and_ends_with_a_box_a_paper(unlazy_main):
    code, out, _ = unlazy_main("claims", "--results", ROOT / "results")
    assert code == 0
    first = {line.split(" ")[0] for line in out.splitlines()}
    assert {f"C{number}" for number in range(1, 30)} | {f"L{number}" for number in range(1, 12)} <= first
    assert out.count("Undecided") == 5  # three papers, the estimators, beyond the papers


def test_claims_have_one_line_each_and_their_parts_on_request(unlazy_main):
    code, out, _ = unlazy_main("claims", "--results", ROOT / "results")
    lines = out.split("\n\n")[0].splitlines()
    assert code == 0
    assert len(lines) == 1 + len(declared_claims())
    code, out, _ = unlazy_main("claims", "C29", "--results", ROOT / "results")
    assert code == 0
    assert out.count("C29 part") == 6
    assert "spectral" in out
    assert "C8" not in out
    (row,) = json.loads(unlazy_main("claims", "C29", "--json", "--results", ROOT / "results")[1])
    assert row["id"] == "C29"
    assert_one_clear_line(unlazy_main("claims", "C99", "--results", ROOT / "results"), "no claim C99")
    assert "never [never" not in out
    assert "never reached" in out


def test_claims_of_a_folder_of_ones_own_name_a_claim_that_is_there_and_the_shipped_results(
    unlazy_main, tmp_path, monkeypatch
):
    shutil.copytree(ROOT / "results" / "swap", tmp_path / "results" / "swap")
    monkeypatch.chdir(tmp_path)
    _, out, _ = unlazy_main("claims")
    (named,) = re.findall(r"`unlazy claims (\w+)` shows", out)
    assert unlazy_main("claims", named)[0] == 0
    assert f"The shipped results are in {ROOT / 'results'}" in out
    assert_one_clear_line(unlazy_main("claims", "C29"), "--results shows them")


def test_claims_need_no_torch():
    code = f"from unlazy.cli.app import app\napp(['claims', '--results', {str(ROOT / 'results')!r}], standalone_mode=False)"
    assert "torch" not in imported_by(code)


def test_an_empty_results_folder_has_no_claims(tmp_path, unlazy_main):
    (tmp_path / "results").mkdir()
    assert unlazy_main("claims", "--json")[1] == "[]\n"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"study": "circle", "scale": "vast", "claims": []}'])
def test_a_damaged_result_file_gets_one_line(tmp_path, unlazy_main, text):
    path = tmp_path / "results" / "circle" / "desk" / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert_one_clear_line(unlazy_main("claims", "--json"), "results.json")


# --- runs ----------------------------------------------------------------------------------------


def tiny(folder: Path, lr: float, study: str) -> Run:
    recipe = Recipe(NetSpec(2, width=2, depth=1), (Member(0, lr), Member(1, lr)), epochs=2, batch=4)
    return fit(recipe, Circle(n=8).dataset(), [Measure(standard.curves, FixedSteps.at((0, 2, 4)))], folder, study=study)


@pytest.fixture
def two_runs(tmp_path) -> Path:
    tiny(tmp_path / "slow", 1e-3, "one")
    tiny(tmp_path / "fast", 1e-2, "two")
    return tmp_path


def test_runs_lists_every_run(two_runs):
    answer = invoke("runs", "--root", two_runs)
    assert answer.exit_code == 0
    lines = answer.stdout.splitlines()
    assert len(lines) == 3
    for name in ("slow", "fast"):
        [line] = [line for line in lines if line.endswith(str(two_runs / name))]
        assert line.split()[:4] == [Run(two_runs / name).id, "finished", "2", "4"]


def test_runs_as_json_has_the_facts(two_runs):
    rows = json.loads(invoke("runs", "--root", two_runs, "--json").stdout)
    [row] = [row for row in rows if row["folder"] == str(two_runs / "fast")]
    assert (row["state"], row["members"], row["step"], row["study"], row["error"]) == ("finished", 2, 4, "two", None)
    _, losses = Run(two_runs / "fast").scalars("loss")
    assert row["loss"] == pytest.approx(losses[-1].mean())  # the median of two


def test_runs_can_be_chosen_by_study_and_state(two_runs):
    def found(*words: str) -> list[str]:
        return [Path(row["folder"]).name for row in json.loads(invoke("runs", "--root", two_runs, *words).stdout)]

    assert found("--json", "--study", "two") == ["fast"]
    assert found("--json", "--state", "interrupted") == []


def test_a_choice_that_no_run_meets_says_so(two_runs):
    answer = invoke("runs", "--root", two_runs, "--study", "three")
    assert answer.stdout == f"none of the 2 runs below {two_runs} is of that study and state.\n"


def test_a_training_that_goes_on_is_listed_at_its_last_measurement(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    scope = Scope(net, (torch.randn(8, 2), torch.arange(8) % 2), tmp_path / "mine", budget=math.inf)
    for step in range(1, 6):
        scope.step(step)
    [row] = json.loads(invoke("runs", "--root", tmp_path, "--json").stdout)
    assert (row["state"], row["step"]) == ("running", 5)
    scope.finish()


def test_runs_below_nothing_says_so(unlazy_main):
    code, out, err = unlazy_main("runs")
    assert (code, err) == (0, "")
    assert out.startswith("no runs below runs")
    assert "a Scope" in out


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl"])
def test_one_damaged_run_does_not_hide_the_others(two_runs, name):
    (two_runs / "fast" / name).write_bytes(b"nonsense\n")
    answer = invoke("runs", "--root", two_runs)
    assert answer.exit_code == 0
    assert [line for line in answer.stdout.splitlines() if line.endswith(str(two_runs / "slow"))]
    assert answer.stderr.startswith(f"damaged: {two_runs / 'fast'}")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl"])
def test_a_folder_in_place_of_a_file_is_damage_like_any_other(two_runs, name):
    (two_runs / "fast" / name).unlink()
    (two_runs / "fast" / name).mkdir()
    answer = invoke("runs", "--root", two_runs)
    assert answer.exit_code == 0
    assert [line for line in answer.stdout.splitlines() if line.endswith(str(two_runs / "slow"))]
    assert answer.stderr.startswith(f"damaged: {two_runs / 'fast' / name} cannot be read")


def test_list_and_page_find_the_same_runs(two_runs):
    """Nothing inside a run is looked at, and nothing hidden."""
    for inside in ("slow/inner", ".trash/old"):
        shutil.copytree(two_runs / "fast", two_runs / inside)
    listed = {row["folder"] for row in json.loads(invoke("runs", "--root", two_runs, "--json").stdout)}
    assert listed == {str(folder) for folder in RunIndex(two_runs).folders().values()}
    assert {Path(folder).name for folder in listed} == {"slow", "fast"}


def test_what_a_run_does_not_tell_of_itself_is_not_missed(two_runs):
    path = two_runs / "fast" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"provenance": {}}))
    assert len(invoke("runs", "--root", two_runs).stdout.splitlines()) == 3
    assert "torch        unknown" in invoke("runs", "show", two_runs / "fast").stdout
    (two_runs / "fast" / "status.json").write_text('{"state": "finished", "step": null, "error": null}')
    assert "status.json is damaged" in invoke("runs", "--root", two_runs).stderr


def test_a_name_that_no_file_can_have(two_runs, unlazy_main):
    code, _, err = unlazy_main("runs", "show", "x" * 300, "--root", two_runs)
    assert (code, err.count("\n")) == (2, 1)


def test_a_terminal_that_knows_few_letters(tmp_path):
    words = [sys.executable, "-c", "from unlazy.cli.app import main; main()", "claims"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"C20" in done.stdout


def test_runs_show_prints_facts_and_last_measurement(two_runs):
    answer = invoke("runs", "show", two_runs / "slow")
    assert answer.exit_code == 0
    facts = dict(line.split(None, 1) for line in answer.stdout.splitlines())
    assert facts["id"] == Run(two_runs / "slow").id
    assert facts["state"] == "finished"
    assert float(facts["loss_top"]) == pytest.approx(Run(two_runs / "slow").scalars("loss_top")[1][-1].mean(), rel=1e-4)


def test_a_run_can_be_named_by_the_beginning_of_its_id(two_runs):
    run_id = Run(two_runs / "slow").id
    answer = invoke("runs", "show", run_id[:8], "--root", two_runs)
    assert answer.exit_code == 0
    assert str(two_runs / "slow") in answer.stdout
    with pytest.raises(StoreError, match="0 runs below"):
        find_run("zzzz", two_runs)


def test_runs_compare_prints_what_differs_and_nothing_else_of_the_settings(two_runs):
    answer = invoke("runs", "compare", two_runs / "slow", two_runs / "fast")
    assert answer.exit_code == 0
    rows = [line.split() for line in answer.stdout.splitlines()]
    known = set(Run(two_runs / "slow").header["recipe"]) - {"loss"}  # also the name of a measured curve
    settings = [row for row in rows if row[0].split("[")[0].split(".")[0] in known]
    assert settings == [["members.lr", "0.001", "0.01"]]
    [loss] = [row for row in rows if row[0] == "loss"]
    assert float(loss[1]) != float(loss[2])


def test_long_settings_are_compared_on_one_line_where_they_part():
    first, second = (str(torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU())) for width in (16, 32))
    left, right = shorten_values([first, second])
    assert (left[0], left[-1]) == (right[0], right[-1]) == ("…", "…")
    assert "=16" in left
    assert "=32" in right
    assert max(len(left), len(right)) <= CELL
    assert shorten_values([0.1, None]) == ["0.1", "None"]
    assert shorten_values(["a\n  b", "a\n  c"]) == ["a b", "a c"]


# --- cores and words -----------------------------------------------------------------------------


def test_a_process_bound_to_one_core_trains_one_at_a_time(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    assert study_commands.available_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert study_commands.available_cores() == 6


def test_the_token_of_the_studio_may_stay_off_the_command_line(tmp_path, monkeypatch):
    from unlazy.cli.studio import read_token

    monkeypatch.delenv("UNLAZY_TOKEN", raising=False)
    (tmp_path / "secret").write_text("from a file\nmore\n")
    assert read_token(None, None) is None
    assert read_token(None, tmp_path / "secret") == "from a file"
    assert read_token("given", None) == "given"
    assert len(read_token("new", None)) >= 18
    monkeypatch.setenv("UNLAZY_TOKEN", "from the environment")
    assert read_token(None, None) == "from the environment"
    with pytest.raises(InputError, match="not both"):
        read_token("given", tmp_path / "secret")
    with pytest.raises(InputError, match="cannot be read"):
        read_token(None, tmp_path / "missing")
