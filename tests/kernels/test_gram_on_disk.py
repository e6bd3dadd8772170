"""Gram matrices on disk: the same numbers as in memory, nothing computed twice, nothing lost, nothing mixed up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gram_cases import data, net
from repository import SUPPORT
from unlazy import GramFile, gram_file, overlap_kernel, tangent_kernel
from unlazy.kernels import gram_on_disk
from unlazy.kernels.gram_tiles import TileComputer, compute_tile
from unlazy.kernels.overlap import layer_overlap
from unlazy.runtime import InputError, StoreError, Unsupported

zarr = pytest.importorskip("zarr")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tiles that were computed, in order."""
    places: list[tuple[int, int]] = []

    def counting(computer: TileComputer, file: GramFile, place: tuple[int, int]) -> None:
        compute_tile(computer, file, place)
        places.append(place)

    monkeypatch.setattr(gram_on_disk, "compute_tile", counting)
    return places


CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("tangent", {}, tangent_kernel),
    ("tangent", {"outputs": 1}, tangent_kernel),
    ("tangent", {"outputs": "full"}, tangent_kernel),
    ("tangent", {"parameters": "2.*", "method": "loop"}, tangent_kernel),
    ("overlap", {}, overlap_kernel),
    ("overlap", {"log": True, "bias_paths": True}, overlap_kernel),
    ("layer-overlap", {}, layer_overlap),
]


@pytest.mark.parametrize(("kernel", "options", "twin"), CASES)
@pytest.mark.parametrize("cross", [False, True])
def test_the_file_holds_what_memory_would(
    tmp_path: Path, kernel: str, options: dict[str, Any], twin: Any, cross: bool
) -> None:
    x, x2 = data(23), data(11, seed=2) if cross else None
    file = gram_file(tmp_path / "k.zarr", net(), x, x2, kernel=kernel, tile=5, **options)
    wanted = twin(net(), x, x2, **options)
    wanted = wanted.permute(2, 3, 0, 1) if wanted.ndim == 4 else wanted
    found = torch.from_numpy(np.asarray(file.array()[...]))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert file.is_symmetric is not cross
    opened = zarr.open_array(tmp_path / "k.zarr", mode="r")  # any reader of the format
    assert np.array_equal(opened[..., 3, 7], found[..., 3, 7].numpy())


def test_an_interrupted_file_goes_on_where_it_was(tmp_path: Path, counted: list[tuple[int, int]]) -> None:
    x = data(20)
    whole = gram_file(tmp_path / "whole.zarr", net(), x, tile=4).array()[...]
    counted.clear()

    def stop(done: int, total: int) -> None:
        assert total == 15
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gram_file(tmp_path / "k.zarr", net(), x, tile=4, progress=stop)
    begun = GramFile(tmp_path / "k.zarr")
    assert len(begun.missing_places()) == 9
    with pytest.raises(InputError, match="9 tiles are still to be computed"):
        begun.array()
    assert np.isnan(zarr.open_array(tmp_path / "k.zarr")[-1, -1])
    told: list[tuple[int, int]] = []
    file = gram_file(tmp_path / "k.zarr", net(), x, tile=4, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 15) for done in range(7, 16)]
    assert sorted(counted) == file.places()  # no tile twice
    assert np.array_equal(file.array()[...], whole)  # the same bits


def test_a_full_disk_leaves_no_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, path, writes = data(12), tmp_path / "k.zarr", []
    put = zarr.Array.__setitem__

    def full(self: Any, where: Any, values: Any) -> None:
        if len(writes) == 2:  # between a tile and its mirror image
            raise OSError(28, "No space left on device")
        writes.append(where)
        put(self, where, values)

    with monkeypatch.context() as patched:
        patched.setattr(zarr.Array, "__setitem__", full)
        with pytest.raises(StoreError, match="No space left on device"):
            gram_file(path, net(), x, tile=4)
    assert GramFile(path).missing_places() == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    found = gram_file(path, net(), x, tile=4).array()[...]
    assert torch.allclose(torch.from_numpy(found), tangent_kernel(net(), x), rtol=1e-12)


def damage_a_number(path: Path) -> None:
    chunk = path / "c" / "0" / "1"
    content = bytearray(chunk.read_bytes())
    content[9] ^= 1
    chunk.write_bytes(content)


def damage_the_mirror(path: Path) -> None:
    (path / "c" / "1" / "0").unlink()


def cut_short(path: Path) -> None:
    chunk = path / "c" / "0" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-3])


def half_a_receipt(path: Path) -> None:
    receipt = path / "receipts" / "0-1.json"
    receipt.write_text(receipt.read_text()[:20])


def no_receipt(path: Path) -> None:
    (path / "receipts" / "0-1.json").unlink()


@pytest.mark.parametrize("damage", [damage_a_number, damage_the_mirror, cut_short, half_a_receipt, no_receipt])
def test_a_damaged_tile_is_found_and_made_again(tmp_path: Path, counted: list[tuple[int, int]], damage: Any) -> None:
    x, path = data(9), tmp_path / "k.zarr"
    whole = gram_file(path, net(), x, tile=4).array()[...]
    counted.clear()
    damage(path)
    assert GramFile(path).missing_places() == [(0, 1)]
    again = gram_file(path, net(), x, tile=4)
    assert counted == [(0, 1)]
    assert np.array_equal(again.array()[...], whole)


