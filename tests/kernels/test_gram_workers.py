"""Workers of one process: the same kernel as one worker, every feature made once, and the process left as it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import checkpoint

from gram_cases import data, net
from unlazy import gram_file, overlap_kernel, plan_tangent, runtime, tangent_kernel
from unlazy.kernels import gram_workers
from unlazy.kernels.gram import gram
from unlazy.kernels.gram_workers import SplitKernel
from unlazy.kernels.overlap import layer_overlap
from unlazy.kernels.tangent_engine import TangentKernel
from unlazy.runtime import InputError

TWO = ["cpu", "cpu"]


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def convolutional(width: int) -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.BatchNorm2d(width))
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)).double()


class Scaled(nn.Module):
    """A parameter that no rule serves, beside layers with rules."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale.exp()


MODELS: list[tuple[Any, Any]] = [
    (net, data),
    (Scaled, data),
    (lambda: convolutional(3), images),
    (lambda: convolutional(40), images),  # too wide for explicit gradients: tap by tap
]


@pytest.mark.parametrize(("model", "inputs"), MODELS)
@pytest.mark.parametrize("outputs", ["trace", "full", 1])
@pytest.mark.parametrize("workers", [2, 3])
def test_several_workers_give_what_one_gives(model: Any, inputs: Any, outputs: Any, workers: int) -> None:
    x, x2 = inputs(13), inputs(20)[13:]
    for columns in (None, x2):
        one = tangent_kernel(model(), x, columns, outputs=outputs)
        several = tangent_kernel(model(), x, columns, outputs=outputs, devices=["cpu"] * workers)
        torch.testing.assert_close(several, one, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 30), st.integers(2, 5), st.integers(2, 40), st.booleans(), st.booleans())
def test_any_number_of_workers_and_memory_give_the_same(
    n: int, workers: int, kilobytes: int, cross: bool, apart: bool
) -> None:
    x, x2 = data(n), data(7, seed=4) if cross else None
    kernels = [TangentKernel(net(), x, x2, memory="1MB") for _ in range(workers)]
    split = SplitKernel(kernels)
    split._any_worker = not apart  # as on several devices: each worker keeps to the pieces it has
    split.work_bytes = 0
    split.best_tile = 1 + kilobytes % 9
    with split.ready():
        found = gram(split, x, x2, memory=10**5 + 1000 * kilobytes)
    torch.testing.assert_close(found, tangent_kernel(net(), x, x2), rtol=1e-12, atol=1e-12)


def test_no_feature_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    x, made = data(50), Counter[float]()
    plain = TangentKernel.features

    def counting(self: TangentKernel, part: Tensor) -> Any:
        made.update(part[:, 0].tolist())
        return plain(self, part)

    monkeypatch.setattr(TangentKernel, "features", counting)
    tangent_kernel(net(), x, devices=["cpu"] * 3)
    assert len(made) == 50
    assert set(made.values()) == {1}


@pytest.mark.parametrize(
    ("kernel", "twin"), [("tangent", tangent_kernel), ("overlap", overlap_kernel), ("layer-overlap", layer_overlap)]
)
def test_workers_fill_a_file(tmp_path: Path, kernel: str, twin: Any) -> None:
    pytest.importorskip("zarr")
    x = data(23)
    file = gram_file(tmp_path / "k.zarr", net(), x, kernel=kernel, tile=5, devices=TWO)
    assert np.allclose(file.array()[...], twin(net(), x), rtol=1e-12)
    one = gram_file(tmp_path / "one.zarr", net(), x, kernel=kernel, tile=5)
    assert file.about["job"]["data"] == one.about["job"]["data"]
    assert gram_file(tmp_path / "k.zarr", net(), x, kernel=kernel, tile=5).missing_places() == []  # one goes on for two
    with pytest.raises(InputError, match="client and devices"):
        gram_file(tmp_path / "k.zarr", net(), x, devices=TWO, client=object())  # type: ignore[arg-type]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] == 77.0).any()):
            raise ValueError("not this one")
        return self.layer(x)


def test_an_error_of_one_worker_is_raised_and_the_process_is_as_before() -> None:
    x = data(40)
    x[30, 0] = 77.0
    before = torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled(), vars(checkpoint)["CheckpointFunction"]
    model = Broken()
    flags = [(p.requires_grad, id(p)) for p in model.parameters()]
    with pytest.raises(ValueError, match="not this one"):
        tangent_kernel(model, x, devices=TWO)
    tangent_kernel(model, x[:20], devices=TWO)
    after = torch.get_num_threads(), torch.backends.mha.get_fastpath_enabled(), vars(checkpoint)["CheckpointFunction"]
    assert after == before
    assert [(p.requires_grad, id(p)) for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


class Shut(nn.Linear):
    """A layer that nobody may copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def test_what_cannot_be_shared_out_is_an_error_that_says_so() -> None:
    with pytest.raises(InputError, match=r"copied for 2 workers \(no copies\)"):
        tangent_kernel(Shut(4, 2).double(), data(6), devices=TWO)
    with pytest.raises(InputError, match="at least one device"):
        tangent_kernel(net(), data(6), devices=[])


def count_workers(monkeypatch: pytest.MonkeyPatch, threads: int, model: nn.Module, x: Tensor) -> int:
    """How many workers a kernel without ``devices`` takes."""
    found = []
    plain = SplitKernel.__init__

    def noting(self: SplitKernel, workers: Any) -> None:
        found.append(len(workers))
        plain(self, workers)

    monkeypatch.setattr(SplitKernel, "__init__", noting)
    with runtime.threads(threads):
        tangent_kernel(model, x)
    return found[0] if found else 1


def test_workers_are_as_many_as_torch_has_threads_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_workers(monkeypatch, 2, net(), data(9)) == 1  # too small
    monkeypatch.setattr(gram_workers, "WORTH_SECONDS", 0.0)
    assert count_workers(monkeypatch, 1, net(), data(9)) == 1
    assert count_workers(monkeypatch, 2, net(), data(9)) == 2
    assert count_workers(monkeypatch, 2, Shut(4, 2).double(), data(9)) == 1
    hooked = net()
    hooked[0].register_forward_hook(lambda module, x, out: None)
    assert count_workers(monkeypatch, 2, hooked, data(9)) == 1


def test_the_plan_names_the_workers() -> None:
    x = data(30)
    assert "workers: 2 (cpu, cpu)" in str(plan_tangent(net(), x, devices=TWO))
    assert "workers" not in str(plan_tangent(net(), x))


def test_workers_share_the_parameters() -> None:
    model = net()
    copied = gram_workers._copy_model(model, torch.device("cpu"))
    for ours, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        assert ours is not theirs
        assert ours.data_ptr() == theirs.data_ptr()
