"""When are features finished? Copy the gates at many times, freeze them, and train fresh experts under them.

If a network has found its features by time t, then its gates of that time, frozen, serve newly drawn experts as well as
the gates from the end of training do. The retrained loss is compared with the losses
of fixed kernels of the same time: the overlap kernel and free path values under the copied gates, and the tangent kernel.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import evaluation_mode
from unlazy.kernels.flow import ridge_loss
from unlazy.kernels.overlap import free_path_kernel, overlap_from_gates
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build, build_stack
from unlazy.models.net import GatedNet
from unlazy.models.spec import relu_spec
from unlazy.runtime import Unsupported, require
from unlazy.store import Run
from unlazy.training.ensemble import Member
from unlazy.training.fit import Progress, Recipe, fit, squared_error
from unlazy.training.recorder import FixedSteps, Measure, Probe

Values = NDArray[np.float64]
GATE_KINDS = ("as trained", "hard")
KERNELS = {
    "overlap": "overlap kernel",
    "free_paths": "a free value on every path",
    "tangent": "tangent kernel",
    "linearised": "linearised from there",
}


@dataclass(frozen=True)
class Retraining:
    """How fresh experts are trained under copied gates (Adam, mean squared error), and when they do as well.

    ``gates``: the numbers the network used (``"as trained"``) or the half-spaces they stand for (``"hard"``). ``learned``: a
    loss below this share of the targets' mean square counts as learned, and no better or worse than another such.
    ``factor``: how much more loss than the end's still counts as the same. ``ridge`` and ``kernel_samples`` are those of the
    regressions beside it: relative to the mean diagonal, on so many samples evenly chosen.
    """

    epochs: int = 300
    lr: float = 1e-3
    batch: int = 32
    seed: int = 1000
    gates: str = "as trained"
    factor: float = 2.0
    learned: float = 0.02
    ridge: float = 1e-3
    kernel_samples: int = 250

    def __post_init__(self) -> None:
        require(self.gates in GATE_KINDS, f"gates must be one of {', '.join(GATE_KINDS)}; got {self.gates!r}.")
        require(self.factor >= 1, f"factor must be at least 1, got {self.factor!r}.")
        require(0 <= self.learned < 1, f"learned is a share in [0, 1), got {self.learned!r}.")
        require(self.kernel_samples >= 2, f"kernel_samples must be at least 2, got {self.kernel_samples!r}.")

    def learned_loss(self, data: Dataset) -> float:
        """The loss that counts as learned on these data."""
        return self.learned * float(data.y.double().square().mean())


@dataclass(frozen=True)
class FeaturesFinished:
    """Per copy time and network ``[times, members]``: what fresh experts and fixed kernels make of the features of that time.

    ``at``: for each network the earliest time from which copied gates serve as well as those of the end (t*).
    ``retrained``: final loss of fresh experts; ``epochs_to_learn``: until the learned loss, infinity = never.
    ``kernels``: losses of ridge regression by kernel, see ``KERNELS``.
    """

    times: tuple[float, ...]
    at: Values
    retrained: Values
    epochs_to_learn: Values
    kernels: Mapping[str, Values]
    rule: str

    def __str__(self) -> str:
        """t*, then the curve over copy times (medians over networks)."""
        who = (
            "" if len(self.at) == 1 else f" (median of {len(self.at)} networks, {self.at.min():g} to {self.at.max():g})"
        )
        lines = [f"Features are finished at time {np.median(self.at):g}{who}: {self.rule}."]
        lines.append("   time  fresh experts  " + "  ".join(KERNELS[name] for name in self.kernels))
        for row, time in enumerate(self.times):
            losses = [f"{np.median(values[row]):>{len(KERNELS[name])}.3g}" for name, values in self.kernels.items()]
            lines.append(f"{time:>7g}  {np.median(self.retrained[row]):>13.3g}  " + "  ".join(losses))
        return "\n".join(lines)


def features_finished(
    copies: Mapping[float, nn.Module],
    data: Dataset | tuple[Tensor, Tensor],
    settings: Retraining | None = None,
    *,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> FeaturesFinished:
    """How good the features of a network were at each training time, and when they were finished.

        ``copies``: of one network (or stack) by training time.

    The latest copy counts as the end of training. Networks: a :class:`GatedNet`, single or stacked, or a dense ReLU chain
        made of ``nn.Linear``. All copies are retrained together as members of one stack with the same fresh experts and batches,
        so differences are due to the gates. ``folder`` keeps that run (and lets it resume); by default nothing is kept.
    """
    settings, probe = settings or Retraining(), _as_dataset(data)
    require(len(copies) >= 2, f"need copies of at least two moments, the last being the end; got {len(copies)}.")
    times = sorted(copies)
    nets = [to_gated_net(copies[time], probe.x) for time in times]
    widths = _true_widths([copies[time] for time in times])
    with tempfile.TemporaryDirectory() as nowhere:
        place = Path(nowhere) / "retrained" if folder is None else folder
        run = retrain_experts(nets, probe, settings, place, widths, progress=progress)
        loss, epochs = summarise_retraining(run, probe, settings, len(nets))
    few = take_evenly(probe, settings.kernel_samples)
    losses = [kernel_losses(net, few, settings) for net in nets]
    return FeaturesFinished(
        times=tuple(float(time) for time in times),
        at=find_finish_time(times, loss, settings.factor, settings.learned_loss(probe)),
        retrained=loss,
        epochs_to_learn=epochs,
        kernels={name: np.stack([found[name] for found in losses]) for name in KERNELS},
        rule=f"from then on fresh experts stay within {settings.factor:g} times the loss that the last gates allow"
        + (f", or below {settings.learned_loss(probe):.2g}" if settings.learned else ""),
    )


def find_finish_time(times: Sequence[float], losses: Values, factor: float, learned: float) -> Values:
    """Earliest time from which every loss ``[times, members]`` is at most ``max(factor * the last loss, learned)``.

    A NaN loss counts as not learned; the result is NaN if the last loss is.
    """
    bad = ~(losses <= np.maximum(factor * losses[-1], learned))
    later_too = np.logical_or.accumulate(bad[::-1], axis=0)  # bad at this time or after it, counted from the end
    return np.append(np.asarray(times, dtype=np.float64), np.nan)[later_too.sum(0)]


# --- retraining ----------------------------------------------------------------------------------


def retrain_experts(
    copies: Sequence[GatedNet],
    data: Dataset,
    settings: Retraining,
    folder: str | Path,
    widths: Sequence[int] | None = None,
    *,
    study: str | None = None,
    scale: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train fresh experts under the copied gates, all copies in one stack (copy by copy, members within).

    The gates are replayed sample by sample, so it does not matter what made them: a gating network, or the weights of a ReLU
    net that are then drawn anew. ``widths``: true widths of the layers, if some have padding units (see ``to_gated_net``).
    """
    spec, members = copies[0].settings, copies[0].members or 1
    for net in copies:
        require(net.settings == spec and (net.members or 1) == members, "copies must be of one network or stack.")
    gates = [
        torch.cat(layers) for layers in zip(*(copy_gates(net, data.x, settings.gates) for net in copies), strict=True)
    ]
    seeds = [settings.seed + member for member in range(members)]
    dtype = "float64" if data.x.dtype == torch.float64 else "float32"
    recipe = Recipe(
        spec,
        tuple(Member(seed, settings.lr) for _ in copies for seed in seeds),
        epochs=settings.epochs,
        batch=settings.batch,
        dtype=dtype,
        checkpoint_epochs=100,
    )
    unit = recipe.steps_per_epoch(len(data))
    every_epoch = FixedSteps.at(range(0, settings.epochs * unit + 1, unit))
    start = None
    if widths is not None:
        fresh = build_stack(spec, [member.seed for member in recipe.members], dtype=getattr(torch, dtype))
        start = {f"model/{name}": tensor.numpy() for name, tensor in _rescale_to_fan_in(fresh, widths).items()}
    measures = [Measure(_replayed_loss_probe(gates), every_epoch)]
    return fit(recipe, data, measures, folder, start=start, gates=gates, study=study, scale=scale, progress=progress)


