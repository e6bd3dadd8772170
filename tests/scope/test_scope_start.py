"""The first measurement: what is slow or large waits for the first steps, and gives what it would have given before them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from unlazy import Scope
from unlazy.scope.memory import MemoryLimit, is_out_of_memory
from unlazy.scope.user_model import exchange_values
from unlazy.store import Run

ALWAYS = float("inf")


class Recurrent(nn.Module):
    """A recurrent network keeps its weights in a list of its own as well; the embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 9)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x))[0][:, -1])


def normed() -> tuple[nn.Module, Tensor, Tensor]:
    net = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 4))
    return net, torch.randn(24, 6), torch.arange(24) % 4


def recurrent() -> tuple[nn.Module, Tensor, Tensor]:
    return Recurrent(), torch.randint(9, (12, 5)), torch.arange(12) % 9


def train(
    make, last: int, folder: Path | None = None, *, watch: bool = True, **options
) -> tuple[nn.Module, Scope | None]:
    torch.manual_seed(0)
    net, x, y = make()
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scope = Scope(net, (x, y), folder, **{"budget": ALWAYS, "strict": True, **options}) if watch else None
    for step in range(1, last + 1):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
        if scope is not None:
            scope.step(step)
    return net, scope


@pytest.mark.parametrize("make", [normed, recurrent])
@pytest.mark.parametrize("last", [2, 8])
def test_what_waited_gives_the_numbers_of_the_start(make, last: int, monkeypatch, tmp_path: Path) -> None:
    """Every number and array of step 0, and every later one but velocities, is that of a scope that did not wait, bit by bit."""
    _, early = train(make, last, tmp_path / "early")
    monkeypatch.setattr("unlazy.scope.session.FIRST_SECONDS", 0.0)
    net, late = train(make, last, tmp_path / "late")
    early.finish()
    late.finish()
    plain, _ = train(make, last, watch=False)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True))
    numbers, expected = late.history.scalars, early.history.scalars
    assert numbers.keys() == expected.keys()
    for name, by_step in numbers.items():
        if name == "overhead" or name.endswith("velocity"):
            continue
        assert list(by_step) == sorted(by_step)
        assert name.startswith("train_") or 0 in by_step, name
        assert by_step == {step: expected[name][step] for step in by_step}, name
    for name in ("tangent", "linear", "output"):
        assert (late.history.array(name, first=True) == early.history.array(name, first=True)).all()
    run = Run(tmp_path / "late")
    assert run.header["recipe"]["scope"]["waiting"] == []
    assert run.status() == {"state": "finished", "step": last, "error": None}
    assert run.array_steps("tangent")[0] == 0
    assert late.overhead()["measurements"] == len(late.history.steps)


def test_a_measure_waits_once_at_a_step_and_is_not_taken_before_its_start(monkeypatch) -> None:
    monkeypatch.setattr("unlazy.scope.session.FIRST_SECONDS", 0.0)
    net, scope = train(normed, 0)
    left = [len(scope._session.measurements.waiting)]
    for step in range(1, 8):
        with torch.no_grad():
            net[0].weight.add_(0.01)
        scope.step(step)
        left.append(len(scope._session.measurements.waiting))
        assert ("tangent_distance" in scope.history.scalars) == (left[-1] == 0)
    assert left == [6, 5, 4, 3, 2, 1, 0, 0]


def test_an_interrupted_start_is_completed_by_the_scope_that_resumes(monkeypatch, tmp_path: Path) -> None:
    _, whole = train(normed, 6)
    monkeypatch.setattr("unlazy.scope.session.FIRST_SECONDS", 0.0)
    net, scope = train(normed, 2, tmp_path)
    scope._session.finish(RuntimeError("power failure"))
    waiting = Run(tmp_path).header["recipe"]["scope"]["waiting"]
    assert waiting == ["paths", "layers", "overlap", "tangent"]
    again = Scope(net, train_probe(), tmp_path, budget=ALWAYS, strict=True)
    for step in range(3, 7):
        with torch.no_grad():
            net[0].weight.add_(0.01)
        again.step(step)
    again.finish()
    for name in ("tangent_rank", "tangent_alignment", "overlap_rank", "linearisation_error"):
        assert again.history.first(name) == whole.history.first(name), name
        assert min(again.history.scalars[name]) == 0


def train_probe() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return normed()[1:]


