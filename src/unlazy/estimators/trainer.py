"""Train the network of an estimator: a stack of half-space networks whose outputs are averaged into one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from unlazy.estimators.path_sum import Array, PathSum
from unlazy.estimators.stack_gradient import StackGradient
from unlazy.models.build import build_stack
from unlazy.models.dense_layers import Affine, effective_weights
from unlazy.models.gates import HardGate, SoftGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import Init, NetSpec
from unlazy.runtime import require, stream

LEAST_STEPS = 200  # small samples are passed more often, so that training takes at least this many steps
LEAST_EPOCHS = 50
FIRST_DECAY, SECOND_DECAY, SMALL = 0.9, 0.99, 1e-8  # of AdamW
OFFSET_SPREAD = 0.5  # deviation of the gates' biases at the start, so that not all half-spaces begin at the mean row


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of an estimator that decide its training; :class:`unlazy.HalfSpaceClassifier` explains them."""

    width: int
    depth: int
    members: int
    gate: str
    beta: float
    experts: str
    learning_rate: float
    weight_decay: float
    batch_size: int
    epochs: int | None
    early_stopping: bool
    validation_fraction: float
    patience: int
    device: str

    def __post_init__(self) -> None:
        for name in ("width", "depth", "members", "batch_size", "patience"):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            require(whole and int(value) >= 1, f"{name} must be a whole number of at least 1, got {value!r}.")
        require(self.gate in ("hard", "soft"), f"gate must be 'hard' or 'soft', got {self.gate!r}.")
        require(
            self.experts in ("constant", "linear"), f"experts must be 'constant' or 'linear', got {self.experts!r}."
        )
        require(self.learning_rate > 0, f"learning_rate must be positive, got {self.learning_rate!r}.")
        require(self.weight_decay >= 0, f"weight_decay must be at least 0, got {self.weight_decay!r}.")
        require(self.epochs is None or self.epochs >= 1, f"epochs must be at least 1 or None, got {self.epochs!r}.")
        inside = 0 < self.validation_fraction < 1
        require(inside, f"validation_fraction must lie between 0 and 1, got {self.validation_fraction!r}.")

    def epochs_for(self, samples: int) -> int:
        """The number of passes over a sample of this size."""
        if self.epochs is not None:
            return int(self.epochs)
        return max(LEAST_EPOCHS, math.ceil(LEAST_STEPS / math.ceil(samples / self.batch_size)))

    def spec(self, inputs: int, outputs: int) -> NetSpec:
        """The network of one member; no biases in its value branch, so that its output is a sum over whole paths."""
        rule = HardGate(self.beta) if self.gate == "hard" else SoftGate(self.beta)
        return NetSpec(
            inputs,
            outputs,
            width=int(self.width),
            depth=int(self.depth),
            experts=self.experts,
            gate=rule,
            value_bias=False,
            constant_input="one",
            init=Init("he"),
        )


