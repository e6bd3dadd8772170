"""Products and solutions from kernels on disk, against the same matrix in memory; damaged tiles are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gram_cases import data, net
from unlazy import GramFile, InputError, StoreError, alignment, effective_rank, gram_file, tangent_kernel
from unlazy.kernels.gram import TooLittleMemory
from unlazy.kernels.regression import kernel_regression

pytest.importorskip("zarr")


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(x: Tensor, x2: Tensor | None = None, outputs: Any = "trace") -> Tensor:
    found = tangent_kernel(net(), x, x2, outputs=outputs)
    return found if found.ndim == 2 else found.transpose(1, 2).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("outputs", ["trace", "full", 1])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("memory", ["1GB", "little"])  # all tiles kept, and none
def test_products_are_those_of_the_matrix(tmp_path: Path, outputs: Any, cross: bool, memory: str) -> None:
    x, x2 = data(23), data(11, seed=2) if cross else None
    file = gram_file(tmp_path / "k.zarr", net(), x, x2, tile=5, outputs=outputs)
    wanted = dense(x, x2, outputs)
    v = drawn(wanted.shape[1], 3)
    little = "8kB" if outputs == "full" else "1kB"
    K = file.operator(memory=little if memory == "little" else memory)
    for _ in range(2):  # the second time tiles may be at hand
        torch.testing.assert_close(K @ v, wanted @ v, rtol=1e-11, atol=1e-11)
    assert bool(K._kept) == (memory == "1GB")
    torch.testing.assert_close(file @ v[:, 0], wanted @ v[:, 0], rtol=1e-11, atol=1e-11)
    assert isinstance(file @ v.numpy(), np.ndarray)
    if cross:
        for ask in (
            K.trace,
            K.diagonal_sum,
            lambda: K.top_eigenpairs(1),
            lambda: K.fit_ridge(v),
            lambda: K.alignment(v),
        ):
            with pytest.raises(InputError, match="between two sets"):
                ask()


def test_questions_have_the_answers_of_the_matrix(tmp_path: Path) -> None:
    x, new = data(60), data(9, seed=4)
    kernel, y = dense(x), drawn(60, 2)
    file = gram_file(tmp_path / "k.zarr", net(), x, tile=16)
    K = file.operator(memory="500kB")
    found = K.top_eigenpairs(6)
    torch.testing.assert_close(found.values, torch.linalg.eigvalsh(kernel).flip(0)[:6], rtol=1e-10, atol=0)
    fit = K.fit_ridge(y, 1e-3, tolerance=1e-12)
    cross = gram_file(tmp_path / "c.zarr", net(), new, x, tile=16)
    wanted = kernel_regression(kernel, y, dense(new, x), ridge=1e-3)
    torch.testing.assert_close(fit.predict(cross), wanted, rtol=1e-8, atol=1e-8)
    for matrix, bound in ((dense(new, x), 1e-8), (dense(new, x).numpy(), 1e-8), (dense(new, x).float(), 1e-3)):
        torch.testing.assert_close(fit.predict(matrix), wanted, rtol=bound, atol=bound)
    exact = {
        "trace": (K.trace(), kernel.trace()),
        "alignment": (K.alignment(y), alignment(kernel, y)),
        "participation": (K.effective_rank("participation"), effective_rank(kernel, "participation")),
    }
    for estimate, value in exact.values():
        assert estimate.value == pytest.approx(float(value), rel=1e-10)
        assert (estimate.error, estimate.probes) == (0.0, 0)  # no random numbers are needed
    shifted = kernel + 1e-2 * kernel.trace() / 60 * torch.eye(60).double()
    guess = K.log_determinant(1e-2, rank=4, probes=20)
    assert abs(guess.value - float(torch.logdet(shifted))) < 4 * guess.error


def damage(path: Path) -> None:
    chunk = path / "c" / "0" / "1"
    content = bytearray(chunk.read_bytes())
    content[9] ^= 1
    chunk.write_bytes(content)


def test_a_damaged_tile_is_named_or_computed_again(tmp_path: Path) -> None:
    x, path, v = data(20), tmp_path / "k.zarr", drawn(20)
    file = gram_file(path, net(), x, tile=8)
    damage(path)
    with pytest.raises(StoreError, match=r"tile \(0, 1\) is damaged"):
        GramFile(path) @ v
    torch.testing.assert_close(file @ v, dense(x) @ v, rtol=1e-11, atol=1e-11)  # made by gram_file: knows the model
    assert GramFile(path).missing_places() == []
    torch.testing.assert_close(GramFile(path) @ v, dense(x) @ v, rtol=1e-11, atol=1e-11)
    damage(path)
    again = gram_file(path, net(), x, tile=8)
    torch.testing.assert_close(again @ v, dense(x) @ v, rtol=1e-11, atol=1e-11)


def test_unfinished_files_and_small_memory_are_refused(tmp_path: Path) -> None:
    x = data(20)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gram_file(tmp_path / "k.zarr", net(), x, tile=8, progress=stop)
    with pytest.raises(InputError, match="5 tiles are still to be computed"):
        GramFile(tmp_path / "k.zarr") @ drawn(20)
    file = gram_file(tmp_path / "k.zarr", net(), x, tile=8)
    with pytest.raises(TooLittleMemory, match="smaller tile"):
        file.operator(memory=1000)
    with pytest.raises(TooLittleMemory, match="ask for less"):
        file.operator(memory="3kB").top_eigenpairs(10)
