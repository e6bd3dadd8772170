"""Kernels turn toward what is learned (Figures 1, 3; L6, L8, L9).

Digits 2 against 3. Every seed has its own smooth target; one network is trained on it and one on its signs. Tangent features
averaged along the line from start to end explain what was learned; their kernel is compared with the label kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from unlazy import plots
from unlazy.claims.claim import Claim, Part, Quantity, Shown
from unlazy.claims.functions import difference
from unlazy.kernels.averaged_tangents import ParameterPath as ParameterPath
from unlazy.kernels.averaged_tangents import averaged_tangents, linearisation_quality, member_states
from unlazy.kernels.compare import alignment, centered_alignment, kernel_distance
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build, build_stack
from unlazy.models.spec import Init, NetSpec, relu_spec
from unlazy.runtime import require, short_hash, stream
from unlazy.store import Run
from unlazy.studies.study import Figure, Results, Settings, Study, Work
from unlazy.studies.table import Rows
from unlazy.studies.trainings import Numbers, is_finished, open_run, seeds_in_recipe, twos_and_threes
from unlazy.training.ensemble import Member, batch_order
from unlazy.training.fit import squared_error

# --- settings and cases --------------------------------------------------------------------------------------

# images: to train on; looked_at: how many of them kernels are measured on; readout_cycle: epochs in which the learning rate falls
# while the smooth target is made (it then rises again); points: on the line along which features are averaged
PAPER = {
    "data": "mnist",
    "images": 5000,
    "looked_at": 500,
    "width": 256,
    "epochs": 500,
    "readout_epochs": 400,
    "readout_cycle": 100,
    "batch": 100,
    "points": 50,
}
SMOKE_IMAGES = {"data": "digits", "images": 60, "looked_at": 20, "batch": 20}
SMOKE_TRAINING = {"width": 12, "epochs": 5, "readout_epochs": 4, "readout_cycle": 2, "points": 5}
SCALES = {
    "smoke": PAPER | SMOKE_IMAGES | SMOKE_TRAINING,
    # the 500 images of the caption, fewer epochs than the script's 500, fewer points on the line
    "desk": PAPER | {"images": 500, "looked_at": 150, "epochs": 200, "points": 20},
    "paper": PAPER,
}
RATE, MOMENTUM = 0.1, 0.9
TASKS = ("smooth", "sign")
RESUME_EPOCHS = 50  # between two checkpoints


@dataclass(frozen=True)
class NetworkStack:
    """The one case of a scale: all seeds and both tasks, trained as one stack, smooth tasks first."""

    seeds: tuple[int, ...]
    settings: Settings

    @property
    def data(self) -> str:
        """The image set, a column of the table."""
        return str(self.settings.data)

    @property
    def members(self) -> list[tuple[str, int]]:
        """Task and seed of every network of the stack, in order."""
        return [(task, seed) for task in TASKS for seed in self.seeds]

    def spec(self, inputs: int) -> NetSpec:
        """784-256-256-1 and N(0, 2 / fan_in) weights as in the paper; biases begin at 0 (there: as PyTorch draws them)."""
        return relu_spec(inputs, 1, width=self.settings.width, depth=2, init=Init("he"))

    def trajectory(self) -> list[int]:
        """Epochs whose networks are saved, dense at first, where the trajectory bends most: 0, 1, 2, 4, ... and the last."""
        epochs = self.settings.epochs
        return [0, *(2**power for power in range(epochs.bit_length()) if 2**power < epochs), epochs]

    def recipe(self, device: str) -> dict[str, object]:
        """Everything that decides the trained numbers."""
        kept = {name: value for name, value in asdict(self.settings).items() if name not in ("looked_at", "points")}
        constants = {"study": "label-alignment", "rate": RATE, "momentum": MOMENTUM, "device": device}
        return {**constants, **kept, "seeds": seeds_in_recipe(self.seeds), "trajectory": self.trajectory()}

    def folder(self, work: Work) -> Path:
        """The run folder of the stack."""
        return work.runs / f"networks-{short_hash(self.recipe(work.device))}"

    def figure_file(self, work: Work) -> Path:
        """The file with the arrays of the first seed that the figures show."""
        return self.folder(work) / f"shown-{short_hash(asdict(self))}.npz"


def cases(settings: Settings, seeds: Sequence[int]) -> list[NetworkStack]:
    """One case: all seeds and both tasks as a stack."""
    looked_at, images = settings.looked_at, settings.images
    require(1 <= looked_at <= images, f"{looked_at} images looked at, but {images} trained on.")
    return [NetworkStack(tuple(seeds), settings)]


# --- training ------------------------------------------------------------------------------------------------


def train(case: NetworkStack, work: Work) -> Run:
    """The finished run of the stack; an interrupted training is resumed, with the same numbers to the last bit."""
    settings, folder = case.settings, case.folder(work)
    if is_finished(folder):
        return Run(folder)
    x, labels = (t.to(work.device) for t in twos_and_threes(settings.data, settings.images, folder=work.data))
    spec, members = case.spec(x.shape[1]), [Member(seed, RATE) for _, seed in case.members]
    data = {"name": f"{settings.data} 2 against 3", "options": {"images": settings.images}, "fingerprint": None}
    recipe = case.recipe(work.device)
    with open_run(folder, work, members, recipe=recipe, model=spec.to_dict(), data=data) as writer:
        net = build_stack(spec, [member.seed for member in members]).to(work.device)
        sgd = torch.optim.SGD(net.parameters(), momentum=MOMENTUM)
        saved = {f"model/{name}": tensor for name, tensor in net.state_dict().items()}
        for name, parameter in net.named_parameters():
            saved[f"optim/{name}/speed"] = sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

        def record(epoch: int, scalars: Numbers, arrays: Numbers | None = None) -> None:
            writer.record(epoch, scalars, arrays, {name: tensor.cpu().numpy() for name, tensor in saved.items()})

        if writer.resumed is None:
            first, smooth = 0, smooth_targets(settings, x, labels, case.seeds)
            record(0, {}, {"smooth": smooth.cpu().numpy()})
        else:
            first, before = writer.resumed
            smooth = torch.from_numpy(Run(folder).array("smooth", 0)).to(work.device)
            for name, tensor in saved.items():
                tensor.copy_(torch.from_numpy(np.array(before[name])))
        targets = torch.cat([smooth, smooth.sign()])  # [tasks * seeds, n, 1]
        for done in range(first + 1, settings.epochs + 1):
            sgd.param_groups[0]["lr"] = cosine_rate((done - 1) / settings.epochs)
            train_epoch(sgd, lambda some: net(x[some]), targets, members, settings.batch, done - 1)
            work.progress(done, settings.epochs)
            if done in case.trajectory() or done % RESUME_EPOCHS == 0:
                with torch.no_grad():
                    record(done, {"loss": squared_error(net(x), targets).cpu().numpy()})
        writer.finish()
    return Run(folder)


def cosine_rate(turns: float) -> float:
    """The learning rate at ``turns`` half periods of the cosine: ``RATE`` at 0, zero at 1, ``RATE`` again at 2."""
    return RATE * (1 + math.cos(math.pi * turns)) / 2


def smooth_targets(
    settings: Settings, x: Float[Tensor, "n d"], labels: Float[Tensor, "n"], seeds: Sequence[int]
) -> Float[Tensor, "seeds n 1"]:
    """Targets without a jump between the classes: what a linear readout of two random ReLU layers learns of the labels."""
    hidden = x
    for layer in range(2):
        shape = settings.width, hidden.shape[-1]
        draws = [stream(seed, "features", layer) for seed in seeds]
        weights = [torch.randn(*shape, generator=random, dtype=torch.float64) for random in draws]
        matrix = torch.stack(weights).to(x) * math.sqrt(2 / hidden.shape[-1])
        hidden = (hidden @ matrix.mT).relu()  # [seeds, n, width]
    readout = torch.zeros(len(seeds), settings.width, 1, device=x.device, requires_grad=True)
    sgd = torch.optim.SGD([readout], momentum=MOMENTUM)
    own, members = torch.arange(len(seeds), device=x.device)[:, None], [Member(seed, RATE) for seed in seeds]
    targets = labels[None, :, None].expand(len(seeds), -1, -1)
    for epoch in range(settings.readout_epochs):
        sgd.param_groups[0]["lr"] = cosine_rate(epoch / settings.readout_cycle)
        train_epoch(sgd, lambda some: hidden[own, some] @ readout, targets, members, settings.batch, epoch)
    return (hidden @ readout).detach()


def train_epoch(
    sgd: torch.optim.SGD,
    outputs: Callable[[Tensor], Tensor],
    targets: Float[Tensor, "members n 1"],
    members: Sequence[Member],
    batch: int,
    epoch: int,
) -> None:
    """Train one epoch on the mean squared error. ``outputs(some)``: of every member, for its own samples ``[members, b]``."""
    own = torch.arange(len(members), device=targets.device)[:, None]
    for some in batch_order(members, epoch, targets.shape[1]).to(targets.device).split(batch, 1):
        sgd.zero_grad()
        squared_error(outputs(some), targets[own, some]).sum().backward()
        sgd.step()


# --- measuring -----------------------------------------------------------------------------------------------

NEAR, NEAREST, FAR = (
    0.1,
    0.02,
    0.5,
)  # shares of the images: two of those nearest to y = 0, one of those farthest from it


def measure(case: NetworkStack, work: Work) -> Rows:
    """Compare the kernels of each training with what was learned; arrays for figures go to :meth:`NetworkStack.figure_file`.

    The column ``kernel``: averaged along the *line* or the real *trajectory*, or the tangent kernel at the *start* or *end*.
    """
    run, settings, found = train(case, work), case.settings, Rows()
    x = twos_and_threes(settings.data, settings.images, folder=work.data)[0][: settings.looked_at].to(work.device)
    smooth = run.array("smooth", 0)[:, : settings.looked_at, 0]  # [seeds, n]
    kept = [run.checkpoint(epoch) for epoch in case.trajectory()]
    shown: dict[str, NDArray[Any]] = {}
    for member, (task, seed) in enumerate(case.members):
        states = [
            {name: tensor.to(x.device) for name, tensor in state.items()} for state in member_states(kept, member)
        ]
        place, rows = member % len(case.seeds), Rows(task=task, seed=seed)
        arrays = _measure_network(case, states, x, smooth[place], rows)
        found.entries += rows.entries
        if place == 0:
            shown |= {f"{task}_{name}": array for name, array in arrays.items()}
        work.progress(member + 1, len(case.members))
    np.savez(case.figure_file(work), **shown)  # type: ignore[arg-type]
    return found


def _measure_network(
    case: NetworkStack, states: list[dict[str, Tensor]], x: Tensor, smooth: NDArray[Any], rows: Rows
) -> dict[str, NDArray[Any]]:
    """Add the rows of one network; returns its arrays for the figures, with the images in order of y."""
    ends, net = [states[0], states[-1]], build(case.spec(x.shape[1])).to(x.device)
    points = case.settings.points
    line = ParameterPath(ends, points)
    averaged = averaged_tangents(net, line, x)
    along = averaged_tangents(net, ParameterPath(states, max(2, points // (len(states) - 1)), "gauss"), x)
    single, mean = linearisation_quality(net, line, x)
    kernels = {"line": averaged.kernel(), "trajectory": along.kernel()}
    for name, state in zip(("start", "end"), ends, strict=True):
        net.load_state_dict(state)
        kernels[name] = tangent_kernel(net, x)
    for name, kernel in kernels.items():
        rows.add("similarity", float(alignment(kernel, averaged.change)), kernel=name)
    rows.add("similarity_centred", float(centered_alignment(kernels["line"], averaged.change)), kernel="line")
    rows.add("kernels_agree", float(1 - kernel_distance(kernels["line"], kernels["trajectory"])))
    rows.add("way_over_line", path_length(states) / path_length(ends))
    diagonals = {name: kernel.diagonal().double().cpu().numpy() for name, kernel in kernels.items()}
    diagonals["line over start"] = diagonals["line"] / diagonals["start"]
    for name in ("line", "line over start", "trajectory", "start"):
        for share in (NEAR, NEAREST) if name == "line" else (NEAR,):
            ratio = near_over_far(diagonals[name], np.abs(smooth), share)
            rows.add("near_over_far", ratio, kernel=name, nearest=share)
    rows.add("rank_correlation", rank_correlation(diagonals["line"], np.abs(smooth)), kernel="line")
    explained = {"mean": mean, "best single": max(single), "trajectory": along.signal_to_noise()}
    rows.add("signal_to_noise", list(explained.values()), features=list(explained))
    target = torch.from_numpy(smooth if rows.columns["task"] == "smooth" else np.sign(smooth))
    rows.add("loss", float((averaged.end[:, 0].cpu() - target).square().mean()), at="end")
    order = np.argsort(smooth)
    return {
        "kernel": kernels["line"].cpu().numpy()[np.ix_(order, order)],
        "target": smooth[order],
        "end": averaged.end[:, 0].cpu().numpy()[order],
        "diagonal": diagonals["line"][order],
        "single": np.array(single),
        "mean": np.array(mean),
    }


def path_length(states: Sequence[Mapping[str, Tensor]]) -> float:
    """The length of the broken line through the parameters of these networks."""
    steps = (torch.cat([(last[n] - first[n]).flatten() for n in first]) for first, last in pairwise(states))
    return float(sum(step.double().norm() for step in steps))


def near_over_far(diagonal: np.ndarray, distance: np.ndarray, share: float = NEAR) -> float:
    """The mean of ``diagonal`` over the points nearest to y = 0 (a ``share`` of all), over its mean over the farther half."""
    order = np.argsort(distance)
    near, far = order[: max(1, int(share * len(order)))], order[int((1 - FAR) * len(order)) :]
    return float(diagonal[near].mean() / diagonal[far].mean())


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (first, second)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


# --- claims --------------------------------------------------------------------------------------------------

HIGHER, PEAKS, FALLS, MUCH_BETTER = 0.0, 1.0, 0.0, 10.0  # thresholds: difference, ratio, correlation, decibels


def shown_by_task(words: str, name: str, at: str | None = None, **where: str | float) -> list[Shown]:
    """A quantity of both tasks, to show beside a claim."""
    return [Shown(f"{words}, {task} task", Quantity(name, at, task=task, **where)) for task in TASKS]


def shown_near_over_far(words: str, kernel: str, share: float = NEAR) -> list[Shown]:
    """The diagonal of a kernel near y = 0 over that far from it, for both tasks."""
    return shown_by_task(words, "near_over_far", kernel=kernel, nearest=share)


CLAIMS = (
    Claim(
        "L6",
        says=(
            "On MNIST digits 2 and 3 the kernel of a network trained on the signs of a smooth target ends more "
            "similar to its label kernel than the kernel of one trained on the smooth target itself."
        ),
        where="Fig. 1",
        paper="0.17 (smooth) < 0.40 (sign)",
        figure="figure-1",
        parts=[
            Part(
                "similarity for the sign task minus that for the smooth one",
                tuple(Quantity("similarity", task=task, kernel="line") for task in ("sign", "smooth")),
                by=difference,
                above=HIGHER,
            )
        ],
        shows=[
            *shown_by_task(
                "kernel averaged along the line (paper: 0.17 smooth, 0.40 sign)", "similarity", kernel="line"
            ),
            *shown_by_task("the same, centred", "similarity_centred", kernel="line"),
            *shown_by_task("kernel averaged along the real trajectory", "similarity", kernel="trajectory"),
            *shown_by_task("cosine of the two averaged kernels", "kernels_agree"),
            *shown_by_task("length of the trajectory over that of the line", "way_over_line"),
            *shown_by_task("tangent kernel at the start", "similarity", kernel="start"),
            *shown_by_task("tangent kernel at the end", "similarity", kernel="end"),
            *shown_by_task("mean squared error left on the images looked at", "loss", at="end"),
        ],
    ),
    Claim(
        "L8",
        says=(
            "For the sign task the diagonal of the adapted kernel is largest at the difficult points, those whose "
            "smooth target is near zero."
        ),
        where="Fig. 3",
        paper="about 20-32 near zero against 5-8 far from it",
        figure="figure-3",
        parts=[
            Part(
                "diagonal near y = 0 over far from it, sign task",
                Quantity("near_over_far", task="sign", kernel="line", nearest=NEAR),
                above=PEAKS,
                unit="times",
            ),
            Part(
                "rank correlation of the diagonal with |y|, sign task",
                Quantity("rank_correlation", task="sign", kernel="line"),
                below=FALLS,
            ),
        ],
        shows=[
            *shown_near_over_far("diagonal near over far, nearest tenth", "line"),
            *shown_near_over_far(
                "diagonal near over far, nearest fiftieth (paper: peaks about 3 to 5 times for sign)", "line", NEAREST
            ),
            *shown_near_over_far("the same, relative to the start's diagonal", "line over start"),
            *shown_near_over_far(
                "kernel averaged along the real trajectory, near over far, nearest tenth", "trajectory"
            ),
            *shown_near_over_far("the start's own diagonal, near over far", "start"),
        ],
    ),
    Claim(
        "L9",
        says=(
            "Tangent features averaged along the straight line from initial to final parameters reproduce the "
            "learned change of the function much better than the tangent features of any single point on it."
        ),
        where="authors' code",
        paper="exact up to quadrature",
        figure="linearisation",
        parts=[
            Part(
                f"mean of the line over its best single point, {task} task",
                tuple(Quantity("signal_to_noise", task=task, features=one) for one in ("mean", "best single")),
                by=difference,
                above=MUCH_BETTER,
                unit="dB",
            )
            for task in TASKS
        ],
        shows=[
            *shown_by_task("signal to noise of the mean, dB", "signal_to_noise", features="mean"),
            *shown_by_task("of the best single point, dB", "signal_to_noise", features="best single"),
            *shown_by_task("of the integral along the real trajectory, dB", "signal_to_noise", features="trajectory"),
        ],
    ),
)


# --- figures -------------------------------------------------------------------------------------------------

TITLES = {"smooth": "trained on y", "sign": "trained on sign(y)"}
COLOUR = {"smooth": "blue", "sign": "red"}
PUBLISHED = (0.17, 0.40)  # similarities: smooth, sign


def load_figure_arrays(results: Results) -> dict[str, dict[str, NDArray[Any]]]:
    """Arrays of the first seed by task, as :func:`measure` left them."""
    (case,) = results.cases()
    shown: dict[str, dict[str, NDArray[Any]]] = {task: {} for task in TASKS}
    with np.load(case.figure_file(results.work)) as found:
        for key in found:
            task, _, name = key.partition("_")
            shown[task][name] = found[key]
    return shown


def kernels_figure(results: Results) -> plots.Figure:
    """Kernels averaged along the line, first seed, images in order of y; right: similarity to the label kernel."""
    figure, ((*heat_maps, last),) = plots.grid(1, 3, (3.0, 2.9))
    pairs = np.array([results.table.select("similarity", task=task, kernel="line") for task in TASKS])
    for axis, (task, one), similarity in zip(heat_maps, load_figure_arrays(results).items(), pairs[:, 0], strict=True):
        kernel = one["kernel"]
        image = axis.imshow(kernel, cmap="cividis", vmin=0, vmax=np.quantile(kernel, 0.99), interpolation="nearest")
        zero = float(np.searchsorted(one["target"], 0)) - 0.5
        axis.axhline(zero, color="white", linewidth=0.5)
        axis.axvline(zero, color="white", linewidth=0.5)
        title = f"{TITLES[task]}: similarity {similarity:.2f}"
        axis.set(title=title, xticks=[], yticks=[], xlabel="images in order of y")
        figure.colorbar(image, ax=axis, shrink=0.75)
    seeds = last.plot([0, 1], pairs, "o-", color=plots.COLOURS["grey"], linewidth=0.8, markersize=4)
    paper = last.plot([0, 1], PUBLISHED, "D--", color=plots.COLOURS["orange"])
    last.set_xticks([0, 1], [TITLES[task] for task in TASKS])
    last.set(title="similarity to the label kernel", xlim=(-0.3, 1.3), ylim=(0, None))
    last.legend([seeds[0], paper[0]], ["our seeds", "paper"])
    return figure


def difficulty_figure(results: Results) -> plots.Figure:
    """Outputs and the diagonal of the averaged kernel against the smooth target, first seed."""
    figure, ((left, right),) = plots.grid(1, 2, (3.4, 2.8))
    for task, one in load_figure_arrays(results).items():
        dots = {"markersize": 3, "color": plots.COLOURS[COLOUR[task]], "label": TITLES[task]}
        left.plot(one["target"], one["end"], ".", **dots)
        right.plot(one["target"], one["diagonal"], ".", **dots)
    for axis in (left, right):
        axis.axvline(0, color=plots.COLOURS["grey"], linewidth=0.6)
        axis.set_xlabel("smooth target y")
    left.set(title="what the networks give", ylabel="output")
    right.set(title="where the kernel bends", ylabel="diagonal of the averaged kernel", ylim=(0, None))
    left.legend(markerscale=3)
    return figure


def linearisation_figure(results: Results) -> plots.Figure:
    """Signal to noise of the end, for tangent features of each point of the line and for their mean, first seed."""
    figure, ((axis,),) = plots.grid(1, 1, (4.6, 3.4))
    for task, one in load_figure_arrays(results).items():
        colour, points = plots.COLOURS[COLOUR[task]], np.linspace(0, 1, len(one["single"]))
        axis.plot(points, one["single"], color=colour, label=f"{TITLES[task]}: one point")
        axis.axhline(float(one["mean"]), color=colour, linestyle="--", label=f"{TITLES[task]}: mean of the line")
    axis.set(title="how linear is training in these features?", xlabel="point on the line from start (0) to end (1)")
    axis.set(ylabel="signal to noise of the end, dB", ylim=(0, None))
    plots.legend_below(axis)
    return figure


STUDY = Study(
    name="label-alignment",
    paper="tangent",
    scales=SCALES,
    seeds={"smoke": 2, "desk": 5, "paper": 5},
    columns=("data",),
    cases=cases,
    measure=measure,
    claims=CLAIMS,
    figures=(
        Figure("figure-1", "Kernels turn toward what is learned (Figure 1)", kernels_figure, from_runs=True),
        Figure("figure-3", "Where the kernel bends (Figure 3)", difficulty_figure, from_runs=True),
        Figure("linearisation", "How linear training is in averaged features", linearisation_figure, from_runs=True),
    ),
)
