"""A second training into a folder that holds one already: gone on with, refused or replaced, never spliced."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from store_runs import header
from unlazy import HardGate, InputError, Run, Scope, StoreError
from unlazy.models.build import build
from unlazy.models.spec import ImageSpec
from unlazy.runtime import stream
from unlazy.scope import run_folder as run_folders
from unlazy.scope import session as sessions
from unlazy.store import Writer

ALWAYS = float("inf")
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 2
SEEN = [0, 1, 2, 3, 4, 5, 7]  # steps measured while a training of eight runs


def network(seed: int, width: int = 24) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))


class Training:
    """A training that can be stopped, saved and taken up; ``batches``: the seed of what it sees."""

    def __init__(self, seed: int, lr: float = 0.05, batches: int = 0, adam: bool = False, width: int = 24) -> None:
        self.net = network(seed, width)
        self.optimiser = (torch.optim.Adam if adam else torch.optim.SGD)(self.net.parameters(), lr)
        self.batches = torch.Generator().manual_seed(batches)

    def scope(self, folder: Path, **options: object) -> Scope:
        return Scope(self.net, (X, Y), folder, **{"budget": ALWAYS, "views": ("tangents",)} | options)  # type: ignore[arg-type]

    def steps(self, steps: range, scope: Scope | None = None) -> Training:
        for step in steps:
            rows = torch.randint(40, (10,), generator=self.batches)
            self.optimiser.zero_grad()
            F.cross_entropy(self.net(X[rows]), Y[rows]).backward()
            self.optimiser.step()
            if scope is not None:
                scope.step(step)
        return self

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def crash(scope: Scope) -> None:
    """The lock is freed as by a kill; nothing is finished and nobody in this process knows of the folder any more."""
    session = scope._session
    assert session is not None
    assert session.scope_writer is not None
    session.scope_writer.__exit__(None, None, None)
    session.finished = True
    sessions._open_sessions.clear()


def run_files(folder: Path) -> dict[str, bytes]:
    """Every byte of a run but its lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def assert_goes_on(folder: Path, last: int) -> None:
    """Earlier measurements are still there, no step is there twice, and the run reaches the last step."""
    steps = [line.step for line in Run(folder).lines]
    assert steps[: len(SEEN)] == SEEN
    assert steps == sorted(set(steps))
    assert steps[-1] == last


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    training = Training(seed=0)
    with training.scope(tmp_path / "run") as scope:
        training.steps(range(1, 9), scope)
    return tmp_path / "run"


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    training = Training(seed=0)
    scope = training.scope(tmp_path / "run")
    training.steps(range(1, 9), scope)
    crash(scope)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "lr", "words"),
    [(1, 0.05, "finished training that had other weights"), (0, 0.2, "began at these very weights")],
)
def test_a_new_training_is_refused_by_a_finished_one(finished: Path, seed: int, lr: float, words: str) -> None:
    before = run_files(finished)
    with pytest.raises(InputError, match=f"{words}.*another folder.*overwrite=True"):
        Training(seed, lr).scope(finished)
    assert run_files(finished) == before


def test_a_network_of_another_draw_is_refused_by_an_interrupted_training(interrupted: Path) -> None:
    before = run_files(interrupted)
    for seed in range(1, 21):
        with pytest.raises(InputError, match=r"began at other weights.*load its weights before"):
            Training(seed).scope(interrupted)
    with pytest.raises(InputError, match="began at other weights"):
        Training(1).steps(range(50)).scope(interrupted)
    assert run_files(interrupted) == before


def test_another_architecture_is_refused_with_the_way_out(finished: Path) -> None:
    with pytest.raises(StoreError, match=r"another model.*overwrite=True"):
        Training(0, width=25).scope(finished)


# --- gone on with --------------------------------------------------------------------------------------------


def test_a_training_goes_on_from_its_own_checkpoint_seen_or_not(interrupted: Path) -> None:
    """A checkpoint may lie at, before or behind the last measurement; no step is repeated, no number refers to a new start."""
    for reached in (5, 8, 13):
        again = Training(seed=0).steps(range(1, reached + 1))
        scope = again.scope(interrupted, strict=True)
        again.steps(range(reached + 1, reached + 4), scope)
        scope.verdict()  # which measures the last step
        crash(scope)
    assert_goes_on(interrupted, 16)
    whole = Training(seed=0)
    watched = Scope(whole.net, (X, Y), budget=ALWAYS, views=("tangents",))
    whole.steps(range(1, 17), watched)
    watched.finish()
    for name in ("parameter_motion", "linearisation_error", "tangent_distance", "loss"):
        assert Run(interrupted).scalars(name)[1][-1, 0] == pytest.approx(watched.history.last(name), rel=1e-4), name


