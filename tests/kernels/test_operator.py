"""Products with a tangent kernel that never exists as a matrix, against the dense one in float64; every kind of data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zoo
from process_memory import run_code
from unlazy import DLGN, Dataset, HardGate, InputError, Unsupported, tangent_kernel, tangent_operator
from unlazy.kernels.gram import TooLittleMemory
from unlazy.kernels.operator import TangentOperator

MEMORY = "200MB"


def net(seed: int = 0, outputs: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, outputs)).double()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(model: nn.Module, x: Any, outputs: Any = "trace", x2: Any = None, **options: Any) -> Tensor:
    """The kernel as a matrix, rows of ``full`` sample by sample."""
    found = tangent_kernel(model, x, x2, outputs=outputs, **options)
    return found if found.ndim == 2 else found.transpose(1, 2).flatten(2).flatten(0, 1)


def close(found: Tensor, wanted: Tensor, bound: float = 1e-10) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= bound * float(wanted.abs().max())


@pytest.mark.parametrize("outputs", ["trace", "full", "sum", 1, -1, [2, 0]])
@pytest.mark.parametrize("at_once", [7, 100])
def test_products_are_those_of_the_matrix(outputs: Any, at_once: int) -> None:
    model, x = net(), drawn(23, 4)
    wanted = dense(model, x, outputs)
    K = tangent_operator(model, x, outputs=outputs, memory=MEMORY)
    K.at_once, K.columns_at_once = at_once, 2
    assert K.shape == tuple(wanted.shape)
    v = drawn(len(wanted), 5, seed=2)
    close(K @ v, wanted @ v)
    close(K @ v[:, 0], wanted @ v[:, 0])
    close(torch.from_numpy(K @ v.numpy()), wanted @ v)
    assert (K @ v.float()).dtype == torch.float32
    assert K.diagonal_sum() == pytest.approx(float(wanted.trace()), rel=1e-12)


@pytest.mark.parametrize("name", zoo.ZOO)
@pytest.mark.parametrize("outputs", ["trace", "full"])
def test_products_of_every_kind_of_layer(name: str, outputs: str) -> None:
    model, x = zoo.build(name)
    wanted = dense(model, x, outputs)
    K = tangent_operator(model, x, outputs=outputs, memory=MEMORY)
    v = drawn(len(wanted), 3)
    close(K @ v, wanted @ v)
    close(K @ v[:, 0], wanted @ v[:, 0])


def test_some_parameters_only() -> None:
    model, x = net(), drawn(8, 4)
    wanted = dense(model, x, parameters="2.*")
    close(tangent_operator(model, x, parameters="2.*", memory=MEMORY) @ drawn(8), wanted @ drawn(8))


class Idle(nn.Module):
    """One layer is used, another is not; the used one may have no forward mode."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.used, self.idle = nn.Embedding(5, 3, padding_idx=padding), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("padding", [None, 0])
def test_parameters_without_effect_have_no_share(padding: int | None) -> None:
    model, x = Idle(padding).double(), torch.tensor([0, 3, 1, 4])
    v = drawn(4, 2)
    assert not bool((tangent_operator(model, x, parameters="idle.*", memory=MEMORY) @ v).any())
    close(tangent_operator(model, x, memory=MEMORY) @ v, dense(model, x) @ v)


def test_hard_gates_count_by_their_value_parameters() -> None:
    model = DLGN(4, 2, width=5, depth=2, gate=HardGate()).double()
    x = drawn(6, 4)
    close(tangent_operator(model, x, memory=MEMORY) @ drawn(6), dense(model, x) @ drawn(6))


class Batches:
    """An iterable of batches that starts again every time."""

    def __init__(self, x: Tensor, sizes: list[int]) -> None:
        self.parts = x.split(sizes)

    def __iter__(self) -> Any:
        return iter(self.parts)


def mapped(x: Tensor, folder: Path) -> np.ndarray:
    np.save(folder / "x.npy", x.numpy())
    return np.load(folder / "x.npy", mmap_mode="r")


KINDS: dict[str, Any] = {
    "tensor": lambda x, _: x,
    "arguments": lambda x, _: (x,),
    "array": lambda x, _: x.numpy(),
    "memory-mapped file": mapped,
    "data set": lambda x, _: Dataset("mine", x, x[:, :1]),
    "torch data set": lambda x, _: TensorDataset(x, torch.arange(len(x))),
    "loader": lambda x, _: DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=5),
    "loader of tensors": lambda x, _: DataLoader(list(x), batch_size=4),
    "batches": lambda x, _: Batches(x, [3, 11, 1, 8]),
    "list of pairs": lambda x, _: [(part, None) for part in x.split(6)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same_product(kind: str, tmp_path: Path) -> None:
    model, x = net(), drawn(23, 4)
    v = drawn(23, 2)
    data = KINDS[kind](x, tmp_path)
    state = torch.get_rng_state()
    K = tangent_operator(model, data, memory=MEMORY)
    K.at_once = 4
    close(K @ v, dense(model, x) @ v)
    assert torch.equal(torch.get_rng_state(), state)  # a loader draws from it
    close(K.apply(K.apply_transposed(v), data), dense(model, x) @ v)


def test_a_function_picks_the_inputs_of_a_batch() -> None:
    model, x = net(), drawn(9, 4)
    data = [{"labels": part[:, 0], "pixels": part} for part in x.split(4)]
    K = tangent_operator(model, data, memory=MEMORY, pick=lambda batch: batch["pixels"])
    close(K @ drawn(9), dense(model, x) @ drawn(9))


class Shuffled(Batches):
    """Other rows every time; the sums of the batches stay."""

    def __iter__(self) -> Any:
        self.parts = tuple(part.roll(1, dims=0) for part in self.parts)
        return iter(self.parts)


class Growing(Batches):
    def __iter__(self) -> Any:
        self.parts = (*self.parts, self.parts[0])
        return iter(self.parts)


def test_data_that_change_are_refused() -> None:
    model, x = net(), drawn(12, 4)
    loader = DataLoader(TensorDataset(x), batch_size=4, shuffle=True)
    with pytest.raises(InputError, match="shuffle=False"):
        tangent_operator(model, loader, memory=MEMORY)
    with pytest.raises(InputError, match="can be read once only"):
        tangent_operator(model, iter(x.split(4)), memory=MEMORY)
    for kind in (Shuffled, Growing):
        with pytest.raises(InputError, match="not what it was when the data were first read"):
            K = tangent_operator(model, kind(x.round(), [4, 8]), memory=MEMORY)  # whose sums are exact in any order
            K @ drawn(K.shape[0])
    bad = x.clone()
    bad[11, 2] = torch.nan
    for data in (bad, bad.numpy(), [bad[:6], bad[6:]]):
        with pytest.raises(InputError, match="1 of the inputs are NaN"):
            tangent_operator(model, data, memory=MEMORY)
    with pytest.raises(InputError, match="no samples"):
        tangent_operator(model, x[:0], memory=MEMORY)
    with pytest.raises(InputError, match="got int"):
        tangent_operator(model, 3, memory=MEMORY)


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)).double()
    model.train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    K = tangent_operator(model, drawn(7, 4), memory=MEMORY)
    product = K @ drawn(7)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert torch.equal(K @ drawn(7), product)  # of the model as it was