def test_large_measures_wait_until_a_step_was_seen(monkeypatch) -> None:
    monkeypatch.setattr("unlazy.scope.memory.EARLY_BYTES", 10_000)
    net, scope = train(normed, 0)
    measurements = scope._session.measurements
    assert set(measurements.waiting) == {"gates", "paths", "linear", "layers", "overlap", "tangent"}
    assert measurements.limit.allowed() == 10_000
    assert not any("in parts" in note for note in measurements.notes)  # the small limit is not what later ones have
    for step in range(1, 7):
        with torch.no_grad():
            net[0].weight.add_(0.01)
        scope.step(step)
    assert measurements.limit.allowed() > 10_000
    assert not measurements.waiting
    assert 0 in scope.history.scalars["tangent_rank"]


def test_memory_that_is_given_does_not_wait() -> None:
    net, x, _ = normed()
    limit = MemoryLimit("1GB", net, x, step_seen=False)
    assert (limit.allowed(), limit.is_early) == (10**9, False)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: not enough memory"),
    ],
)
def test_memory_that_runs_out_costs_one_measurement_and_a_note(error: Exception, monkeypatch) -> None:
    net, scope = train(normed, 2, strict=False)
    measurements = scope._session.measurements
    overlap, output = measurements.measures["overlap"], measurements.measures["outputs"]

    def fail(step: int) -> None:
        raise error

    for step, name, before in ((3, "overlap", overlap), (4, "outputs", output)):
        measurements.measures[name] = fail
        with torch.no_grad():
            net[0].weight.add_(0.01)
        scope.step(step)
        measurements.measures[name] = before
        assert any(note.startswith(f"{name} is missing at some steps") for note in scope.history.notes)
    scope.step(5)
    assert 3 not in scope.history.scalars["overlap_distance"]
    assert 3 in scope.history.scalars["tangent_distance"]
    assert 5 in scope.history.scalars["overlap_distance"]
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_a_start_that_never_fits_is_left_out_and_training_goes_on(monkeypatch) -> None:
    def fail(self, *arguments) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("unlazy.scope.tangent.TangentMeasure.measure", fail)
    _, scope = train(normed, 12, strict=False)
    scope.finish()
    assert scope.history.left_out["tangent"].startswith("tangent does not fit the memory (OutOfMemoryError: CUDA")
    assert scope.history.steps[-1] == 12
    assert len(scope.history.scalars["linearisation_error"]) > 3


def test_memory_that_does_not_suffice_at_the_very_start_ends_the_scope_alone(monkeypatch) -> None:
    def fail(self, *arguments) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("unlazy.scope.measurements.Measurements.outputs", fail)
    with pytest.warns(UserWarning, match="the scope does not measure; training goes on"):
        train(normed, 2, strict=False)
    with pytest.raises(torch.OutOfMemoryError):
        train(normed, 2)


def test_a_training_with_next_to_no_memory_runs_to_its_end() -> None:
    """One sample at a time passes the model; what does not fit is named, and nothing is raised."""
    net, scope = train(normed, 10, memory=100, strict=False)
    scope.finish()
    plain, _ = train(normed, 10, watch=False)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), plain.state_dict().values(), strict=True))
    assert scope.history.steps[-1] == 10
    assert sum("samples pass the model in parts (1 at a time)" in note for note in scope.history.notes) == 1
    assert 10 in scope.history.scalars["linearisation_error"]


def test_values_come_back_after_an_error() -> None:
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    own, version, place = net.weight.detach().clone(), net.weight._version, net.weight.data_ptr()
    pairs = [(p, q.detach()) for p, q in zip(net.parameters(), other.parameters(), strict=True)]
    with pytest.raises(ValueError, match="stop"), exchange_values(pairs):
        assert torch.equal(net.weight, other.weight)
        raise ValueError("stop")
    assert torch.equal(net.weight, own)
    assert (net.weight._version, net.weight.data_ptr()) == (version, place)


def test_few_full_measurements_are_noted() -> None:
    net, scope = train(normed, 0, budget=1e-9)
    scope._session.budget.grace = 0.0
    for step in range(1, 31):
        with torch.no_grad():
            net[0].weight.add_(0.01)
        scope.step(step)
    scope.finish()
    assert scope.overhead()["full_measurements"] == 2
    assert sum(note.startswith("2 full measurements: each takes") for note in scope.history.notes) == 1
    enough = train(normed, 30)[1]
    enough.finish()
    assert not any("full measurements" in note for note in enough.history.notes)


