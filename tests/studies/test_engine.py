"""The engine: what a study declares is measured once, kept, resumed, judged, drawn; rules are recorded before the first case."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from separate_hosts import start_two_hosts
from unlazy.claims.scorecard import AFTER_DATA, caveats_text
from unlazy.cli.app import app
from unlazy.cli.studies import make_request, parse_seeds, parse_setting
from unlazy.runtime import InputError
from unlazy.studies.engine import Reproduction, measure_study, reproduce, select_cases
from unlazy.studies.registry import load_study
from unlazy.studies.request import ExecutionOptions, Request
from unlazy.studies.rules import RuleBook
from unlazy.studies.sources import sources_sha256
from unlazy.studies.study import Study
from unlazy.studies.table import Table

SOURCE = '''
"""A toy: the number of a case is its width plus its seed."""

from pathlib import Path

import unlazy as ul
from unlazy import plots
from unlazy.data.files import DataMissing

LOG = Path(__file__).with_name("log.txt")


def measure(case, work):
    with LOG.open("a") as log:
        log.write(f"{case.width} {case.seed} {(Path(work.runs).parent.parent / 'results/toy/desk/rules.json').exists()}\\n")
    if case.width == case.broken and not LOG.with_name("mended").exists():
        raise ValueError("this case is broken")
    if case.width == case.absent:
        raise DataMissing("no files here")
    rows = ul.Rows()
    rows.add("sum", case.width + case.seed + SHIFT)
    return rows


SHIFT = 0


def draw(results):
    figure, axes = plots.grid(1, 1, (2, 2))
    axes[0, 0].plot(*results.table.series("sum", over="width"))
    return figure


STUDY = ul.Study(
    name="toy",
    paper="ours",
    scales={"smoke": {"broken": -1, "absent": -1}, "desk": {"broken": -1, "absent": -1}},
    seeds={"smoke": 2, "desk": 3},
    varies={"width": (1, 2)},
    measure=measure,
    claims=(
        ul.Claim(
            "T1",
            says="Sums are positive.",
            where="here",
            paper="always",
            figure="sums",
            parts=[ul.Part("width 1", ul.Quantity("sum", width=1), above=THRESHOLD)],
            controls=[ul.Part("width 2", ul.Quantity("sum", width=2), above=THRESHOLD)],
        ),
    ),
    figures=(ul.Figure("sums", "Sums", draw, caption="By width."),),
)
'''


def quiet(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total, what


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write(tmp_path, "study.py")


def write(folder: Path, name: str, shift: int = 0, threshold: float = 0) -> Path:
    """The study in a file of its own: modules are loaded once, so another version needs another name."""
    text = SOURCE.replace("SHIFT = 0", f"SHIFT = {shift}").replace("THRESHOLD", str(threshold))
    (folder / name).write_text(text)
    return folder / name


def rewrite(path: Path, **changes: Any) -> Path:
    """Another version of the same file, as if somebody had edited it and started anew."""
    for name in [name for name in sys.modules if name.startswith(f"unlazy_study_{path.stem}_")]:
        del sys.modules[name]
    sources_sha256.cache_clear()
    return write(path.parent, path.name, **changes)


def request(path: Path, scale: str = "desk", **options: Any) -> Request:
    return Request(str(path), scale, path.parent / "runs", path.parent / "results", **options)


def run(path: Path, scale: str = "desk", how: ExecutionOptions | None = None, **options: Any) -> Reproduction:
    return reproduce(request(path, scale, **options), how or ExecutionOptions(), progress=lambda *_: None)


def log(path: Path) -> list[str]:
    file = path.parent / "log.txt"
    return file.read_text().splitlines() if file.exists() else []


def test_a_study_is_measured_judged_and_drawn(toy: Path) -> None:
    found = run(toy)
    assert found.failed == found.without_data == found.not_drawn == {}
    (row,) = found.results["claims"]
    assert (row["verdict"], row["survives"], row["seeds"], row["agree"]) == ("holds", "holds", 3, 3)
    assert row["interval"] == [1, 3]
    names = {path.name for path in found.folder.iterdir()}
    assert names == {"table.csv", "cases.json", "results.json", "rules.json", "sums.png", "sums.pdf"}
    table = Table.read(found.folder / "table.csv")
    assert table.select("sum", width=2).tolist() == [2, 3, 4]
    cases = json.loads((found.folder / "cases.json").read_text())
    assert len(cases) == 6
    assert {"commit", "clean", "sources_sha256", "seconds", "started"} <= cases[0]["provenance"].keys()


def test_rules_are_recorded_before_the_first_case_starts(toy: Path) -> None:
    run(toy)
    assert all(line.endswith("True") for line in log(toy))


def test_what_is_measured_is_not_measured_again(toy: Path) -> None:
    run(toy)
    run(toy)
    assert len(log(toy)) == 6
    run(toy, seeds=(0, 1, 2, 3))
    assert len(log(toy)) == 8


def test_what_a_killed_process_left_of_a_case_goes_with_the_next_try(toy: Path) -> None:
    wanted = request(toy)
    path = wanted.case_file(wanted.cases[0])
    path.parent.mkdir(parents=True)
    for name in (f".{path.name}.1234.tmp", ".another.json.1234.tmp"):
        (path.parent / name).write_text("{")
    run(toy)
    assert [one.name for one in path.parent.glob(".*.tmp")] == [".another.json.1234.tmp"]


def test_other_code_measures_again(toy: Path) -> None:
    run(toy)
    found = run(rewrite(toy, shift=10))
    assert len(log(toy)) == 12
    assert Table.read(found.folder / "table.csv").select("sum", width=1).tolist() == [11, 12, 13]


def test_processes_give_the_same_table(toy: Path, tmp_path: Path) -> None:
    alone = (run(toy).folder / "table.csv").read_bytes()
    (tmp_path / "other").mkdir()
    again = write(tmp_path / "other", "study.py")
    assert (run(again, how=ExecutionOptions(workers=2)).folder / "table.csv").read_bytes() == alone


def test_a_broken_case_costs_only_itself_and_goes_on_later(toy: Path) -> None:
    found = run(toy, changes={"broken": 2})
    assert set(found.failed) == {"2-0", "2-1", "2-2"}
    assert re.fullmatch(r"ValueError: this case is broken \(study\.py, line \d+\)", found.failed["2-0"])
    in_processes = run(toy, changes={"broken": 2}, how=ExecutionOptions(workers=2))
    assert in_processes.failed["2-0"] == found.failed["2-0"]
    (row,) = found.results["claims"]
    assert (row["verdict"], row["survives"]) == ("holds", "not measured")
    (toy.parent / "mended").touch()
    (row,) = run(toy, changes={"broken": 2}).results["claims"]
    assert row["survives"] == "holds"
    assert len(log(toy)) == 12


def test_a_case_is_tried_again_as_often_as_asked(toy: Path) -> None:
    run(toy, how=ExecutionOptions(retries=2), changes={"broken": 2})
    assert len(log(toy)) == 3 + 3 * 3


def test_cases_without_data_are_left_out_with_the_reason(toy: Path) -> None:
    found = run(toy, changes={"absent": 1})
    assert found.failed == {}
    assert found.without_data["1-0"] == "DataMissing: no files here"
    assert found.results["claims"][0]["verdict"] == "not measured"


def test_only_some_cases_beside_what_the_table_has(toy: Path) -> None:
    run(toy, how=ExecutionOptions(only="1,*"))
    assert sorted(log(toy)) == ["1 0 True", "1 1 True", "1 2 True"]
    found = run(toy, how=ExecutionOptions(only="2,0"))
    assert len(log(toy)) == 4
    assert len(Table.read(found.folder / "table.csv")) == 4
    assert [case.width for case in select_cases(request(toy), "2,*")] == [2, 2, 2]
    with pytest.raises(InputError, match="no case matches 'nine'"):
        select_cases(request(toy), "nine")


def test_rows_of_another_machine_are_kept(toy: Path) -> None:
    """A table that came from elsewhere is judged without its measurements."""
    run(toy)
    for path in (toy.parent / "runs" / "toy" / "measured").iterdir():
        path.unlink()
    found = reproduce(request(toy), ExecutionOptions(), progress=lambda *_: None, measure=False)
    assert found.results["measured_cases"] == 6
    assert found.results["claims"][0]["verdict"] == "holds"
    assert len(log(toy)) == 6


MIXED = """
import unlazy as ul
from unlazy.studies.study import make_cases