def test_precision_and_mixed_types() -> None:
    model, x = net().float(), drawn(15, 4)
    wanted = dense(model.double(), x)
    model.float()
    v = drawn(15, 2)
    exact = tangent_operator(model, x, precision="float64", memory=MEMORY)
    assert exact.dtype == torch.float64
    close(exact @ v, wanted @ v)
    rough = tangent_operator(model, x, memory=MEMORY)  # float64 samples for a float32 model
    assert rough.dtype == torch.float32
    close(rough @ v, wanted @ v, 1e-5)


def test_errors_say_what_to_do() -> None:
    model, x = net(), drawn(9, 4)
    K = tangent_operator(model, x, memory=MEMORY)
    with pytest.raises(InputError, match=r"v must be \[9\] or \[9, columns\]; got \(8,\)"):
        K @ drawn(8)
    with pytest.raises(InputError, match="real numbers"):
        K @ torch.arange(9)
    with pytest.raises(InputError, match="precision must be"):
        tangent_operator(model, x, precision="half")
    with pytest.raises(InputError, match="does not take samples of shape"):
        tangent_operator(model, drawn(9, 5), memory=MEMORY)
    with pytest.raises(TooLittleMemory, match="Give more memory"):
        tangent_operator(model, x, memory=5000)
    with pytest.raises(Unsupported, match="depends on the other samples"):
        tangent_operator(MixesSamples(), x, memory=MEMORY)


class MixesSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0))


def test_scipy_takes_the_operator() -> None:
    from scipy.sparse.linalg import cg, eigsh

    model, x = net(), drawn(30, 4)
    wanted = dense(model, x)
    A = tangent_operator(model, x, memory=MEMORY).as_linear_operator()
    assert A.shape == (30, 30)
    close(torch.from_numpy(A @ np.eye(30)), wanted)
    values = eigsh(A, k=3, return_eigenvectors=False, v0=np.ones(30))
    close(torch.from_numpy(values), torch.linalg.eigvalsh(wanted)[-3:])
    b = drawn(30)
    shifted = A + 0.1 * float(wanted.trace()) * _identity(30)
    found, failed = cg(shifted, b.numpy(), rtol=1e-12)
    assert not failed
    close(torch.from_numpy(found), torch.linalg.solve(wanted + 0.1 * wanted.trace() * torch.eye(30).double(), b))


def _identity(n: int) -> Any:
    from scipy.sparse.linalg import LinearOperator

    return LinearOperator((n, n), matvec=lambda v: v, dtype=np.float64)


WATCHED = """
import sys
import numpy as np, torch
from torch import nn
from process_memory import PeakGrowth
from unlazy import tangent_operator

torch.set_num_threads(1)
budget, kind = int(sys.argv[1]) * 10**6, sys.argv[2]
if kind == "dense":
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    x = torch.randn(4000, 784)
else:
    convolutions = nn.Conv2d(3, 26, 3, padding=1), nn.ReLU(), nn.Conv2d(26, 26, 3, padding=1), nn.ReLU()
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(26, 10))
    x = torch.randn(300, 3, 32, 32)
v = torch.randn(len(x), 12)
tangent_operator(model, x[:4], outputs=1) @ v[:4]  # libraries loaded, pools warm

with PeakGrowth() as peak:
    tangent_operator(model, x, outputs=1, memory=budget) @ v
print(peak.bytes / budget)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("megabytes", "kind"), [(60, "dense"), (150, "dense"), (40, "conv"), (200, "conv")])
def test_the_memory_given_is_kept(megabytes: int, kind: str) -> None:
    used = float(run_code(WATCHED, megabytes, kind))
    assert 0.05 < used < 1.1, f"used {used:.2f} of the budget"


def test_columns_share_passes_only_as_memory_allows() -> None:
    model, x = net(), drawn(40, 4)
    roomy, tight = (tangent_operator(model, x, memory=memory) for memory in ("200MB", "30kB"))
    assert isinstance(tight, TangentOperator)
    assert tight.columns_at_once < 12 < roomy.columns_at_once
    assert tight.at_once < 40 == roomy.at_once
    v = drawn(40, 12)
    close(tight @ v, roomy @ v)
