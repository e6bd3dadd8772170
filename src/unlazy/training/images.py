"""Training image networks at the speed of the device: pictures, augmentation and batches stay on it.

On a GPU the forward and backward pass of a step is captured once as a CUDA graph and replayed (small networks and deep narrow
ones are bound by launching kernels, not by computing), in bfloat16 where the recipe says so. On a CPU the same loop runs
plainly in float32. Batch order, flips and crops of an epoch belong to (seed, epoch) and are the same on every device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unlazy.data.images import Images
from unlazy.models.gates import SoftGate
from unlazy.models.image_net import GatedImageNet
from unlazy.runtime import exact_float32, require
from unlazy.store import Writer
from unlazy.training.batches import DeviceImages
from unlazy.training.fit import Progress
from unlazy.training.state import resume_training, training_state, write_measurement

OPTIMISERS = ("sgd", "adam")
SCHEDULES = ("one-cycle", "constant")
PRECISIONS = ("bfloat16", "float32")
EVALUATED_AT_ONCE = 1000


@dataclass(frozen=True)
class ImageRecipe:
    """How to train an image network. ``precision`` counts on a GPU only; ``distil`` is the share of the loss that follows a
    teacher's softened outputs; ``gate_lr`` multiplies the learning rate of the gating branch. ``mixed``: the share of pictures
    that get a patch of another one; only with ``distil=1``, because such a picture has no label of its own. ``whiten``: the ridge
    of a filter that whitens pictures first (:mod:`unlazy.training.whitening`); 0: none.

    ``looks_every``: accuracies are measured after every so many epochs, and always at the end; those on training images on the
    first ``train_probe`` of them (default: all), without augmentation.
    """

    epochs: int
    batch: int = 512
    optimiser: str = "sgd"
    lr: float = 0.3
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: str = "one-cycle"
    warm_up: float = 0.25
    smoothing: float = 0.1
    augment: bool = True
    standardise: bool = True
    precision: str = "bfloat16"
    distil: float = 0.0
    temperature: float = 4.0
    gate_lr: float = 1.0
    mixed: float = 0.0
    whiten: float = 0.0
    looks_every: int | None = None
    train_probe: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)!r}.")
        for name, allowed in (("optimiser", OPTIMISERS), ("schedule", SCHEDULES), ("precision", PRECISIONS)):
            given = getattr(self, name)
            require(given in allowed, f"{name} must be one of {', '.join(allowed)}; got {given!r}.")
        for name in ("lr", "gate_lr"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)!r}.")
        require(0 < self.warm_up < 1, f"warm_up is a share of the steps, between 0 and 1; got {self.warm_up!r}.")
        require(0 <= self.distil <= 1, f"distil is a share of the loss, from 0 to 1; got {self.distil!r}.")
        require(0 <= self.mixed <= 1, f"mixed is a share of the pictures, from 0 to 1; got {self.mixed!r}.")
        require(
            self.mixed == 0 or self.distil == 1,
            "pictures with patches have no label of their own: mixed needs distil=1.",
        )
        require(self.whiten >= 0, f"whiten is a ridge, at least 0; got {self.whiten!r}.")
        require(self.looks_every is None or self.looks_every >= 1, "looks_every must be at least 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``whiten`` is left out if it is 0, so that trainings from before it existed keep their ids."""
        plain = asdict(self)
        return plain if self.whiten else {name: value for name, value in plain.items() if name != "whiten"}

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step: constant, or linearly up over the first part and down on half a cosine."""
        if self.schedule == "constant":
            return self.lr
        turn = self.warm_up * steps
        if step < turn:
            return self.lr * (step + 1) / (turn + 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - turn) / (steps - turn)))


# --- a step --------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_function(net: GatedImageNet, recipe: ImageRecipe, teacher: nn.Module | None, *, autocast: bool) -> Loss:
    """Cross-entropy with smoothed labels, mixed with the distance to a teacher's softened outputs."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        # no cache of cast weights: a captured graph must cast them anew at every replay
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
            logits = net(x)
            wanted = None
            if teacher is not None and recipe.distil > 0:
                with torch.no_grad():
                    wanted = teacher(x)
        hard = F.cross_entropy(logits.float(), y, label_smoothing=recipe.smoothing)
        if wanted is None:
            return hard
        heat = recipe.temperature
        soft = F.kl_div(
            (logits.float() / heat).log_softmax(1),
            (wanted.float() / heat).log_softmax(1),
            reduction="batchmean",
            log_target=True,
        )
        return (1 - recipe.distil) * hard + recipe.distil * heat**2 * soft

    return loss


