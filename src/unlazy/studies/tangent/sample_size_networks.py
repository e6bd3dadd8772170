"""The models of the sample-size study, and how they are trained.

Three models from one start, many seeds as one stack: the network, its linearisation, and one with adaptive features. The
linearised network is f_0(x) + J(x) d with a change d of every layer's weights. *Fixed*: d is what is trained. *Adaptive*:
d = M_1 W M_2 for dense layers, and for convolutions one factor each for the output channels, the input channels and the nine
places of the kernel; all factors begin as identities and W at 0, a bias is changed by M_1 b. J d is computed layer by layer
beside the forward pass, with the gates of f_0.

Every model is trained until its test accuracy has not risen for a while. On a GPU a step (picking the batches, forward,
backward, update) is captured once as a CUDA graph and replayed: such small networks are bound by launching kernels. On a CPU
the same step runs plainly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from unlazy.data.images import Images, load_images
from unlazy.runtime import exact_float32, require, short_hash, stream
from unlazy.store import Run
from unlazy.studies.study import Work
from unlazy.studies.trainings import is_finished, open_run, seeds_in_recipe
from unlazy.training.ensemble import Member, batch_order

# --- models --------------------------------------------------------------------------------------------------

KINDS = ("fixed", "adaptive", "full")
Weights = list[tuple[Tensor, Tensor]]  # weight [S, outputs, inputs, ...] and bias [S, outputs] of every layer


@dataclass(frozen=True)
class Layout:
    """Convolutions of these channels (3 x 3, each with ReLU and a 2 x 2 mean), then dense layers of these widths."""

    shape: tuple[int, int, int]
    channels: tuple[int, ...]
    widths: tuple[int, ...]
    outputs: int = 10

    def weights(self) -> list[tuple[int, ...]]:
        """The shape of every layer's weight: four axes for convolutions, two for dense layers."""
        convolutions = list(zip(self.channels, (self.shape[0], *self.channels), strict=False))
        halved = 2 ** len(self.channels)
        flat = (self.channels or self.shape[:1])[-1] * (self.shape[1] // halved) * (self.shape[2] // halved)
        dense = zip((*self.widths, self.outputs), (flat, *self.widths), strict=True)
        return [(after, before, 3, 3) for after, before in convolutions] + list(dense)


HE, LECUN = "he", "lecun"
"""Starts. *he*: weights N(0, 2 / fan-in) and PyTorch's default biases, as in the authors' script for Figures 1 and 3. *lecun*:
weights of variance 1 / fan-in from a normal cut off at two deviations, biases 0: flax's default, as in their script for Figure 4.
From PyTorch's default weights the first epochs bring nothing, and the stopping rule ends all training."""
CUT_DEVIATION = 0.8796256610342398  # of a standard normal that is cut off at -2 and 2


def draw_start(layout: Layout, seeds: Sequence[int], device: str, start: str = HE) -> Weights:
    """The weights and biases at which every seed starts."""
    found = []
    for place, shape in enumerate(layout.weights()):
        fan_in, random = math.prod(shape[1:]), [stream(seed, "sample-size", place) for seed in seeds]
        if start == LECUN:
            parts = [torch.nn.init.trunc_normal_(torch.empty(shape), a=-2, b=2, generator=draws) for draws in random]
            weights, biases = (
                torch.stack(parts) / (CUT_DEVIATION * math.sqrt(fan_in)),
                torch.zeros(len(seeds), shape[0]),
            )
        else:
            weights = torch.stack([torch.randn(shape, generator=draws) for draws in random]) * math.sqrt(2 / fan_in)
            uniform = torch.stack([2 * torch.rand(shape[0], generator=draws) - 1 for draws in random])
            biases = uniform / math.sqrt(fan_in)
        found.append((weights.to(device), biases.to(device)))
    return found


@dataclass(frozen=True)
class StartStates:
    """What the network at the start makes of some images: the input and the gates of every layer, and the outputs."""

    inputs: list[Tensor]
    gates: list[Tensor]
    outputs: Tensor


class Stack:
    """One kind of model for all seeds: its parameters, and its outputs ``[S, n, 10]``."""

    def __init__(self, kind: str, layout: Layout, seeds: Sequence[int], device: str = "cpu", start: str = HE) -> None:
        self.kind, self.base = kind, draw_start(layout, seeds, device, start)
        self.trained: list[tuple[Tensor, ...]] = [self._initial(weight, bias) for weight, bias in self.base]
        for tensor in self.parameters():
            tensor.requires_grad_()

    def _initial(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        """The trained tensors of a layer at the start: (W, b), and for adaptive features the factors after them."""
        if self.kind == "full":
            return weight.clone(), bias.clone()
        changes = torch.zeros_like(weight), torch.zeros_like(bias)
        if self.kind == "fixed":
            return changes
        sizes = (*weight.shape[1:3], *([9] if weight.ndim == 5 else []))
        factors = [torch.eye(n, device=weight.device).repeat(len(weight), 1, 1) for n in sizes]
        return (*changes, *factors)

    def parameters(self) -> list[Tensor]:
        """Every tensor that is trained."""
        return [tensor for layer in self.trained for tensor in layer]

    def __call__(self, x: Float[Tensor, "s n c h w"]) -> Float[Tensor, "s n o"]:
        """Outputs for training: dense factors are applied to the data, which has few rows, not multiplied with each other."""
        return self._outputs(self.base, self.trained, x)

    @torch.no_grad()
    def outputs(self, x: Float[Tensor, "n c h w"], at_once: int) -> Float[Tensor, "s n o"]:
        """Outputs for many images that all seeds share: factors are multiplied first, and convolutions run seed by seed."""
        changes = [layer_change(layer) for layer in self.trained]
        seeds = len(self.base[0][0])
        groups = [slice(one, one + 1) for one in range(seeds)] if self.base[0][0].ndim == 5 else [slice(seeds)]
        found = []
        with exact_float32():
            for own in groups:
                moved, base = ([(weight[own], bias[own]) for weight, bias in layers] for layers in (changes, self.base))
                some = [part.expand(len(moved[0][0]), *part.shape) for part in x.split(at_once)]
                found.append(torch.cat([self._outputs(base, moved, part) for part in some], 1))
        return torch.cat(found)

    @torch.no_grad()
    def start_states(self, x: Float[Tensor, "n c h w"]) -> StartStates | None:
        """What f_0 makes of images that all seeds share, for :meth:`outputs_from`; ``None`` unless linearised and all dense."""
        if self.kind == "full" or self.base[0][0].ndim == 5:
            return None
        inputs, gates, h = [], [], x.flatten(1).expand(len(self.base[0][0]), -1, -1)
        with exact_float32():
            for weight, bias in self.base:
                inputs.append(h)
                output = _affine(h, weight, bias)
                gates.append(output > 0)
                h = output.relu()
        return StartStates(inputs, gates[:-1], output)

    @torch.no_grad()
    def outputs_from(self, states: StartStates) -> Float[Tensor, "s n o"]:
        """The outputs for the images of ``states``: what f_0 makes of them is not computed again."""
        moved = None
        with exact_float32():
            for place, (layer, (weight, _)) in enumerate(zip(self.trained, self.base, strict=True)):
                own = _affine(states.inputs[place], *layer_change(layer))
                moved = own if moved is None else torch.baddbmm(own, moved, weight.mT)
                if place < len(states.gates):
                    moved *= states.gates[place]
        assert moved is not None
        return states.outputs + moved

    def _outputs(self, base: Weights, trained: Sequence[tuple[Tensor, ...]], x: Tensor) -> Tensor:
        return network_outputs(trained, x) if self.kind == "full" else linearised_outputs(base, trained, x)


def layer_change(layer: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The change of a layer's weight and bias: its factors multiplied out."""
    weight, bias, *factors = layer
    if not factors:
        return weight, bias
    moved_bias = (factors[0] @ bias[..., None])[..., 0]
    if len(factors) == 2:
        return factors[0] @ weight @ factors[1], moved_bias
    places = weight.flatten(3) @ factors[2][:, None]  # [S, outputs, inputs, 9]
    channels = torch.einsum("soi,sipq,spr->sorq", factors[0], places, factors[1])
    return channels.view_as(weight), moved_bias


def network_outputs(layers: Sequence[tuple[Tensor, ...]], x: Tensor) -> Tensor:
    """Outputs of the network itself."""
    h = x
    for place, (weight, bias) in enumerate(layers):
        h = _affine(_arrange(h, weight), weight, bias)
        if place + 1 < len(layers):
            h = _pool(h.relu(), weight)
    return h


def linearised_outputs(base: Weights, trained: Sequence[tuple[Tensor, ...]], x: Tensor) -> Tensor:
    """Outputs f_0 + J d: the change that every layer adds, and those of earlier layers carried on by the weights of f_0."""
    h, moved = x, None
    for place, ((weight, bias), layer) in enumerate(zip(base, trained, strict=True)):
        own, h = _change_and_output(_arrange(h, weight), layer, weight, bias)
        moved = own if moved is None else own + _affine(_arrange(moved, weight), weight, None)
        if place + 1 < len(base):
            open_units = (h > 0).to(h)
            h, moved = _pool(h * open_units, weight), _pool(moved * open_units, weight)
    assert moved is not None
    return h + moved


def _change_and_output(h: Tensor, layer: Sequence[Tensor], weight: Tensor, bias: Tensor) -> list[Tensor]:
    """The layer's change applied to its input, and its output. The factors of a dense layer are applied one after another."""
    if weight.ndim == 5:
        return _convolve(h, layer_change(layer), (weight, bias))
    changed_weight, changed_bias, *factors = layer
    if not factors:
        return [_affine(h, changed_weight, changed_bias), _affine(h, weight, bias)]
    left, right = factors
    return [_affine(h @ right.mT, changed_weight, changed_bias) @ left.mT, _affine(h, weight, bias)]


def _affine(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A layer applied to ``h``: dense for ``[S, n, i]``, or a convolution of ``[n, S c, height, width]``."""
    if weight.ndim == 5:
        return _convolve(h, (weight, bias))[0]
    return h @ weight.mT if bias is None else torch.baddbmm(bias[:, None], h, weight.mT)


def _convolve(h: Tensor, *layers: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Convolutions of ``[n, S c, height, width]``, every seed a group of channels."""
    if h.is_cuda and len(layers[0][0]) > 1:
        return convolve_by_windows(h, *layers)
    return [
        F.conv2d(h, weight.flatten(0, 1), None if bias is None else bias.flatten(), padding=1, groups=len(weight))
        for weight, bias in layers
    ]


def convolve_by_windows(h: Tensor, *layers: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """The same convolutions as products of matrices: faster on GPUs, slower on CPUs."""
    seeds, inputs = layers[0][0].shape[0], layers[0][0].shape[2]
    n, _, height, width = h.shape
    padded = F.pad(h, (1, 1, 1, 1)).unflatten(1, (seeds, inputs))
    windows = padded.unfold(3, 3, 1).unfold(4, 3, 1)  # [n, S, inputs, height, width, 3, 3]
    rows = windows.permute(1, 0, 3, 4, 2, 5, 6).reshape(seeds, n * height * width, inputs * 9)
    products = [_affine(rows, weight.flatten(2), bias) for weight, bias in layers]
    return [
        found.unflatten(1, (n, height, width)).permute(1, 0, 4, 2, 3).reshape(n, -1, height, width)
        for found in products
    ]


def _arrange(h: Tensor, weight: Tensor) -> Tensor:
    """Images ``[S, n, c, height, width]`` or a layer's outputs, in the shape that the layer with this weight needs."""
    if h.ndim == 5:
        return h.flatten(2) if weight.ndim == 3 else h.transpose(0, 1).flatten(1, 2)
    if h.ndim == 4 and weight.ndim == 3:  # from the last convolution to the first dense layer
        return h.reshape(len(h), len(weight), -1).transpose(0, 1)
    return h


def _pool(h: Tensor, weight: Tensor) -> Tensor:
    """The 2 x 2 mean after a convolution; nothing after a dense layer."""
    return h if weight.ndim == 3 else F.avg_pool2d(h, 2)


# --- training ------------------------------------------------------------------------------------------------

PATIENCE = 20
RATES = {"sgd": 0.01, "adam": 1e-3}
MOMENTUM = 0.9
AT_ONCE, CONVOLVED_AT_ONCE = 2000, 250  # test images in one forward pass
SMALL_BATCH, BATCH = 25, 50  # for up to 125 training images, and above


@dataclass(frozen=True)
class Task:
    """A data set, its network, its optimiser, and the sizes of training sets; ``tested``: how many test images.

    ``seeds``: the most seeds of a task that takes longer than the others.
    """

    data: str
    layout: Layout
    optimiser: str
    sizes: tuple[int, ...]
    tested: int
    seeds: int | None = None

    def __str__(self) -> str:
        return f"{self.data}-{self.optimiser}"

    @property
    def start(self) -> str:
        """Which start the networks have."""
        return HE

    @property
    def draws_every_epoch(self) -> bool:
        """Whether every epoch has images of its own."""
        return False


@dataclass(frozen=True)
class ScriptTask(Task):
    """A task as in the authors' public script, with its start. ``redrawn``: every epoch has ``size`` images of its own, drawn
    from all training images, as the script does; otherwise one set of ``size`` images is trained on throughout."""

    redrawn: bool = True

    def __str__(self) -> str:
        sizes = "-".join(str(size) for size in self.sizes)
        return f"{super().__str__()}-{'redrawn' if self.redrawn else 'fixed'}-{sizes}"

    @property
    def start(self) -> str:
        """Which start the networks have."""
        return LECUN

    @property
    def draws_every_epoch(self) -> bool:
        """Whether every epoch has images of its own."""
        return self.redrawn


@dataclass(frozen=True)
class ModelCase:
    """One case: one kind of model on all training sets of a task, all seeds as one stack."""

    task: Task
    kind: str
    seeds: tuple[int, ...]
    epochs: int

    @property
    def members(self) -> list[Member]:
        """The members of the stack, one a seed."""
        return [Member(seed, RATES[self.task.optimiser]) for seed in self.seeds]

    def recipe(self, size: int) -> dict[str, object]:
        """Everything that decides the numbers, except the machine: runs made on another machine are found."""
        task = {name: value for name, value in asdict(self.task).items() if name not in ("sizes", "seeds")}
        own = {"kind": self.kind, "size": size, "seeds": seeds_in_recipe(self.seeds), "epochs": self.epochs}
        rates = {"rate": RATES[self.task.optimiser], "momentum": MOMENTUM, "patience": PATIENCE}
        return {"study": "sample-size", "task": task, **own, **rates}

    def folder(self, size: int, runs: Path) -> Path:
        """The run folder of the training set of this size."""
        return runs / f"{self.task}-{size}-{self.kind}-{short_hash(self.recipe(size))}"


def train(case: ModelCase, size: int, work: Work) -> Run:
    """The finished run: ``errors [S, epochs, 2]`` on both halves of the test images. An interrupted training starts again."""
    folder, task = case.folder(size, work.runs), case.task
    if is_finished(folder):
        return Run(folder)
    data = {"name": task.data, "options": {"images": size}, "fingerprint": None}
    about = {"recipe": case.recipe(size), "model": asdict(task.layout), "data": data}
    with open_run(folder, work, case.members, **about) as writer:
        errors = train_until_patience_ends(case, size, work)
        writer.record(errors.shape[1], {}, {"errors": errors}, None)
        writer.finish()
    return Run(folder)


def train_until_patience_ends(case: ModelCase, size: int, work: Work) -> NDArray[np.float64]:
    """Train until no seed has improved for ``PATIENCE`` epochs. Returns the errors after every epoch, ``[S, epochs, 2]``."""
    task, seeds, device = case.task, list(case.seeds), work.device
    images = load_images(task.data, "train", work.data)
    test = load_images(task.data, "test", work.data).take(slice(task.tested))
    require(size <= len(images), f"{task.data} has {len(images)} images, not {size}.")
    x, labels = (tensor.to(device) for tensor in draw_subsets(images, size, seeds))
    test_x, test_labels = test.floats().to(device), test.labels.to(device)
    model = Stack(case.kind, task.layout, seeds, device, task.start)
    descent = Descent(model, task.optimiser, x, labels, batch_size(size))
    at_once = CONVOLVED_AT_ONCE if task.layout.channels else AT_ONCE
    states = model.start_states(test_x)
    history: list[Tensor] = []
    for epoch in range(case.epochs):
        if epoch > 0 and task.draws_every_epoch:
            descent.replace_images(*draw_subsets(images, size, seeds, epoch))
        descent.epoch(batch_order(case.members, epoch, size))
        outputs = model.outputs(test_x, at_once) if states is None else model.outputs_from(states)
        wrong = (outputs.argmax(-1) != test_labels).double()  # [S, tests]
        history.append(torch.stack([half.mean(1) for half in wrong.tensor_split(2, 1)], 1).cpu())
        errors = torch.stack(history, 1).numpy()
        if all(is_patience_over(own) for own in errors):
            break
    return errors


def batch_size(size: int) -> int:
    """Images in a batch, for a training set of this size."""
    return min(size, SMALL_BATCH if size <= 125 else BATCH)


class Descent:
    """Trains a model on its images ``[S, n, ...]``, epoch by epoch."""

    def __init__(self, model: Stack, optimiser: str, x: Tensor, labels: Tensor, batch: int) -> None:
        self.model, self.x, self.labels, self.batch = model, x, labels, batch
        self.optimiser: torch.optim.Optimizer
        if optimiser == "adam":
            self.optimiser = torch.optim.Adam(model.parameters(), lr=RATES["adam"], capturable=x.is_cuda)
        else:
            self.optimiser = torch.optim.SGD(model.parameters(), lr=RATES["sgd"], momentum=MOMENTUM)
        self.own = torch.arange(len(x), device=x.device)[:, None]
        self.order = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
        self.place = torch.zeros((), dtype=torch.int64, device=x.device)
        self.graph: torch.cuda.CUDAGraph | None = None  # only on a GPU
        self._prepare()

    def replace_images(self, x: Tensor, labels: Tensor) -> None:
        """Train on other images from now on, as many as before."""
        self.x.copy_(x)
        self.labels.copy_(labels)

    def epoch(self, order: Int[Tensor, "s n"]) -> None:
        """All batches of an epoch in this order; the last may be smaller."""
        self.order.copy_(order)
        self.place.zero_()
        whole, rest = divmod(order.shape[1], self.batch)
        for _ in range(whole):
            if self.graph is None:
                self._step(self.batch)
            else:
                self.graph.replay()
        if rest:
            self._step(rest)

    def _step(self, batch: int) -> None:
        """One step on the next ``batch`` images of the order."""
        some = self.order[:, self.place + torch.arange(batch, device=self.order.device)]
        out = self.model(self.x[self.own, some])
        loss = F.cross_entropy(out.flatten(0, 1), self.labels[self.own, some].flatten(), reduction="sum") / batch
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.place += batch

    def _prepare(self) -> None:
        """Take trial steps, so that the optimiser has its buffers; on a GPU capture a step; then restore all numbers."""
        before = [tensor.detach().clone() for tensor in self.model.parameters()]
        if self.x.is_cuda:
            self._capture_graph()
        else:
            self._step(self.batch)
        with torch.no_grad():
            for tensor, old in zip(self.model.parameters(), before, strict=True):
                tensor.copy_(old)
                for value in self.optimiser.state[tensor].values():
                    value.zero_()

    def _capture_graph(self) -> None:
        """Capture one step as a CUDA graph, after three trial steps on a side stream."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.place.zero_()
                self._step(self.batch)
        torch.cuda.synchronize()
        self.optimiser.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step(self.batch)
        torch.cuda.synchronize()


def draw_subsets(
    images: Images, size: int, seeds: list[int], epoch: int = 0
) -> tuple[Float[Tensor, "s n c h w"], Tensor]:
    """Training images and labels of every seed, others for every ``epoch``; a larger set of a seed contains its smaller ones."""
    names = ("subset", epoch) if epoch else ("subset",)
    chosen = [torch.randperm(len(images), generator=stream(seed, *names))[:size] for seed in seeds]
    return torch.stack([images.take(rows).floats() for rows in chosen]), torch.stack([images.labels[r] for r in chosen])


def is_patience_over(errors: NDArray[np.float64]) -> bool:
    """Whether a seed may stop, judged on all test images and on their first half (``errors [epochs, 2]``)."""
    return all(best_epoch(series)[1] for series in (errors.mean(1), errors[:, 0]))


def best_epoch(errors: NDArray[np.float64]) -> tuple[int, bool]:
    """The best epoch before the first ``PATIENCE`` epochs without a better one, and whether there were such epochs."""
    best = 0
    for epoch in range(len(errors)):
        if errors[epoch] < errors[best]:
            best = epoch
        if epoch - best >= PATIENCE:
            return best, True
    return best, False