def test_a_checkpoint_far_away_still_counts_as_the_same_training(interrupted: Path) -> None:
    far = Training(seed=0, lr=0.05).steps(range(1, 400))
    scope = far.scope(interrupted, strict=True)
    far.steps(range(400, 402), scope)
    scope.finish()  # which measures the last step
    assert scope.history.last("parameter_motion") > 0.2
    assert scope.history.steps[-1] == 401


def test_a_training_that_starts_again_after_a_crash_goes_on_behind_it(interrupted: Path) -> None:
    again = Training(seed=0)
    scope = again.scope(interrupted, strict=True)
    again.steps(range(1, 12), scope)
    scope.finish()
    assert_goes_on(interrupted, 11)
    assert Run(interrupted).status()["state"] == "finished"


def test_a_finished_training_goes_on_at_its_end(finished: Path) -> None:
    more = Training(seed=0).steps(range(1, 9))
    with more.scope(finished, strict=True) as scope:
        more.steps(range(9, 12), scope)
    assert_goes_on(finished, 11)


def test_a_loop_that_counts_from_one_again_at_the_end_is_counted_on(finished: Path) -> None:
    """As when a cell of a notebook trains the same network once more."""
    more = Training(seed=0).steps(range(1, 9))
    scope = more.scope(finished)
    with pytest.warns(UserWarning, match="goes on counting from 9"):
        more.steps(range(1, 4), scope)
    scope.finish()
    assert_goes_on(finished, 11)


def test_a_cell_that_failed_may_be_run_again(tmp_path: Path) -> None:
    first = Training(seed=0)
    scope = first.scope(tmp_path / "run")
    first.steps(range(1, 5), scope)  # an error ends the cell here; the scope is still open
    again = Training(seed=0)
    second = again.scope(tmp_path / "run", strict=True)
    again.steps(range(1, 9), second)
    second.finish()
    steps = list(second.history.scalars["loss"])
    assert steps[:5] == [0, 1, 2, 3, 4]
    assert steps == sorted(set(steps))
    assert steps[-1] == 8


def test_a_start_that_was_too_large_to_keep_is_known_by_its_outputs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_folders, "START_BYTES", 10)
    training = Training(seed=0)
    with training.scope(tmp_path / "run") as scope:
        training.steps(range(1, 5), scope)
    with pytest.raises(InputError, match="other weights"):
        Training(seed=1).scope(tmp_path / "run")
    with training.scope(tmp_path / "run", strict=True) as scope:
        training.steps(range(5, 7), scope)
    assert list(scope.history.scalars["loss"]) == list(range(7))


# --- found out later -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{"lr": 0.06}, {"batches": 1}])
@pytest.mark.parametrize("adam", [False, True])
def test_another_training_from_the_same_start_is_found_out_at_its_first_steps(
    tmp_path: Path, changed: dict[str, float], adam: bool
) -> None:
    """Same weights, other rate or batches: the run stays as it is, and the verdict is about this training alone."""
    first = Training(seed=0, adam=adam)
    scope = first.scope(tmp_path / "run")
    first.steps(range(1, 9), scope)
    crash(scope)
    before = run_files(tmp_path / "run")
    again = Training(seed=0, adam=adam, **changed)  # type: ignore[arg-type]
    scope = again.scope(tmp_path / "run")
    with pytest.warns(UserWarning, match="elsewhere at step 1.*overwrite=True.*memory only"):
        again.steps(range(1, 6), scope)
    scope.finish()
    assert run_files(tmp_path / "run") == before
    alone = Training(seed=0, adam=adam, **changed)  # type: ignore[arg-type]
    watched = Scope(alone.net, (X, Y), budget=ALWAYS, views=("tangents",))
    alone.steps(range(1, 6), watched)
    watched.finish()
    assert scope.history.steps == watched.history.steps == list(range(6))
    for name, numbers in watched.history.scalars.items():
        if name != "overhead":
            assert scope.history.scalars[name] == pytest.approx(numbers, rel=1e-5, abs=1e-9), name
    ours, theirs = scope.verdict(), watched.verdict()
    assert (ours.label, ours.when) == (theirs.label, theirs.when)
    assert ours.gap == pytest.approx(theirs.gap, rel=1e-4)


