"""The playground's child process: trains one small network into a run folder, at a pace that can be watched.

    python -m unlazy.studio.playground_child        reads folder and settings as one line of JSON from standard input

The process imports everything first and then waits for that line, so that a training can begin at once. It ends when its time is
over, when it is killed, or when its parent is gone (standard input closes).
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unlazy.runtime import InputError, require

if TYPE_CHECKING:
    import torch

    from unlazy.data.dataset import Dataset
    from unlazy.models.spec import NetSpec

MODELS = ("relu", "dlgn", "pwc")
DATA = ("circle", "moons", "xor", "spiral")
GATES = ("soft", "hard")
EXTENT, SIDE = 1.5, 48  # the grid on which the output is drawn
SECONDS = 120
STEPS = 20_000
BATCH = 32
FRAMES_PER_SECOND = 18
MEMORY = 4 << 30  # bytes of address space; torch itself takes more than one GiB of it
LARGEST_FILE = 64 << 20


@dataclass(frozen=True)
class PlaySettings:
    """The settings of a playground training."""

    model: str = "pwc"
    data: str = "circle"
    width: int = 8
    depth: int = 3
    beta: float = 4.0
    gate: str = "soft"
    frequencies: tuple[float, float] = (1.0, 5.0)
    seed: int = 0
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        for name, known in (("model", MODELS), ("data", DATA), ("gate", GATES)):
            value = getattr(self, name)
            require(value in known, f"{name} must be one of {', '.join(known)}; got {value!r}.")
        for name, low, high in (("width", 1, 64), ("depth", 1, 8), ("seed", 0, 10**6)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(
                whole and low <= value <= high, f"{name} must be a whole number from {low} to {high}; got {value!r}."
            )
        _require_within("beta", self.beta, 0.1, 100.0)
        _require_within("learning_rate", self.learning_rate, 1e-5, 1.0)
        pair = self.frequencies
        require(isinstance(pair, tuple) and len(pair) == 2, f"frequencies are two numbers; got {pair!r}.")
        for value in pair:
            _require_within("a frequency", value, 0.0, 32.0)
        object.__setattr__(self, "frequencies", (float(pair[0]), float(pair[1])))

    @classmethod
    def from_json(cls, plain: Any) -> PlaySettings:
        """Parse settings from the page; raises ``InputError`` for unknown or impossible ones."""
        require(isinstance(plain, dict), "settings must be a JSON object.")
        unknown = sorted(set(plain) - {field.name for field in fields(cls)})
        require(not unknown, f"unknown settings: {', '.join(map(str, unknown))[:200]}.")
        plain = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        try:
            return cls(**plain)
        except TypeError as error:
            raise InputError(f"settings: {error}.") from error


def _require_within(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    require(number and low <= value <= high, f"{name} must be a number from {low:g} to {high:g}; got {value!r}.")


def is_frame_step(step: int) -> bool:
    """Whether a step is measured: every step at first, later one step in ``step // 50``, at most 50 steps apart."""
    return step % max(1, min(50, step // 50)) == 0


def make_data(play: PlaySettings) -> Dataset:
    """The chosen data set of points in the plane: two waves on the circle, or classes -1 and 1."""
    import torch

    from unlazy.data.circle import Circle
    from unlazy.data.dataset import Dataset
    from unlazy.runtime import stream

    if play.data == "circle":
        return Circle(n=240, top=play.frequencies[0], bottom=play.frequencies[1]).dataset()
    n, random = 240, stream(play.seed, "playground", play.data)
    noise = torch.randn(n, 2, generator=random)
    t, label = torch.rand(n, generator=random), torch.arange(n) % 2
    if play.data == "moons":
        angle = math.pi * (t + label)
        x = torch.stack([torch.cos(angle) + label - 0.5, torch.sin(angle) + 0.5 * label - 0.25], 1) * 0.85
        x = x + 0.07 * noise
    elif play.data == "spiral":
        angle = 3 * math.pi * t.sqrt() + math.pi * label
        x = torch.stack([torch.cos(angle), torch.sin(angle)], 1) * (0.1 + 1.1 * t.sqrt())[:, None] + 0.03 * noise
    else:
        corner = torch.arange(n) // 2 % 2
        signs = torch.stack([2.0 * corner - 1, (2.0 * corner - 1) * (2.0 * label - 1)], 1)
        x = 0.7 * signs + 0.18 * noise
    classes = {"blue": label == 0, "orange": label == 1}
    return Dataset(play.data, x, (2.0 * label - 1)[:, None], classes, {"n": n, "seed": play.seed})


def make_spec(play: PlaySettings) -> NetSpec:
    """The spec of the chosen network."""
    from unlazy.models.gates import HardGate, SoftGate
    from unlazy.models.spec import NetSpec, relu_spec

    sizes: dict[str, Any] = {"width": play.width, "depth": play.depth}
    if play.model == "relu":
        return relu_spec(2, **sizes)
    gate = SoftGate(play.beta) if play.gate == "soft" else HardGate(play.beta)
    return NetSpec(2, experts="constant" if play.model == "pwc" else "linear", gate=gate, **sizes)


def output_grid() -> torch.Tensor:
    """The points at which the output is drawn, ``[SIDE * SIDE, 2]``, row by row from the lowest."""
    import torch

    line = torch.linspace(-EXTENT, EXTENT, SIDE)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.reshape(-1), y.reshape(-1)], 1)


