"""Linear models on the tangent features of an untrained image network, fitted exactly by ridge regression."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from unlazy.data.images import Images
from unlazy.kernels.tangent import tangent_features, tangent_kernel
from unlazy.models.image_net import GatedImageNet
from unlazy.runtime import exact_float32, require
from unlazy.studies.table import Rows
from unlazy.studies.trainings import AS_TRAINED
from unlazy.training.batches import DeviceImages

Numbers = dict[str, Any]
HELD_OUT_SHARE = 0.1  # of the training images: to choose a ridge, or a variant of a network
RIDGES = tuple(10.0**-power for power in range(13, 2, -1))  # relative to the mean diagonal
BATCH_IMAGES = 500  # images whose tangent features are in memory at once
TRAIN_SAMPLE = 10_000  # training images on which the training accuracy is measured


def add_linear_model(rows: Rows, found: Mapping[str, Any]) -> None:
    """Add the numbers of a linear model; ``least_ridge`` tells whether a ridge below the chosen one was tried."""
    for images in ("train", "test"):
        share = found[f"{images}_as_trained"]
        rows.add("accuracy", 100 * share, images=images, gates=AS_TRAINED, at="end")
    for ridge, share in found["held_out_by_ridge"].items():
        rows.add("held_out_accuracy", 100 * share, ridge=ridge)
    rows.add_all({"ridge": found["ridge"], "least_ridge": min(RIDGES), "parameters": found["parameters"]})


def fit_tangent_model(net: GatedImageNet, train: Images, test: Images, device: str) -> Numbers:
    """Accuracies of the linearised network f(x) + J(x) theta, with theta from exact ridge regression on one-hot targets.

    All outputs of an image share theta, so every image gives one equation per class. The ridge is chosen on a tenth of the
    training images; theta is then solved again with all of them.
    """
    net = net.to(device).eval()
    data, judged = (DeviceImages.from_images(images, device, standardise=False) for images in (train, test))
    fitted, held_out = split_held_out(len(data))
    with exact_float32():
        gram, target = normal_equations(net, data, fitted)
        thetas = solve_for_ridges(gram, target, RIDGES)
        tried = linear_accuracies(net, data, held_out, torch.stack(list(thetas.values()), 1))
        by_ridge = dict(zip(thetas, tried, strict=True))
        ridge = max(by_ridge, key=lambda one: by_ridge[one])
        more, more_target = normal_equations(net, data, held_out)
        theta = solve_for_ridges(gram.add_(more), target + more_target, (ridge,))[ridge]
        return {
            "test_as_trained": linear_accuracies(net, judged, range(len(judged)), theta[:, None])[0],
            "train_as_trained": linear_accuracies(net, data, range(len(data))[:TRAIN_SAMPLE], theta[:, None])[0],
            "ridge": ridge,
            "held_out_by_ridge": by_ridge,
            "parameters": len(theta),
        }


def fit_trace_kernel_model(net: GatedImageNet, train: Images, test: Images, device: str) -> Numbers:
    """Accuracies of kernel ridge regression on one-hot targets with the trace of the tangent kernel over the outputs."""
    net = net.to(device).eval()
    data, judged = (DeviceImages.from_images(images, device, standardise=False) for images in (train, test))
    x, other, labels = data.floats(data.pixels), judged.floats(judged.pixels), data.labels
    cut = len(split_held_out(len(data))[0])
    with exact_float32(), torch.no_grad():
        kernel, cross = tangent_kernel(net, x), tangent_kernel(net, other, x)
        y = torch.nn.functional.one_hot(labels).to(torch.float64)
        tried = solve_for_ridges(kernel[:cut, :cut].double(), y[:cut], RIDGES)
        by_ridge = {
            one: _share_right(kernel[cut:, :cut].double() @ found, labels[cut:]) for one, found in tried.items()
        }
        ridge = max(by_ridge, key=lambda one: by_ridge[one])
        weights = solve_for_ridges(kernel.double(), y, (ridge,))[ridge]
        return {
            "test_as_trained": _share_right(cross.double() @ weights, judged.labels),
            "train_as_trained": _share_right(kernel[:TRAIN_SAMPLE].double() @ weights, labels[:TRAIN_SAMPLE]),
            "ridge": ridge,
            "held_out_by_ridge": by_ridge,
            "parameters": y.numel(),
        }


def split_held_out(count: int) -> tuple[range, range]:
    """Indices of the training images that are fitted, and of the last tenth, on which the ridge is chosen."""
    cut = count - max(1, round(HELD_OUT_SHARE * count))
    return range(cut), range(cut, count)


def solve_for_ridges(gram: Float[Tensor, "p p"], target: Tensor, ridges: Sequence[float]) -> dict[float, Tensor]:
    """The solution at every ridge at which the system can be solved in float64; raises if there is none."""
    found = {ridge: solution for ridge in ridges if (solution := solve_ridge(gram, target, ridge)) is not None}
    require(len(found) > 0, f"a linear model is singular to rounding at every ridge that was tried: {ridges}.")
    return found


def solve_ridge(gram: Float[Tensor, "p p"], target: Tensor, ridge: float) -> Tensor | None:
    """(gram + ridge mean(diagonal) I)^(-1) target by Cholesky; ``None`` if the factorisation fails."""
    shifted = gram.clone()
    shifted.diagonal().add_(ridge * gram.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(shifted)
    if int(failed):
        return None
    return torch.cholesky_solve(target.reshape(len(target), -1), factor).reshape(target.shape)


def normal_equations(
    net: GatedImageNet, data: DeviceImages, images: range
) -> tuple[Float[Tensor, "p p"], Float[Tensor, "p"]]:
    """J^T J and J^T (y - f) over images and outputs, in float64."""
    size = sum(parameter.numel() for parameter in net.parameters())
    gram = torch.zeros(size, size, dtype=torch.float64, device=data.labels.device)
    target = torch.zeros(size, dtype=torch.float64, device=data.labels.device)
    for features, start, labels in _features_in_batches(net, data, images):
        wanted = torch.nn.functional.one_hot(labels, start.shape[1]).to(torch.float64)
        rows = features.flatten(0, 1)
        gram.addmm_(rows.T, rows)
        target.addmv_(rows.T, (wanted - start).flatten())
    return gram, target


def linear_accuracies(
    net: GatedImageNet, data: DeviceImages, images: range, thetas: Float[Tensor, "p r"]
) -> list[float]:
    """Accuracy of f(x) + J(x) theta for every column theta."""
    right = torch.zeros(thetas.shape[1], dtype=torch.int64, device=thetas.device)
    for features, start, labels in _features_in_batches(net, data, images):
        right += ((start[..., None] + features @ thetas).argmax(1) == labels[:, None]).sum(0)
    return [int(count) / len(images) for count in right]


def _features_in_batches(
    net: GatedImageNet, data: DeviceImages, images: range
) -> Iterator[tuple[Float[Tensor, "k o p"], Float[Tensor, "k o"], Int64[Tensor, "k"]]]:
    """Tangent features, outputs and labels of ``BATCH_IMAGES`` images at a time."""
    require(len(images) > 0, "there are no images to measure on.")
    for first in range(images.start, images.stop, BATCH_IMAGES):
        rows = slice(first, min(first + BATCH_IMAGES, images.stop))
        x = data.floats(data.pixels[rows])
        with torch.no_grad():
            start = net(x)
        yield tangent_features(net, x).double(), start.double(), data.labels[rows]


def _share_right(scores: Float[Tensor, "n o"], labels: Int64[Tensor, "n"]) -> float:
    return float((scores.argmax(1) == labels).double().mean())
