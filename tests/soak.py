"""Hours of harm in one command: kills at random writes, wrong values in every argument, damaged runs; ends in one line.

    python tests/soak.py --kills 1000 --calls 10000 --seed 0

Exit status 1 if a bit or a line was lost, an answer was NaN in silence, a call hung, or a command ended in a traceback.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import ModuleType

FUNCTIONS = 0.6  # of the calls are of functions, the others of commands
TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "support"))


def load(path: Path) -> ModuleType:
    """A test module, for the functions in it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kill(count: int, folder: Path, chance: random.Random) -> int:
    """Kill trainings at random writes and let them finish; how many did not end with the bits of an undisturbed one."""
    kills = load(TESTS / "training" / "test_kill_training.py")
    [ended] = kills.drive(folder, [kills.plan("whole")])
    whole, lost = kills.contents(folder / "whole"), 0
    for begin in range(0, count, 50):
        plans = [
            kills.plan(f"{begin + number}", chance.randint(1, ended["writes"]), chance.choice(kills.HOWS))
            for number in range(min(50, count - begin))
        ]
        kills.drive(folder, plans)
        kills.drive(folder, [kills.plan(plan["folder"]) for plan in plans])
        lost += sum(kills.contents(folder / plan["folder"]) != whole for plan in plans)
    return lost


def call(count: int, folder: Path, chance: random.Random) -> Counter[str]:
    """Wrong values in arguments of public names: how many calls ended how."""
    calls = load(TESTS / "test_public_calls.py")
    cases = list(calls.tried(calls.public_calls(folder), 1))
    chosen = chance.sample(cases, min(count, len(cases)))
    return Counter(calls.outcome(one, argument, value) for one, argument, _, value in chosen)


def command(count: int, folder: Path, seed: int) -> tuple[int, list[str]]:
    """Commands on damaged runs: how many, and those that ended in a traceback."""
    damaged = load(TESTS / "cli" / "test_damaged_runs.py")
    import tarfile

    with tarfile.open(damaged.KEPT) as archive:
        archive.extractall(folder / "good", filter="data")
    found: list[str] = []
    for number in range(count // 4):
        found += damaged.try_commands(folder / "good", folder, 1000 * seed + number)
    return count // 4 * 4, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=10_000, help="of functions and of commands")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("kills", "calls", "commands"):
            (folder / part).mkdir()
        lost = kill(options.kills, folder / "kills", chance)
        ends = call(int(FUNCTIONS * options.calls), folder / "calls", chance)
        functions = sum(ends.values())
        commands, tracebacks = command(max(0, options.calls - functions), folder / "commands", options.seed)
    share = ends["foreign"] / max(1, functions)
    print(  # noqa: T201
        *tracebacks,
        f"soak: {options.kills} kills, {lost} runs with other bits; {functions} calls, {ends['silent']} silent, "
        f"{ends['slow']} hung, {share:.2%} with errors that are not ours; {commands} commands on damaged runs, "
        f"{len(tracebacks)} tracebacks",
        sep="\n",
    )
    sys.exit(bool(lost or ends["silent"] or ends["slow"] or tracebacks or share > 0.01))


if __name__ == "__main__":
    main()
