"""Whitened pictures: the filter against a slow twin and a closed form, what it does to smooth pictures, and where it is used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor
from torch.nn import functional as F

from image_cases import QUICK, SMALL, stripes
from unlazy.models.build import build
from unlazy.runtime import InputError
from unlazy.training.batches import DeviceImages
from unlazy.training.images import ImageRecipe, accuracy, put_on_device, train_images
from unlazy.training.whitening import apply_filter, whitening_filter


def smooth(n: int = 60, channels: int = 2, size: int = 16, seed: int = 0) -> Tensor:
    """Pictures whose neighbouring pixels are nearly equal."""
    noise = torch.randn(
        n, channels, size + 8, size + 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    blurred = F.avg_pool2d(F.avg_pool2d(noise, 5, 1), 5, 1)
    return (blurred - blurred.mean()) / blurred.std()


def likeness(pictures: Tensor) -> float:
    """Correlation of pixels with their right neighbours."""
    left, right = pictures[..., :-1].flatten(), pictures[..., 1:].flatten()
    return float(torch.corrcoef(torch.stack([left, right]))[0, 1])


@pytest.mark.parametrize("size", [3, 5])
def test_filter_is_the_middle_row_of_the_whitening_matrix(size: int) -> None:
    pictures, ridge = smooth(20, size=9), 0.05
    n, channels, height, width = pictures.shape
    patches = [
        pictures[k, :, i : i + size, j : j + size].flatten().numpy()
        for k in range(n)
        for i in range(height - size + 1)
        for j in range(width - size + 1)
    ]
    covariance = np.cov(np.array(patches), rowvar=False)
    ridged = covariance + ridge * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    matrix = np.linalg.inv(sqrtm(ridged).real)
    place = np.arange(channels * size * size).reshape(channels, size, size)[:, size // 2, size // 2]
    wanted = torch.from_numpy(matrix[place].reshape(channels, channels, size, size))
    found = whitening_filter(pictures, ridge, size)
    for own, twin in zip(found, wanted, strict=True):  # every channel has a scale of its own
        torch.testing.assert_close(own / own.norm(), twin / twin.norm(), rtol=1e-8, atol=1e-8)
    spread = apply_filter(pictures, found).std((0, 2, 3))
    torch.testing.assert_close(spread, torch.ones_like(spread))


def test_what_neighbours_have_in_common_is_taken_out() -> None:
    pictures, others = smooth(), smooth(seed=1)
    whitening = whitening_filter(pictures, 1e-4)
    assert likeness(others) > 0.9
    assert abs(likeness(apply_filter(others, whitening))) < 0.2


def test_noise_stays_as_it_is() -> None:
    noise = torch.randn(400, 1, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whitening = whitening_filter(noise, 0.1, 5)[0, 0]
    assert whitening[2, 2] == pytest.approx(1, abs=0.02)
    whitening[2, 2] = 0
    assert whitening.abs().max() < 0.02


def test_a_filter_is_linear_and_mirrors_at_the_edges() -> None:
    first, second = smooth(3, seed=1), smooth(3, seed=2)
    whitening = whitening_filter(smooth(), 0.1, 5)
    together = apply_filter(2 * first - second, whitening)
    torch.testing.assert_close(together, 2 * apply_filter(first, whitening) - apply_filter(second, whitening))
    room = np.pad(first[0].numpy(), ((0, 0), (2, 2), (2, 2)), mode="reflect")
    corner = (torch.from_numpy(room[:, :5, :5]) * whitening).sum((1, 2, 3))
    torch.testing.assert_close(apply_filter(first, whitening)[0, :, 0, 0], corner)


@pytest.mark.parametrize(("ridge", "size", "told"), [(0.0, 3, "ridge"), (0.1, 4, "odd"), (0.1, 17, "no patches")])
def test_what_cannot_be_is_refused(ridge: float, size: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        whitening_filter(smooth(2), ridge, size)


@pytest.mark.parametrize("dead", [slice(None), slice(1)])
def test_a_channel_that_never_changes_is_refused(dead: slice) -> None:
    pictures = smooth(4)
    pictures[:, dead] = 0.5
    with pytest.raises(InputError, match="never changes"):
        whitening_filter(pictures, 0.1, 3)


def test_one_patch_is_refused() -> None:
    with pytest.raises(InputError, match="two patches"):
        whitening_filter(smooth(1, size=3), 0.1, 3)


def test_whitened_twice_is_whitened_once() -> None:
    once = DeviceImages.from_images(stripes(40, size=12), "cpu").with_whitening(0.1)
    again = once.with_whitening(0.1).whitening
    assert once.whitening is not None
    assert again is not None
    assert torch.equal(once.whitening, again)


def test_mirrored_pictures_are_mirrored_before_they_are_whitened() -> None:
    """The filter need not be symmetric."""
    data = DeviceImages.from_images(stripes(30, size=12), "cpu").with_whitening(0.1)
    assert data.whitening is not None
    data.whitening[..., 0] += 0.5
    net = build(SMALL, seed=1).eval()
    other = replace(data, pixels=data.pixels.flip(2))
    with torch.no_grad():
        outputs = net(data.floats(data.pixels)) + net(other.floats(other.pixels))
    assert accuracy(net, data, mirrored=True) == float((outputs.argmax(1) == data.labels).double().mean())


def test_teachers_see_no_whitened_pictures() -> None:
    net = build(SMALL, seed=0)
    with pytest.raises(InputError, match="teacher"):
        train_images(
            net, stripes(40, size=12), stripes(20, size=12), replace(QUICK, whiten=0.1, distil=1.0), teacher=net
        )


def test_training_pictures_decide_for_all() -> None:
    train, test = stripes(80, size=12), stripes(40, seed=1, size=12)
    recipe = ImageRecipe(1, whiten=0.1)
    own, other = put_on_device(recipe, train, test, device="cpu")
    plain = DeviceImages.from_images(test, "cpu")
    wanted = apply_filter(plain.floats(plain.pixels), whitening_filter(train.floats(standardise=True), 0.1))
    torch.testing.assert_close(other.floats(other.pixels), wanted, rtol=1e-4, atol=1e-5)
    batch, _ = next(own.batches(0, 0, 10, augment=False))
    torch.testing.assert_close(batch, own.floats(own.pixels[own.epoch_order(0, 0)[:10]]))
    for some in put_on_device(ImageRecipe(1), train, test, device="cpu"):
        assert some.whitening is None


def test_networks_learn_from_whitened_pictures() -> None:
    train, test = stripes(240, size=12), stripes(60, seed=1, size=12)
    recipe = replace(QUICK, whiten=0.1)
    net = build(SMALL, seed=0)
    found = train_images(net, train, test, recipe)
    assert found["test_as_trained"] > 0.8
    _, whitened = put_on_device(recipe, train, test, device="cpu")
    assert accuracy(net, whitened) == found["test_as_trained"]


def test_only_recipes_that_whiten_say_so() -> None:
    """Networks trained before there was a choice keep their ids."""
    assert "whiten" not in ImageRecipe(3).to_dict()
    assert ImageRecipe(**ImageRecipe(3, whiten=0.2).to_dict()).whiten == 0.2
    with pytest.raises(InputError, match="whiten"):
        ImageRecipe(1, whiten=-1.0)
