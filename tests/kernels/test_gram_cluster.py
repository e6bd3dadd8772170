"""Tiles over a Dask cluster: the same bits, whoever computes them and whoever dies."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from gram_cases import data, net
from separate_hosts import start_two_hosts
from unlazy import GramFile, gram_file, runtime, tangent_kernel
from unlazy.kernels import gram_cluster
from unlazy.kernels.gram import all_places
from unlazy.runtime import InputError

distributed = pytest.importorskip("distributed")
pytest.importorskip("zarr")


class Slow(nn.Module):
    """A network that takes its time, so that there is time to kill."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.005)
        return self.net(x)


class Picky(nn.Module):
    """A network that refuses one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] == 77.0).any()):
            raise ValueError("not this one")
        return self.layer(x)


@pytest.fixture(scope="module")
def here() -> Iterator[Any]:
    """Two workers as threads of this process: quick, and they see what tests patch."""
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options) as workers, distributed.Client(workers) as client:
        yield client


def test_a_cluster_computes_what_one_process_does(tmp_path: Path, here: Any) -> None:
    x = data(26)
    told: list[tuple[int, int]] = []
    file = gram_file(
        tmp_path / "k.zarr", net(), x, tile=4, client=here, progress=lambda done, total: told.append((done, total))
    )
    assert told == [(done, 28) for done in range(1, 29)]
    with runtime.threads(1):
        alone = gram_file(tmp_path / "alone.zarr", net(), x, tile=4)
    assert np.array_equal(file.array()[...], alone.array()[...])
    assert torch.allclose(torch.from_numpy(file.array()[...]), tangent_kernel(net(), x), rtol=1e-12)
    cross = gram_file(tmp_path / "cross.zarr", net(), x, data(7, seed=3), tile=5, client=here, outputs="full")
    assert np.array_equal(
        cross.array()[...],
        gram_file(tmp_path / "c.zarr", net(), x, data(7, seed=3), tile=5, outputs="full").array()[...],
    )


def test_only_what_is_missing_travels(tmp_path: Path, here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, x = tmp_path / "k.zarr", data(26)
    gram_file(path, net(), x, tile=4, shard=(0, 2))
    computed: list[tuple[int, int]] = []
    plain = gram_cluster.compute_tile
    monkeypatch.setattr(
        gram_cluster, "compute_tile", lambda tiles, file, place: (plain(tiles, file, place), computed.append(place))
    )
    missing = GramFile(path).missing_places()
    gram_file(path, net(), x, tile=4, client=here)
    assert sorted(computed) == sorted(missing)
    gram_file(path, net(), x, tile=4, client=here)
    assert len(computed) == len(missing)


def test_what_a_tile_raises_is_raised_here_and_the_rest_is_kept(tmp_path: Path, here: Any) -> None:
    x = data(40)
    x[22, 0] = 77.0
    with pytest.raises(Exception, match="not this one"):
        gram_file(tmp_path / "k.zarr", Picky(), x, tile=4, client=here)
    file = GramFile(tmp_path / "k.zarr")
    assert (0, 0) not in file.missing_places()
    assert (5, 5) in file.missing_places()


def test_one_worker_serves_jobs_one_after_another(tmp_path: Path, here: Any) -> None:
    for seed in (0, 1, 0):
        path = tmp_path / f"{seed}-{len(list(tmp_path.iterdir()))}.zarr"
        found = gram_file(path, net(seed), data(9), tile=4, client=here).array()[...]
        assert torch.allclose(torch.from_numpy(found), tangent_kernel(net(seed), data(9)), rtol=1e-12)


def test_a_file_that_was_deleted_and_begun_with_other_tiles_is_a_new_one(tmp_path: Path, here: Any) -> None:
    for tile in (4, 3, 5):
        found = gram_file(tmp_path / "k.zarr", net(), data(20), tile=tile, client=here).array()[...]
        assert torch.allclose(torch.from_numpy(found), tangent_kernel(net(), data(20)), rtol=1e-12)
        shutil.rmtree(tmp_path / "k.zarr")


def test_a_cluster_without_workers_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_cluster, "PATIENCE", 0.2)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty,
        distributed.Client(empty) as client,
        pytest.raises(InputError, match="no worker joined"),
    ):
        gram_file(tmp_path / "k.zarr", net(), data(6), client=client)


def test_a_folder_that_workers_do_not_share_is_an_error(
    tmp_path: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gram_cluster, "compute_tile", lambda tiles, file, place: None
    )  # written elsewhere, as seen from here
    with pytest.raises(InputError, match="share the folder"):
        gram_file(tmp_path / "k.zarr", net(), data(9), tile=4, client=here)


@example(40, 8, True)
@given(st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_a_queue_of_squares_gives_every_tile_once_and_few_samples_to_a_worker(
    parts: int, workers: int, symmetric: bool
) -> None:
    places = all_places(parts, parts, 1, symmetric=symmetric)
    queue = gram_cluster.TileQueue(gram_cluster.square_groups(places, workers))
    taken: dict[str, list[tuple[int, int]]] = {str(worker): [] for worker in range(workers)}
    turn = itertools.cycle(taken)
    while (place := queue.take(worker := next(turn))) is not None:
        taken[worker].append(place)
    assert sorted(place for share in taken.values() for place in share) == sorted(places)
    if parts == 40 and workers == 8 and symmetric:  # features made in all, against every worker making all
        met = [len({part for place in share for part in place}) for share in taken.values()]
        assert sum(met) <= 0.7 * workers * parts
    queue.put_back((3, 4))
    assert queue.take("another") == (3, 4)
    assert queue.take("another") is None


# --- two hosts -----------------------------------------------------------------------------------------------

MINE = """
import torch
from torch import nn
from my_helpers import bend

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 9).double(), nn.Linear(9, 3).double()

    def forward(self, x):
        return self.last(bend(self.first(x)))
