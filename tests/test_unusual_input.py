"""Targets, labels, gates, seeds and slopes of an unexpected shape or kind: refused in words, or understood, never misread."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import unlazy as ul
from image_cases import QUICK, SMALL, stripes
from unlazy import Circle, Member, NetSpec, Recipe, fit
from unlazy.data.dataset import Dataset
from unlazy.data.patterns import Patterns, check_assumptions
from unlazy.kernels import gram_cluster
from unlazy.kernels.gram import ready_context
from unlazy.kernels.gram_on_disk import gram_file
from unlazy.kernels.gram_tiles import GramJob
from unlazy.models.build import build, build_stack
from unlazy.models.spec import relu_spec
from unlazy.probes.paths import cell_floor, count_cells
from unlazy.runtime import InputError, StoreError, Unsupported, stream
from unlazy.store import Writer
from unlazy.theory.infinite_width import starting_variances
from unlazy.theory.regions import path_polyhedron
from unlazy.theory.truncated_limit import pair_moments
from unlazy.theory.two_layers import decompose_module
from unlazy.theory.value_kernel import expected_value_kernel
from unlazy.training.feature_freeze import find_finish_time
from unlazy.training.images import train_images

SPEC = NetSpec(2, width=4, depth=2)
ROUND = Circle(n=20).dataset()


def made(*, columns: int = 1, sets: int | None = None) -> Dataset:
    y = ROUND.y.expand(-1, columns)
    return Dataset("made", ROUND.x, y if sets is None else y.expand(sets, -1, -1))


def recipe(spec: NetSpec = SPEC, **more: object) -> Recipe:
    return Recipe(spec, (Member(0, 1e-3), Member(1, 1e-3)), epochs=1, batch=10, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "data", "options", "told"),
    [
        (SPEC, made(columns=2), {}, "1 outputs, but the data 2"),
        (NetSpec(2, 3, width=4, depth=2), made(), {}, "3 outputs, but the data 1"),
        (SPEC, made(sets=3), {}, "3 members, but there are 2"),
        (SPEC, made(), {"loss": "cross-entropy"}, "at least two outputs"),
    ],
)
def test_targets_that_would_broadcast_are_refused(
    spec: NetSpec, data: Dataset, options: dict[str, object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        fit(recipe(spec, **options), data, [], tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shape", [(3, 20, 4), (2, 25, 4), (2, 20, 1)])
def test_gates_that_would_broadcast_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(2, 20, 4\)"):
        fit(recipe(), made(), [], tmp_path / "run", gates=[torch.ones(shape)] * 2)


def test_cells_are_those_of_the_half_spaces() -> None:
    gates = build(SPEC, seed=1).gates(ROUND.x)
    hard = gates.hard()
    assert count_cells(gates) == count_cells(hard) > 1
    assert float(cell_floor(gates, ROUND.y)) == float(cell_floor(hard, ROUND.y))
    with pytest.raises(InputError, match="open or closed"):
        count_cells(list(gates))


def test_labels_as_a_column_are_labels() -> None:
    patterns = Patterns(20, 20, 3)
    data = patterns.dataset(60)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1))
    known = patterns.dictionary(), patterns.is_relevant()
    column, flat = (decompose_module(net, data.x, y, *known) for y in (data.y, data.y[:, 0]))
    assert torch.equal(column.components, flat.components)
    with pytest.raises(InputError, match="one number a row"):
        decompose_module(net, data.x, data.y.expand(-1, 2), *known)


def test_a_mask_of_relevant_patterns_is_understood() -> None:
    patterns = Patterns(20, 20, 3)
    random = torch.Generator().manual_seed(0)
    indicators = torch.rand(80, 20, generator=random) < 0.5
    y = (torch.randint(0, 2, (80,), generator=random) * 2 - 1).double()
    mask = patterns.is_relevant()
    numbers = mask.nonzero()[:, 0]
    assert check_assumptions(indicators, y, mask)["gamma"] == check_assumptions(indicators, y, numbers)["gamma"]
    with pytest.raises(InputError, match="once"):
        check_assumptions(indicators, y, torch.tensor([0, 0, 1]))


def test_losses_that_are_not_numbers_are_not_learned() -> None:
    nan = math.nan
    assert find_finish_time([0, 1, 2], np.array([[nan], [nan], [0.1]]), 2, 0).tolist() == [2]
    assert np.isnan(find_finish_time([0, 1, 2], np.array([[9.0], [5.0], [nan]]), 2, 0)).all()
    assert find_finish_time([0, 1, 2], np.array([[9.0], [0.1], [0.1]]), 2, 0).tolist() == [1]


def test_seeds_are_whole_numbers() -> None:
    for seed in (1, np.int64(1), torch.tensor(1)):
        assert stream(seed, "x").initial_seed() == stream(1, "x").initial_seed()


def test_a_network_without_slopes_has_none_of_its_own() -> None:
    with pytest.raises(InputError, match="no slope"):
        build_stack(relu_spec(2, width=3, depth=1), [0, 1], [4.0, 8.0])


def test_a_region_takes_points_of_any_precision() -> None:
    net = ul.DLGN(2, width=3, depth=2)
    region = path_polyhedron(net, (0, 1))
    assert torch.equal(region.contains(ROUND.x.float()), region.contains(ROUND.x.float().double()))


def test_laws_of_one_parametrisation_are_not_told_of_another() -> None:
    x = torch.randn(3, 2)
    with pytest.raises(InputError, match="standard parametrisation"):
        expected_value_kernel(ul.DLGN(2, width=3, depth=2, parametrisation="ntk"), x, 0.7)
    with pytest.raises(Unsupported, match="mup"):
        starting_variances(relu_spec(10, depth=2, parametrisation="mup"))


@pytest.mark.parametrize("variance", [1e-10, 1e-8, 1e-6, 1e-4])
def test_moments_of_a_narrow_pair(variance: float) -> None:
    """Far below 1 a truncated neuron is a ReLU: E[s s] = variance / 2, E[s' s'] = 1/2 where both see the same."""
    pair = torch.tensor([variance], dtype=torch.float64)
    neuron, slope = pair_moments(pair, pair, pair)
    assert float(neuron) == pytest.approx(variance / 2, rel=1e-3)
    assert float(slope) == pytest.approx(0.5, rel=1e-2)


def test_distillation_needs_a_teacher() -> None:
    with pytest.raises(InputError, match="teacher"):
        train_images(build(SMALL), stripes(40), stripes(20), replace(QUICK, distil=0.5))


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a//b", ""])
def test_arrays_stay_inside_their_run(name: str, tmp_path: Path) -> None:
    header = {"recipe": {}, "members": [{"seed": 0}], "study": None, "scale": None, "provenance": {}}
    with Writer(tmp_path / "deep" / "run", header) as writer, pytest.raises(StoreError, match="outside"):
        writer.record(0, {}, {name: np.zeros(1)})
    assert not list(tmp_path.rglob("*.npy"))


def test_a_worker_works_on_a_copy(tmp_path: Path) -> None:
    """Another worker may fetch the job meanwhile: what it gets must be the model as it was sent."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(6, 3)
    job = GramJob("tangent", net, x)
    file = gram_file(tmp_path / "k.zarr", net, x, tile=4)
    address = gram_cluster.FileAddress(str(file.path), file.tile, file.about["job"], mark="")
    computer = gram_cluster._open_job(gram_cluster.pack_job(job), address, None)
    with ready_context(computer.kernel):
        assert not any(p.requires_grad for p in computer.job.model.parameters())
        assert all(p.requires_grad for p in job.model.parameters())
