"""Gram files know what their model computes, and every tile knows its job: nothing of another function gets in unseen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gram_cases import data, net
from repository import ROOT
from unlazy import GramFile, gram_file, tangent_kernel
from unlazy.kernels import gram_identity
from unlazy.kernels.gram_tiles import GramJob, TileComputer, compute_tile
from unlazy.runtime import InputError, StoreError

zarr = pytest.importorskip("zarr")

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 20), nn.Linear(20, 2)

    def forward(self, x):
        return self.last(bend(self.first(x)))  # a comment

def bend(x):
    return torch.relu(x)
"""


def run_gram(folder: Path, shard: str) -> subprocess.CompletedProcess[str]:
    words = ["gram", "mine:Net", "x.npy", "--out", "k.zarr", "--tile", "8", "--shard", shard]
    call = [sys.executable, "-c", "from unlazy.cli.app import main; main()", *words]
    fresh = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=fresh)


@pytest.mark.parametrize(
    ("before", "after"),
    [("torch.relu(x)", "torch.tanh(x)"), ("self.first(x)))  #", "self.first(2 * x)))  #")],
    ids=["a helper function", "the class itself"],
)
def test_a_model_whose_code_changes_between_two_shares_is_refused(tmp_path: Path, before: str, after: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    np.save(tmp_path / "x.npy", data(20).float().repeat(1, 2)[:, :6].numpy())
    assert run_gram(tmp_path, "0/2").returncode == 0
    mine.write_text(MINE.replace(before, after))
    refused = run_gram(tmp_path, "1/2")
    assert refused.returncode == 2
    assert "the code of the model was changed" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert GramFile(tmp_path / "k.zarr").missing_places()
    mine.write_text(MINE.replace("# a comment", "# another comment"))
    finished = run_gram(tmp_path, "1/2")
    assert finished.returncode == 0, finished.stderr
    assert GramFile(tmp_path / "k.zarr").missing_places() == []


class Switched(nn.Module):
    """A network whose activation is no part of its printed form or its weights."""

    def __init__(self, bend: Any) -> None:
        super().__init__()
        self.net, self.bend = net(), bend

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.bend(self.net[0](x)))


@pytest.mark.parametrize("kernel", ["tangent", "overlap", "layer-overlap"])
def test_equal_weights_and_another_function_are_another_job(tmp_path: Path, kernel: str) -> None:
    gram_file(tmp_path / "k.zarr", Switched(torch.relu), data(12), kernel=kernel, tile=4, shard=(0, 2))
    with pytest.raises(InputError, match="code of the model was changed"):
        gram_file(tmp_path / "k.zarr", Switched(lambda x: torch.relu(x) ** 2 if kernel == "tangent" else 2 * torch.relu(x)),
                  data(12), kernel=kernel, tile=4)  # fmt: skip
    gram_file(tmp_path / "k.zarr", Switched(torch.relu), data(12), kernel=kernel, tile=4)


def test_a_fingerprint_forgives_rounding_and_nothing_more() -> None:
    model, x = net().float(), data(9).float()
    engine = GramJob("tangent", model, x).engine()
    found = gram_identity.function_fingerprint(model, [x], engine)
    assert len(found["outputs"]) == 3
    for change, same in ((1e-5, True), (1e-2, False)):
        moved = json.loads(json.dumps(found))
        moved["block"][0] *= 1 + change
        assert gram_identity.same_function(found, moved) is same
    unknown = {**found, "outputs": [[None, *row[1:]] for row in found["outputs"]]}
    assert not gram_identity.same_function(found, unknown)
    assert gram_identity.same_function(unknown, unknown)


def test_the_source_of_torch_s_own_layers_is_not_asked_for() -> None:
    assert gram_identity.source_checksum(net()) is None
    assert gram_identity.source_checksum(Switched(torch.relu)) is not None


# --- receipts ----------------------------------------------------------------------------------------------


def copy_tile(source: Path, goal: Path, name: str, to: str | None = None) -> None:
    """Copy the chunks and the receipt of a tile."""
    row, column = name.split("-")
    new_row, new_column = (to or name).split("-")
    for down, across, new_down, new_across in (
        (row, column, new_row, new_column),
        (column, row, new_column, new_row),
    ):
        shutil.copy(source / "c" / down / across, goal / "c" / new_down / new_across)
    receipt = (source / "receipts" / f"{name}.json").read_text().replace(name, to or name)
    swapped, new_swapped = f"{column}-{row}", f"{new_column}-{new_row}"
    (goal / "receipts" / f"{to or name}.json").write_text(receipt.replace(swapped, new_swapped))


def test_a_tile_of_another_model_with_its_receipt_is_noticed(tmp_path: Path) -> None:
    x = data(12)
    gram_file(tmp_path / "other.zarr", net(seed=5), x, tile=4)
    whole = gram_file(tmp_path / "k.zarr", net(), x, tile=4).array()[...]
    copy_tile(tmp_path / "other.zarr", tmp_path / "k.zarr", "0-1")
    assert GramFile(tmp_path / "k.zarr").missing_places() == [(0, 1)]
    with pytest.raises(StoreError, match="tile"):
        GramFile(tmp_path / "k.zarr").read_tile((0, 1))
    assert np.array_equal(gram_file(tmp_path / "k.zarr", net(), x, tile=4).array()[...], whole)