def cases(settings, seeds):
    places = [{"seed": seed} for seed in seeds] + [{"seed": seed, "extra": "yes"} for seed in seeds]
    return make_cases(places, settings)


def measure(case, work):
    rows = ul.Rows()
    rows.add("with" if hasattr(case, "extra") else "without", case.seed)
    return rows


STUDY = ul.Study("mixed", "ours", {"desk": {"a": 1}}, {"desk": 2}, measure, cases, columns=("extra",))
"""


def test_cases_that_lack_a_column_do_not_take_the_rows_of_those_that_have_it(tmp_path: Path) -> None:
    """Rows from the results folder, beside cases measured in another call."""
    file = tmp_path / "mixed.py"
    file.write_text(MIXED)
    first = Request(str(file), "desk", tmp_path / "runs", tmp_path / "results")
    wanted = reproduce(first, ExecutionOptions(), progress=quiet).results["table_sha256"]
    for other in ("b", "c"):
        elsewhere = Request(str(file), "desk", tmp_path / other, tmp_path / "results")
        found = reproduce(elsewhere, ExecutionOptions(only="yes,*"), progress=quiet)
        assert found.results["table_sha256"] == wanted


def test_no_case_starts_that_would_end_too_late(toy: Path) -> None:
    with pytest.raises(InputError, match=r"no measured case at scale desk\. --seconds 1e-09 is too short"):
        run(toy, how=ExecutionOptions(seconds=1e-9))
    outcome = measure_study(request(toy), ExecutionOptions(seconds=0.0), lambda *_: None)
    assert len(outcome.not_started) + len(outcome.done) == 6
    assert outcome.not_started


def test_a_rule_that_is_younger_than_its_data_says_so_until_fresh_seeds_are_judged(toy: Path) -> None:
    assert not run(toy).results["claims"][0]["rule_record"]["after_data"]
    first = RuleBook.read(request(toy).folder / "rules.json").claims["T1"]
    assert first.seen == ()
    younger = rewrite(toy, threshold=0.5)
    record = run(younger).results["claims"][0]["rule_record"]
    assert record["after_data"]
    assert record["first_measured"] == first.first_measured
    assert run(younger).results["claims"][0]["rule_record"]["after_data"]  # the same seeds again
    assert not run(younger, seeds=(10, 11, 12)).results["claims"][0]["rule_record"]["after_data"]


def test_smoke_judges_nothing(toy: Path) -> None:
    (row,) = run(toy, scale="smoke").results["claims"]
    assert (row["verdict"], row["survives"], row["parts"]) == ("cannot tell", "cannot tell", [])


def test_deleting_failed_numbers_rescues_nothing(tmp_path: Path) -> None:
    failing = write(tmp_path, "failing.py", threshold=100)
    found = run(failing)
    assert found.results["claims"][0]["verdict"] == "fails"
    path = found.folder / "table.csv"
    Table.read(path).without(width=1).write(path)
    for kept in (tmp_path / "runs" / "toy" / "measured").glob("1-*.json"):
        kept.unlink()
    again = reproduce(request(failing), ExecutionOptions(), progress=lambda *_: None, measure=False)
    assert again.results["claims"][0]["verdict"] == "fails"


def judge_only(path: Path) -> Reproduction:
    return reproduce(request(path), ExecutionOptions(), progress=lambda *_: None, measure=False)


def test_a_rule_changed_between_measuring_and_judging_says_so_too(toy: Path) -> None:
    run(toy)
    (row,) = judge_only(rewrite(toy, threshold=0.5)).results["claims"]
    assert row["rule_record"]["after_data"]
    assert caveats_text(row) == AFTER_DATA


def test_the_table_that_is_there_is_judged(toy: Path) -> None:
    folder = run(toy).folder
    Table.read(folder / "table.csv").without(width=1, seed=0).write(folder / "table.csv")
    (row,) = judge_only(toy).results["claims"]
    assert (row["verdict"], row["parts"][0]["missing"]) == ("provisional", 1)


def test_misspelt_names_are_reported(toy: Path) -> None:
    toy.write_text(
        SOURCE.replace("THRESHOLD", "0").replace('ul.Quantity("sum", width=1)', 'ul.Quantity("smu", width=1)')
    )
    found = run(toy)
    assert found.notes == ("claim T1 asks for the quantity 'smu', which no case measured; did you mean sum?",)
    assert found.results["claims"][0]["verdict"] == "not measured"


def test_a_figure_that_cannot_be_drawn_costs_no_verdict(toy: Path) -> None:
    toy.write_text(SOURCE.replace("THRESHOLD", "0").replace("return figure", "raise ValueError('no ink')"))
    found = run(toy)
    assert found.not_drawn["sums"].startswith("ValueError: no ink (study.py, line ")
    assert found.results["claims"][0]["verdict"] == "holds"


def test_two_files_cannot_share_a_name(toy: Path) -> None:
    run(toy)
    with pytest.raises(InputError, match=r"holds results of study\.py"):
        run(write(toy.parent, "another.py"))
    (toy.parent / "taken.py").write_text(SOURCE.replace("THRESHOLD", "0").replace('name="toy"', 'name="circle"'))
    with pytest.raises(InputError, match="in the package already"):
        load_study(str(toy.parent / "taken.py"))


def test_a_file_that_cannot_be_read_as_python_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    with pytest.raises(InputError, match=r"broken\.py, line 2: SyntaxError"):
        load_study(str(tmp_path / "broken.py"))
    (tmp_path / "absent.py").write_text("x = 1\nimport nothing_of_the_kind\n")
    with pytest.raises(InputError, match=r"absent\.py, line 2: ModuleNotFoundError"):
        load_study(str(tmp_path / "absent.py"))


def test_measuring_nothing_is_said_so(toy: Path) -> None:
    toy.write_text(SOURCE.replace("THRESHOLD", "0").replace("return rows", "return None"))
    with pytest.raises(InputError, match="returned nothing"):
        run(toy)


def test_settings_from_the_command_line() -> None:
    assert parse_seeds("0..2,7") == (0, 1, 2, 7)
    for bad in ("x", "", "3..1", "-1"):
        with pytest.raises(InputError, match="seeds are"):
            parse_seeds(bad)
    assert parse_setting("1,2", (5,)) == (1, 2)
    for text, like in (("many", 3), ("2.5", 3), ("True", 3), ("3", False)):
        with pytest.raises(InputError, match=f"width takes a value like {like}, got '{text}'"):
            parse_setting(text, like, "width")


def test_declarations_that_cannot_be_are_refused(toy: Path) -> None:
    study = load_study(str(toy))
    with pytest.raises(InputError, match="has no setting depth"):
        study.settings("desk", {"depth": 3})
    with pytest.raises(InputError, match="has no paper scale"):
        study.settings("paper")
    with pytest.raises(InputError, match="several cases are"):
        Request(str(toy), "desk", Path("a"), Path("b"), seeds=(1, 1)).cases  # noqa: B018
    with pytest.raises(InputError, match="names the figure"):
        Study("x", "ours", {"desk": {}}, {"desk": 1}, measure=print, claims=study.claims)
    (toy.parent / "empty.py").write_text("x = 1")
    with pytest.raises(InputError, match="declares no study"):
        load_study(str(toy.parent / "empty.py"))


def test_a_cluster_gives_the_same_table(toy: Path) -> None:
    distributed = pytest.importorskip("distributed")
    alone = (run(toy).folder / "table.csv").read_bytes()
    for path in (toy.parent / "runs" / "toy" / "measured").iterdir():
        path.unlink()
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        found = run(toy, how=ExecutionOptions(cluster=cluster.scheduler_address))
    assert (found.folder / "table.csv").read_bytes() == alone
    assert len(log(toy)) == 12


# --- sweeps --------------------------------------------------------------------------------------------------

SWEPT = """
import os
from pathlib import Path