def train(play: PlaySettings, folder: Path, *, steps: int = STEPS, seconds: float = SECONDS) -> None:
    """Train, and write a measurement at every frame step, at most ``FRAMES_PER_SECOND`` per second."""
    import torch

    from unlazy import runtime
    from unlazy.probes import standard
    from unlazy.store import Writer
    from unlazy.training.ensemble import Member, MemberAdam, batch_order, build_member_stack
    from unlazy.training.fit import squared_error

    data, spec, picture = make_data(play), make_spec(play), output_grid()
    member = Member(play.seed, play.learning_rate, None if play.model == "relu" else play.beta)
    net = build_member_stack(spec, [member], torch.float32)
    adam = MemberAdam(net, [member.lr])
    groups = {name: inside.nonzero()[:, 0].tolist() for name, inside in data.groups.items()}
    recipe = {
        "play": asdict(play),
        "batch": BATCH,
        "grid": {"extent": EXTENT, "size": SIDE},
        "scope": {"groups": groups},
        "started": time.time(),
    }
    header = {
        "kind": "play",
        "study": None,
        "scale": None,
        "recipe": recipe,
        "members": [member.to_dict()],
        "model": spec.to_dict(),
        "data": data.describe(),
        "provenance": runtime.provenance("float32"),
    }
    end, next_frame = time.monotonic() + seconds, 0.0
    with Writer(folder, header) as writer:
        for step in range(steps + 1):
            if step:
                epoch, place = divmod(step - 1, -(-len(data) // BATCH))
                rows = batch_order([member], epoch, len(data))[:, place * BATCH : (place + 1) * BATCH]
                adam.minimise(squared_error(net(data.x[rows]), data.y[rows]))
            over = step == steps or time.monotonic() > end
            if not (is_frame_step(step) or over):
                continue
            time.sleep(max(0.0, next_frame - time.monotonic()))
            next_frame = time.monotonic() + 1 / FRAMES_PER_SECOND
            scalars = {name: value.numpy() for name, value in standard.curves(net, data).items()}
            arrays = {name: value.detach().numpy() for name, value in standard.portrait(net, data).items()}
            with torch.no_grad():
                arrays["grid_output"] = net(picture)[..., 0].numpy()
            if step == 0:
                arrays |= {"probe_x": data.x[None].numpy(), "probe_y": data.y[None].numpy()}
            writer.record(step, scalars, arrays)
            if over:
                break
        writer.finish()


def limit_this_process(seconds: int = SECONDS) -> None:
    """Lower this process's priority and limit its processor time, memory and file size."""
    os.nice(10)
    for what, most in (
        (resource.RLIMIT_CPU, seconds + 30),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, LARGEST_FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard), min(most, hard)))


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()  # returns when the other end is closed
    os._exit(0)


def warm_up() -> None:
    """Import everything and train a small network for two steps, because first calls are slow."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix=".", dir=".") as place:  # the leading dot hides it from the list of runs
        train(PlaySettings(width=2, depth=1), Path(place) / "run", steps=2)


def main() -> None:
    """Entry point of the child process."""
    limit_this_process()
    warm_up()
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the parent closed its end: no training was asked for
    asked = json.loads(line)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    train(PlaySettings.from_json(asked["play"]), Path(asked["folder"]))


if __name__ == "__main__":
    main()