def copy_gates(net: GatedNet, x: Tensor, kind: str) -> list[Float[Tensor, "members n units"]]:
    """The gates of every sample as numbers, with a member axis."""
    with torch.no_grad():
        gates = net.gates(x)
        layers = gates.hard() if kind == "hard" else list(gates)
    stacked = [layer.to(x.dtype) if layer.ndim == 3 else layer.to(x.dtype)[None] for layer in layers]
    return [layer.expand(net.members or 1, *layer.shape[1:]) for layer in stacked]


def summarise_retraining(run: Run, data: Dataset, settings: Retraining, copies: int) -> tuple[Values, Values]:
    """Final loss (median of the last tenth of the epochs: single epochs jump) and epochs to the learned loss, each
    ``[copies, members]``."""
    losses = run.scalars("loss")[1]  # [1 + epochs, copies * members]
    below = losses < settings.learned_loss(data)
    epochs = np.where(below.any(0), below.argmax(0), np.inf)
    final = np.median(losses[-max(1, settings.epochs // 10) :], axis=0)
    return final.reshape(copies, -1), epochs.reshape(copies, -1)


def _replayed_loss_probe(gates: Sequence[Tensor]) -> Probe:
    """The probe that measures the loss of the value branch under fixed gates."""

    def replayed_loss(model: GatedNet, batch: Dataset) -> dict[str, Tensor]:
        """Loss of the value branch under the replayed gates."""
        with torch.no_grad():
            return {"loss": squared_error(model.value(batch.x, gates), batch.y)}

    return replayed_loss


def _rescale_to_fan_in(net: GatedNet, widths: Sequence[int]) -> dict[str, Tensor]:
    """Parameters drawn for the padded width, rescaled to the true number of inputs of each layer."""
    numbers = dict(net.state_dict())
    after_first = [*(f"value_layers.{layer}" for layer in range(1, len(widths))), "readout"]
    for name, fan_in in zip(after_first, widths, strict=True):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in numbers:
                numbers[f"{name}.{part}"] = numbers[f"{name}.{part}"] * (net.settings.width / fan_in) ** 0.5
    return numbers


# --- fixed kernels to compare --------------------------------------------------------------------


def kernel_losses(net: GatedNet, data: Dataset, settings: Retraining) -> dict[str, Values]:
    """Losses of ridge regression with each kernel of the network at this time, one number per member.

    ``overlap`` and ``free_paths`` use the copied gates (soft ones as they are); free paths know where the experts begin and
    whether they have biases. ``tangent`` and ``linearised`` are those of the network with such gates; the latter starts from
    its own output instead of zero.
    """
    net = net.hard() if settings.gates == "hard" else net
    gates = copy_gates(net, data.x, settings.gates)
    constant = net.settings.experts == "constant"
    inputs = data.x.new_ones((len(data), len(data))) if constant else data.x @ data.x.T
    tangent = tangent_kernel(net, data.x)
    with torch.no_grad():
        missing = data.y - net(data.x)
    losses = {
        "overlap": ridge_loss(overlap_from_gates(gates, gates), data.y, settings.ridge),
        "free_paths": ridge_loss(
            free_path_kernel(gates, inputs.double(), net.settings.value_bias), data.y, settings.ridge
        ),
        "tangent": ridge_loss(tangent, data.y, settings.ridge),
        "linearised": ridge_loss(tangent, missing, settings.ridge),
    }
    return {name: np.atleast_1d(loss.numpy()) for name, loss in losses.items()}


def take_evenly(data: Dataset, most: int) -> Dataset:
    """At most ``most`` samples, evenly chosen."""
    return data.take(slice(None, None, -(-len(data) // most)))


# --- foreign networks ----------------------------------------------------------------------------


def to_gated_net(model: nn.Module, x: Tensor) -> GatedNet:
    """A dense ReLU chain as one of our networks, the same function to rounding; ours are returned as they are.

    Layers narrower than the widest are padded with units of weight zero, which are never open and never trained.
    """
    if isinstance(model, GatedNet):
        return model
    chain = _linear_layers(model)
    widths = [layer.out_features for layer in chain[:-1]]
    biased = chain[0].bias is not None
    spec = relu_spec(
        chain[0].in_features, chain[-1].out_features, width=max(widths), depth=len(widths), value_bias=biased
    )
    twin = build(spec, dtype=chain[0].weight.dtype)
    with torch.no_grad(), evaluation_mode(model):
        for ours, theirs in zip([*twin.value_layers, twin.readout], chain, strict=True):
            for name, given in theirs.named_parameters():
                parameter = ours.get_parameter(name).zero_()
                parameter[tuple(slice(0, size) for size in given.shape)] = given
        wanted, found = model(x), twin(x)
    scale = max(1.0, float(wanted.abs().max()))
    if wanted.shape != found.shape or float((wanted - found).abs().max()) > 1e4 * torch.finfo(x.dtype).eps * scale:
        raise _chain_error(model, "it does more than its linear layers and ReLUs in their order")
    return twin


def _linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a chain, in order; raises if they do not form one."""
    chain = [module for module in model.modules() if isinstance(module, nn.Linear)]
    fits = all(a.out_features == b.in_features for a, b in itertools.pairwise(chain))
    if len(chain) < 2 or not fits:
        raise _chain_error(model, "its linear layers do not form a chain")
    if len({layer.bias is None for layer in chain}) > 1:
        raise _chain_error(model, "some of its linear layers have a bias and some have none")
    return chain


def _chain_error(model: nn.Module, why: str) -> Unsupported:
    remedy = "Gates are replayed in dense ReLU chains of nn.Linear, and in GatedNet."
    return Unsupported(type(model).__name__, why, remedy)


def _true_widths(models: Sequence[nn.Module]) -> tuple[int, ...] | None:
    """True widths of the layers of a foreign chain; ``None`` if nothing was padded."""
    foreign = [model for model in models if not isinstance(model, GatedNet)]
    widths = {tuple(layer.out_features for layer in _linear_layers(model)[:-1]) for model in foreign}
    require(len(widths) <= 1, f"copies must be of one network; layers have widths {sorted(widths)}.")
    (common,) = widths or {()}
    return common if len(set(common)) > 1 else None


def _as_dataset(data: Dataset | tuple[Tensor, Tensor]) -> Dataset:
    if isinstance(data, Dataset):
        require(data.y.ndim == 2, "features are timed on one set of targets, [n, outputs].")
        return data
    x, y = data
    return Dataset("data", x, y[:, None] if y.ndim == 1 else y)