import unlazy as ul

def measure(case, work):
    tried = Path(work.runs) / f"tried-{case.beta}-{case.seed}"
    if case.beta == 10 and case.seed == 1 and not tried.exists():
        tried.parent.mkdir(parents=True, exist_ok=True)
        tried.touch()
        raise ValueError("once is not enough")
    if case.seed == case.broken:
        raise ValueError("this seed is broken")
    rows = ul.Rows()
    rows.add("number", case.beta * 100 + case.seed)
    rows.add("process", os.getpid())
    return rows

STUDY = ul.Study(
    "swept", "ours", {"desk": {"beta": 4.0, "broken": -1}}, {"desk": 2}, measure=measure, varies={"arm": ("a", "b")},
    claims=(ul.Claim("S1", says="x", where="y", paper="z", parts=[ul.Part("n", ul.Quantity("number"), above=0)]),),
)
"""


def sweep(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Exit code and messages of a sweep over seeds and betas from the command line."""
    monkeypatch.chdir(folder)
    call = ["reproduce", "swept.py", "--set", "seed=0..3", "--set", "beta=4,10,30", *words]
    done = CliRunner().invoke(app, call)
    return done.exit_code, done.output


def read_numbers(folder: Path) -> dict[tuple[str, str, str], float]:
    table = Table.read(folder / "results" / "swept" / "desk-by-beta" / "table.csv")
    rows = [row for row in table.rows() if row["quantity"] == "number"]
    return {(str(row["beta"]), str(row["arm"]), str(row["seed"])): float(row["value"]) for row in rows}


