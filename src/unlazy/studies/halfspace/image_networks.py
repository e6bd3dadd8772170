"""Image networks of the two accuracy tables: layouts, models, how one network is trained in a run folder and measured.

The paper gives layouts and, for its first table, Adam at 2e-4; it gives no recipe for the second. Two deviations:

* Networks of five convolutions have batches of 128 at 4e-4 (the rate grows with the square root of the batch), where the group's
  code has 32 at 2e-4: with small batches most of the time goes into launching kernels. Gates are soft, as published; networks
  trained with hard gates are measured besides.
* Residual networks have one modern recipe for all models: SGD, one cycle, flips and crops, smoothed labels. The recipe ``plain``
  has no flips, no crops and no smoothed labels. How gradients pass hard gates was chosen on held-out training images of a smaller
  network, see the study ``hard-gate-search``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unlazy.data.images import Images, load_images
from unlazy.kernels.compare import centered_alignment, kernel_distance, kernel_velocity
from unlazy.kernels.overlap import overlap_kernel
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.image_net import GatedImageNet
from unlazy.models.spec import ImageSpec, conv_spec, resnet34_spec, resnet110_spec
from unlazy.runtime import provenance, require, short_hash
from unlazy.store import Run, Writer
from unlazy.studies.halfspace.image_linear_models import (
    HELD_OUT_SHARE,
    add_linear_model,
    fit_tangent_model,
    fit_trace_kernel_model,
)
from unlazy.studies.study import Work, require_at_least_one
from unlazy.studies.table import Rows
from unlazy.studies.trainings import AS_TRAINED, HARD, is_finished
from unlazy.training.batches import DeviceImages
from unlazy.training.images import ImageRecipe, accuracy, put_on_device, synchronised_time, train_images
from unlazy.training.parallel_images import Stack, train_in_parallel

MODELS = {
    "relu": "ReLU",
    "dlgn": "DLGN, soft gates",
    "pwc": "DLGN-PWC, soft gates",
    "dln": "deep linear",
    "dlgn-hard": "DLGN, hard gates",
    "pwc-hard": "DLGN-PWC, hard gates",
    "relu-wide": "ReLU, as many parameters as the DLGN",
    "tangent": "linear model on tangent features",
    "trace": "ridge on the trace kernel",
}
LINEAR_MODELS = ("tangent", "trace")
MAIN, PLAIN, COST, DECAY = "main", "plain", "cost", "learning-rate decay"  # recipes
DECAY_FACTOR = 0.1  # on the learning rate
TEST, HELD_OUT = "test images", "held-out training images"  # what accuracies are judged on
CHECKPOINT_EPOCHS = 10  # between checkpoints of a residual network


# --- networks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """One case: a model of a layout on data, trained by a recipe from a seed.

    ``recipe``: ``main``; ``plain``, without augmentation and smoothed labels; ``cost``, a few epochs to measure time and memory;
    ``learning-rate decay``, the network of the main recipe trained on for ``decay_epochs`` at a tenth of its rate.
    ``hard_beta``, ``normalised_gates``, ``gate_lr``: slope in the backward pass, scaling and rate factor of hard gates.
    ``measured_at``: epochs after which small networks are measured and checkpointed. ``kernel_images``: how many images of each
    class kernels are measured on. ``teacher``: a network whose outputs are learned besides the labels, with weight ``distil``.
    """

    data: str
    layout: str
    model: str
    epochs: int
    lr: float | None
    seed: int
    recipe: str = MAIN
    variant: str = ""
    judged_on: str = TEST
    images: int = 50_000
    test_images: int = 10_000
    batch: int = 512
    width: float = 1.0
    beta: float = 4.0
    hard_beta: float = 4.0
    normalised_gates: bool = False
    gate_lr: float = 1.0
    gate_bias: bool = True
    augment: bool = True
    weight_decay: float = 5e-4
    whiten: float = 0.0
    mixed: float = 0.0
    distil: float = 0.0
    teacher: Network | None = None
    precision: str = "float32"  # of small networks on a GPU; residual ones have bfloat16
    train_probe: int = 10_000
    measured_at: tuple[int, ...] = ()
    kernel_images: int = 0
    decay_epochs: int = 0

    def __post_init__(self) -> None:
        require(self.model in MODELS, f"unknown model {self.model!r}; there are {', '.join(MODELS)}.")
        require(self.layout in LAYOUTS, f"unknown layout {self.layout!r}; there are {', '.join(LAYOUTS)}.")
        require_at_least_one(self, "images", "test_images", "batch")

    def spec(self, channels: int, classes: int) -> ImageSpec:
        """The architecture; that of a linear model is the ReLU network whose tangent features it uses."""
        base = LAYOUTS[self.layout](self.width, channels=channels, classes=classes)
        if self.model.endswith("hard"):
            return replace(model_spec(base, self.model, self.hard_beta), even_gates=self.normalised_gates)
        return model_spec(base, self.model, self.beta)

    def training(self) -> ImageRecipe:
        """The full recipe of its training."""
        assert self.lr is not None
        recipe = ImageRecipe(self.epochs, self.batch, lr=self.lr, train_probe=min(self.train_probe, self.images))
        if self.layout == "conv":
            adam: Any = {"optimiser": "adam", "schedule": "constant", "weight_decay": 0.0, "precision": self.precision}
            return replace(recipe, **adam, smoothing=0.0, augment=False, standardise=False)
        own = {name: getattr(self, name) for name in ("augment", "weight_decay", "whiten", "mixed", "distil")}
        recipe = replace(recipe, **own, gate_lr=self.gate_lr if self.model.endswith("hard") else 1.0)
        return replace(recipe, augment=False, smoothing=0.0) if self.recipe == PLAIN else recipe


def network_from(*settings: Any, **own: Any) -> Network:
    """A network with these fields; its other fields are taken from the settings, of which later ones win."""
    names = [one.name for one in fields(Network)]
    shared = {name: getattr(some, name) for some in settings for name in names if hasattr(some, name)}
    return Network(**shared | own)


def _residual(widths: tuple[int, ...], blocks: tuple[int, ...], width: float, **sizes: Any) -> ImageSpec:
    return ImageSpec(tuple(round(width * one) for one in widths), blocks, **sizes)


LAYOUTS: Mapping[str, Any] = {
    "conv": lambda width, **sizes: conv_spec(max(2, round(26 * width)), **sizes),
    "resnet-34": lambda width, **sizes: resnet34_spec(width=width, **sizes),
    "resnet-110": lambda width, **sizes: resnet110_spec(width=width, **sizes),
    "small": partial(_residual, (32, 64, 128, 256), (2, 2, 2, 2)),  # ResNet-18 at half its width
    "wide": partial(_residual, (128, 256, 512, 1024), (2, 2, 2, 2)),  # ResNet-18 at twice its width
    "tiny": partial(_residual, (4, 8), (1, 1)),  # for the smoke and desk scales
}


def model_spec(base: ImageSpec, model: str, beta: float) -> ImageSpec:
    """The architecture of a model on a layout, which is given as a linearly gated network."""
    if model in ("relu", *LINEAR_MODELS):
        return base.relu()
    if model == "dln":
        return base.deep_linear()
    if model == "relu-wide":
        return relu_of_equal_size(base)
    experts = "constant" if model.startswith("pwc") else "linear"
    return replace(base, experts=experts, gate=HardGate(beta) if model.endswith("hard") else SoftGate(beta))


@cache
def relu_of_equal_size(base: ImageSpec) -> ImageSpec:
    """The ReLU network of this depth whose number of parameters is nearest to that of the linearly gated network."""
    wanted, own = count_parameters(base), base.relu()
    shares = [1 + extra / 50 for extra in range(51)]
    wider = [replace(own, widths=tuple(round(share * width) for width in base.widths)) for share in shares]
    return min(wider, key=lambda spec: abs(count_parameters(spec) - wanted))


def count_parameters(spec: ImageSpec | Mapping[str, Any]) -> int:
    """The number of trained parameters."""
    return sum(parameter.numel() for parameter in build(spec).parameters())


# --- training ------------------------------------------------------------------------------------------------

Numbers = dict[str, Any]


def load_splits(network: Network, work: Work) -> tuple[Images, Images]:
    """Images to train on and to judge on: both splits, or nine tenths and the last tenth of the training images."""
    train = load_images(network.data, "train", work.data).take(slice(network.images))
    if network.judged_on == HELD_OUT:
        cut = len(train) - round(HELD_OUT_SHARE * len(train))
        return train.take(slice(cut)), train.take(slice(cut, len(train)))
    return train, load_images(network.data, "test", work.data).take(slice(network.test_images))


def build_network(network: Network, train: Images) -> GatedImageNet:
    """The untrained network of a case."""
    net = build(network.spec(int(train.pixels.shape[1]), len(train.classes)), seed=network.seed)
    for name, parameter in net.branch("gate") if not network.gate_bias else ():
        if name.endswith("bias"):
            parameter.requires_grad_(False)  # it stays at zero, where batch-norm starts
    return net


def train_network(network: Network, train: Images, test: Images, work: Work) -> Run:
    """Train a network, resuming from its run folder, and return the finished run. Its teacher is trained first."""
    net, recipe = build_network(network, train), network.training()
    spec = net.spec()
    about: dict[str, Any] = {
        "model_name": network.model,
        "model": spec,
        "training": recipe.to_dict(),
        "seeds": [network.seed],
        "device": work.device,
        "data": f"{train.fingerprint} {test.fingerprint}",
        "looks": list(network.measured_at),
    }
    if network.teacher is not None:
        about["teacher"] = asdict(network.teacher)
    if not network.gate_bias:
        about["gate_bias"] = False
    header = {
        "kind": "train",
        "study": work.study,
        "scale": work.scale,
        "recipe": about,
        "members": [{"seed": network.seed}],
        "model": spec,
        "data": {"name": network.data, "images": len(train), "per_epoch": len(train) // recipe.batch},
        "provenance": provenance("float32", work.device) | {"data_sha256": about["data"]},
    }
    place = network.model if network.layout == "conv" else f"{network.data}-{network.layout}-{network.model}"
    folder = work.runs / f"{place}-{short_hash(about)}"
    while (folder / "status.json").exists() and Run(folder).status()["state"] == "running":
        time.sleep(1)  # another process trains this network, for its own case or as a teacher
    if is_finished(folder):
        return Run(folder)
    with Writer(folder, header) as writer:
        options: Any = {"device": work.device, "progress": work.progress}
        if network.layout == "conv":
            stack = Stack(network.model, [net], [network.seed], writer)
            train_in_parallel([stack], train, test, recipe, measured_epochs=network.measured_at, **options)
        else:
            teacher = network.teacher and load_network(train_network(network.teacher, train, test, work))
            options |= {"seed": network.seed, "teacher": teacher, "keep_every": CHECKPOINT_EPOCHS}
            train_images(net, train, test, recipe, writer=writer, **options)
        writer.finish()
    return Run(folder)


def load_network(run: Run, step: int | None = None) -> GatedImageNet:
    """The network of a run after a number of steps, or at the last checkpoint."""
    net = build(ImageSpec.from_dict(run.header["model"]))
    checkpoint = run.checkpoint(checkpoint_steps(run)[-1] if step is None else step)
    net.load_state_dict({name: torch.as_tensor(checkpoint[f"model/{name}"][0]) for name in net.state_dict()})
    return net.eval()


def checkpoint_steps(run: Run) -> list[int]:
    """Steps at which a run has checkpoints."""
    return [line.step for line in run.lines if line.checkpoint is not None]


def summarise_run(run: Run) -> Numbers:
    """Curve, best epoch, costs and size of a finished run, in the form in which training loops return them."""
    lines: list[Numbers] = [{name: values[0] for name, values in line.scalars.items()} for line in run.lines]
    curve = [one | {"epoch": int(one["epoch"])} for one in lines if "test_as_trained" in one]
    best = max(curve, key=lambda one: one["test_as_trained"])
    recipe, seconds = run.header["recipe"]["training"], curve[-1]["seconds"]
    return {
        **curve[-1],
        "best_test": best["test_as_trained"],
        "best_epoch": best["epoch"],
        "curve": curve,
        "seconds_per_epoch": seconds / recipe["epochs"],
        "steps": run.header["data"]["per_epoch"] * recipe["epochs"],
        "parameters": count_parameters(run.header["model"]),
    }


# --- how a case is measured ----------------------------------------------------------------------------------

GATES = {AS_TRAINED: "as_trained", HARD: "hard_gates"}  # column of the table, name in a training's numbers
COSTS = ("loss", "seconds", "seconds_per_epoch", "steps", "parameters", "peak_megabytes", "best_epoch")


def measure(network: Network, work: Work) -> Rows:
    """Train one network to its end and measure it. Accuracies are in percent."""
    train, test = load_splits(network, work)
    rows = Rows()
    if network.model in LINEAR_MODELS:
        fit = fit_tangent_model if network.model == "tangent" else fit_trace_kernel_model
        add_linear_model(rows, fit(build_network(network, train), train, test, work.device))
    elif network.recipe == COST:
        net = build_network(network, train)
        options: Any = {"seed": network.seed, "device": work.device, "progress": work.progress}
        add_training_numbers(rows, train_images(net, train, test, network.training(), **options))
        rows.add("images_per_second", round(images_per_second(net, test, work.device), 1))
    else:
        run = train_network(network, train, test, work)
        found = train_with_decay(network, run, train, test, work) if network.recipe == DECAY else summarise_run(run)
        add_training_numbers(rows, found)
        if network.layout == "conv":
            add_last_third(rows, found["curve"], network.decay_epochs or network.epochs)
        if network.kernel_images:
            add_kernels(rows, run, first_of_each_class(train, network.kernel_images), work.device)
        if network.variant:
            _, held_out = put_on_device(network.training(), train, test, device=work.device)
            right = accuracy(load_network(run).to(work.device).hard(), held_out, mirrored=True)
            rows.add("mirrored_accuracy", 100 * right, gates=HARD)
    if torch.device(work.device).type == "cuda":
        torch.cuda.empty_cache()  # graphs keep memory of their own
    return rows


def train_with_decay(network: Network, run: Run, train: Images, test: Images, work: Work) -> Numbers:
    """Train the network of a run on at a tenth of its rate, with a fresh Adam, measuring after every epoch."""
    recipe = network.training()
    slower = replace(recipe, lr=DECAY_FACTOR * recipe.lr, epochs=network.decay_epochs)
    stack = Stack("", [load_network(run).to(work.device)], [network.seed])
    every: Any = range(1, slower.epochs + 1)
    return train_in_parallel(
        [stack], train, test, slower, device=work.device, measured_epochs=every, progress=work.progress
    )[""][0]


def add_training_numbers(rows: Rows, found: Mapping[str, Any]) -> None:
    """Add the curve of a training, its numbers at the end and at its best epoch, and its costs."""
    curve = [(one["epoch"], one) for one in with_probe_accuracies(found.get("curve", ()))]
    for epoch, measured in [*curve, ("end", found)]:
        for images in ("train", "test"):
            for gates, name in GATES.items():
                share = measured.get(f"{images}_{name}")
                if share is not None:
                    rows.add("accuracy", 100 * share, images=images, gates=gates, at=epoch)
        if epoch != "end":
            rows.add("loss", measured["loss"], at=epoch)
    if "best_test" in found:
        rows.add("accuracy", 100 * found["best_test"], images="test", gates=AS_TRAINED, at="best epoch")
    for name in COSTS:
        if found.get(name) is not None:
            rows.add(name, found[name], at="end" if name == "loss" else None)


def with_probe_accuracies(curve: Sequence[Mapping[str, Any]]) -> list[Numbers]:
    """The curve with all training accuracies on the same few images; the last one may also exist on all images."""
    return [{**one, "train_as_trained": one.get("probe_as_trained", one.get("train_as_trained"))} for one in curve]


def add_last_third(rows: Rows, curve: Sequence[Mapping[str, Any]], epochs: int) -> None:
    """Add how much accuracies still changed in the last third of a training: rise of the best one, and range, in points."""
    for images in ("train", "test"):
        shares = [(one["epoch"], one.get(f"{images}_as_trained")) for one in with_probe_accuracies(curve)]
        percent = [(epoch, 100 * share) for epoch, share in shares if share is not None]
        before = [value for epoch, value in percent if epoch <= 2 / 3 * epochs]
        after = [value for epoch, value in percent if epoch > 2 / 3 * epochs]
        known = len(before) > 0 and len(after) > 0
        rows.add("last_third_rise", max(after) - max(before) if known else np.nan, images=images)
        rows.add("last_third_range", max(after) - min(after) if known else np.nan, images=images)


def images_per_second(net: GatedImageNet, images: Images, device: str) -> float:
    """Speed of inference: the best of five passes over the images, in evaluation mode and float32."""
    data = DeviceImages.from_images(images, device, standardise=False)
    x = data.floats(data.pixels)
    net = net.to(device).eval()
    taken, cuda = [], torch.device(device).type == "cuda"
    with torch.no_grad():
        for _ in range(6):
            started = synchronised_time(cuda)
            for part in x.split(1000):
                net(part)
            taken.append(synchronised_time(cuda) - started)
    return len(images) / min(taken[1:])  # the first pass warms up


# --- kernels of fixed images along training ------------------------------------------------------------------

KERNELS = ("overlap", "tangent")
TOP_SHARE = 0.01  # of the images: those with the largest entries on the diagonal of a kernel


def first_of_each_class(images: Images, count: int) -> Images:
    """The first ``count`` images of every class, class by class."""
    rows = [torch.nonzero(images.labels == label)[:count, 0] for label in range(len(images.classes))]
    return images.take(torch.cat(rows))


def add_kernels(rows: Rows, run: Run, images: Images, device: str) -> None:
    """Add numbers of the kernels of fixed images at every checkpoint: alignment with the labels, distance from the start,
    velocity, active paths.

    Overlaps count paths through hard gates. The tangent kernel is that of the network as trained; hard gates have no gradient, so
    there it is the kernel of the value parameters. A velocity is stored at the later of its two epochs.
    """
    classes, x = len(images.classes), images.floats().to(device)
    targets = torch.nn.functional.one_hot(images.labels, classes).double()
    steps, per_epoch = checkpoint_steps(run), int(run.header["data"]["per_epoch"])
    epochs = [step / per_epoch for step in steps]
    nets = [load_network(run, step).to(device) for step in steps]
    kernels = {
        "overlap": [overlap_kernel(net, x).cpu() for net in nets],
        "tangent": [tangent_kernel(net, x).float().cpu() for net in nets],
    }
    for kind, found in kernels.items():
        doubles = [kernel.double() for kernel in found]
        for k, kernel in enumerate(doubles):
            moved = {"alignment": centered_alignment(kernel, targets), "distance": kernel_distance(kernel, doubles[0])}
            if k:
                moved["velocity"] = kernel_velocity(doubles[k - 1], kernel, epochs[k] - epochs[k - 1])
            rows.add_all({name: float(value) for name, value in moved.items()}, kernel=kind, at=epochs[k])
    for epoch, overlap, tangent in zip(epochs, *kernels.values(), strict=True):
        rows.add("top_share", top_share(tangent.numpy()), kernel="tangent", at=epoch)
        paths = mean_log_paths(overlap.numpy(), images.labels.numpy(), classes)
        rows.add("log10_paths", paths, label=range(classes), at=epoch)


def top_share(kernel: NDArray[Any]) -> float:
    """The share of the trace that the images with the largest diagonal entries have: ``TOP_SHARE`` if all are equal."""
    largest = np.sort(kernel.diagonal().astype(np.float64))[::-1]
    return float(largest[: max(1, round(TOP_SHARE * len(largest)))].sum() / largest.sum())


def mean_log_paths(overlap: NDArray[Any], labels: NDArray[Any], classes: int) -> list[float]:
    """Per class the mean of log10(active paths) over its images with an active path; -1 if there is none."""
    counts = overlap.diagonal()
    with np.errstate(divide="ignore"):
        logs = np.log10(counts)
    own = [logs[(labels == label) & (counts > 0)] for label in range(classes)]
    return [float(one.mean()) if len(one) else -1.0 for one in own]
