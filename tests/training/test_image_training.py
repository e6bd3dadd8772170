"""Training image networks: batches against a loop over pictures, the recipe against its formulas, and networks that learn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from image_cases import QUICK, SMALL, stripes
from unlazy.models.build import build
from unlazy.models.gates import HardGate
from unlazy.runtime import InputError, StoreError
from unlazy.store import Run, Writer
from unlazy.training import images as training
from unlazy.training.batches import CROP, DeviceImages
from unlazy.training.images import ImageRecipe, loss_function, make_optimiser, train_images
from unlazy.training.state import restore_state, training_state

# --- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("standardise", [False, True])
def test_numbers_are_those_of_the_pictures(standardise: bool) -> None:
    images = stripes(7)
    data = DeviceImages.from_images(images, "cpu", standardise=standardise)
    torch.testing.assert_close(data.floats(data.pixels), images.floats(standardise), rtol=1e-5, atol=1e-6)
    layout = torch.channels_last
    last = DeviceImages.from_images(images, "cpu", standardise=standardise, layout=layout)
    assert last.floats(last.pixels).is_contiguous(memory_format=layout)
    torch.testing.assert_close(last.floats(last.pixels), data.floats(data.pixels))


def numbered(n: int) -> DeviceImages:
    """Pictures of which no two crops are alike."""
    pixels = torch.randint(0, 256, (n, 12, 12, 1), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return DeviceImages(pixels, torch.arange(n), torch.zeros(1), torch.ones(1))


def crops(picture: Tensor) -> list[Tensor]:
    """All crops of a picture with mirrored edges, and of its mirror image."""
    found = []
    for turned in (picture, picture.flip(1)):
        room = F.pad(turned[None, None], (CROP,) * 4, mode="reflect")[0, 0]
        found += [room[i : i + 12, j : j + 12] for i in range(2 * CROP + 1) for j in range(2 * CROP + 1)]
    return found


def test_augmented_pictures_are_crops_of_their_own_picture() -> None:
    data, shown = numbered(60), Counter[int]()
    for x, y in data.batches(0, 3, 20, augment=True):
        for picture, label in zip(x[:, 0], y.tolist(), strict=True):
            own = crops(data.pixels[label, :, :, 0].float())
            matches = [place for place, crop in enumerate(own) if torch.equal(crop, picture)]
            assert len(matches) == 1
            shown[matches[0]] += 1
    turned = sum(count for place, count in shown.items() if place >= (2 * CROP + 1) ** 2)
    assert 15 <= turned <= 45  # half of 60, give or take
    assert len(shown) > 40  # of 162


def test_an_epoch_shows_every_picture_once_in_an_order_of_its_own() -> None:
    data = numbered(50)
    first, again, other, elsewhere = (
        torch.cat([y for _, y in data.batches(seed, epoch, 10, augment=False)])
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert sorted(first.tolist()) == list(range(50))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, elsewhere)
    assert [len(y) for _, y in data.batches(0, 0, 16, augment=False)] == [16, 16, 16]  # whole batches only
    for x, y in data.batches(0, 0, 16, augment=False):
        assert torch.equal(x, data.floats(data.pixels[y]))


# --- the recipe ------------------------------------------------------------------------------------


def test_one_cycle_goes_up_and_down() -> None:
    recipe = ImageRecipe(1, lr=0.4, warm_up=0.25)
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(0.4)
    assert rates.index(max(rates)) == 25
    assert rates[:26] == sorted(rates[:26])
    assert rates[25:] == sorted(rates[25:], reverse=True)
    assert 0 < rates[0] < 0.02
    assert 0 < rates[-1] < 0.001
    flat = replace(recipe, schedule="constant")
    assert {flat.rate(step, 100) for step in range(100)} == {0.4}


def test_loss_is_cross_entropy_mixed_with_a_teacher() -> None:
    net, teacher = build(SMALL), build(SMALL, seed=1).eval()
    x, y = torch.randn(9, 2, 8, 8), torch.arange(9) % 3
    net.eval()
    plain = loss_function(net, ImageRecipe(1, smoothing=0.0), None, autocast=False)(x, y)
    torch.testing.assert_close(plain, -net(x).log_softmax(1)[torch.arange(9), y].mean())
    smoothed = loss_function(net, ImageRecipe(1, smoothing=0.3), None, autocast=False)(x, y)
    wanted = 0.7 * F.one_hot(y, 3) + 0.1
    torch.testing.assert_close(smoothed, -(wanted * net(x).log_softmax(1)).sum(1).mean())
    mixed = loss_function(net, ImageRecipe(1, smoothing=0.0, distil=0.4, temperature=2.0), teacher, autocast=False)(
        x, y
    )
    p, log_q = (teacher(x) / 2).softmax(1), (net(x) / 2).log_softmax(1)
    torch.testing.assert_close(mixed, 0.6 * plain + 0.4 * 4 * (p * (p.log() - log_q)).sum(1).mean())
    itself = loss_function(net, ImageRecipe(1, distil=1.0), net, autocast=False)(x, y)
    assert abs(float(itself.detach())) < 1e-6


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_only_weights_decay(optimiser: str) -> None:
    net = build(SMALL)
    made = make_optimiser(net, ImageRecipe(1, optimiser=optimiser, weight_decay=0.1), fused=False)
    decay = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert len(decay) == len(list(net.parameters()))
    for parameter in net.parameters():
        assert decay[id(parameter)] == (0.1 if parameter.ndim > 1 else 0.0)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_rates_are_those_of_branch_and_parametrisation(optimiser: str) -> None:
    for parametrisation in ("standard", "mup"):
        net = build(replace(SMALL, parametrisation=parametrisation))
        made = make_optimiser(net, ImageRecipe(1, optimiser=optimiser, lr=0.5, gate_lr=0.1), fused=False)
        rates = {id(p): group["lr"] for group in made.param_groups for p in group["params"]}
        asked = net.rate_multipliers(optimiser)
        for name, parameter in net.named_parameters():
            branch = 0.1 if name.startswith("gate_layers.") else 1.0
            assert rates[id(parameter)] == pytest.approx(0.5 * branch * asked[name])
    assert (min(asked.values()) < 1) == (optimiser == "adam")


def test_wrong_recipes_are_refused() -> None:
    for wrong in (
        {"epochs": 0},
        {"optimiser": "lion"},
        {"schedule": "step"},
        {"lr": 0.0},
        {"distil": 2.0},
        {"warm_up": 1.0},
    ):
        with pytest.raises(InputError):
            ImageRecipe(**{"epochs": 1, **wrong})
    with pytest.raises(InputError, match="more than the 10 pictures"):
        train_images(build(SMALL), stripes(10), stripes(10), QUICK)


# --- training --------------------------------------------------------------------------------------

MODELS = {
    "relu": SMALL.relu(),
    "soft": SMALL,
    "hard": replace(SMALL, gate=HardGate(4.0)),
    "pwc": replace(SMALL, gate=HardGate(4.0), experts="constant"),
}


@pytest.mark.parametrize("name", MODELS)
def test_networks_learn_stripes(name: str) -> None:
    train, test = stripes(192), stripes(60, seed=1)
    net = build(MODELS[name])
    found = train_images(net, train, test, replace(QUICK, looks_every=2))
    assert found["test_as_trained"] > 0.9
    assert found["train_as_trained"] > 0.9
    assert [look["epoch"] for look in found["curve"]] == [2, 4]
    assert found["best_test"] == max(look["test_as_trained"] for look in found["curve"])
    assert found["steps"] == 4 * 12
    assert found["seconds"] > 0
    assert not found["graphs"]
    x = test.floats(standardise=True)
    with torch.no_grad():
        for key, model in (("test_as_trained", net), ("test_hard_gates", net.hard())):
            right = [int(model.eval()(x[i : i + 1]).argmax()) == int(test.labels[i]) for i in range(60)]
            assert found[key] == pytest.approx(sum(right) / 60)
    if name != "soft":
        assert found["test_hard_gates"] == found["test_as_trained"]


def test_accuracies_count_soft_and_hard_gates_apart() -> None:
    net, images = build(SMALL).eval(), stripes(300)
    data = DeviceImages.from_images(images, "cpu")
    x = data.floats(data.pixels)
    with torch.no_grad():
        answers = {"as_trained": net(x).argmax(1), "hard_gates": net.hard()(x).argmax(1)}
    assert not torch.equal(answers["as_trained"], answers["hard_gates"])
    for labels in answers.values():
        found = training.measure_accuracies(net, replace(data, labels=labels), data)
        for name, given in answers.items():
            assert found[f"train_{name}"] == pytest.approx(float((given == labels).float().mean()))
            assert found[f"test_{name}"] == pytest.approx(float((given == images.labels).float().mean()))


def test_training_is_repeatable_and_follows_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "EVALUATED_AT_ONCE", 7)  # several parts, the last one short
    recipe = replace(QUICK, epochs=1, augment=True)
    made = []
    for seed in (0, 0, 1):
        net = build(SMALL)
        made.append((train_images(net, stripes(64), stripes(20), recipe, seed=seed), net.state_dict()))
    (a, first), (b, second), (_, third) = made
    assert a["loss"] == b["loss"]
    assert a["test_as_trained"] == b["test_as_trained"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_adam_at_a_constant_rate_learns_too() -> None:
    recipe = replace(QUICK, optimiser="adam", schedule="constant", lr=3e-3, weight_decay=0.0, standardise=False)
    found = train_images(build(MODELS["relu"]), stripes(192), stripes(60, seed=1), recipe)
    assert found["test_as_trained"] > 0.9


def test_training_accuracy_counts_the_probe_alone() -> None:
    train = stripes(192)
    wrong_later = replace(train, labels=torch.where(torch.arange(192) < 96, train.labels, (train.labels + 1) % 3))
    net = build(SMALL.relu())
    train_images(net, train, stripes(60, seed=1), QUICK)
    slow = replace(QUICK, epochs=1, lr=1e-9)
    all_of_it = train_images(net, wrong_later, stripes(60), slow)["train_as_trained"]
    half = train_images(net, wrong_later, stripes(60), replace(slow, train_probe=96))["train_as_trained"]
    assert half > 0.9
    assert 0.4 < all_of_it < 0.6


def test_diverged_training_is_reported_not_hidden() -> None:
    spec = replace(SMALL.relu(), batch_norm=False)
    found = train_images(build(spec), stripes(64), stripes(20), replace(QUICK, lr=1e12))
    assert found["loss"] is None
    assert 0 <= found["test_as_trained"] <= 1


def test_trial_steps_leave_the_statistics_alone() -> None:
    net = build(SMALL).train()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    loss = loss_function(net, QUICK, None, autocast=False)
    with training._preserve_statistics(net):
        training._PlainStep(net, loss)(torch.randn(9, 2, 8, 8), torch.arange(9) % 3)
        assert any(not torch.equal(before[name], buffer) for name, buffer in net.named_buffers())
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


# --- interruptions ---------------------------------------------------------------------------------


class UnpluggedError(Exception):
    """Stands for a machine that goes away."""


def folder_of(path: Path, recipe: ImageRecipe) -> Writer:
    header = {"kind": "train", "study": None, "scale": None, "recipe": recipe.to_dict(), "members": [{}]}
    return Writer(path, header | {"provenance": {}})


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize(("stop", "begun"), [(3, 2), (4, 4)])
def test_interrupted_training_goes_on_to_the_same_bits(optimiser: str, stop: int, begun: int, tmp_path: Path) -> None:
    recipe = replace(QUICK, epochs=5, optimiser=optimiser, lr=0.02, augment=True, looks_every=1)
    train, test = stripes(64), stripes(30, seed=1)
    alone = build(MODELS["hard"])
    wanted = train_images(alone, train, test, recipe)

    def unplugged(done: int, _: int) -> None:
        if done == stop:
            raise UnpluggedError

    options: dict[str, Any] = {"keep_every": 2}
    with folder_of(tmp_path / "run", recipe) as writer, pytest.raises(UnpluggedError):
        train_images(build(MODELS["hard"]), train, test, recipe, writer=writer, progress=unplugged, **options)
    net, told = build(MODELS["hard"], seed=7), list[int]()
    with folder_of(tmp_path / "run", recipe) as writer:
        found = train_images(
            net, train, test, recipe, writer=writer, progress=lambda done, _: told.append(done), **options
        )
        writer.finish()
    assert told == list(range(begun + 1, 6))
    assert found["curve"] == wanted["curve"]
    assert all(torch.equal(a, b) for a, b in zip(alone.state_dict().values(), net.state_dict().values(), strict=True))
    run = Run(tmp_path / "run")
    assert [line.step for line in run.lines] == [4, 8, 12, 16, 20]
    assert [line.step for line in run.lines if line.checkpoint] == [8, 16, 20]
    assert found["seconds"] == pytest.approx(run.scalars("seconds")[1][-1, 0], abs=1e-3)
    kept = run.checkpoint(20)
    assert all(np.array_equal(kept[f"model/{name}"][0], value) for name, value in net.state_dict().items())


def test_states_of_other_networks_are_refused() -> None:
    net, other = build(MODELS["hard"]), build(MODELS["relu"])
    arrays = training_state(net, make_optimiser(net, QUICK, fused=False))
    with pytest.raises(StoreError, match="another network"):
        restore_state(other, make_optimiser(other, QUICK, fused=False), arrays)
    with pytest.raises(InputError, match="keep_every"):
        train_images(net, stripes(64), stripes(20), QUICK, keep_every=0)


def test_momentum_lies_in_memory_as_its_parameter_does() -> None:
    """One that lay differently would be slow, or refused, on a GPU."""
    made = []
    for _ in range(2):
        net: Any = build(MODELS["hard"]).to(memory_format=torch.channels_last)
        made.append((net, make_optimiser(net, QUICK, fused=False)))
    (first, moved), (second, fresh) = made
    training._PlainStep(first, loss_function(first, QUICK, None, autocast=False))(
        torch.randn(9, 2, 8, 8), torch.arange(9) % 3
    )
    moved.step()
    restore_state(second, fresh, training_state(first, moved))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        (mine,), (theirs,) = moved.state[one].values(), fresh.state[other].values()
        assert torch.equal(mine, theirs)
        assert theirs.stride() == other.stride()
        assert not theirs.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_train_as_plain_ones_do(name: str) -> None:
    recipe = replace(QUICK, precision="float32")
    found = [
        train_images(build(MODELS[name]), stripes(192), stripes(60), recipe, device="cuda", graphs=graphs)
        for graphs in (True, False)
    ]
    assert found[0]["graphs"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=0.05)