def test_a_strict_scope_raises_instead(interrupted: Path) -> None:
    again = Training(seed=0, lr=0.2)
    scope = again.scope(interrupted, strict=True)
    with pytest.raises(InputError, match="elsewhere at step 1"):
        again.steps(range(1, 3), scope)


def test_a_loop_that_counts_from_one_elsewhere_is_not_mixed_in(interrupted: Path) -> None:
    """Trained weights that resemble the start, but a count that begins anew: nobody can say which step this is."""
    before = run_files(interrupted)
    elsewhere = Training(seed=0).steps(range(1, 30))
    scope = elsewhere.scope(interrupted)
    with pytest.warns(UserWarning, match="begins at step 1.*not where the training.*overwrite=True"):
        elsewhere.steps(range(1, 20), scope)
    assert run_files(interrupted) == before
    assert scope.history.steps == []
    assert scope.verdict().label == "cannot tell"
    assert "begins at step 1" in str(scope.verdict())


# --- replaced ------------------------------------------------------------------------------------------------


def test_overwrite_leaves_nothing_of_the_earlier_training(finished: Path, tmp_path: Path) -> None:
    for folder, options in ((finished, {"overwrite": True}), (tmp_path / "fresh", {})):
        new = Training(seed=1, lr=0.2)
        with new.scope(folder, **options) as scope:
            new.steps(range(1, 4), scope)
    ours, fresh = Run(finished), Run(tmp_path / "fresh")
    assert [line.step for line in ours.lines] == [0, 1, 2, 3]
    assert run_files(finished).keys() == run_files(tmp_path / "fresh").keys()
    for name in ("loss", "parameter_motion", "tangent_distance"):
        assert (ours.scalars(name)[1] == fresh.scalars(name)[1]).all()
    verdicts = [json.loads((run.folder / "verdict.json").read_text()) for run in (ours, fresh)]
    assert verdicts[0] == verdicts[1]
    assert ours.status() == {"state": "finished", "step": 3, "error": None}


def test_overwrite_takes_another_architecture_and_a_new_folder_too(finished: Path, tmp_path: Path) -> None:
    wide = Training(0, width=25)
    for folder in (finished, tmp_path / "new"):
        wide.scope(folder, overwrite=True).finish()
        assert Run(folder).array("probe_y", 0).shape == (1, 40)
    assert Run(finished).header["identity"] == Run(tmp_path / "new").header["identity"]


def test_overwrite_touches_no_run_that_a_scope_did_not_write(tmp_path: Path) -> None:
    with Writer(tmp_path / "run", header()) as writer:
        writer.record(0, {}, {}, {"model/w": X.numpy()})
    before = run_files(tmp_path / "run")
    with pytest.raises(StoreError, match="no scope wrote"):
        Training(0).scope(tmp_path / "run", overwrite=True)
    assert run_files(tmp_path / "run") == before


@pytest.mark.parametrize("change", [{"parametrisation": "mup"}, {"gate": HardGate(2.0)}])
def test_image_networks_that_print_alike_are_told_apart(tmp_path: Path, change: dict[str, object]) -> None:
    """Gate rules and multipliers do not show where a module prints its layers."""
    spec = replace(ImageSpec((3, 4), channels=1, classes=2), parametrisation="ntk", gate=HardGate(4.0))
    x = torch.randn(12, 1, 5, 5, generator=stream(2, "pictures"))
    probe = (x, torch.arange(12) % 2)
    Scope(build(spec), probe, tmp_path / "run", views=()).finish()
    recipe = Run(tmp_path / "run").header["recipe"]
    assert recipe["model"].splitlines()[0] == "GatedImageNet("
    with pytest.raises(StoreError, match="another model, probe set or choice of views"):
        Scope(build(replace(spec, **change)), probe, tmp_path / "run", views=())  # type: ignore[arg-type]
