"""The campaign, the kernels along training and the page of the tables: against slow twins, and against made results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from test_image_training import stripes
from test_tables_claims import cell, first_table, second_table
from unlazy import plots
from unlazy.data.images import Images, load_images
from unlazy.models.conv import ImageSpec, build_images, gated, of_unit_size
from unlazy.models.folding import half_space_normals
from unlazy.models.fused import plain_backward, plain_forward
from unlazy.models.gates import HardGate
from unlazy.runtime import InputError
from unlazy.store import Run, Writer
from unlazy.studies.halfspace.tables import campaign, cooled, dynamics, figures, measure, pages, train
from unlazy.studies.halfspace.tables.claims import claims
from unlazy.studies.halfspace.tables.settings import SCALES, cells

TINY = ImageSpec((3, 4), (1, 1), channels=1, gate=HardGate(4.0))


# --- gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
def test_one_pass_formulas_are_the_gates(soft: bool) -> None:
    q, v, g = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    q, v = q.requires_grad_(), v.requires_grad_()
    share = torch.sigmoid(3.0 * q)
    hard = (q >= 0).double()
    out = share * v if soft else (share + (hard - share).detach()) * v
    torch.testing.assert_close(plain_forward(q, v, 3.0, soft=soft), out)
    wanted = torch.autograd.grad(out, (q, v), g)
    found = plain_backward(g, q.detach(), v.detach(), 3.0, soft=soft)
    torch.testing.assert_close(found, wanted)


def test_even_gates_keep_every_half_space_and_bring_all_gates_within_reach() -> None:
    plain = build_images(replace(TINY, gate=HardGate(2.0)), seed=1).double()
    even = build_images(replace(TINY, gate=HardGate(2.0), even_gates=True), seed=1).double()
    x = torch.randn(6, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(plain.train()(x), even.train()(x))
    torch.testing.assert_close(plain.eval()(x), even.eval()(x))
    q = torch.randn(40, 3, 5, 5, dtype=torch.float64) * torch.tensor([50.0, 10.0, 20.0])[:, None, None]
    assert torch.equal(of_unit_size(q) >= 0, q >= 0)
    torch.testing.assert_close(of_unit_size(q).square().mean((0, 2, 3)), torch.ones(3).double(), rtol=1e-4, atol=0)
    reached = []
    for make in (lambda given: given, of_unit_size):
        given = q.clone().requires_grad_()
        (slope,) = torch.autograd.grad(gated(HardGate(2.0), make(given), torch.ones_like(q)).sum(), given)
        reached.append(float((slope > 0.01 * slope.max()).double().mean()))
    assert reached[0] < 0.2
    assert reached[1] > 0.95
    with pytest.raises(InputError, match="hard gates"):
        ImageSpec((3,), even_gates=True)


# --- kernels along training ------------------------------------------------------------------------


def test_kernels_follow_the_run_folders(tmp_path: Path) -> None:
    settings = SCALES["smoke", 1]
    wanted = [one for one in cells(settings) if one.in_stack() and one.model in ("relu", "dlgn-hard", "dln")]
    pictures = train.Pictures(settings)
    found = train.run_stacks(wanted, pictures, "cpu", tmp_path, "smoke")
    assert [one["model"] for one in found] == [one.model for one in wanted]
    folders = sorted(tmp_path.glob("*-*"))
    images = dynamics.fixed_images(pictures.get("digits")[0], 2)
    assert images.labels.tolist() == [label for label in range(10) for _ in range(2)]
    dynamics.do_all(folders, images)
    table = {net["model"]: net for net in dynamics.dynamics_of(folders, images)["networks"]}
    assert table.keys() == {"relu", "dlgn-hard", "dln"}
    for net in table.values():
        assert net["epochs"] == [0, 1, 2]
        assert net["tangent_distance"][0] == pytest.approx(0, abs=1e-6)
        assert net["tangent_distance"][1] / 1 == pytest.approx(net["tangent_velocity"][0], abs=1e-8)
        assert np.shape(net["log10_paths_by_class"]) == (3, 10)
    assert table["dln"]["overlap_alignment"] == [None] * 3  # every path is open on every image
    before = [path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz")]
    dynamics.do_all(folders, images)
    assert before == [path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz")]
    job = dynamics.Job(folders[0], 0, 0)
    first = build_images(wanted[[one.model for one in wanted].index("dlgn-hard")].spec(1, 10), seed=0)
    assert folders[0].name.startswith("dlgn-hard")
    assert all(
        torch.equal(a, b) for a, b in zip(dynamics.network_of(job).parameters(), first.parameters(), strict=True)
    )


def test_cooling_goes_on_from_the_last_state_at_a_tenth_of_the_rate(tmp_path: Path) -> None:
    settings = SCALES["smoke", 1]
    wanted = [one for one in cells(settings) if one.in_stack() and one.model in ("relu", "dlgn")]
    pictures = train.Pictures(settings)
    trained = {one["model"]: one for one in train.run_stacks(wanted, pictures, "cpu", tmp_path, "smoke")}
    folders = dynamics.folders_in(tmp_path)
    cold = {}
    for folder in folders:
        (net,) = cooled.cool(folder, *pictures.get("digits"), epochs=2)
        cold[net["model"]] = net
        assert (net["epochs_before"], net["epochs"], len(net["curve"])) == (2, 2, 2)
        assert net["rate"] == pytest.approx(0.1 * net["rate_before"]) == pytest.approx(0.1 * settings.lr)
        for name, value in net["before"].items():  # the last state, not another one
            assert value == trained[net["model"]][name]
        assert net["after"] == {name: net["curve"][-1][name] for name in net["after"]}
    out = tmp_path / "paper-cooled.json"
    cooled.main(["--runs", str(tmp_path), "--out", str(out), "--epochs", "2"])
    written = json.loads(out.read_text())
    assert len(written["provenance"]["data_sha256"].split()) == 2
    for net in written["networks"]:  # the same images, weights and batches in another process
        assert net["curve"][-1]["loss"] == pytest.approx(cold[net["model"]]["curve"][-1]["loss"], rel=1e-5)
    with pytest.raises(InputError, match="no runs"):
        dynamics.folders_in(tmp_path / "nothing")
    residual = Run(folders[0]).header | {"study": "table2"}
    Writer(tmp_path / "another", residual).__exit__(None, None, None)
    assert dynamics.folders_in(tmp_path) == folders


def test_cooled_networks_are_a_control_of_c20() -> None:
    def c20(cold: dict[str, Any] | None) -> dict[str, Any]:
        return next(row for row in claims(first_table() | {"cooled": cold}) if row["id"] == "C20")

    about = {"epochs_before": 10, "rate_before": 4e-4, "epochs": 5}
    nets = [
        {"model": model, "seed": seed, **about, "after": {"train_as_trained": 0.8, "test_as_trained": test}}
        for model, test in (("relu", 0.731), ("dlgn", 0.65), ("pwc", 0.66))
        for seed in range(2)
    ]
    without, told = c20(None), c20({"networks": nets})
    assert told["verdict"] == without["verdict"] == "holds"  # a control does not judge
    assert (
        "After 5 more epochs at a tenth of the rate: ReLU 73.1 % (training 80.0 %), DLGN, soft gates 65.0 %"
        in told["why"]
    )
    assert len(told["controls"]) == len(without["controls"]) + 6
    assert "Judged on" not in told["why"]
    of_another = c20({"networks": [net | {"rate_before": 1e-3} for net in nets]})
    assert of_another["why"] == without["why"]


def test_a_hundredth_of_the_images_may_hold_the_trace() -> None:
    assert dynamics.top_share(np.eye(200)) == pytest.approx(0.01)
    assert dynamics.top_share(np.diag([1.0] * 98 + [49.0, 2.0])) == pytest.approx(49 / 149, abs=1e-6)
    assert dynamics.top_share(np.diag([3.0, 1.0])) == pytest.approx(0.75)  # one image at least


def test_dead_classes_are_marked() -> None:
    overlap = np.diag([100.0, 10.0, 0.0])
    assert dynamics.log_paths(overlap, np.array([0, 0, 1]), 2) == [1.5, -1.0]


# --- the campaign ----------------------------------------------------------------------------------


class Digits(train.Pictures):
    """Digits, whatever is asked for."""

    def __init__(self) -> None:
        super().__init__(replace(SCALES["smoke", 2], images=120, test_images=40))

    def get(self, name: str) -> tuple[Images, Images]:
        return super().get("digits")


def tiny(one: campaign.Try) -> campaign.Try:
    """The same try on a network and a training that take no time."""

    def shrunk(spec: ImageSpec) -> ImageSpec:
        return replace(spec, widths=(3, 4), blocks=(1, 1))

    short: dict[str, Any] = {"epochs": 1, "batch": 32, "augment": False}
    teacher_recipe = None if one.teacher_recipe is None else replace(one.teacher_recipe, **short)
    teacher = None if one.teacher is None else shrunk(one.teacher)
    spec, recipe = shrunk(one.spec), replace(one.recipe, **short)
    return replace(one, spec=spec, recipe=recipe, teacher=teacher, teacher_recipe=teacher_recipe)


def test_tries_are_kept_once_and_judged_without_test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("base: beta 4", "normalised gates, beta 1", "no gate bias", "teacher")
    small = [tiny(one) for one in campaign.explore() if one.layout == campaign.SMALL and one.name in names]
    seen = []
    real = train.train_images

    def watching(net: Any, train_images: Images, test_images: Images, *more: Any, **named: Any) -> Any:
        seen.append((len(train_images), len(test_images), test_images.split))
        return real(net, train_images, test_images, *more, **named)

    monkeypatch.setattr(train, "train_images", watching)
    told: list[str] = []
    path = tmp_path / "tries.json"
    done = campaign.run(small, path, Digits(), "cpu", None, told.append)
    assert [one["try"] for one in done] == list(names)
    assert set(seen) == {(108, 12, "train")}
    assert len(seen) == len(names) + 1  # the teacher
    again = campaign.run(small, path, Digits(), "cpu", None, told.append)
    assert again == done
    assert len(told) == len(names)
    with pytest.raises(InputError, match="every layout"):
        campaign.chosen_gates([])
    wide = tiny(campaign.best({"hard_beta": 1.0, "even_gates": True}, 3)[0])
    assert wide.spec.even_gates
    assert wide.recipe.mixed > 0
    campaign.run([wide], path, Digits(), "cpu", tmp_path, told.append)
    assert told[-1].startswith("failed cifar-10 wide")
    assert "weights" in told[-1]
    assert wide.teacher is not None
    train.keep_weights(
        build_images(replace(wide.teacher, channels=1)), tmp_path / "cifar-10-resnet-34-relu-main-0.safetensors"
    )
    followed: list[str] = []
    (last,) = campaign.run([wide], path, Digits(), "cpu", tmp_path, told.append, tmp_path / "runs", followed.append)[
        -1:
    ]
    assert last["judged_on"] == "test images"
    assert followed == ["cifar-10 wide wide, teacher, patches: epoch 1 of 1"]
    (folder,) = (tmp_path / "runs").iterdir()
    run = Run(folder)
    assert run.status()["state"] == "finished"
    assert run.scalars("test_hard_gates")[1][-1, 0] == last["test_hard_gates"]
    assert run.header["model"] == wide.spec.to_dict()


def test_the_best_mean_over_layouts_is_chosen() -> None:
    def made(name: str, layout: str, score: float) -> dict[str, Any]:
        gates = campaign.gate_choices()[name]
        return {"stage": "explore", "try": name, "layout": layout, "gates": gates, "test_hard_gates": score}

    tries = [
        made("base: beta 4", "a", 0.8),
        made("base: beta 4", "b", 0.5),
        made("beta 1", "a", 0.7),
        made("beta 1", "b", 0.65),
    ]
    assert campaign.chosen_gates(tries) == {"hard_beta": 1.0}
    assert campaign.chosen_gates([*tries, made("beta 10", "a", 0.99)]) == {"hard_beta": 1.0}  # not tried on b


# --- pictures and pages ----------------------------------------------------------------------------


def test_patches_come_from_another_picture_of_the_batch() -> None:
    data = train_batches()
    plain = list(data.batches(0, 0, 20, augment=False))
    mixed = list(data.batches(0, 0, 20, augment=False, mixed=0.5))
    touched = 0
    for (x, y), (other, label) in zip(plain, mixed, strict=True):
        assert torch.equal(y, label)
        from_next = (other == x.roll(1, 0)) | (other == x)
        assert from_next.all()
        touched += int((other != x).flatten(1).any(1).sum())
    assert 10 < touched < 50  # of 60, half of them chosen


def train_batches() -> Any:
    from unlazy.training.batches import DeviceImages

    return DeviceImages.put(stripes(60), "cpu")


def test_normals_are_those_of_the_gates() -> None:
    net = build_images(TINY, seed=4).eval()
    found = measure.gate_normals(net, (0, 3), count=2, size=8)
    for layer in (0, 3):
        height = net.pre_activations(torch.zeros(1, 1, 8, 8))[layer].shape[2]
        units = [(channel, height // 2, height // 2) for channel in range(2)]
        wanted, _ = half_space_normals(net, layer, units, (8, 8))
        made = torch.from_numpy(found[f"layer_{layer}"]).float()
        torch.testing.assert_close(made, wanted / wanted.abs().amax((1, 2, 3), keepdim=True), rtol=1e-2, atol=1e-3)
    figure = figures.normals(found)
    assert len(figure.axes) == 4


def made_try(data: str, accuracy: float) -> dict[str, Any]:
    numbers = {"test_hard_gates": accuracy, "test_mirrored": accuracy + 0.01, "parameters": 2_000_000, "seconds": 7.0}
    about = {"stage": "best", "try": "wide", "data": data, "layout": "wide", "judged_on": "test images"}
    return {**about, **numbers, "seconds_in_all": 9.0, "recipe": {"epochs": 3}}


def test_the_page_says_what_was_measured_and_missed() -> None:
    first, second = first_table(), second_table()
    second["cells"].append(cell("cifar-10", "resnet-34", "relu", 92, seed=1))
    second["cells"].append(cell("cifar-10", "resnet-34", "dlgn-hard", 90, seed=1))
    for made in (first, second):
        made["claims"] = claims(made)
    text = pages.page(first, second, [made_try("cifar-10", 0.92), made_try("cifar-100", 0.5)])
    assert (
        "| DLGN, soft gates | 2 seeds, 10 epochs, rate 0.0004 | 85.0 | 73.2 ± 0.0 | 63.2 ± 0.0 | -1.0 ± 0.0 | 73.2 |"
        in text.replace("85.0 ± 0.0", "85.0")
    )
    assert "| cifar-10, resnet-34 | DLGN, hard gates | 2 seeds, 10 epochs |" in text
    assert "88.5 ± 2.1" in text
    assert "| cifar-10, wide: past 91 % | 92.0 | reached |" in text
    assert "| cifar-100, wide: past 67 % | 50.0 | missed |" in text
    assert (
        "| cifar-10, resnet-34: at least 88 % | 88.5 | reached |" in text
    )  # the mean of 87 and 90, not the better seed
    assert pages.MISSED in text
    aim = "resnet-110: within 6 points of its ReLU twin, trained longest"
    assert f"| cifar-100, {aim} | 3.0 (1 seed, 10 epochs) | reached |" in text
    second["cells"] += [
        cell("cifar-10", "resnet-110", "relu", 92, epochs=40),
        cell("cifar-10", "resnet-110", "dlgn-hard", 85, epochs=40),
    ]
    gaps = "3.0 (1 seed, 10 epochs); 7.0 (1 seed, 40 epochs)"
    assert f"| cifar-10, {aim} | {gaps} | missed |" in pages.page(first, second, [])
    second["cells"] = [made for made in second["cells"] if made["layout"] != "resnet-110"]
    assert f"| cifar-10, {aim} | not run | not run |" in pages.page(first, second, [])


def test_wide_networks_are_wide() -> None:
    first, second = first_table(), second_table()
    for made in (first, second):
        made["claims"] = claims(made)
    narrow = made_try("cifar-10", 0.93) | {"layout": "resnet-34", "try": "resnet-34, teacher"}
    text = pages.page(first, second, [made_try("cifar-10", 0.9), narrow])
    assert "| cifar-10, wide: past 91 % | 90.0 | missed |" in text
    assert "resnet-34, teacher" not in text[text.index("## Wide networks") : text.index("## How far")]


@pytest.mark.parametrize("states", [1, 2])
def test_kernels_are_drawn_however_few_were_measured(states: int) -> None:
    """With one stroke for every training, however many there are."""
    numbers = {f"{kind}_{name}": [0.1] * states for kind in dynamics.KERNELS for name in ("alignment", "distance")}
    numbers |= {f"{kind}_velocity": [0.1] * (states - 1) for kind in dynamics.KERNELS}
    nets = [
        {"model": model, "seed": 0, "trained_for": 10 * k, "rate": 1e-3, "epochs": [0, 5][:states], **numbers}
        for k in range(1, 6)
        for model in ("relu", "dlgn")
    ]
    figure = figures.kernels({"networks": nets})
    assert [len(axis.lines) for axis in figure.axes] == [10] * 6
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 2 + 5


def test_only_half_spaces_have_their_colour() -> None:
    first = first_table()
    first["cells"].append(cell("cifar-10", "conv", "dlgn-hard", 71))
    figure = figures.accuracies(first, [("cifar-10", "conv")])
    (axis,) = figure.axes
    names = [label.get_text().replace("\n", " ") for label in axis.get_xticklabels()]
    orange = {
        names[round(bar.get_x() + bar.get_width() / 2)]
        for bar in axis.patches
        if to_hex(bar.get_facecolor()) == to_hex(plots.COLOURS["orange"])
    }
    assert len(names) > len(orange) == 3  # two soft networks, made hard, and one trained hard
    assert all(name.startswith("DLGN") for name in orange)


def test_soft_gates_made_hard_stand_beside_hard_ones() -> None:
    first = first_table()
    assert pages.hard_from_the_start(pages.Table(first)) == []
    first["cells"].append(cell("cifar-10", "conv", "dlgn-hard", 71))
    (said,) = pages.hard_from_the_start(pages.Table(first))
    assert "DLGN, soft gates: 73.2 % as trained, 63.2 % once its gates are made hard, 71.0 % trained with hard" in said
    assert "(1 seed, 10 epochs)" in said
    assert "PWC" not in said


def test_aims_that_were_reached_need_no_excuse_and_a_point_short_is_missed() -> None:
    first, second = first_table(), second_table()
    for made in (first, second):
        made["claims"] = claims(made)
    for made in second["cells"]:
        if made["model"] == "dlgn-hard":
            made["test_as_trained"] = 0.88
    reached = pages.page(first, second, [made_try("cifar-10", 0.92), made_try("cifar-100", 0.68)])
    assert "missed" not in reached
    assert "prototype" not in reached
    equal = pages.page(first, second, [made_try("cifar-10", 0.91), made_try("cifar-100", 0.68)])
    assert "| cifar-10, wide: past 91 % | 91.0 | missed |" in equal


def test_rates_and_ridges_are_those_of_the_cells() -> None:
    first = first_table()
    linear = next(made for made in first["cells"] if made["model"] == "tangent")
    assert pages.ridge_of(pages.Table(first), "tangent") == "ridge not told"
    linear |= {"ridge": 1e-8, "held_out_by_ridge": {"1e-08": 0.55, "1e-07": 0.52}}
    assert pages.ridge_of(pages.Table(first), "tangent") == "ridge 1e-08, the least that was tried"
    linear["ridge_at_its_least"] = False
    assert pages.ridge_of(pages.Table(first), "tangent") == "ridge 1e-08, the least that can be solved"
    linear["ridge"] = 1e-7
    assert pages.ridge_of(pages.Table(first), "tangent") == "ridge 1e-07"
    first["cells"].append(cell("cifar-10", "conv", "dlgn", 73, epochs=40, training={"lr": 1e-3}))
    rows = [line for line in pages.first_table(pages.Table(first)).splitlines() if line.startswith("| DLGN, soft")]
    assert [row.split("|")[2].strip() for row in rows] == [
        "2 seeds, 10 epochs, rate 0.0004",
        "1 seed, 40 epochs, rate 0.001",
    ]
    assert [row.split("|")[6].strip() for row in rows] == ["-1.0 ± 0.0", "not run"]  # no ReLU network of that length


def test_every_length_stands_beside_its_own_twin() -> None:
    second = second_table()
    second["cells"] += [
        cell("cifar-10", "resnet-34", "relu", 95, epochs=40, training={"lr": 0.6}),
        cell("cifar-10", "resnet-34", "relu", 96, epochs=40),
        cell("cifar-10", "resnet-34", "dlgn-hard", 89, epochs=40, training={"lr": 0.6}),
        cell("cifar-10", "resnet-34", "relu", 80, epochs=5),  # with no gated network beside it
    ]
    made = pages.second_table(pages.Table(second))
    shown = [line for line in made.splitlines() if line.startswith("| cifar-10, resnet-34 |")]
    gaps = [[line.split("|")[column].strip() for column in (2, 3, 7)] for line in shown]
    assert gaps == [
        ["ReLU", "1 seed, 10 epochs", ""],
        ["DLGN, soft gates", "1 seed, 10 epochs", "5.5"],
        ["DLGN, hard gates", "1 seed, 10 epochs", "3.0"],
        ["DLGN-PWC, hard gates", "1 seed, 10 epochs", "4.0"],
        ["ReLU", "1 seed, 40 epochs, rate 0.6", ""],
        ["DLGN, hard gates", "1 seed, 40 epochs, rate 0.6", "6.0"],
    ]


def test_kernels_are_told_once_they_are_measured() -> None:
    first, second = first_table(), second_table()
    for made in (first, second):
        made["claims"] = claims(made)
    assert "How the kernels move" not in pages.page(first, second, [])
    followed = {"overlap_alignment": [None, 0.2], "tangent_alignment": [0.1, 0.3]}
    moved = {"overlap_distance": [0.0, 0.25], "tangent_distance": [0.0, 0.5]}
    counted = {"log10_paths_by_class": [[4.0, 4.0], [5.0, 6.0]]}
    held = {"tangent_top_share": [0.01, 0.02]}
    how = {"model": "dlgn", "seed": 0, "trained_for": 40, "rate": 4e-4, "epochs": [0, 40]}
    net = {**how, **followed, **moved, **counted, **held}
    later = {"trained_for": 90, "rate": 1e-3, "epochs": [0, 80]}  # not every state has been measured
    longer = net | later | {"tangent_distance": [0.0, 0.75], "tangent_top_share": [0.01, 0.02]}
    first["dynamics"] = {"images": 500, "classes": ["a", "b"], "networks": [longer, net, net | {"seed": 1}]}
    text = pages.page(first, second, [])
    assert "Kernels of 500 fixed training images" in text
    start = text.index("| DLGN, soft gates | 2 seeds, 40 epochs, rate 0.0004 | none ->")
    assert text[start:].splitlines()[1] == (
        "| DLGN, soft gates | 1 seed, 90 epochs, rate 0.001 | none -> 0.20 | 0.10 -> 0.30 | 0.25 | 0.75 | 0.01 -> 0.02 "
        "| 4.0 -> 5.5 | 1.00 |"
    )
    assert "they fall apart" not in text
    relu = net | {"model": "relu", "tangent_top_share": [0.01, 0.3]}
    first["dynamics"]["networks"].append(relu)
    assert "they fall apart" not in pages.page(first, second, [])  # told of soft gates alone
    net["tangent_top_share"][-1] = 0.3
    assert "they fall apart" in pages.page(first, second, [])
    assert "table1_kernels.png" in text


def test_words_of_only_are_whole_words() -> None:
    second = cells(SCALES["paper", 2])
    chosen = [one for one in second if train.matches(one, "cifar-10,relu|dlgn,resnet-34,main,0")]
    assert [(one.data, one.model) for one in chosen] == [("cifar-10", "relu"), ("cifar-10", "dlgn")]
    assert load_images("digits").name == "digits"


def test_two_processes_never_take_the_same_cell(tmp_path: Path) -> None:
    with train.claimed(tmp_path / "a.lock") as mine:
        assert mine
        with train.claimed(tmp_path / "a.lock") as also:
            assert not also
    with train.claimed(tmp_path / "a.lock") as again:
        assert again
    settings = SCALES["smoke", 2]
    for key in ("x", "y", "x"):
        train.add(tmp_path / "kept.json", settings, "smoke", {"key": key})
    assert [one["key"] for one in train.load(tmp_path / "kept.json")["cells"]] == ["x", "y"]