class _PlainStep:
    """Forward and backward pass of one step, launched kernel by kernel."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        self.net, self.loss = net, loss

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.net.zero_grad(set_to_none=True)
        value = self.loss(x, y)
        value.backward()
        return value.detach()


class _CapturedStep:
    """Forward and backward pass of one step as one CUDA graph, whose memory holds the gradients until the next replay."""

    def __init__(self, net: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.clone(), y.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                net.zero_grad(set_to_none=True)
                loss(self.x, self.y).backward()
        torch.cuda.current_stream().wait_stream(side)
        net.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.value = loss(self.x, self.y)
            self.value.backward()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.value.detach()


def _capture_step(net: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> _CapturedStep | None:
    """The step as a CUDA graph, or ``None`` if capture fails on this network, driver or card; the network is unchanged."""
    with _preserve_statistics(net):
        try:
            return _CapturedStep(net, loss, x, y)
        except RuntimeError:
            torch.cuda.synchronize()
            return None


def _step_bytes(net: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> int:
    """Peak bytes of one step, parameters included. A first step lets cuDNN choose its algorithms."""
    step = _PlainStep(net, loss)
    with _preserve_statistics(net):
        step(x, y)
        net.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(x, y)
        peak = torch.cuda.max_memory_allocated() - before
        net.zero_grad(set_to_none=True)
    return peak + sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())


@contextmanager
def _preserve_statistics(net: nn.Module) -> Iterator[None]:
    """Restore batch-norm statistics after the block."""
    kept = [buffer.clone() for buffer in net.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in zip(net.buffers(), kept, strict=True):
                buffer.copy_(before)


def make_optimiser(net: GatedImageNet, recipe: ImageRecipe, *, fused: bool) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum or Adam; weights of convolutions and dense layers decay, nothing else does.

    Every group carries its ``share`` of the recipe's rate: ``gate_lr`` in the gating branch, and what the network's
    parametrisation asks for.
    """
    by_share: dict[tuple[float, float], list[nn.Parameter]] = {}
    asked = net.rate_multipliers(recipe.optimiser)
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            share = asked[name] * (recipe.gate_lr if name.startswith("gate_layers.") else 1.0)
            decay = recipe.weight_decay if parameter.ndim > 1 else 0.0
            by_share.setdefault((share, decay), []).append(parameter)
    groups = [
        {"params": some, "weight_decay": decay, "share": share, "lr": share * recipe.lr}
        for (share, decay), some in by_share.items()
    ]
    if recipe.optimiser == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr, fused=fused)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.momentum > 0)


# --- the loop ------------------------------------------------------------------------------------


