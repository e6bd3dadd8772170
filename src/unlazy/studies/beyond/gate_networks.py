"""Networks of the studies about gates: how they are trained, with their gates or under frozen ones, and whose unit is whose.

Dense networks of all seeds are trained as one stack, residual ones one by one. Both give the same
thing back: one network a seed, in evaluation mode, with its accuracies. Gates are frozen by a spec with ``train_gates=False`` and
the gating network of a donor; values always begin anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unlazy.data.dataset import Dataset
from unlazy.data.images import Images
from unlazy.kernels.gated import net_gates
from unlazy.models.build import build, build_stack, member
from unlazy.models.image_layers import ConvLayer
from unlazy.models.image_net import GatedImageNet
from unlazy.models.net import GatedNet
from unlazy.models.spec import ImageSpec, NetSpec
from unlazy.runtime import require, short_hash
from unlazy.store import Run
from unlazy.studies.beyond.gate_tasks import Spec, Task, TaskData
from unlazy.studies.study import Work
from unlazy.studies.trainings import Training, classification, is_finished, open_run
from unlazy.training.ensemble import Member
from unlazy.training.images import ImageRecipe, train_images

Net = GatedNet | GatedImageNet
Array = NDArray[np.float64]
CHUNK = 500  # samples at a time
ACCURACIES = ("train_hard_gates", "test_hard_gates", "test_as_trained")
QUARTERS = 4  # networks are kept after every quarter of their training


# --- training ------------------------------------------------------------------------------------------------

GateState = Mapping[str, Tensor]  # of a gating network, by the names within it


@dataclass(frozen=True)
class Trained:
    """One network a seed after training, accuracies in percent by name, and the networks after each quarter of training."""

    nets: list[Net]
    accuracies: dict[str, Array]
    quarters: dict[int, list[Net]]

    @property
    def test(self) -> Array:
        """Test accuracies with hard gates."""
        return self.accuracies["test_hard_gates"]


def gating_state(net: Net) -> GateState:
    """The gating network of a net by names; that of a ReLU network is its value branch."""
    branch = net.value_layers if net.settings.gating == "own" else net.gate_layers
    return {name: value.detach().cpu().clone() for name, value in branch.state_dict().items()}


def _fingerprint(states: Sequence[GateState]) -> str:
    digest = hashlib.sha256()
    for state in states:
        for name in sorted(state):
            digest.update(name.encode() + state[name].cpu().numpy().tobytes())
    return digest.hexdigest()[:12]


def train_task(
    key: str,
    task: Task,
    spec: Spec,
    data: TaskData,
    seeds: Sequence[int],
    work: Work,
    donors: Sequence[GateState] | None = None,
) -> Trained:
    """Train one network a seed, resuming from run folders. ``donors``: frozen gates, one gating network a seed.

    ``key``: the first part of the names of run folders.
    """
    if donors is not None:
        require(len(donors) == len(seeds), f"{len(donors)} donors for {len(seeds)} seeds.")
        spec = replace(spec, train_gates=False)
    if isinstance(spec, NetSpec):
        return _train_stack(key, task, spec, data, seeds, work, donors)
    runs = [
        _train_pictures(
            key, task, spec, data, seed, work.stage(place, len(seeds)), None if donors is None else donors[place]
        )
        for place, seed in enumerate(seeds)
    ]
    at = quarter_epochs(task)
    return Trained(
        [_load_pictures_net(run, spec) for run in runs],
        {name: np.array([100 * run.scalars(name)[1][-1, 0] for run in runs]) for name in ACCURACIES},
        {quarter: [_load_pictures_net(run, spec, quarter) for run in runs] for quarter in at},
    )


def _train_stack(
    key: str,
    task: Task,
    spec: NetSpec,
    data: TaskData,
    seeds: Sequence[int],
    work: Work,
    donors: Sequence[GateState] | None,
) -> Trained:
    assert isinstance(data.train, Dataset)
    assert isinstance(data.test, Dataset)
    members = [Member(seed, task.lr) for seed in seeds]
    training = classification(key, spec, members, task.epochs, task.batch, (data.train, data.test), (task.epochs,))
    at = quarter_epochs(task)
    recipe = replace(training.recipe, checkpoints_at=tuple(at.values()))
    start: dict[str, NDArray[Any]] | None = None
    if donors is not None:
        start = {f"model/gate_layers.{name}": torch.stack([one[name] for one in donors]).numpy() for name in donors[0]}
    after = None if donors is None else _fingerprint(donors)
    run = Training(key, recipe, training.data, training.measures, start, after).run(work)

    def load(epoch: int) -> list[Net]:
        stack = build_stack(spec, list(seeds))
        numbers = run.checkpoint(epoch * recipe.steps_per_epoch(len(data.train)))
        stack.load_state_dict({name: torch.as_tensor(numbers[f"model/{name}"]) for name in stack.state_dict()})
        return [member(stack, place).eval() for place in range(len(seeds))]

    accuracies = {name: 100 * run.scalars(name)[1][-1] for name in ACCURACIES}
    return Trained(load(task.epochs), accuracies, {quarter: load(epoch) for quarter, epoch in at.items()})


def quarter_epochs(task: Task) -> dict[int, int]:
    """The epochs after which the first, second and third quarter of the training are done; none where it is too short."""
    whole = task.epochs // QUARTERS
    return {quarter: quarter * whole for quarter in range(1, QUARTERS)} if whole else {}


def _train_pictures(
    key: str, task: Task, spec: ImageSpec, data: TaskData, seed: int, work: Work, donor: GateState | None
) -> Run:
    assert isinstance(data.train, Images)
    assert isinstance(data.test, Images)
    net = build(spec, seed=seed)
    if donor is not None:
        net.gate_layers.load_state_dict(dict(donor))
    recipe = ImageRecipe(task.epochs, task.batch, lr=task.lr, augment=task.augment, train_probe=task.test_images)
    about = {
        "model": spec.to_dict(),
        "training": recipe.to_dict(),
        "seed": seed,
        "device": work.device,
        "data": f"{data.train.fingerprint} {data.test.fingerprint}",
        "gates": None if donor is None else _fingerprint([donor]),
    }
    folder = work.runs / f"{key}-{seed}-{short_hash(about)}"
    if not is_finished(folder):
        per_epoch = len(data.train) // recipe.batch
        more = {
            "model": spec.to_dict(),
            "data": {"name": data.train.name, "images": len(data.train), "per_epoch": per_epoch},
        }
        with open_run(folder, work, [Member(seed, task.lr)], recipe=about, **more) as writer:
            keep = max(1, task.epochs // QUARTERS)
            options: Any = {"seed": seed, "device": work.device, "writer": writer, "keep_every": keep}
            train_images(net, data.train, data.test, recipe, progress=work.progress, **options)
            writer.finish()
    return Run(folder)


def _load_pictures_net(run: Run, spec: ImageSpec, quarter: int | None = None) -> GatedImageNet:
    """The network of a run at its end, or after a quarter of its training."""
    steps = [line.step for line in run.lines if line.checkpoint is not None]
    numbers = run.checkpoint(steps[-1] if quarter is None else steps[quarter - 1])
    net = build(spec)
    net.load_state_dict({name: torch.as_tensor(numbers[f"model/{name}"][0]) for name in net.state_dict()})
    return net.eval()


# --- gates that were not trained -----------------------------------------------------------------------------


def untrained_gates(spec: Spec, seed: int, x: Tensor) -> Net:
    """A network at its start whose gating batch-norms have seen the inputs ``x``."""
    net: Net = build(spec, seed=seed).to(x.device)
    norms = [module for module in net.gate_layers.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # its statistics become those of x
    with torch.no_grad():
        net.train().pre_activations(x)
    return net.eval()


def on_rates(net: Net, x: Tensor) -> list[Tensor]:
    """How often each unit (channel) of each layer is open, over samples and positions."""
    return [_by_unit(layer).double().mean(1) for layer in net_gates(net, x)]


def match_on_rates(net: Net, x: Tensor, rates: Sequence[Tensor]) -> None:
    """Shift the gates' offsets in place, layer by layer, so that each unit is open as often on ``x`` as ``rates`` say."""
    for number, (layer, wanted) in enumerate(zip(net.gate_layers, rates, strict=True)):
        offset = layer.norm.bias if isinstance(layer, ConvLayer) else layer.bias
        assert isinstance(offset, Tensor)
        with torch.no_grad():
            q = _by_unit(net.pre_activations(x)[number]).double()  # [units, samples and positions]
            ordered = q.sort(1, descending=True).values
            ordered = torch.cat([ordered[:, :1] + 1, ordered, ordered[:, -1:] - 1], 1)
            opened = (wanted * q.shape[1]).round().long()[:, None]
            border = (ordered.gather(1, opened) + ordered.gather(1, opened + 1)) / 2
            offset -= border[:, 0].to(offset.dtype)