def test_a_tile_put_in_the_place_of_another_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "k.zarr"
    gram_file(path, net(), data(12), tile=4)
    copy_tile(path, path, "0-1", "0-2")
    assert GramFile(path).missing_places() == [(0, 2)]


@pytest.mark.parametrize(
    "text",
    ['{"checksums": {}}', "{}", "[]", "7", "null", '{"checksums": 3}', '{"job": 1, "tile": [0, 1], "checksums": {}}'],
)
def test_a_receipt_that_says_nothing_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "k.zarr"
    file = gram_file(path, net(), data(9), tile=4)
    (path / "receipts" / "0-1.json").write_text(text)
    assert file.missing_places() == [(0, 1)]
    assert (0, 1) not in file.receipts()
    named = json.loads((path / "receipts" / "0-0.json").read_text())
    (path / "receipts" / "0-0.json").write_text(json.dumps({**named, "checksums": {}}))
    assert file.missing_places() == [(0, 0), (0, 1)]


# --- reading -----------------------------------------------------------------------------------------------


def flip_a_bit(chunk: Path) -> None:
    content = bytearray(chunk.read_bytes())
    content[9] ^= 1
    chunk.write_bytes(content)


@pytest.mark.parametrize("outputs", ["trace", "full"])
def test_any_reader_of_the_format_notices_a_flipped_bit(tmp_path: Path, outputs: str) -> None:
    path = tmp_path / "k.zarr"
    file = gram_file(path, net(), data(9), tile=4, outputs=outputs)
    flip_a_bit(path / "c" / ("0/1" if outputs == "trace" else "0/0/0/1"))
    array = file.array()
    assert np.isfinite(array[..., 4:, 4:]).all()
    for reader in (array, zarr.open_array(path, mode="r")):
        with pytest.raises(ValueError, match="checksum"):
            reader[...]


def test_a_lost_chunk_is_noticed_by_the_array(tmp_path: Path) -> None:
    path = tmp_path / "k.zarr"
    file = gram_file(path, net(), data(9), tile=4)
    (path / "c" / "2" / "1").unlink()
    with pytest.raises(StoreError, match=r"numbers of 1 tiles are not on disk, such as \(1, 2\)"):
        file.array()
    assert np.isnan(zarr.open_array(path, mode="r")[8, 4])  # another reader sees what is missing as NaN


@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
def test_damage_after_the_first_read_is_noticed_too(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "k.zarr"
    made = gram_file(path, net(), data(9), tile=4)
    opened, whole = GramFile(path), made.read_tile((0, 1))
    opened.read_tile((0, 1))
    damage(path / "c" / "0" / "1")
    with pytest.raises(StoreError, match=r"tile \(0, 1\) is damaged"):
        opened.read_tile((0, 1))
    assert np.array_equal(made.read_tile((0, 1)), whole)  # model and data are at hand: computed again


def test_a_tile_of_nan_is_no_missing_tile(tmp_path: Path) -> None:
    file = gram_file(tmp_path / "k.zarr", net(), data(9), tile=4)
    file.write((0, 1), torch.full((4, 4), torch.nan, dtype=torch.float64), 0.0)
    assert GramFile(tmp_path / "k.zarr").missing_places() == []


def test_files_of_the_first_format_still_open(tmp_path: Path) -> None:
    """As release 0.1 wrote them: chunks without checksums of their own, receipts without job and tile."""
    path, x = tmp_path / "old.zarr", data(9)
    new = gram_file(tmp_path / "new.zarr", net(), x, tile=4)
    job = {name: new.about["job"][name] for name in ("kernel", "options", "model", "data", "code")}
    array = zarr.create_array(
        path, shape=(9, 9), chunks=(4, 4), dtype="float64", compressors=None, fill_value=float("nan"),
        attributes={"unlazy": {"job": job, "provenance": new.about["provenance"]}},
    )  # fmt: skip
    array[...] = new.array()[...]
    (path / "receipts").mkdir()
    for place, receipt in new.receipts().items():
        kept = {name: receipt[name] for name in ("checksums", "seconds", "by")}
        (path / "receipts" / f"{place[0]}-{place[1]}.json").write_text(json.dumps(kept))
    file = GramFile(path)
    assert (file.format, file.missing_places()) == (1, [])
    assert torch.allclose(torch.from_numpy(file.array()[...]), tangent_kernel(net(), x), rtol=1e-12)
    assert gram_file(path, net(), x, tile=4).missing_places() == []
    flip_a_bit(path / "c" / "0" / "1")
    (path / "receipts" / "1-1.json").write_text('{"checksums": {}}')
    assert GramFile(path).missing_places() == [(0, 1), (1, 1)]


def test_chunk_and_folders_are_flushed_before_the_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    plain = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        plain(descriptor)

    job = GramJob("tangent", net(), data(9))
    file = gram_file(tmp_path / "k.zarr", net(), data(9), tile=4)
    monkeypatch.setattr(os, "fsync", note)
    compute_tile(TileComputer(job, job.engine(), 4), file, (0, 1))
    short = [name.removeprefix(f"{file.path}/") for name in flushed]
    for name in ("c/0/1", "c/1/0", "c/0", "c/1", "c"):
        assert short.index(name) < short.index("receipts")
    assert short[-1] == "receipts"