def train_images(
    net: GatedImageNet,
    train: Images,
    test: Images,
    recipe: ImageRecipe,
    *,
    seed: int = 0,
    device: str = "cpu",
    teacher: nn.Module | None = None,
    graphs: bool = True,
    writer: Writer | None = None,
    keep_every: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train ``net`` in place and measure it: a plain table of accuracies, seconds and memory.

    ``test_as_trained`` uses the gates of training, ``test_hard_gates`` the half-spaces; both count in full float32, training
    pictures in the precision of training. ``graphs=False`` launches every kernel by itself. Seconds are those of training alone,
    without measurements and without the capture; peak memory is that of one plain step, parameters included.

    ``writer``: of the run folder that gets every measurement, and network and optimiser after every ``keep_every`` epochs and
    at the end; an interrupted training resumes from the last of these checkpoints, to the same numbers.
    """
    require(teacher is not None or recipe.distil == 0, "distil is a share of what a teacher says: give a teacher.")
    require(teacher is None or recipe.whiten == 0, "a teacher would be shown whitened pictures: distil without whiten.")
    require(keep_every is None or keep_every >= 1, f"keep_every must be at least 1, got {keep_every!r}.")
    require(recipe.batch <= len(train), f"a batch of {recipe.batch} is more than the {len(train)} pictures there are.")
    cuda = torch.device(device).type == "cuda"
    autocast = cuda and recipe.precision == "bfloat16"
    layout = torch.channels_last if autocast else torch.contiguous_format  # tensor cores read bfloat16 channels last
    data, probe, held_out = put_on_device(
        recipe, train, train.take(slice(recipe.train_probe)), test, device=device, layout=layout
    )
    _move(net, device, layout).train()
    if teacher is not None:
        _move(teacher, device, layout).eval()
    loss = loss_function(net, recipe, teacher, autocast=autocast)
    optimiser = make_optimiser(net, recipe, fused=cuda)
    step: _PlainStep | _CapturedStep = _PlainStep(net, loss)
    per_epoch = len(data) // recipe.batch
    step_done, seconds, curve = resume_training(writer, net, optimiser)
    peak = 0
    with benchmark_convolutions():
        if cuda:
            some = data.floats(data.pixels[: recipe.batch]), data.labels[: recipe.batch]
            peak = _step_bytes(net, loss, *some)
            step = (_capture_step(net, loss, *some) if graphs else None) or step
        for epoch in range(step_done // per_epoch, recipe.epochs):
            started = synchronised_time(cuda)
            total = _train_epoch(step, optimiser, data, recipe, seed, epoch)
            seconds += synchronised_time(cuda) - started
            measures, keeps = (_is_due(epoch + 1, every, recipe.epochs) for every in (recipe.looks_every, keep_every))
            numbers: dict[str, Any] = {}
            if measures or keeps:
                numbers = {"epoch": epoch + 1, "loss": _finite_or_none(total / per_epoch)}
            if measures:
                numbers |= measure_accuracies(net, probe, held_out, autocast=autocast)
                curve.append(numbers)
                net.train()
            if writer is not None and numbers:
                kept = training_state(net, optimiser) if keeps else None
                write_measurement(writer, (epoch + 1) * per_epoch, numbers | {"seconds": seconds}, kept)
            if progress is not None:
                progress(epoch + 1, recipe.epochs)
    best = max(curve, key=lambda one: one["test_as_trained"])
    return {
        **{name: value for name, value in curve[-1].items() if name != "epoch"},
        "best_test": best["test_as_trained"],
        "best_epoch": best["epoch"],
        "curve": curve,
        "seconds": round(seconds, 3),
        "seconds_per_epoch": round(seconds / recipe.epochs, 4),
        "steps": per_epoch * recipe.epochs,
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "peak_megabytes": round(peak / 1e6, 1) if cuda else None,
        "precision": "bfloat16" if autocast else "float32",
        "graphs": isinstance(step, _CapturedStep),
    }


def put_on_device(
    recipe: ImageRecipe,
    train: Images,
    *others: Images,
    device: str,
    layout: torch.memory_format = torch.contiguous_format,
) -> list[DeviceImages]:
    """Training pictures and others on the device, prepared as a recipe says; the training pictures decide the whitening."""
    put = [
        DeviceImages.from_images(some, device, standardise=recipe.standardise, layout=layout)
        for some in (train, *others)
    ]
    if recipe.whiten == 0:
        return put
    filter_ = put[0].with_whitening(recipe.whiten).whitening
    return [replace(some, whitening=filter_) for some in put]


def _is_due(epoch: int, every: int | None, last: int) -> bool:
    """Whether this epoch is a multiple of ``every``, or the last one."""
    return epoch == last or (every is not None and epoch % every == 0)


def _train_epoch(
    step: _PlainStep | _CapturedStep,
    optimiser: torch.optim.Optimizer,
    data: DeviceImages,
    recipe: ImageRecipe,
    seed: int,
    epoch: int,
) -> Tensor:
    """Train on all whole batches of one epoch; returns the summed loss, still on the device."""
    count = len(data) // recipe.batch
    total = torch.zeros((), device=data.labels.device)
    batches = data.batches(seed, epoch, recipe.batch, augment=recipe.augment, mixed=recipe.mixed)
    for number, (x, y) in enumerate(batches):
        total += step(x, y)
        for group in optimiser.param_groups:
            group["lr"] = group["share"] * recipe.rate(epoch * count + number, recipe.epochs * count)
        optimiser.step()
    return total


def measure_accuracies(
    net: GatedImageNet, train: DeviceImages, test: DeviceImages, *, autocast: bool = False
) -> dict[str, float]:
    """Accuracies on both sets, as trained and with hard gates; ``autocast`` counts for training pictures only."""
    found = {}
    for name, model in (("as_trained", net), ("hard_gates", net.hard())):
        if name == "as_trained" or isinstance(net.settings.gate, SoftGate):
            found[f"train_{name}"] = accuracy(model, train, autocast=autocast)
            found[f"test_{name}"] = accuracy(model, test)
        else:
            found |= {f"train_{name}": found["train_as_trained"], f"test_{name}": found["test_as_trained"]}
    return found


def accuracy(net: nn.Module, data: DeviceImages, *, autocast: bool = False, mirrored: bool = False) -> float:
    """Share of right answers in evaluation mode, in full float32 unless in bfloat16 (``autocast``).

    ``mirrored``: use the mean of the outputs on a picture and on its mirror image.
    """
    net.eval()
    device = data.labels.device
    right = torch.zeros((), dtype=torch.int64, device=device)
    in_bfloat16 = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
    with torch.no_grad(), exact_float32(), benchmark_convolutions(False), in_bfloat16:
        for start in range(0, len(data), EVALUATED_AT_ONCE):
            rows = slice(start, start + EVALUATED_AT_ONCE)
            pixels = data.pixels[rows]
            outputs = net(data.floats(pixels))
            if mirrored:
                outputs = outputs + net(data.floats(pixels.flip(2)))  # [n, h, w, c]
            right += (outputs.argmax(1) == data.labels[rows]).sum()
    return int(right) / len(data)


@contextmanager
def benchmark_convolutions(tried: bool = True) -> Iterator[None]:
    """Inside the block, cuDNN tries its algorithms once for every shape (``tried``) or chooses by its heuristics."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = tried
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _move(net: nn.Module, device: str, layout: torch.memory_format) -> nn.Module:
    """Move a network to a device, its weights in this memory layout."""
    move: Any = net.to  # torch's annotations forget memory_format
    moved: nn.Module = move(device, memory_format=layout)
    return moved


def synchronised_time(cuda: bool) -> float:
    """The time in seconds, after all work of the GPU is done."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _finite_or_none(value: Tensor) -> float | None:
    """A number for JSON; ``None`` if it is not finite because training diverged."""
    number = float(value)
    return number if math.isfinite(number) else None
