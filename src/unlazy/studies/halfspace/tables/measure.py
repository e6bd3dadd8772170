"""Linear models on tangent features, and what a network costs to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from unlazy.data.images import Images
from unlazy.kernels.tangent import tangent_features, tangent_kernel
from unlazy.models.conv import GatedImageNet
from unlazy.models.folding import half_space_normals
from unlazy.runtime import InputError, exact_float32, require
from unlazy.studies.halfspace.tables.settings import HELD_OUT, RIDGES
from unlazy.training.batches import DeviceImages
from unlazy.training.images import now

AT_ONCE = 500


def tangent_model(net: GatedImageNet, train: Images, test: Images, device: str) -> dict[str, Any]:
    """Accuracy of the linearised network f(x) + J(x) theta with theta from exact ridge least squares on one-hot targets.

    All outputs of an image share theta, so every image gives as many rows as there are classes. The ridge is chosen on a tenth
    of the training images; then theta is found anew from all of them.
    """
    net = net.to(device).eval()
    data, held_out = (DeviceImages.put(images, device, standardise=False) for images in (train, test))
    cut = len(data) - max(1, round(HELD_OUT * len(data)))
    with exact_float32():
        gram, target = normal_equations(net, data, range(cut))
        thetas = {ridge: theta for ridge in RIDGES if (theta := solve(gram, target, ridge)) is not None}
        require(len(thetas) > 0, "the tangent features are singular to rounding at every ridge that was tried.")
        tried = linear_accuracies(net, data, range(cut, len(data)), torch.stack(list(thetas.values()), 1))
        more, more_target = normal_equations(net, data, range(cut, len(data)))
        by_ridge = dict(zip(thetas, tried, strict=True))
        ridge = max(by_ridge, key=lambda one: by_ridge[one])
        theta = solve(gram.add_(more), target + more_target, ridge)
        if theta is None:
            raise InputError(f"the tangent features of all images are singular to rounding at ridge {ridge}.")
        return {
            "test_as_trained": linear_accuracies(net, held_out, range(len(held_out)), theta[:, None])[0],
            "train_as_trained": linear_accuracies(net, data, range(min(10_000, len(data))), theta[:, None])[0],
            "ridge": ridge,
            "ridge_at_its_least": ridge == min(RIDGES),
            "held_out_by_ridge": {f"{one:g}": score for one, score in by_ridge.items()},
            "parameters": len(theta),
        }


def trace_model(net: GatedImageNet, train: Images, test: Images, device: str) -> dict[str, Any]:
    """Accuracy of kernel ridge regression on one-hot targets with the trace of the tangent kernel: outputs share one kernel."""
    net = net.to(device).eval()
    data, held_out = (DeviceImages.put(images, device, standardise=False) for images in (train, test))
    x, other = data.floats(data.pixels), held_out.floats(held_out.pixels)
    n = len(data)
    cut = n - max(1, round(HELD_OUT * n))
    with exact_float32(), torch.no_grad():
        kernel, cross = tangent_kernel(net, x), tangent_kernel(net, other, x)
        y = torch.nn.functional.one_hot(data.labels).to(torch.float64)
        by_ridge = {}
        for ridge in RIDGES:
            weights = solve(kernel[:cut, :cut].double(), y[:cut], ridge)
            if weights is not None:
                by_ridge[ridge] = _right(kernel[cut:, :cut].double() @ weights, data.labels[cut:])
        require(len(by_ridge) > 0, "the trace kernel is singular to rounding at every ridge that was tried.")
        ridge = max(by_ridge, key=lambda one: by_ridge[one])
        weights = solve(kernel.double(), y, ridge)
        if weights is None:
            raise InputError(f"the trace kernel of all images is singular to rounding at ridge {ridge}.")
        few = slice(min(10_000, n))
        return {
            "test_as_trained": _right(cross.double() @ weights, held_out.labels),
            "train_as_trained": _right(kernel[few].double() @ weights, data.labels[few]),
            "ridge": ridge,
            "ridge_at_its_least": ridge == min(RIDGES),
            "held_out_by_ridge": {f"{one:g}": score for one, score in by_ridge.items()},
            "parameters": n * y.shape[1],
        }


def solve(gram: Float[Tensor, "p p"], target: Tensor, ridge: float) -> Tensor | None:
    """(gram + ridge mean(diagonal) I)^(-1) target by Cholesky; ``None`` where it breaks down."""
    shifted = gram.clone()
    shifted.diagonal().add_(ridge * gram.diagonal().mean())
    columns = target if target.ndim == 2 else target[:, None]
    factor, failed = torch.linalg.cholesky_ex(shifted)
    if int(failed):
        return None
    found = torch.cholesky_solve(columns, factor)
    return found if target.ndim == 2 else found[:, 0]


def normal_equations(
    net: GatedImageNet, data: DeviceImages, images: range
) -> tuple[Float[Tensor, "p p"], Float[Tensor, "p"]]:
    """J^T J and J^T (y - f) over images and outputs, in float64."""
    size = sum(parameter.numel() for parameter in net.parameters())
    gram = torch.zeros(size, size, dtype=torch.float64, device=data.labels.device)
    target = torch.zeros(size, dtype=torch.float64, device=data.labels.device)
    for features, start, labels in _features(net, data, images):
        wanted = torch.nn.functional.one_hot(labels, start.shape[1]).to(torch.float64)
        rows = features.flatten(0, 1)
        gram.addmm_(rows.T, rows)
        target.addmv_(rows.T, (wanted - start).flatten())
    return gram, target


def linear_accuracies(
    net: GatedImageNet, data: DeviceImages, images: range, thetas: Float[Tensor, "p r"]
) -> list[float]:
    """Share of right answers of f(x) + J(x) theta, for every column theta."""
    right = torch.zeros(thetas.shape[1], dtype=torch.int64, device=thetas.device)
    for features, start, labels in _features(net, data, images):
        right += ((start[..., None] + features @ thetas).argmax(1) == labels[:, None]).sum(0)
    return [int(count) / len(images) for count in right]


def _features(
    net: GatedImageNet, data: DeviceImages, images: range
) -> Iterator[tuple[Float[Tensor, "k o p"], Float[Tensor, "k o"], Int64[Tensor, "k"]]]:
    """Tangent features, outputs and labels, a few images at a time."""
    require(len(images) > 0, "there are no images to look at.")
    for first in range(images.start, images.stop, AT_ONCE):
        rows = slice(first, min(first + AT_ONCE, images.stop))
        x = data.floats(data.pixels[rows])
        with torch.no_grad():
            start = net(x)
        yield tangent_features(net, x).double(), start.double(), data.labels[rows]


def gate_normals(net: GatedImageNet, layers: Sequence[int], count: int = 8, size: int = 32) -> dict[str, Any]:
    """Normals of the first channels' gates at the middle position, ``layer_N`` by layer, as float16 arrays for a figure."""
    found = {}
    for layer in layers:
        probe = torch.zeros(1, net.settings.channels, size, size)
        with torch.no_grad():
            height, width = net.eval().pre_activations(probe)[layer].shape[2:]
        units = [(channel, height // 2, width // 2) for channel in range(count)]
        pictures, _ = half_space_normals(net, layer, units, (size, size))
        scale = pictures.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
        found[f"layer_{layer}"] = (pictures / scale).half().numpy()
    return found


def images_per_second(net: GatedImageNet, images: Images, device: str, repeats: int = 5) -> float:
    """The best of several timed passes over the images, in evaluation mode and float32."""
    data = DeviceImages.put(images, device, standardise=False)
    x = data.floats(data.pixels)
    net = net.to(device).eval()
    taken, cuda = [], torch.device(device).type == "cuda"
    with torch.no_grad():
        for _ in range(repeats + 1):
            started = now(cuda)
            for part in x.split(1000):
                net(part)
            taken.append(now(cuda) - started)
    return len(images) / min(taken[1:])


def _right(scores: Float[Tensor, "n o"], labels: Int64[Tensor, "n"]) -> float:
    return float((scores.argmax(1) == labels).double().mean())
