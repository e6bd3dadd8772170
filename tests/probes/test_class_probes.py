"""Probes by class, against slow twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from unlazy import InputError
from unlazy.data.dataset import Dataset
from unlazy.kernels.overlap import overlap_kernel, path_count
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.build import build_stack, member
from unlazy.models.gates import HardGate
from unlazy.models.net import GatedNet
from unlazy.models.spec import NetSpec, relu_spec
from unlazy.probes import classes
from unlazy.runtime import Unsupported


def small_stack(kind: str, seeds: int = 3) -> GatedNet:
    specs = {
        "relu": relu_spec(6, 4, width=5, depth=3),
        "relu-bias-free": relu_spec(6, 4, width=5, depth=3, gate_bias=False, value_bias=False),
        "pwc-one": NetSpec(6, 4, width=5, depth=3, experts="constant", constant_input="one"),
        "pwc-ones": NetSpec(6, 4, width=5, depth=3, experts="constant"),
        "frozen": NetSpec(6, 4, width=5, depth=2, train_gates=False),
    }
    return build_stack(specs[kind], list(range(seeds)), dtype=torch.float64)


def small_batch(members: int = 3, n: int = 23) -> Dataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=random, dtype=torch.float64)
    label = torch.arange(n) % 3
    y = torch.nn.functional.one_hot(torch.randint(4, (members, n), generator=random), 4).double()
    return Dataset("small", x, y, {str(c): label == c for c in range(3)})


KINDS = ["relu", "relu-bias-free", "pwc-one", "pwc-ones", "frozen"]


@pytest.mark.parametrize("kind", KINDS)
def test_dense_tangent_kernel_is_the_tangent_kernel(kind: str) -> None:
    stack, x = small_stack(kind), small_batch().x
    fast = classes.dense_tangent_kernel(stack, x)
    for index in range(3):
        slow = tangent_kernel(member(stack, index), x, method="loop")
        torch.testing.assert_close(fast[index], slow, rtol=1e-12, atol=1e-14)
    assert not fast.requires_grad
    assert all(parameter.grad is None for parameter in stack.parameters())


def test_dense_tangent_kernel_refuses_what_it_cannot_do() -> None:
    for choices in ({"gating": "quadratic"}, {"gate": HardGate(4.0)}):
        stack = build_stack(NetSpec(6, 4, width=3, depth=2, **choices), [0])
        with pytest.raises(Unsupported, match="tangent_kernel"):
            classes.dense_tangent_kernel(stack, torch.randn(3, 6))


@pytest.mark.parametrize("kind", KINDS)
def test_class_kernels_are_block_means(kind: str) -> None:
    stack, batch = small_stack(kind), small_batch()
    found = classes.class_kernels(stack, batch)
    rows = [inside.nonzero()[:, 0].tolist() for inside in batch.groups.values()]
    for index in range(3):
        one = member(stack, index)
        whole = {"overlap": overlap_kernel(one, batch.x), "tangent": tangent_kernel(one, batch.x, method="loop")}
        for name, kernel in whole.items():
            for a in range(3):
                for b in range(3):
                    mean = np.mean([float(kernel[i, j]) for i in rows[a] for j in rows[b]])
                    assert float(found[name][index, a, b]) == pytest.approx(mean, rel=1e-10)
        for a in range(3):
            mean = np.mean([float(whole["tangent"][i, i]) for i in rows[a]])
            assert float(found["tangent_diagonal"][index, a]) == pytest.approx(mean, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_class_curves_count_image_by_image(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, batch = small_stack(kind), small_batch()
    monkeypatch.setattr(classes, "CHUNK", 7)  # several parts, the last one short
    found = classes.class_curves(stack, batch)
    for index in range(3):
        one, hard = member(stack, index), member(stack, index).hard()
        for row, inside in enumerate(batch.groups.values()):
            x, wanted = batch.x[inside], batch.y[index, inside].argmax(-1)
            for name, net in (("accuracy", one), ("accuracy_hard_gates", hard)):
                right = [bool(net(x[i : i + 1]).argmax() == wanted[i]) for i in range(len(x))]
                assert float(found[name][index, row]) == pytest.approx(np.mean(right))
            paths = path_count(one, x)
            assert float(found["paths"][index, row]) == pytest.approx(float(paths.mean()))
            assert float(found["log_paths"][index, row]) == pytest.approx(float((1 + paths).log().mean()))


def test_classes_without_images_are_refused() -> None:
    batch = small_batch()
    lost = replace(batch, groups={"nobody": torch.zeros(23, dtype=torch.bool)})
    with pytest.raises(InputError, match="nobody"):
        classes.class_curves(small_stack("relu"), lost)
    with pytest.raises(InputError, match="groups"):
        classes.class_kernels(small_stack("relu"), replace(batch, groups={}))
