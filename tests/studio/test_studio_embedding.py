"""Neurons on a plane: distances kept, stress never grows, and no point jumps between steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unlazy.studio import neuron_layout
from unlazy.studio.run_reader import even_indices


def vectors(units: int, inputs: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(units, inputs))


def test_distances_are_one_minus_the_cosine():
    v = vectors(5)
    v[3] = 0
    v[4] = np.nan
    got = neuron_layout.cosine_distances(v)
    for i in range(5):
        for j in range(5):
            a, b = (np.nan_to_num(v[place]) for place in (i, j))
            length = np.linalg.norm(a) * np.linalg.norm(b)
            assert got[i, j] == pytest.approx(0 if i == j else 1 - a @ b / length if length else 1)


def test_what_fits_in_a_plane_is_drawn_exactly():
    points = np.random.default_rng(1).normal(size=(12, 2))
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    drawn = neuron_layout.classical_scaling(distance)
    assert np.allclose(neuron_layout._plane_distances(drawn), distance, atol=1e-6)
    assert neuron_layout.stress(drawn, distance) < 1e-10


@settings(max_examples=20)
@given(units=st.integers(3, 25), seed=st.integers(0, 1000))
def test_the_stress_never_grows(units, seed):
    distance = neuron_layout.cosine_distances(vectors(units, seed=seed))
    points = np.random.default_rng(seed).normal(size=(units, 2))
    before = neuron_layout.stress(points, distance)
    for _ in range(10):
        points = neuron_layout.majorise(points, distance, 1)
        now = neuron_layout.stress(points, distance)
        assert now <= before + 1e-9
        before = now


def test_majorisation_is_near_what_scikit_learn_finds():
    from sklearn.manifold import MDS

    distance = neuron_layout.cosine_distances(vectors(30))
    ours = neuron_layout.stress(
        neuron_layout.majorise(neuron_layout.classical_scaling(distance), distance, 60), distance
    )
    options = {"metric": "precomputed", "n_init": 4, "init": "random", "max_iter": 300, "random_state": 0}
    theirs = MDS(metric_mds=True, normalized_stress=False, **options).fit(distance).stress_
    assert ours <= 1.1 * theirs


def test_turning_finds_a_rotation_and_reflection_back():
    points = np.random.default_rng(2).normal(size=(9, 2))
    turn = np.array([[np.cos(2.0), -np.sin(2.0)], [np.sin(2.0), np.cos(2.0)]]) @ np.diag([1, -1])
    assert np.allclose(neuron_layout.rotate_onto(points @ turn + 5, points), points - points.mean(0))


def test_neurons_that_hardly_move_are_drawn_hardly_moved():
    random = np.random.default_rng(3)
    frames = [vectors(40)]
    for _ in range(10):
        frames.append(frames[-1] + 0.01 * random.normal(size=frames[0].shape))
    drawn = neuron_layout.layout_frames(frames).astype(np.float64)
    spread = drawn[0].std()
    assert np.linalg.norm(np.diff(drawn, axis=0), axis=-1).max() < 0.25 * spread
    one_by_one = np.stack([neuron_layout.layout_frames([frame])[0] for frame in frames])
    assert np.abs(np.diff(drawn, axis=0)).mean() <= np.abs(np.diff(one_by_one, axis=0)).mean() + 1e-6


def test_neurons_that_stand_still_stay():
    drawn = neuron_layout.layout_frames([vectors(20)] * 3)
    assert np.abs(drawn[2] - drawn[0]).max() < 0.05 * drawn.std()


def test_neurons_on_one_spot_and_apart_again():
    frames = [vectors(10), np.ones((10, 6)), np.ones((10, 6)), vectors(10)]
    drawn = neuron_layout.layout_frames(frames)
    assert np.isfinite(drawn).all()
    assert drawn[1].std() < 1e-6
    assert drawn[3].std() > 0.1  # a layout that fell into one point does not stay there


@given(count=st.integers(1, 5000), most=st.integers(2, 300))
def test_even_choices_hold_both_ends(count, most):
    chosen = even_indices(count, most)
    assert len(chosen) == min(count, most)
    assert chosen[0] == 0
    assert chosen[-1] == count - 1