class Trainer:
    """A stack of networks in training, on scaled inputs and targets, by AdamW.

    In float64 where one batch holds all ``rows``, so that a row of weight 2 and the same row twice train alike; in float32
    otherwise, which is faster. The fitted sum over paths is float64 in any case.

    Every random number belongs to ``seed`` and the epoch, so that equal data and settings give equal bits on one device.
    """

    def __init__(self, settings: TrainingSettings, inputs: int, outputs: int, loss: str, seed: int, rows: int) -> None:
        self.settings, self.loss, self.seed, self.inputs, self.outputs = settings, loss, seed, inputs, outputs
        self.dtype = torch.float64 if rows <= settings.batch_size else torch.float32
        self._build()
        self.moments = torch.zeros_like(self.stack.numbers), torch.zeros_like(self.stack.numbers)
        self.steps_done = self.epochs_done = 0
        self.curve: list[float] = []
        self.validation_scores: list[float] = []

    def _build(self) -> None:
        seeds = [self.seed * 1000 + member for member in range(self.settings.members)]
        spec = self.settings.spec(self.inputs, self.outputs)
        self.net: GatedNet = build_stack(spec, seeds, dtype=self.dtype).to(self.settings.device)
        with torch.no_grad():
            for number, layer in enumerate(self.net.gate_layers):
                assert isinstance(layer, Affine)
                assert layer.bias is not None
                drawn = torch.randn(
                    layer.bias.shape, generator=stream(self.seed, "offsets", number), dtype=torch.float64
                )
                layer.bias.copy_(OFFSET_SPREAD * drawn)
        self.stack = StackGradient(self.net)

    def __getstate__(self) -> dict[str, Any]:
        """Without the network, whose parameters are views of one vector: pickle would make copies of them."""
        own = {name: value for name, value in self.__dict__.items() if name not in ("net", "stack")}
        return {**own, "numbers": self.stack.numbers.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        numbers = state.pop("numbers")
        self.__dict__.update(state)
        self._build()
        self.stack.numbers.copy_(numbers)

    @torch.no_grad()
    def train(self, x: Array, y: Array, weights: Array | None, *, epochs: int, decay: bool = True) -> None:
        """Pass over the sample ``epochs`` times; ``decay``: the learning rate falls to 0 along a half cosine.

        With early stopping a part of the sample is held out, and the numbers of the best epoch on it are kept.
        """
        shares = np.ones(len(x)) if weights is None else weights
        each = (
            np.concatenate([x, np.ones((len(x), 1))], axis=1).T,
            y.T,
            shares[None],
        )  # a column for every row of the table
        data = [torch.from_numpy(np.ascontiguousarray(one)).to(self.settings.device, self.dtype) for one in each]
        held: list[Tensor] = []
        if self.settings.early_stopping:
            order = torch.randperm(len(x), generator=stream(self.seed, "held out")).to(self.settings.device)
            count = max(1, round(self.settings.validation_fraction * len(x)))
            require(count < len(x), "early stopping needs at least two samples.")
            held = [one[:, order[:count]] for one in data]
            data = [one[:, order[count:]] for one in data]
        data[2] = data[2] / data[2].mean()
        best, best_numbers, since = math.inf, None, 0
        for epoch in range(epochs):
            self._one_epoch(data, (epoch, epochs) if decay else (0, epochs))
            if not held:
                continue
            out = self.stack.forward(held[0]).mean(0, keepdim=True)
            self.validation_scores.append(self._loss(out, *held[1:]))
            if self.validation_scores[-1] < best:
                best, since, best_numbers = self.validation_scores[-1], 0, self.stack.numbers.clone()
            else:
                since += 1
                if since >= self.settings.patience:
                    break
        if best_numbers is not None:
            self.stack.numbers.copy_(best_numbers)

    def _one_epoch(self, data: list[Tensor], progress: tuple[int, int]) -> None:
        """One pass in random batches of nearly equal size (all samples at once where they fit one batch)."""
        rows = data[0].shape[1]
        count = math.ceil(rows / int(self.settings.batch_size))
        if count > 1:
            order = torch.randperm(rows, generator=stream(self.seed, "order", self.epochs_done)).to(
                self.settings.device
            )
            data = [one[:, order] for one in data]
        outputs = []
        for number, (x, y, weights) in enumerate(zip(*(one.tensor_split(count, 1) for one in data), strict=True)):
            done = (progress[0] + number / count) / progress[1]
            out = self.stack.forward(x)
            outputs.append(out.clone())
            self.stack.backward(x, self._slopes(out, y, weights))
            self._update(self.settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done)))
        self.epochs_done += 1
        self.curve.append(self._loss(torch.cat(outputs, 2), *data[1:]))

    def _update(self, rate: float) -> None:
        """One step of AdamW on all parameters at once."""
        numbers, gradient, (mean, square) = self.stack.numbers, self.stack.gradient, self.moments
        self.steps_done += 1
        mean.lerp_(gradient, 1 - FIRST_DECAY)
        square.mul_(SECOND_DECAY).addcmul_(gradient, gradient, value=1 - SECOND_DECAY)
        spread = square.sqrt().mul_(1 / math.sqrt(1 - SECOND_DECAY**self.steps_done)).add_(SMALL)
        numbers.mul_(1 - rate * self.settings.weight_decay)
        numbers.addcdiv_(mean, spread, value=-rate / (1 - FIRST_DECAY**self.steps_done))

    def _loss(self, out: Float[Tensor, "members o n"], y: Tensor, weights: Tensor) -> float:
        """Weighted mean over samples, and over members: each learns by itself."""
        if self.loss == "squared":
            each = (out - y).square().mean(1)
        elif self.outputs == 1:
            each = F.binary_cross_entropy_with_logits(out, y.expand_as(out), reduction="none")[:, 0]
        else:
            each = -(y * out.log_softmax(1)).sum(1)
        return float((each * weights).mean())

    def _slopes(self, out: Float[Tensor, "members o n"], y: Tensor, weights: Tensor) -> Tensor:
        """The derivatives of the loss of every member by its outputs; ``out`` is overwritten."""
        rows = out.shape[-1]
        if self.loss == "squared":
            return out.sub_(y).mul_(weights * (2 / (rows * self.outputs)))
        shares = out.sigmoid_() if self.outputs == 1 else out.softmax(1)
        return shares.sub_(y).mul_(weights / rows)

    def path_sum(self, x_mean: Array, x_scale: Array, y_mean: Array, y_scale: Array) -> PathSum:
        """The trained stack as one sum over paths, in the units of the raw columns and targets."""
        net = self.net

        def numbers(layer: torch.nn.Module) -> tuple[Array, Array]:
            weight, bias = effective_weights(layer)
            shift = weight.new_zeros(weight.shape[:-1]) if bias is None else bias
            return weight.double().cpu().numpy(), shift.double().cpu().numpy()

        normals: list[Array] = []
        offsets: list[Array] = []
        for layer in net.gate_layers:
            weight, bias = numbers(layer)
            normals.append(weight if not normals else weight @ normals[-1])
            offsets.append(bias if not offsets else (weight @ offsets[-1][..., None])[..., 0] + bias)
        scaled = [normal / x_scale for normal in normals]
        shifted = [offset - normal @ x_mean for offset, normal in zip(offsets, scaled, strict=True)]
        first = numbers(net.value_layers[0])[0]
        linear = self.settings.experts == "linear"
        expert_normals = first / x_scale if linear else None
        experts = -(expert_normals @ x_mean) if expert_normals is not None else first.sum(-1)
        size = int(self.settings.width)
        links = [numbers(layer)[0] for layer in list(net.value_layers)[1:]]
        return PathSum(
            np.stack(scaled, 1),
            np.stack(shifted, 1),
            experts,
            expert_normals,
            np.stack(links, 1) if links else np.zeros((len(first), 0, size, size)),
            numbers(net.readout)[0] * y_scale[:, None] / len(first),
            y_mean,
            None if self.settings.gate == "hard" else float(self.settings.beta),
        )


def named_settings(estimator: Any) -> TrainingSettings:
    """The training settings among an estimator's parameters, checked."""
    return TrainingSettings(**{name: getattr(estimator, name) for name in TrainingSettings.__dataclass_fields__})
