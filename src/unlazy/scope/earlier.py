"""Is what a run folder holds the beginning of this very training? Only then may a scope go on behind it.

Names and shapes say little: two trainings of one architecture have them in common. Two ways to tell them apart were weighed. A
token that the user hands from run to run is certain, but a loop that starts again after a crash would have to keep it. The
parameters themselves need no help: the start is in the folder, and every measurement says how far from it the network was. So a
network that stands where the record was goes on; one at the start again must pass through the same outputs; one elsewhere must
resemble the recorded start, as trained networks do and other draws do not. A finished record is more careful than a broken one:
it never begins again, and resemblance must be clear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.runtime import InputError
from unlazy.scope.measures import Instruments, rounding
from unlazy.store import Run

CHECKED = 3  # recorded steps at which a training that starts again is compared with the first one
APART = 0.05  # of the way gone by then: beyond rounding on any device, far below what another batch or rate makes
NOISE, CLEAR = 4.0, 8.0  # correlations of two independent draws, in units of their spread
REPLACE = "choose another folder, or replace that one with Scope(..., overwrite=True)."


@dataclass
class Earlier:
    """A record that a scope goes on with. ``place``: the recorded step at which the network stands now, ``None``: elsewhere."""

    run: Run
    place: int | None
    unchecked: int = 0
    met: bool = False

    @property
    def last(self) -> int:
        return self.run.lines[-1].step

    def asks(self, step: int) -> bool:
        """Whether the outputs at this step must be compared."""
        return self.unchecked > 0 and step > 0 and step in self.run.array_steps("output")

    def differs(self, step: int, out: Float[Tensor, "n o"]) -> bool:
        """Whether the network is elsewhere than the recorded one was at this step."""
        recorded, start = (torch.from_numpy(self.run.array("output", at)[0]).to(out) for at in (step, 0))
        went, noise = float((recorded - start).norm()), rounding(out) * math.sqrt(out.numel())
        if went <= noise:
            return False
        self.unchecked -= 1
        return float((out - recorded).norm()) > APART * went + noise


def recognise(run: Run, finished: bool, instruments: Instruments) -> Earlier:
    """What the folder holds, if this training may go on behind it; else an error that says what to do."""
    place, last = _place(run, instruments), run.lines[-1].step
    related, strange = _kinship(run, instruments)
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
    same = place == 0 and _same_outputs(run, 0, instruments)
    return Earlier(run, place, CHECKED if same else 0)


def other_training(run: Run, step: int) -> str:
    """What to say when a training leaves the recorded one though both began at the same weights."""
    return (
        f"{run.folder} holds another training: it began at the same weights, but was elsewhere at step {step}. "
        f"To keep this one, {REPLACE}"
    )


def counts_anew(run: Run, step: int) -> str:
    """What to say when the first step told does not fit weights that have been trained."""
    return (
        f"the loop begins at step {step}, but the network is not where the training in {run.folder} began. If this is a new "
        f"training, {REPLACE} If it goes on with that one, count steps over the whole training."
    )


def _place(run: Run, instruments: Instruments) -> int | None:
    """The last recorded step at which the network was where it is now: as far from the start, else with the same outputs."""
    if "parameters" in instruments.looks and instruments.trained.keys() <= instruments.start.parameters.keys():
        steps, motions = run.scalars("parameter_motion")
        now = float(instruments.parameters(0)["parameter_motion"])
        here = [int(step) for step in steps[np.isclose(motions[:, 0], now, rtol=1e-6, atol=0)]]
    else:
        here = [step for step in run.array_steps("output") if _same_outputs(run, step, instruments)]
    return here[-1] if here else None


def _same_outputs(run: Run, step: int, instruments: Instruments) -> bool:
    out = instruments.output()
    recorded = torch.from_numpy(run.array("output", step)[0]).to(out)
    return torch.allclose(out, recorded, rtol=0, atol=rounding(out))


def _kinship(run: Run, instruments: Instruments) -> tuple[bool, bool]:
    """Whether the parameters clearly resemble the recorded start, and whether they clearly do not.

    Correlations of parameters that were drawn: for another draw 0 give or take 1 / sqrt(their number), for a network that moved
    m times its own size 1 / sqrt(1 + m^2) or so. One that was seen to go so far may have lost all resemblance.
    """
    pairs = [
        (p.detach().double() - p.detach().double().mean(), start.double() - start.double().mean())
        for name, p in instruments.trained.items()
        if (start := instruments.start.parameters.get(name)) is not None and bool((start != start.flatten()[0]).any())
    ]
    drawn = sum(own.numel() for own, _ in pairs)
    if not drawn or "parameters" not in instruments.looks:
        return False, False
    both = sum(float((own * start).sum()) for own, start in pairs)
    sizes = [math.sqrt(sum(float(pair[side].square().sum()) for pair in pairs)) for side in (0, 1)]
    alike, noise = both / max(math.prod(sizes), 1e-300), 1 / math.sqrt(drawn)
    furthest = float(np.nanmax(run.scalars("parameter_motion")[1]))
    return alike > CLEAR * noise, alike < NOISE * noise and 1 / math.hypot(1, furthest) > CLEAR * noise