EVERY = {
    (beta, arm, str(seed)): float(beta) * 100 + seed for beta in ("4", "10", "30") for arm in "ab" for seed in range(4)
}


def test_a_sweep_lists_what_failed_tries_it_again_and_gives_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swept.py").write_text(SWEPT)
    code, said = sweep(tmp_path, monkeypatch, "--workers", "1")
    assert code == 1
    assert "failed: a-10-1: ValueError: once is not enough" in said
    assert "1 cases failed; the same command tries them again" in said
    assert len(read_numbers(tmp_path)) == 23
    code, said = sweep(tmp_path, monkeypatch, "--workers", "1")
    assert (code, "failed" in said) == (0, False)
    assert read_numbers(tmp_path) == EVERY
    assert "desk-by-beta/table.csv" in said
    assert not (
        tmp_path / "results" / "swept" / "desk"
    ).exists()  # the table of the study's own settings is another one
    assert not (tmp_path / "results" / "swept" / "desk-by-beta" / "results.json").exists()  # claims are about those


def test_a_sweep_tries_again_at_once_if_asked_and_counts_what_it_does_not_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swept.py").write_text(SWEPT)
    code, said = sweep(tmp_path, monkeypatch, "--workers", "2", "--retries", "1")
    assert code == 0
    assert read_numbers(tmp_path) == EVERY
    code, said = sweep(tmp_path, monkeypatch, "--workers", "1", "--set", "broken=0..1")
    assert said.count("this seed is broken") == 10
    assert "failed: 2 more" in said


