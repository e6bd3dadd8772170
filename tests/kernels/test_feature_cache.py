"""Features at hand: never more than there is room for, never made more often than that asks, and the same numbers always."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from unlazy.kernels.gram import FeatureCache, all_places, gram, plan_gram
from unlazy.kernels.gram_tiles import GramJob, TileComputer
from unlazy.kernels.tangent import tangent_kernel
from unlazy.runtime import InputError


class Linear:
    """A kernel whose features are the samples: x x'. Counts how often parts are made and how many are alive."""

    tail: tuple[int, ...] = ()
    dtype, device = torch.float64, torch.device("cpu")
    work_bytes, best_tile, methods = 0, 256, ()

    def __init__(self, feature_bytes: int = 8) -> None:
        self.feature_bytes, self.made, self.alive, self.most = feature_bytes, 0, 0, 0

    def features(self, x: Any) -> Any:
        self.made += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        return Part(self, x)

    def block(self, out: Tensor, a: Any, b: Any, *, same: bool) -> None:
        assert same == (a is b)
        out.copy_(a.x @ b.x.mT)


class Part:
    def __init__(self, kernel: Linear, x: Tensor) -> None:
        self.kernel, self.x = kernel, x

    def __del__(self) -> None:
        self.kernel.alive -= 1


def data(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def through(kernel: Linear, x: Tensor, x2: Tensor | None, tile: int, room: int) -> Tensor:
    """The Gram matrix by a plan with that tile and room."""
    plan = plan_gram(kernel, len(x), None if x2 is None else len(x2))
    with mock.patch("unlazy.kernels.gram.plan_gram", return_value=replace(plan, tile=tile, cached_parts=room)):
        return gram(kernel, x, x2)


@pytest.mark.parametrize(
    ("columns", "room", "made"),
    # all fit: each part once; else a panel of room - 1 rows is made once, and every column beside it once a panel (less what
    # has just passed as the last column when it is wanted again)
    [(None, 10, 10), (None, 3, 30 - 1), (None, 2, 55 - 2), (7, 13, 13), (7, 4, 6 + 2 * 7), (7, 2, 6 + 6 * 7)],
)
def test_features_are_made_as_seldom_as_the_room_allows(columns: int | None, room: int, made: int) -> None:
    rows = 10 if columns is None else 6
    x, x2 = data(4 * rows), None if columns is None else data(4 * columns, seed=2)
    kernel = Linear()
    assert torch.allclose(through(kernel, x, x2, 4, room), x @ (x if x2 is None else x2).mT, rtol=1e-13)
    assert kernel.made == made
    assert kernel.most <= room


@given(st.integers(1, 23), st.one_of(st.none(), st.integers(1, 23)), st.integers(1, 9), st.integers(2, 30))
def test_any_cut_and_room_give_the_same(rows: int, columns: int | None, tile: int, room: int) -> None:
    x, x2 = data(rows), None if columns is None else data(columns, seed=1)
    kernel = Linear()
    assert torch.allclose(through(kernel, x, x2, tile, room), x @ (x if x2 is None else x2).mT, rtol=1e-13)
    assert kernel.most <= room


@given(st.integers(1, 3000), st.one_of(st.none(), st.integers(1, 3000)), st.integers(1, 10**5), st.integers(1, 10**8))
def test_a_plan_keeps_to_its_memory(rows: int, columns: int | None, feature_bytes: int, memory: int) -> None:
    kernel = Linear(feature_bytes)
    one_alone = rows == 1 and columns is None
    least = 8 * rows * (columns or rows) + (1 if one_alone else 2) * feature_bytes + 4 * 8
    if int(0.9 * memory) < least:  # not even two samples fit beside the result
        with pytest.raises(InputError, match="too small"):
            plan_gram(kernel, rows, columns, memory)
        return
    plan = plan_gram(kernel, rows, columns, memory)
    assert plan.peak_bytes <= 0.9 * memory
    assert plan.caches_all or plan.cached_parts >= 2
    if not plan.caches_all:
        assert "rows at a time" in str(plan)
        assert plan.tile == 1 or plan.cached_parts >= 3


def test_more_memory_never_makes_more_features() -> None:
    x = data(600)
    made = []
    for memory in (3_500_000, 4_500_000, 6_000_000, 8_000_000, 20_000_000):
        kernel = Linear(10_000)
        assert torch.allclose(gram(kernel, x, memory=memory), x @ x.mT, rtol=1e-13)
        made.append(kernel.made * plan_gram(kernel, 600, None, memory).tile)
    assert made == sorted(made, reverse=True)
    assert made[-1] < 2 * 600 < made[0]


def test_room_for_one_part_is_refused() -> None:
    with pytest.raises(InputError, match="room for two"):
        FeatureCache(lambda part: part, data(8), None, 4, 1)


def test_a_file_s_tiles_hold_what_their_memory_allows() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 1)).double()
    x = data(40)
    for memory in (10**6, 10**9):
        job = GramJob("tangent", net, x, memory=memory)
        engine = job.engine()
        computer = TileComputer(job, engine, 4)
        held = (10 if computer.cache.all_fit else computer.cache.panel + 1) * 4 * engine.feature_bytes
        assert held + engine.work_bytes <= memory or computer.cache.panel == 1
        places = [(i, j) for j in range(10) for i in reversed(range(10))]  # in no good order, as on a cluster
        blocks = {place: computer.block(place) for place in places}
        whole = torch.cat([torch.cat([blocks[i, j] for j in range(10)], 1) for i in range(10)])
        assert torch.allclose(whole, tangent_kernel(net, x), rtol=1e-12)


def test_places_of_a_symmetric_matrix_are_those_on_and_above_the_diagonal() -> None:
    assert all_places(5, 5, 2, symmetric=True) == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    assert all_places(2, 5, 2, symmetric=False) == [(0, 0), (0, 1), (0, 2)]