def test_files_of_other_jobs_are_refused_by_what_differs(tmp_path: Path) -> None:
    path, x = tmp_path / "k.zarr", data(6)
    gram_file(path, net(), x, tile=4)
    before = sorted(path.rglob("*"))
    for words, again in (
        ("model", lambda: gram_file(path, net(seed=5), x, tile=4)),
        ("data", lambda: gram_file(path, net(), data(6, seed=9), tile=4)),
        ("data", lambda: gram_file(path, net(), x, data(6), tile=4)),
        ("options", lambda: gram_file(path, net(), x, outputs=1, tile=4)),
        ("kernel, options", lambda: gram_file(path, net(), x, kernel="overlap", tile=4, log=True)),
    ):
        with pytest.raises(InputError, match=rf"another kernel \(other {words}\)"):
            again()
    assert sorted(path.rglob("*")) == before
    same_weights = net()
    same_weights[1] = nn.Tanh()
    with pytest.raises(InputError, match="other model"):
        gram_file(path, same_weights, x, tile=4)


def test_what_is_no_gram_matrix_is_refused_and_left_alone(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "other.zarr", shape=(2, 2), dtype="float64")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    for name in ("other.zarr", "folder"):
        with pytest.raises(InputError, match="no Gram matrix that unlazy wrote"):
            gram_file(tmp_path / name, net(), data(4))
    assert (tmp_path / "folder" / "mine.txt").read_text() == "mine"


def test_shards_share_the_tiles_and_fill_one_file(tmp_path: Path, counted: list[tuple[int, int]]) -> None:
    x, path = data(30), tmp_path / "k.zarr"
    shares = []
    for shard in range(4):
        counted.clear()
        gram_file(path, net(), x, tile=5, shard=(shard, 4))
        shares.append(list(counted))
    assert sorted(place for share in shares for place in share) == GramFile(path).places()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert torch.allclose(torch.from_numpy(GramFile(path).array()[...]), tangent_kernel(net(), x), rtol=1e-12)
    for wrong in ((4, 4), (-1, 2), (0, 0)):
        with pytest.raises(InputError, match="0 <= i < n"):
            gram_file(path, net(), x, shard=wrong)


def test_the_slower_of_two_beginners_takes_the_quicker_ones_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, path = data(8), tmp_path / "k.zarr"
    gram_file(path, net(), x, tile=4)
    exists, asked = Path.exists, []

    def too_early(self: Path, **options: Any) -> bool:
        if self == path and not asked:
            asked.append(self)
            return False
        return exists(self, **options)

    monkeypatch.setattr(Path, "exists", too_early)
    assert gram_file(path, net(), x, tile=4).missing_places() == []
    assert asked
    assert [entry.name for entry in tmp_path.iterdir()] == ["k.zarr"]


def test_a_layer_that_samples_call_differently_is_named_with_the_remedy(tmp_path: Path) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            few = x[:, 0] > 1.0
            return out + self.other(x) if bool(few.any()) else out

    x = data(12).float()
    x[:, 0] = 0.0
    x[5, 0] = 2.0
    model = Sometimes()
    with pytest.raises(InputError, match="method='loop'"):
        gram_file(tmp_path / "k.zarr", model, x, tile=3)
    found = gram_file(tmp_path / "loop.zarr", model, x, tile=3, method="loop").array()[...]
    assert torch.allclose(torch.from_numpy(found), tangent_kernel(model, x, method="loop"), rtol=1e-5)


def test_bad_calls_teach(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kernel must be one of"):
        gram_file(tmp_path / "k.zarr", net(), data(4), kernel="laplace")
    with pytest.raises(InputError, match="at least one sample"):
        gram_file(tmp_path / "k.zarr", net(), data(4), tile=0)
    with pytest.raises(Unsupported):
        gram_file(tmp_path / "k.zarr", nn.Sequential(nn.Linear(4, 2), nn.GELU()).double(), data(4), kernel="overlap")
    assert list(tmp_path.iterdir()) == []


def test_tiles_beyond_the_tenth_are_complete(tmp_path: Path) -> None:
    """Receipts are JSON with sorted names, where 10-2 comes before 2-10."""
    file = gram_file(tmp_path / "k.zarr", net(), data(48), tile=4)
    assert GramFile(file.path).missing_places() == []


SLOWLY = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
from gram_cases import net, data
from unlazy import gram_file
torch.set_num_threads(1)
gram_file(sys.argv[1], net(), data(60), tile=4, progress=lambda done, total: time.sleep(0.02))
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_on_the_same_bits(tmp_path: Path) -> None:
    path, torch_threads = tmp_path / "k.zarr", torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = gram_file(tmp_path / "whole.zarr", net(), data(60), tile=4).array()[...]
    finally:
        torch.set_num_threads(torch_threads)
    command = [sys.executable, "-c", SLOWLY, str(path), str(SUPPORT)]
    kills, done = 0, 0
    while True:
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        before = done
        while process.poll() is None and done < before + 25:
            time.sleep(0.01)
            done = len(list((path / "receipts").glob("[0-9]*.json")))
        if process.poll() is not None:
            assert process.returncode == 0
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills >= 3
    file = GramFile(path)
    assert file.missing_places() == []
    assert np.array_equal(file.array()[...], whole)
    told = [json.loads(receipt.read_text())["by"] for receipt in (path / "receipts").glob("[0-9]*.json")]
    assert len(set(told)) == kills + 1