def test_a_sweep_over_hosts_without_a_common_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    home = tmp_path / "client"
    home.mkdir()
    (home / "swept.py").write_text(SWEPT)
    with start_two_hosts(tmp_path, hidden=home) as address:
        code, said = sweep(home, monkeypatch, "--cluster", address, "--retries", "2")
    assert code == 0, said
    assert read_numbers(home) == EVERY
    table = Table.read(home / "results" / "swept" / "desk-by-beta" / "table.csv")
    assert str(os.getpid()) not in {row["value"] for row in table.rows() if row["quantity"] == "process"}


def test_stacks_of_members_are_cases_of_their_own() -> None:
    """A hundred seeds of the circle study are one stack for every arm and beta, not a hundred tasks."""
    made = make_request("circle", "smoke", Path("r"), Path("t"), None, ["seed=0..99", "beta=4,10"], "cpu", None)
    assert made.changes == {"betas": (4.0, 10.0)}
    assert all(len(case.members) >= 100 for case in made.cases)


FIXED = """
from dataclasses import dataclass

import unlazy as ul

@dataclass(frozen=True)
class Place:
    seed: int

STUDY = ul.Study(
    "fixed", "ours", {"desk": {"broken": -1}}, {"desk": 2}, measure=lambda case, work: ul.Rows(),
    cases=lambda settings, seeds: [Place(seed) for seed in seeds],
)
"""


def test_sweeps_that_cannot_be(toy: Path) -> None:
    with pytest.raises(InputError, match=r"broken takes a value like -1, got 'x'"):
        make_request(str(toy), "desk", Path("r"), Path("t"), None, ["broken=1,x"], "cpu", None)
    fixed = toy.with_name("fixed.py")
    fixed.write_text(FIXED)
    made = make_request(str(fixed), "desk", Path("r"), Path("t"), None, ["broken=1,2"], "cpu", None)
    with pytest.raises(InputError, match="cases that do not depend on broken"):
        made.cases  # noqa: B018
