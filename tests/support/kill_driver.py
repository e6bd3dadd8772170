"""A process of its own for tests/training/test_kill_training.py: trains, and dies where it is told to. Not a test module.

    kill_driver.py train FOLDER < plans        one forked child per plan; prints how each ended, as JSON
    kill_driver.py sweep FOLDER JOB [JOB ...]  a two-worker sweep over jobs named below; prints the error, as JSON

A plan is {"folder": NAME, "at": K or null, "how": "before" | "half" | "after"}: the child kills itself before, in the
middle of, or after the K-th write, when the file is not renamed or synced yet.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()


# --- a tiny training -----------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Three members that differ in everything they may differ in; curves, kernels, portraits, four checkpoints."""
    from unlazy.data.circle import Circle
    from unlazy.models.spec import NetSpec
    from unlazy.probes import standard
    from unlazy.training.ensemble import Member
    from unlazy.training.fit import Recipe, fit
    from unlazy.training.recorder import FixedSteps, Measure

    members = (Member(0, 1e-2, 4.0), Member(1, 3e-2, 10.0), Member(5, 1e-3, 30.0))
    recipe = Recipe(NetSpec(2, width=3, depth=2), members, epochs=6, batch=8, checkpoint_epochs=2)
    measures = [
        Measure(standard.curves, FixedSteps.at(range(0, 19, 3))),
        Measure(standard.kernels, FixedSteps.at((0, 4, 12, 18))),
        Measure(standard.portrait, FixedSteps.at((1, 10, 18))),
    ]
    fit(recipe, Circle(n=24).dataset(), measures, folder)


def die_at(at: int | None, how: str) -> list[int]:
    """Pull the plug at the ``at``-th write of this process; returns the list that counts the writes."""
    from unlazy import store

    put, calls = store._write_all, []

    def fatal(descriptor: int, data: bytes) -> None:
        calls.append(len(data))
        due = len(calls) == at
        if not due or how != "before":
            put(descriptor, data[: len(data) // 2] if due and how == "half" else data)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)

    store._write_all = fatal
    return calls


def prepare() -> None:
    """Import once what every child needs, also what torch imports late; compute nothing, so that forking is safe."""
    import sympy  # noqa: F401
    import torch
    import torch.fx.experimental.symbolic_shapes

    from unlazy.runtime import code_sha256

    torch.set_num_threads(1)
    code_sha256()


def train_forked(plan: dict) -> dict:
    """Carry out one plan in a child process."""
    child = os.fork()
    if child == 0:
        try:
            calls = die_at(plan["at"], plan["how"])
            train(FOLDER / plan["folder"])
            os._exit(min(len(calls), 255))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)  # noqa: T201
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return {"killed": killed, "writes": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None}


# --- jobs of a sweep -----------------------------------------------------------------------------


def announce(name: str) -> None:
    """Write our process id to FOLDER/NAME, whole or not at all."""
    path = FOLDER / f".{name}"
    path.write_text(str(os.getpid()))
    path.rename(FOLDER / name)


def forever(name: str) -> None:
    announce(name)
    while True:
        signal.pause()


def store_error(name: str) -> None:
    from unlazy.runtime import StoreError

    raise StoreError("the shelf is broken.")


def unsupported(name: str) -> None:
    from unlazy.runtime import Unsupported

    raise Unsupported("net.pool", "it has no gates", "Use ReLU.")


def plain_error(name: str) -> None:
    raise KeyError("nobody", name)


def orphaned() -> None:
    """A worker that is still importing when its parent dies."""
    parent = os.getppid()
    announce(f"late-{os.getpid()}")
    while os.getppid() == parent:
        time.sleep(0.01)


def short(name: str) -> None:
    announce(name)


def killed(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


JOBS = {job.__name__: job for job in (forever, store_error, unsupported, plain_error, short, killed)}


def sweep_jobs(names: list[str]) -> dict:
    from unlazy.studies.runner import Task, run_tasks

    outcome = run_tasks(call, [Task(name, (name,)) for name in names], workers=2)
    failed = {name: [type(error).__name__, str(error)] for name, error in outcome.failed.items()}
    return {"done": sorted(outcome.done), "failed": failed}


def call(name: str) -> None:
    JOBS[name.split("-")[0]](name)


def main() -> None:
    if sys.argv[1] == "train":
        prepare()
        ended = [train_forked(plan) for plan in json.load(sys.stdin)]
    else:
        ended = sweep_jobs(sys.argv[3:])
    print(json.dumps(ended))  # noqa: T201


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and (FOLDER / "wait-for-my-end").exists():
    orphaned()