def _by_unit(layer: Tensor) -> Tensor:
    """Numbers of a layer as ``[units, samples and positions]``."""
    return layer.transpose(0, 1).flatten(1)


# --- which unit is which -------------------------------------------------------------------------------------


def unit_groups(spec: Spec) -> list[list[int]]:
    """Layers (from 0) whose units are the same units: those of one residual stream; every other layer is a group of its own."""
    if isinstance(spec, NetSpec) or not spec.blocks:
        return [[layer] for layer in range(spec.gated_layers)]
    streams, inner, layer, before = [[0]], [], 1, spec.widths[0]
    for stage, (width, count) in enumerate(zip(spec.widths, spec.blocks, strict=True)):
        if stage > 0 or width != before:
            streams.append([])  # its shortcut is a convolution, so that a new stream begins
        for _ in range(count):
            inner.append([layer])
            streams[-1].append(layer + 1)
            layer += 2
    return [*streams, *inner]


def align_units(mine: Sequence[Tensor], theirs: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """For every layer the order of their units that agrees best with mine, by how often both are open or both closed.

    One order for each group of layers. ``mine``, ``theirs``: hard gates on the same samples.
    """
    from scipy.optimize import linear_sum_assignment

    orders: dict[int, Tensor] = {}
    for group in groups:
        agreement: Any = 0
        for layer in group:
            a, b = (2.0 * _by_unit(gates[layer]).float() - 1 for gates in (mine, theirs))
            agreement = agreement + (a @ b.T).cpu().numpy() / a.shape[1]
        order = torch.as_tensor(linear_sum_assignment(-agreement)[1])
        orders |= dict.fromkeys(group, order)
    return [orders[layer] for layer in range(len(mine))]


def accuracy_under_donor(
    net: Net, donor: Net, x: Tensor, labels: Tensor, orders: Sequence[Tensor] | None = None
) -> float:
    """Percent of right classes of a network's values under the hard gates of a donor, whose units may be put in other orders."""
    right = 0
    for some, wanted in zip(x.split(CHUNK), labels.split(CHUNK), strict=True):
        gates = net_gates(donor, some)
        if orders is not None:
            gates = [layer[:, order] for layer, order in zip(gates, orders, strict=True)]
        with torch.no_grad():
            right += int((net.value(some, gates).argmax(1) == wanted.argmax(1)).sum())
    return 100 * right / len(x)
