"""Resume: decide whether a run folder holds the beginning of this very training, and restore its start if so.

Model and probe set do not decide it: two trainings of one architecture share them. The weights do, because the folder holds the
start and says at every measurement how far from it the network was:

- The network is where it was at a measured step: the scope continues the run.
- It is at the start again: the scope continues, and compares the outputs at the first steps with those of the run.
- It is elsewhere: the scope continues if the weights correlate with the run's start, as weights of a trained network do.

A finished run is never begun again. It is continued only from its last weights, or if the correlation is clear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.runtime import InputError
from unlazy.scope.measurements import KERNELS, QUANTITIES, Measurements, Start, rounding_bound
from unlazy.scope.memory import MemoryLimit
from unlazy.scope.probe_set import ProbeSet
from unlazy.scope.run_folder import identity_hash
from unlazy.scope.user_model import device_and_dtype
from unlazy.store import Run

CHECKED = 3  # measured steps at which a training that starts again is compared with the run
APART = (
    0.05  # of the distance gone by then: beyond rounding on any device, far below the effect of another batch or rate
)
NOISE, CLEAR = 4.0, 8.0  # correlations of two independent draws, in units of their standard deviation
REPLACE = "choose another folder, or replace that one with Scope(..., overwrite=True)."


@dataclass
class EarlierRun:
    """The run of an earlier scope that a scope continues.

    ``current_step``: the measured step at which the network is now, ``None`` if at none of them. ``unchecked``: how many
    measured steps are still to be compared. ``began``: whether the loop has reported its first step.
    """

    run: Run
    current_step: int | None
    unchecked: int = 0
    began: bool = False

    @property
    def last_step(self) -> int:
        """The last measured step of the run."""
        return max(line.step for line in self.run.lines)

    def needs_check(self, step: int) -> bool:
        """Whether the outputs at this step must be compared with those of the run."""
        return self.unchecked > 0 and step > 0 and step in self.run.array_steps("output")

    def differs(self, step: int, out: Float[Tensor, "n o"]) -> bool:
        """Whether the outputs are others than those of the run at this step."""
        then, start = (torch.from_numpy(self.run.array("output", at)[0]).to(out) for at in (step, 0))
        went, noise = float((then - start).norm()), rounding_bound(out) * math.sqrt(out.numel())
        if went <= noise:
            return False
        self.unchecked -= 1
        return float((out - then).norm()) > APART * went + noise


def find_earlier_run(folder: Path, wanted: str) -> Run | None:
    """The run in ``folder`` if the hash of its identity is ``wanted`` and it holds a measurement, else ``None``."""
    if not (folder / "run.json").exists():
        return None
    run = Run(folder)
    return run if identity_hash(run.header) == wanted and run.lines else None


def samples_of_run(run: Run, given: int) -> int:
    """How many samples of the probe set a run measures, of those ``given``."""
    return int(run.header["recipe"]["scope"].get("samples", given))


def restore_measurements(
    before: Run, model: nn.Module, probe: ProbeSet, views: tuple[str, ...], seed: int, limit: MemoryLimit
) -> Measurements:
    """Measurements whose start is that of an earlier run, loaded from its folder."""
    device = device_and_dtype(model)[0]
    left_out = dict(before.header["recipe"]["scope"]["left_out"])
    measures = {quantity: measure for measure, quantity in QUANTITIES.items()}
    left_out = {measures.get(name, name): why for name, why in left_out.items()}
    rows: dict[str, Tensor | None] = {
        measure: torch.tensor(some) for measure, some in before.header["recipe"]["scope"]["rows"].items()
    }
    start = Start()
    kept = before.lines[0].checkpoint
    if kept is not None:
        tensors = {name: torch.from_numpy(array.copy()) for name, array in before.checkpoint(0).items()}
        own = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        start.parameters = {n: tensors[f"model/{n}"].to(p) for n, p in own.items() if f"model/{n}" in tensors}
        start.buffers = {n: tensors[f"buffer/{n}"].to(b) for n, b in buffers.items() if f"buffer/{n}" in tensors}
    for name in KERNELS:
        if before.array_steps(name):
            setattr(start, name, torch.from_numpy(before.array(name, 0)[0]).double().to(device))
    start.output = torch.from_numpy(before.array("output", 0)[0]).to(device)
    measurements = Measurements(model, probe, views, seed, start=start, left_out=left_out, limit=limit, rows=rows)
    for note in before.header["recipe"]["scope"]["notes"]:
        measurements.add_note(note)
    used = [line.scalars["tangent_directions"] for line in before.lines if "tangent_directions" in line.scalars]
    if used and used[0][0] is not None:
        measurements.set_directions(int(used[0][0]))
    for name in left_out:
        measurements.measures.pop(name, None)
    waiting = before.header["recipe"]["scope"].get("waiting", ())
    measurements.waiting = [name for name in waiting if name in measurements.measures]
    if kept is None or not measurements.trained.keys() <= start.parameters.keys():
        too_large = "the parameters of the start were too large to keep, and this scope was resumed"
        if kept is not None:
            too_large = "parameters began to train later, the run does not keep their start, and this scope was resumed"
        for name in (
            "parameters",
            "linear",
            "layers",
            "gates",
            *measurements.waiting,
        ):  # they need the start, or have none yet
            if measurements.measures.pop(name, None):
                measurements.left_out[name] = too_large
        measurements.waiting = []
    elif "gates" in measurements.measures and "gates" not in measurements.waiting:
        start.gates = measurements.gates_at_start()
    for name in KERNELS:
        steps = before.array_steps(name)
        if steps and name in measurements.measures:
            latest = torch.from_numpy(before.array(name, steps[-1])[0]).double().to(device)
            measurements.set_previous_kernel(name, steps[-1], latest)
    return measurements


def match_earlier_run(run: Run, finished: bool, measurements: Measurements) -> EarlierRun:
    """The earlier run, if this training may continue it; raises ``InputError`` with what to do if not."""
    place, last = _find_current_step(run, measurements), max(line.step for line in run.lines)
    related, strange = _compare_with_start(run, measurements)
    if finished and place != last and (place == 0 or not related):
        which = "began at these very weights" if place == 0 else "had other weights"
        raise InputError(
            f"{run.folder} holds a finished training that {which}. For a new one {REPLACE} To train that network further, "
            "load the weights it ended with before you make the scope."
        )
    if place is None and strange:
        raise InputError(
            f"{run.folder} holds an interrupted training that began at other weights. For a new one {REPLACE} To go on "
            "with it, load its weights before you make the scope."
        )
    same = place == 0 and _has_same_outputs(run, 0, measurements)
    return EarlierRun(run, place, CHECKED if same else 0)


def other_training_text(run: Run, step: int) -> str:
    """The message for a training that began at the weights of the run, but differs from it at ``step``."""
    return (
        f"{run.folder} holds another training: it began at the same weights, but was elsewhere at step {step}. "
        f"To keep this one, {REPLACE}"
    )


def step_mismatch_text(run: Run, step: int) -> str:
    """The message for a loop that counts from the start again although its network has been trained."""
    return (
        f"the loop begins at step {step}, but the network is not where the training in {run.folder} began. If this is a new "
        f"training, {REPLACE} If it goes on with that one, count steps over the whole training."
    )


def _find_current_step(run: Run, measurements: Measurements) -> int | None:
    """The last measured step at which the network was where it is now: as far from the start, else with the same outputs."""
    if "parameters" in measurements.measures and measurements.trained.keys() <= measurements.start.parameters.keys():
        steps, motions = run.scalars("parameter_motion")
        now = float(measurements.parameters(0)["parameter_motion"])
        here = [int(step) for step in steps[np.isclose(motions[:, 0], now, rtol=1e-6, atol=0)]]
    else:
        here = [step for step in run.array_steps("output") if _has_same_outputs(run, step, measurements)]
    return here[-1] if here else None


def _has_same_outputs(run: Run, step: int, measurements: Measurements) -> bool:
    out = measurements.output()
    then = torch.from_numpy(run.array("output", step)[0]).to(out)
    return torch.allclose(out, then, rtol=0, atol=rounding_bound(out))


def _compare_with_start(run: Run, measurements: Measurements) -> tuple[bool, bool]:
    """Whether the parameters clearly correlate with the start of the run, and whether they clearly do not.

    Only randomly drawn parameters count. For another draw the correlation is 0 plus or minus 1 / sqrt(their number), for a
    network that moved m times its own size about 1 / sqrt(1 + m^2). A network that moved very far may have lost it.
    """
    pairs = [
        (p.detach().double() - p.detach().double().mean(), start.double() - start.double().mean())
        for name, p in measurements.trained.items()
        if (start := measurements.start.parameters.get(name)) is not None and bool((start != start.flatten()[0]).any())
    ]
    drawn = sum(own.numel() for own, _ in pairs)
    if not drawn or "parameters" not in measurements.measures:
        return False, False
    both = sum(float((own * start).sum()) for own, start in pairs)
    sizes = [math.sqrt(sum(float(pair[side].square().sum()) for pair in pairs)) for side in (0, 1)]
    alike, noise = both / max(math.prod(sizes), 1e-300), 1 / math.sqrt(drawn)
    furthest = float(np.nanmax(run.scalars("parameter_motion")[1]))
    return alike > CLEAR * noise, alike < NOISE * noise and 1 / math.hypot(1, furthest) > CLEAR * noise
