"""Networks trained together: as when trained alone, inside wider ones, and again after an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from image_cases import stripes
from unlazy.models.build import build
from unlazy.models.gates import HardGate
from unlazy.models.image_net import GatedImageNet
from unlazy.models.spec import ImageSpec
from unlazy.runtime import InputError
from unlazy.store import Run, Writer
from unlazy.training import parallel_images
from unlazy.training.batches import DeviceImages
from unlazy.training.images import ImageRecipe, accuracy, train_images
from unlazy.training.parallel_images import Stack, train_in_parallel, widen_with_zeros

SPEC = ImageSpec((5, 6), channels=2, classes=3, batch_norm=False, dense=4)
RECIPE = ImageRecipe(
    3,
    batch=16,
    optimiser="adam",
    lr=3e-3,
    weight_decay=0.0,
    schedule="constant",
    smoothing=0.0,
    augment=False,
    standardise=False,
)
KINDS = {
    "relu": SPEC.relu(),
    "soft": SPEC,
    "hard": replace(SPEC, gate=HardGate(4.0)),
    "pwc": replace(SPEC, experts="constant"),
}


def stacks(names: list[str], seeds: tuple[int, ...] = (0, 1), writers: dict[str, Writer] | None = None) -> list[Stack]:
    made = []
    for name in names:
        nets = [build(KINDS[name], seed=seed) for seed in seeds]
        made.append(Stack(name, nets, seeds, None if writers is None else writers[name]))
    return made


def test_together_is_as_alone() -> None:
    train, test = stripes(100), stripes(40, seed=1)
    found = train_in_parallel(stacks(list(KINDS)), train, test, RECIPE, measured_epochs=(1,))
    for name in KINDS:
        for seed in (0, 1):
            net = build(KINDS[name], seed=seed)
            alone = train_images(net, train, test, replace(RECIPE, looks_every=1), seed=seed)
            mine = found[name][seed]
            assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-4)
            assert mine["parameters"] == alone["parameters"]
            assert mine["steps"] == alone["steps"]
            assert [look["epoch"] for look in mine["curve"]] == [1, 3]
            assert mine["curve"][0] == pytest.approx(alone["curve"][0], rel=1e-4)
            for key in ("test_as_trained", "test_hard_gates", "train_as_trained", "train_hard_gates"):
                assert mine[key] == pytest.approx(alone[key])


def test_the_last_look_is_at_all_pictures_and_at_those_before() -> None:
    train, test = stripes(100), stripes(40, seed=1)
    few = replace(RECIPE, train_probe=12)
    (found, _) = train_in_parallel(stacks(["relu"]), train, test, few, measured_epochs=(1,))["relu"]
    net = build(KINDS["relu"], seed=0)
    alone = train_images(net, train, test, replace(few, looks_every=1))
    assert found["curve"][-1]["probe_as_trained"] == found["probe_as_trained"] == alone["train_as_trained"]
    assert found["train_as_trained"] == accuracy(
        net, DeviceImages.from_images(train, "cpu", standardise=few.standardise)
    )
    assert "probe_as_trained" not in found["curve"][0]


@pytest.mark.parametrize("name", KINDS)
def test_zero_channels_change_nothing_and_stay_zero(name: str) -> None:
    net = build(KINDS[name], seed=3).double()
    wide = widen_with_zeros(net, 8).double()
    assert wide.settings.widths == (8, 8)
    x, y = torch.randn(9, 2, 8, 8, dtype=torch.float64), torch.arange(9) % 3
    torch.testing.assert_close(wide(x), net(x))
    both = []
    for model in (net, wide):
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(5):
            adam.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            adam.step()
        both.append(dict(model.named_parameters()))
    for part, narrow in both[0].items():
        outer = both[1][part].detach().clone()
        torch.testing.assert_close(parallel_images._narrow_corner(outer, narrow.shape), narrow.detach())
        parallel_images._narrow_corner(outer, narrow.shape).zero_()
        assert not outer.any()


def recorded(folder: Path, name: str, recipe: dict[str, Any]) -> Writer:
    header = {"kind": "train", "study": None, "scale": None, "recipe": recipe, "members": [{}, {}], "provenance": {}}
    return Writer(folder / name, header)


class UnpluggedError(Exception):
    """Stands for a machine that goes away."""


def test_interrupted_training_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    train, test, names = stripes(64), stripes(20, seed=1), ["relu", "soft"]

    def attempt(folder: str, stop: int | None = None) -> tuple[dict[str, Any], list[GatedImageNet]]:
        def progress(done: int, _: int) -> None:
            if done == stop:
                raise UnpluggedError

        writers = {name: recorded(tmp_path / folder, name, {"name": name}) for name in names}
        made = stacks(names, writers=writers)
        try:
            found = train_in_parallel(made, train, test, RECIPE, measured_epochs=(1, 2), progress=progress)
            for writer in writers.values():
                writer.finish()
        finally:
            for writer in writers.values():
                writer.__exit__(None, None, None)
        return found, [net for stack in made for net in stack.nets]

    whole, nets = attempt("whole")
    with pytest.raises(UnpluggedError):
        attempt("cut", stop=2)
    again, same = attempt("cut")
    for name in names:
        for one, other in zip(whole[name], again[name], strict=True):
            assert [look["epoch"] for look in other["curve"]] == [1, 2, 3]
            assert one["curve"] == other["curve"]
            kept = [line.scalars["seconds"][0] for line in Run(tmp_path / "cut" / name).lines if line.scalars]
            assert 0 < kept[0] < kept[1] < kept[2] == pytest.approx(other["seconds"], abs=1e-3)  # before the cut, too
        run = Run(tmp_path / "cut" / name)
        assert run.status()["state"] == "finished"
        assert [line.step for line in run.lines] == [0, 4, 8, 12]
        kept = run.checkpoint(12)
        last = build(KINDS[name], seed=1)
        last.load_state_dict({key: torch.from_numpy(kept[f"model/{key}"][1]) for key in last.state_dict()})
        mine = same[2 * names.index(name) + 1]
        assert all(torch.equal(a, b) for a, b in zip(last.parameters(), mine.parameters(), strict=True))
    for one, other in zip(nets, same, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())


def test_what_does_not_go_together_is_refused() -> None:
    train, test = stripes(64), stripes(20)
    for wrong in ({"optimiser": "sgd"}, {"schedule": "one-cycle"}, {"augment": True}, {"batch": 65}):
        with pytest.raises(InputError):
            train_in_parallel(stacks(["relu"]), train, test, replace(RECIPE, **wrong))
    with pytest.raises(InputError, match="as many networks"):
        Stack("relu", [], [])
    with pytest.raises(InputError, match="batch-norm"):
        widen_with_zeros(build(ImageSpec((5,))), 8)
    with pytest.raises(InputError, match="multipliers"):
        widen_with_zeros(build(ImageSpec((5,), batch_norm=False, parametrisation="mup")), 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_streams_train_as_a_cpu_does(precision: str) -> None:
    train, test, recipe = stripes(192), stripes(60, seed=1), replace(RECIPE, precision=precision)
    on_gpu = train_in_parallel(stacks(list(KINDS)), train, test, recipe, device="cuda")
    on_cpu = train_in_parallel(stacks(list(KINDS)), train, test, recipe)
    for name in KINDS:
        for one, other in zip(on_gpu[name], on_cpu[name], strict=True):
            assert one["graphs"]
            assert one["loss"] == pytest.approx(other["loss"], rel=0.05)
