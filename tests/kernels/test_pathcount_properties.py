"""What numbers of common active paths must be like: symmetric, whole, the same in any company and any memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pathnets
from unlazy import InputError
from unlazy.kernels import overlap
from unlazy.kernels.gate_calls import record
from unlazy.kernels.gram import plan_gram
from unlazy.kernels.overlap import layer_overlap, overlap_kernel, path_count
from unlazy.kernels.paths import overlap_engine as path_pairs


def small_convolutional(seed: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 6, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, pathnets.Block(6, 6), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)).double()
    return model, torch.randn(9, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
def test_overlap_is_symmetric_positive_and_bounded_by_its_diagonal(seed: int) -> None:
    model, x = small_convolutional(seed)
    kernel = overlap_kernel(model, x)
    assert torch.equal(kernel, kernel.T)
    assert torch.equal(kernel.diagonal(), path_count(model, x))
    assert (kernel <= torch.minimum(kernel.diagonal()[:, None], kernel.diagonal())).all()
    values = torch.linalg.eigvalsh(kernel)
    assert values.min() >= -1e-12 * values.max()


def test_dense_chains_are_the_product_over_layers() -> None:
    model, x = pathnets.build("dense")
    gates = [gate.open.double() for gate in record(model, x)]
    product = (gates[0] @ gates[0].T) * (gates[1] @ gates[1].T)
    assert torch.equal(overlap_kernel(model, x), product)
    assert torch.equal(layer_overlap(model, x), product)


def test_plain_convolutions_follow_the_recursion_over_positions() -> None:
    """S_l(p) = O_l(p) * sum of S_{l-1} over the window of p, with torch's own convolution as the sum."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 7, 3, padding=1), nn.Conv2d(7, 5, 3, stride=2)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(5 * 9, 1)).double()
    x = torch.randn(6, 2, 7, 7, dtype=torch.float64)
    one, two = (gate.open.double() for gate in record(model, x))
    kernel = overlap_kernel(model, x)
    for i in range(6):
        for j in range(6):
            state = (one[i] * one[j]).sum(0)[None, None]
            state = F.conv2d(state, torch.ones(1, 1, 3, 3, dtype=torch.float64), stride=2)
            assert kernel[i, j] == (state[0, 0] * (two[i] * two[j]).sum(0)).sum()


def test_counts_are_whole_numbers_up_to_the_last_digit() -> None:
    """About 2^50 paths: every type on the way must hold its part. Against whole numbers of any length."""
    torch.manual_seed(0)
    sizes = [(2, 40), (40, 40), (40, 40), (40, 40), (40, 40), (40, 40), (40, 40), (40, 40), (40, 40), (40, 30)]
    layers = [layer for a, b in sizes for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(30, 1)).double()
    x = torch.randn(12, 2, dtype=torch.float64)
    whole = [[1] * 12 for _ in range(12)]
    for gate in record(model, x):
        common = (gate.open.long() @ gate.open.long().T).tolist()
        whole = [[a * b for a, b in zip(r, s, strict=True)] for r, s in zip(whole, common, strict=True)]
    assert 2**35 < max(map(max, whole)) < 2**53
    assert [[int(v) for v in row] for row in overlap_kernel(model, x).tolist()] == whole


def test_channels_are_summed_where_only_their_sum_is_needed() -> None:
    """One number per position for plain convolutions, however many channels; one per unit where a skip needs them."""
    plain = nn.Sequential(nn.Conv2d(1, 9, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(9, 40, 2), nn.ReLU(), nn.Flatten())
    model, x = nn.Sequential(plain, nn.Linear(160, 3)), torch.randn(2, 1, 8, 8)
    kernel = overlap.overlap_engine(model, x)
    assert kernel.program.numbers == 36
    model = nn.Sequential(nn.Conv2d(1, 9, 3), nn.ReLU(), pathnets.Block(9, 9), nn.Flatten(), nn.Linear(9 * 36, 3))
    kernel = overlap.overlap_engine(model, x)
    assert kernel.program.numbers == 9 * 36


def test_pairs_are_counted_alike_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small_convolutional()
    whole = overlap_kernel(model, x)
    monkeypatch.setitem(path_pairs.NUMBERS, "cpu", 1)
    for width in (1, 4):
        monkeypatch.setattr(path_pairs, "WIDTH", width)
        assert torch.equal(overlap_kernel(model, x), whole)
    monkeypatch.setattr(path_pairs, "RECORDED", 1)  # one sample at a time
    assert torch.equal(overlap_kernel(model, x), whole)
    assert torch.equal(path_count(model, x), whole.diagonal())


def test_little_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that the gates of all samples are not held at once: they are recorded again."""
    monkeypatch.setitem(path_pairs.NUMBERS, "cpu", 1)
    monkeypatch.setattr(path_pairs, "RECORDED", 1)
    model, x = small_convolutional()
    kernel = overlap.overlap_engine(model, x)
    plans = (plan_gram(kernel, 9, None, memory) for memory in range(200_000, 0, -500))
    tight = next(plan for plan in plans if not plan.caches_all)
    assert tight.tile < 9
    assert torch.equal(overlap_kernel(model, x, memory=tight.budget_bytes), overlap_kernel(model, x))
    with pytest.raises(InputError, match="too small"):
        overlap_kernel(model, x, memory=1000)


def test_results_in_place_and_in_single_precision() -> None:
    model, x = small_convolutional()
    whole = overlap_kernel(model, x)
    single = torch.zeros(9, 9)
    assert overlap_kernel(model, x, out=single) is single
    assert torch.equal(single, whole.float())
    assert torch.equal(overlap_kernel(model, x, dtype=torch.float32), single)
    rows = torch.zeros(4, 9, dtype=torch.float64).numpy()  # anything that takes slices
    overlap_kernel(model, x[:4], x, out=rows)
    assert (rows == whole[:4].numpy()).all()
    seen: list[tuple[int, int]] = []
    assert torch.equal(overlap_kernel(model, x, progress=lambda done, total: seen.append((done, total))), whole)
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(InputError, match="out must have shape"):
        overlap_kernel(model, x, out=torch.zeros(3, 3))
    with pytest.raises(InputError, match="float32 or float64"):
        overlap_kernel(model, x, dtype=torch.float16)
