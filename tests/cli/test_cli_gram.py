"""``unlazy gram`` and ``unlazy bench``: what is printed is what is done."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from unlazy import Circle, GramFile, Member, NetSpec, Recipe, Scope, build, fit, overlap_kernel, tangent_kernel
from unlazy.bench.kernels import least_operations, row_names
from unlazy.bench.peers import jacobian_contraction, vector_products
from unlazy.bench.tables import AIMS, NETWORKS, save_row
from unlazy.bench.workloads import WORKLOADS, dense, two_layers
from unlazy.cli.app import app
from unlazy.cli.gram import load_model
from unlazy.models.build import member
from unlazy.probes import standard
from unlazy.runtime import InputError
from unlazy.training.ensemble import build_member_stack
from unlazy.training.recorder import FixedSteps, Measure

SPEC = {"in": 3, "out": 2, "width": 5, "depth": 2}


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    np.save(tmp_path / "x.npy", x.numpy())
    return tmp_path / "spec.json", tmp_path / "x.npy", x


def test_the_file_holds_the_kernel(files: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    spec, data, x = files
    net = build(SPEC)
    for kernel, exact in (("tangent", tangent_kernel(net, x)), ("overlap", overlap_kernel(net, x))):
        out = tmp_path / f"{kernel}.npy"
        invoke("gram", str(spec), str(data), "--kernel", kernel, "--out", str(out))
        written = np.load(out)
        assert written.dtype == (np.float32 if kernel == "tangent" else np.float64)
        assert np.allclose(written, exact.detach().numpy(), rtol=1e-5)
    invoke("gram", str(spec), str(data), "--limit", "7", "--out", str(out))
    assert np.load(out).shape == (7, 7)


def test_a_dry_run_writes_nothing(files: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    spec, data, _ = files
    before = sorted(tmp_path.iterdir())
    said = invoke("gram", str(spec), str(data), "--dry-run", "--out", str(tmp_path / "k.npy"))
    assert "40 x 40 symmetric" in said
    assert "outer products" in said
    assert "memory: result elsewhere" in said
    assert f"file: {tmp_path / 'k.npy'}, 6.4 kB (40 x 40 float32)" in said
    assert sorted(tmp_path.iterdir()) == before


def test_a_result_on_disk_takes_no_memory(files: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    """300 kB are too little for 400 x 400 numbers in memory, and enough to write them tile by tile."""
    spec, data, x = files
    many, net = x.repeat(10, 1), build(SPEC)
    np.save(data, many.numpy())
    with pytest.raises(InputError, match="too small"):
        tangent_kernel(net, many, memory="300kB")
    invoke("gram", str(spec), str(data), "--memory", "300kB", "--out", str(tmp_path / "k.npy"))
    assert np.allclose(np.load(tmp_path / "k.npy"), tangent_kernel(net, many).detach(), rtol=1e-5)


def test_a_run_folder_is_a_model(tmp_path: Path) -> None:
    """Its first member, as it was at the end."""
    plan = Recipe(NetSpec(2, width=4, depth=2), (Member(3, 1e-2, 10.0), Member(4, 1e-2, 4.0)), epochs=2)
    data = Circle(n=64).dataset()
    run = fit(plan, data, [Measure(standard.portrait, FixedSteps.at([4]))], tmp_path / "run")
    found = load_model(str(tmp_path / "run"))
    assert np.allclose(found(data.x)[:, 0].detach(), run.array("output", 4)[0], atol=1e-6)
    first = member(build_member_stack(plan.model, plan.members, torch.float32), 0)
    assert not torch.allclose(found(data.x), first(data.x))


def test_a_run_of_a_foreign_model_points_to_what_makes_it(tmp_path: Path) -> None:
    net, x = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.randn(8, 3)
    with Scope(net, probe=(x, torch.randn(8, 2)), run=tmp_path / "mine"):
        pass
    with pytest.raises(InputError, match=r"model of your own .* module:function, such as mine:Net"):
        load_model(str(tmp_path / "mine"))


def test_a_module_that_is_made_already_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ready_made.py").write_text("from torch import nn\nnet = nn.Linear(3, 2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(load_model("ready_made:net"), torch.nn.Linear)


def test_mistakes_are_named(files: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    spec, data, _ = files
    (tmp_path / "broken.json").write_text("{")
    for words, message in (
        ((str(spec), str(tmp_path / "none.npy")), "there is no file"),
        ((str(tmp_path / "none.json"), str(data)), r"no model spec .*json.dumps\(net.spec\(\)\)"),
        ((str(tmp_path / "broken.json"), str(data)), "is not JSON"),
        (("nowhere_at_all:Net", str(data)), "mine:Net means Net in mine.py of this folder"),
        (("torch.nn:Linear", str(data)), "called without arguments"),
        (("nothing", str(data)), "no run folder"),
        (("unlazy.bench.workloads:nothing", str(data)), "nothing"),
        (("unlazy.bench.workloads:convolutional", str(data)), r"samples of shape \(3,\)"),
        ((str(spec), str(data), "--kernel", "other"), "kernel must be one of"),
        ((str(spec), str(data), "--out", "k.txt"), "written as .npy"),
        ((str(spec), str(data), "--memory", "100B"), "too small"),
    ):
        with pytest.raises(InputError, match=message):
            invoke("gram", *words)


def test_what_cannot_be_read_or_written_is_named(files: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    spec, data, _ = files
    (tmp_path / "text.npy").write_text("1 2 3")
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    (tmp_path / "folder.npy").mkdir()
    for words, message in (
        ((str(tmp_path / "text.npy"),), "text.npy is no array of numbers"),
        ((str(tmp_path / "words.npy"),), "words.npy is no array of numbers"),
        ((str(data), "--out", str(tmp_path / "folder.npy")), "is a folder"),
        ((str(data), "--out", str(spec / "k.npy")), "cannot be written"),
    ):
        with pytest.raises(InputError, match=message):
            invoke("gram", str(spec), *words)
    assert "--limit" in invoke("gram", str(spec), str(data), "--limit", "-2")
    deeper = tmp_path / "new" / "folder" / "k.npy"
    invoke("gram", str(spec), str(data), "--limit", "5", "--out", str(deeper))
    assert np.load(deeper).shape == (5, 5)


def test_a_failed_command_leaves_no_file(files: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    spec, data, x = files
    x[3] = torch.nan
    np.save(data, x.numpy())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match="NaN"):
        invoke("gram", str(spec), str(data), "--out", str(tmp_path / "k.npy"))
    assert sorted(tmp_path.iterdir()) == before


# --- the benchmark ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch.func's own
@pytest.mark.parametrize("mode", ["full", "trace", "sum"])
def test_peers_compute_the_same_kernel(mode: str) -> None:
    model, x = dense(6).double(), torch.randn(4, 784, dtype=torch.float64)
    exact = tangent_kernel(model, x, outputs=mode)
    for peer in (jacobian_contraction, vector_products):
        assert torch.allclose(peer(model, x, mode, 2).squeeze(), exact.squeeze(), rtol=1e-9)


def test_least_operations_of_two_layers_by_hand() -> None:
    """Forward and backward of n samples, and (a . a' + 1)(g . g') of every pair once."""
    n, d, m = 7, 500, 1000
    forward = 2 * n * (d * m + m)
    backward = 2 * n * m
    pairs = n * (n + 1) / 2 * 2 * ((d + m) + (m + 1))
    assert least_operations(two_layers(), (500,), n, "sum") == forward + backward + pairs


def test_rows_are_named_by_workload_and_mode() -> None:
    assert row_names(["e", "a:sum"]) == ["e:sum", "a:sum"]
    assert len(row_names()) == sum(len(work.peer_n) for work in WORKLOADS.values())
    with pytest.raises(InputError, match="no benchmark q"):
        row_names(["q"])


def test_a_dry_bench_prints_plans() -> None:
    said = invoke("bench", "kernels", "a:trace", "--dry-run")
    assert "500 x 500 symmetric" in said
    assert "least operations" in said


def test_a_table_keeps_the_rows_that_were_not_measured_again(tmp_path: Path) -> None:
    path, names = tmp_path / "new" / "rows.json", ("workload", "mode")
    for workload, mode, seconds in (("a", "sum", 1.0), ("b", "sum", 2.0), ("a", "full", 3.0), ("a", "sum", 4.0)):
        row = {"workload": workload, "mode": mode, "seconds": seconds}
        save_row(path, row, {"torch": f"of {seconds}"}, names)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["workload"], row["mode"], row["seconds"]) for row in rows] == [
        ("a", "full", 3.0), ("a", "sum", 4.0), ("b", "sum", 2.0),
    ]  # fmt: skip
    assert [row["provenance"]["torch"] for row in rows] == ["of 3.0", "of 4.0", "of 2.0"]


def test_every_row_of_the_benchmark_has_its_network_on_the_page() -> None:
    assert set(NETWORKS) == set(WORKLOADS)
    assert set(AIMS) <= set(row_names())


# --- arrays that several processes fill ----------------------------------------------------------


def test_a_zarr_array_holds_the_same_kernel_and_is_not_computed_twice(
    files: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    spec, data, _ = files
    npy, out = tmp_path / "k.npy", tmp_path / "k.zarr"
    invoke("gram", str(spec), str(data), "--out", str(npy))
    said = invoke("gram", str(spec), str(data), "--out", str(out), "--tile", "16")
    assert "6 tiles of 16" in said
    file = GramFile(out)
    assert np.allclose(file.array()[...], np.load(npy), rtol=1e-5)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    invoke("gram", str(spec), str(data), "--out", str(out), "--tile", "16")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(InputError, match="another kernel"):
        invoke("gram", str(spec), str(data), "--out", str(out), "--kernel", "overlap")


def test_shares_of_a_job_array_fill_one_file(files: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    spec, data, x = files
    out = tmp_path / "k.zarr"
    words = ("gram", str(spec), str(data), "--out", str(out), "--tile", "10", "--shard")
    assert "6 tiles are left to the other shares" in invoke(*words, "2/3")
    assert "3 tiles are left" in invoke(*words, "0/3")
    assert "left" not in invoke(*words, "1/3").split("in ")[-1]
    assert np.allclose(GramFile(out).array()[...], tangent_kernel(build(SPEC), x), rtol=1e-5)


def test_local_workers_fill_it_too_and_open_no_port(
    files: tuple[Path, Path, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zarr")
    bound: list[Any] = []
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: bound.append(address))
    spec, data, x = files
    out = tmp_path / "k.zarr"
    said = invoke("gram", str(spec), str(data), "--out", str(out), "--tile", "8", "--workers", "2")
    assert "workers: 2 (cpu, cpu)" in said
    file = GramFile(out)
    assert np.allclose(file.array()[...], tangent_kernel(build(SPEC), x), rtol=1e-5)
    assert not bound


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--out", "k.npy", "--workers", "2"), "for a .zarr array only"),
        (("--out", "k.npy", "--shard", "0/2"), "for a .zarr array only"),
        (("--out", "k.zarr", "--shard", "2/2"), "0/8 to 7/8"),
        (("--out", "k.zarr", "--shard", "half"), "0/8 to 7/8"),
        (("--out", "k.zarr", "--shard", "0/2", "--workers", "2"), "do not go together"),
        (("--out", "k.zarr", "--workers", "0"), "at least 1"),
        (
            (
                "--out",
                "k.csv",
            ),
            "as .npy or .zarr",
        ),
    ],
)
def test_ways_that_do_not_go_together(
    files: tuple[Path, Path, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, data, _ = files
    with pytest.raises(InputError, match=told):
        invoke("gram", str(spec), str(data), *words)
    assert not list(tmp_path.glob("k.*"))
