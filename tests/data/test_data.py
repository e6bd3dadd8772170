"""The circle, by its formula."""

from __future__ import annotations

import math

import pytest
import torch

from unlazy import Circle, Dataset, InputError
from unlazy.data.circle import CIRCLE_PRESETS


def test_circle_equals_its_formula() -> None:
    circle = Circle(n=10, top=2, bottom=6, offset=0.25)
    data = circle.dataset(torch.float64)
    for j in range(10):
        t = 2 * math.pi * (j + 0.25) / 10
        wave = math.sin(2 * t) if t < math.pi else math.sin(2 * math.pi + 6 * (t - math.pi))
        assert data.x[j].tolist() == pytest.approx([math.cos(t), math.sin(t)])
        assert float(data.y[j]) == pytest.approx(wave, abs=1e-12)
        assert bool(data.groups["top"][j]) == (t < math.pi) != bool(data.groups["bottom"][j])


@pytest.mark.parametrize("preset", CIRCLE_PRESETS)
def test_presets_start_at_loss_one_half(preset: str) -> None:
    data = CIRCLE_PRESETS[preset].dataset(torch.float64)
    assert float(data.y.square().mean()) == pytest.approx(0.5, abs=0.01)
    assert int(data.groups["top"].sum()) == len(data) // 2


def test_pilot_preset_is_sin_2t_and_sin_16t() -> None:
    circle = CIRCLE_PRESETS["pilot"]
    t, y = circle.angles(), circle.dataset(torch.float64).y[:, 0]
    torch.testing.assert_close(y, torch.where(t < math.pi, torch.sin(2 * t), torch.sin(16 * t)), atol=1e-12, rtol=0)


def test_fingerprint_sees_every_value() -> None:
    data = Circle(n=20).dataset()
    assert data.fingerprint == Circle(n=20).dataset().fingerprint
    moved = data.y.clone()
    moved[3] += 1e-6
    assert Dataset("circle", data.x, moved).fingerprint != data.fingerprint
    assert data.to(torch.float64).fingerprint != data.fingerprint


def test_bad_data_is_refused() -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3, 1)
    with pytest.raises(InputError, match="1 of the inputs are NaN"):
        Dataset("mine", torch.tensor([[math.nan, 0.0]]), torch.zeros(1, 1))
    with pytest.raises(InputError, match="1 of the targets"):
        Dataset("mine", x, torch.tensor([[0.0], [math.inf], [0.0]]))
    with pytest.raises(InputError, match="3 inputs but targets of shape"):
        Dataset("mine", x, y[:2])
    with pytest.raises(InputError, match="no samples"):
        Dataset("mine", x[:0], y[:0])