"""


HELPERS = """
import time
import torch

def bend(x):
    time.sleep(0.01)  # so that both workers get tiles
    return torch.tanh(x) * x
"""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[str]:
    with start_two_hosts(tmp_path, hidden=tmp_path / "client") as address:
        yield address


def test_two_hosts_without_a_common_folder(tmp_path: Path, two_hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "client"
    home.mkdir()
    (home / "my_net.py").write_text(MINE)
    (home / "my_helpers.py").write_text(HELPERS)
    monkeypatch.syspath_prepend(str(home))
    model, x = importlib.import_module("my_net").Net(), data(26)
    with runtime.threads(1):
        alone = gram_file(tmp_path / "alone.zarr", model, x, tile=4).array()[...]
    with distributed.Client(two_hosts) as client:
        client.wait_for_workers(2, timeout=60)
        hidden = client.run(lambda path: Path(path).read_text(), str(home / "my_net.py"), on_error="return")
        assert all(isinstance(seen, FileNotFoundError) for seen in hidden.values())
        file = gram_file(home / "k.zarr", model, x, tile=4, client=client)
        workers = set(client.run(os.getpid).values())
    assert np.array_equal(file.array()[...], alone)
    assert torch.allclose(torch.from_numpy(alone), tangent_kernel(model, x), rtol=1e-12)
    assert {int(told["by"].split()[-1]) for told in file.receipts().values()} == workers
    assert len(workers) == 2
    assert not list((home / "k.zarr").glob(".client-*"))


def test_a_worker_with_other_code_of_the_package_is_refused(
    tmp_path: Path, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gram_cluster.PackedJob.unpack
    monkeypatch.setattr(gram_cluster.PackedJob, "unpack", lambda self: replace(plain(self), model=net(seed=5)))
    with pytest.raises(InputError, match=r"the model on this worker is another one \(other model\)"):
        gram_file(tmp_path / "k.zarr", net(), data(9), tile=4, client=here)


def writers(receipts: list[Path]) -> set[str]:
    """The processes that computed these tiles."""
    return {json.loads(receipt.read_text())["by"] for receipt in receipts}


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 2], ids=["one of two workers", "both workers at once"])
def test_killed_workers_cost_only_their_unfinished_tiles(
    tmp_path: Path, victims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x, written = tmp_path / "k.zarr", data(120), dict[Path, int]()
    with runtime.threads(1):
        whole = gram_file(tmp_path / "whole.zarr", Slow(), x, tile=8).array()[...]
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as workers,
        distributed.Client(workers) as client,
    ):

        def kill() -> None:
            while len(receipts := list((path / "receipts").glob("[0-9]*.json"))) < 20 or len(writers(receipts)) < 2:
                time.sleep(0.01)
            written.update({receipt: receipt.stat().st_mtime_ns for receipt in receipts})
            for pid in list(client.run(os.getpid).values())[:victims]:
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        file = gram_file(path, Slow(), x, tile=8, client=client)
        killer.join()
    assert np.array_equal(file.array()[...], whole)
    assert {receipt: receipt.stat().st_mtime_ns for receipt in written} == written  # nothing finished was done again
    assert len({told["by"] for told in file.receipts().values()}) >= 2 + victims - 1
