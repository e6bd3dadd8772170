"""The network linearised at its start: trained with the same Adam on the same batches, or by the flow of its kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import runtime
from unlazy.data.dataset import Dataset
from unlazy.kernels.flow import kernel_flow
from unlazy.kernels.tangent import tangent_features
from unlazy.models.build import build
from unlazy.models.net import GatedNet
from unlazy.runtime import short_hash
from unlazy.store import Writer
from unlazy.studies.halfspace.moments import Nets
from unlazy.studies.trainings import is_finished
from unlazy.training.ensemble import Member, MemberAdam, batch_order

STUDY = "spectral-bias"
FLOW_TIMES = np.logspace(-2, 10, 241)  # in units in which the kernel's largest eigenvalue decays at rate one
# This linearisation needs hundreds of epochs for the top half alone; looked at no longer than its network, it says nothing.
LONGER = {"pilot-relu": 4}
Curves = dict[str, NDArray[np.float64]]


def start_of(nets: Nets, member: Member) -> GatedNet:
    """One network before training."""
    spec = nets.spec()
    return build(spec if member.beta is None else spec.with_beta(member.beta), seed=member.seed)


def linear_epochs(nets: Nets) -> int:
    """How long the linearisation is trained: as long as the network, or longer where that tells nothing."""
    return nets.epochs * LONGER.get(nets.key, 1)


def train_linearised(
    features: Float[Tensor, "n p"],
    start: Float[Tensor, " n"],
    data: Dataset,
    member: Member,
    epochs: int,
    batch: int,
) -> Float[Tensor, "times n"]:
    """Outputs after every epoch of f = f_0 + features . change, the change trained as the network is: the same Adam, the
    same batches. One seed at a time: its features stay in the processor's cache."""
    change, mean, square = (torch.zeros_like(features[0]) for _ in range(3))
    decay, square_decay = MemberAdam.decay, MemberAdam.square_decay
    missing, outputs, step = data.y[:, 0] - start, [start], 0
    for epoch in range(epochs):
        for some in batch_order([member], epoch, len(data))[0].split(batch):
            rows, step = features[some], step + 1
            gradient = rows.T @ (rows @ change - missing[some]) * (2 / len(some))
            mean.lerp_(gradient, 1 - decay)
            square.mul_(square_decay).addcmul_(gradient, gradient, value=1 - square_decay)
            root = square.sqrt().div_((1 - square_decay**step) ** 0.5).add_(MemberAdam.epsilon)
            change.addcdiv_(mean, root, value=-member.lr / (1 - decay**step))
        outputs.append(start + features @ change)
    return torch.stack(outputs)


def losses_by_half(outputs: Float[Tensor, "*times n"], data: Dataset) -> Mapping[str, Float[Tensor, "*times"]]:
    """``loss``, ``loss_top`` and ``loss_bottom`` of outputs at many times."""
    error = (outputs - data.y[:, 0]).square()
    return {"loss": error.mean(-1)} | {
        f"loss_{half}": error[..., inside].mean(-1) for half, inside in data.groups.items()
    }


def linearised_run(nets: Nets, runs: Path, scale: str) -> None:
    """Train every seed's linearisation and keep the curves as a run; one that is finished stays as it is."""
    folder, data, recipe = linearised_folder(nets, runs), nets.data(), nets.recipe()
    if is_finished(folder):
        return
    plain = _recipe(nets)
    header = {
        "kind": "train",
        "study": STUDY,
        "scale": scale,
        "recipe": plain,
        "members": [member.to_dict() for member in recipe.members],
        "model": recipe.model.to_dict(),
        "data": data.describe(),
    }
    with runtime.threads(recipe.threads):
        header["provenance"] = runtime.provenance(recipe.dtype)
        with Writer(folder, header) as writer:
            curves = [_curves_of(nets, member, data) for member in recipe.members]
            for epoch in range(linear_epochs(nets) + 1):
                here = {name: np.array([curve[name][epoch] for curve in curves]) for name in curves[0]}
                writer.record(epoch * nets.unit(), here)
            writer.finish()


def _curves_of(nets: Nets, member: Member, data: Dataset) -> Curves:
    net = start_of(nets, member)
    features = tangent_features(net, data.x)[:, 0]
    with torch.no_grad():
        start = net(data.x)[:, 0]
    outputs = train_linearised(features, start, data, member, linear_epochs(nets), nets.batch)
    return {name: loss.double().numpy() for name, loss in losses_by_half(outputs, data).items()}


def linearised_folder(nets: Nets, runs: Path) -> Path:
    return runs / STUDY / f"{nets.key}-linearised-{short_hash(_recipe(nets))}"


def _recipe(nets: Nets) -> dict[str, object]:
    same = replace(nets.recipe(), epochs=linear_epochs(nets))
    return {"linearised": same.to_dict(nets.data(), nets.measures())}


def flow_curves(nets: Nets) -> Curves:
    """``[times, seeds]``: losses under gradient flow with the tangent kernel of the start, at ``FLOW_TIMES``."""
    data = nets.data().to(torch.float64)
    seen: list[Mapping[str, Tensor]] = []
    for member in nets.recipe().members:
        net = start_of(nets, member).double()
        rows = tangent_features(net, data.x)[:, 0]
        kernel = rows @ rows.T
        scaled = kernel * (len(data) / 2 / torch.linalg.eigvalsh(kernel)[-1])
        with torch.no_grad():
            outputs = kernel_flow(scaled, data.y, net(data.x), FLOW_TIMES.tolist())
        seen.append(losses_by_half(outputs[..., 0], data))
    return {name: torch.stack([one[name] for one in seen], dim=1).numpy() for name in seen[0]}