def test_a_kernel_that_does_not_fit_the_time_is_left_out_at_the_end_and_the_linearised_network_is_not(
    monkeypatch,
) -> None:
    """Everything waits, nothing seems affordable: the end has loss, motion, linearisation error, and a reason for the rest."""
    monkeypatch.setattr("unlazy.scope.session.FIRST_SECONDS", 0.0)
    monkeypatch.setattr("unlazy.scope.measurements.Measurements.expected_seconds", lambda self, name: 100.0)
    _, scope = train(normed, 5, budget=0.05)
    assert scope is not None
    assert not {"linearisation_error", "tangent_distance"} & set(scope.history.scalars)
    scope.finish()
    scalars = scope.history.scalars
    for name in ("loss", "parameter_motion", "linearisation_error"):
        assert {0, 5} <= set(scalars[name]), name
    assert "tangent_distance" not in scalars
    assert "would take about 2e+02 s" in scope.history.left_out["tangent"]


def test_the_end_takes_what_fits_and_light_measures_in_any_case(monkeypatch) -> None:
    _, scope = train(normed, 5, budget=1e-6)
    session = scope._session  # type: ignore[union-attr]
    session.budget.costs.update(tangent=10.0, linear=10.0)
    scope.finish()  # type: ignore[union-attr]
    assert 5 in session.history.scalars["linearisation_error"]
    assert 5 not in session.history.scalars["tangent_distance"]
    assert any("the end has no tangent: it takes 10 s" in note for note in session.history.notes)


def test_a_kernel_that_takes_too_long_waits_until_it_is_paid_for(monkeypatch) -> None:
    """Its smallest form takes 16 s here; it is tried again when the training pays for that."""
    monkeypatch.setattr("unlazy.scope.tangent.idle_seconds", lambda do: (do(), 8.0)[1])
    monkeypatch.setattr("unlazy.scope.tangent.EXACT_SECONDS", 0.0)
    torch.manual_seed(0)
    net, x, y = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 40)), torch.randn(24, 6), torch.arange(24)
    measurements = Scope(net, (x, y), budget=ALWAYS, strict=True)._session.measurements  # type: ignore[union-attr]
    del measurements.rows["tangent"]
    measurements._tangents.method = None
    measurements.set_seconds(1.0, 15.0)
    assert measurements._measure_first("tangent") == {}
    assert measurements.waiting == ["tangent"]
    assert measurements.expected_seconds("tangent") == pytest.approx(16.0)
    measurements.set_seconds(1.0, 17.0)
    assert "tangent_error" in measurements.measure_waiting()
    assert len(measurements.samples_of("tangent")) == 8


def test_a_slow_model_is_measured_on_fewer_samples_and_stays_so_when_resumed(monkeypatch, tmp_path: Path) -> None:
    """A probe set that takes longer than the first seconds is reduced, every class equally; a resumed scope keeps its samples."""
    folder, net, x, y = tmp_path / "run", nn.Linear(6, 4), torch.randn(120, 6), torch.arange(120) % 4
    groups = {"even": torch.arange(120) % 2 == 0, "last": torch.arange(120) == int(torch.randint(120, ()))}
    monkeypatch.setattr("unlazy.scope.timing.idle_seconds", lambda do: (do(), 0.5)[1])  # 16 samples a second
    scope = Scope(net, (x, y), folder, groups=groups)
    for step in (1, 2):
        with torch.no_grad():
            net.weight.add_(0.1 * torch.randn(4, 6))
        scope.step(step)
    scope.finish()
    run = Run(folder)
    assert run.array("output", 0).shape == (1, 32, 4)
    assert sorted(run.array("probe_y", 0)[0].tolist()) == sorted([*range(4)] * 8)
    assert all(number < 32 for numbers in run.header["recipe"]["scope"]["groups"].values() for number in numbers)
    assert any("32 of the probe's 120 samples" in note for note in scope.history.notes)
    monkeypatch.setattr("unlazy.scope.timing.idle_seconds", lambda do: (do(), 1e-3)[1])
    again = Scope(net, (x, y), folder, groups=groups)
    with torch.no_grad():
        net.weight.add_(0.1)
    again.step(3)
    again.finish()
    assert Run(folder).array("output", 3).shape == (1, 32, 4)


def test_without_a_limit_of_time_every_sample_is_measured(monkeypatch) -> None:
    monkeypatch.setattr("unlazy.scope.timing.idle_seconds", lambda do: (do(), 60.0)[1])
    scope = Scope(nn.Linear(6, 4), (torch.randn(120, 6), torch.arange(120) % 4), budget=ALWAYS)
    assert scope.history.targets is not None
    assert len(scope.history.targets) == 120
