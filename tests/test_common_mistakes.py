"""Mistakes a newcomer makes, as a user meets them: without the type checker of the tests, in one clear sentence each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unlazy import (
    alignment,
    effective_rank,
    kernel_distance,
    layer_kernels,
    overlap_kernel,
    path_count,
    relative_change,
    tangent_kernel,
)
from unlazy.kernels.capture import predictions
from unlazy.kernels.compare import centered_alignment
from unlazy.runtime import InputError

SETTING = """
import json, sys
import numpy as np, torch, unlazy as ul
from torch import nn

net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
gated = ul.DLGN(3, width=4, depth=2)
x, wrong, K = torch.randn(6, 3), torch.randn(6, 7), torch.eye(6)
recipe, data = ul.Recipe(ul.NetSpec(2), (ul.Member(0, lr=1e-2),), epochs=1), ul.Circle(n=8).dataset()

class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = net, wrap

    def forward(self, x):
        return self.wrap(self.net(x))

said = {}
for mistake in json.load(sys.stdin):
    try:
        said[mistake] = ["nothing", str(eval(mistake))]
    except Exception as error:
        said[mistake] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""

OTHER_SHAPE = ["does not take samples of shape (7,) float32 (x)"]
OTHER_TYPE = ["float64 (x)", "Its parameters are float32", "convert x"]
NO_TENSOR = ["x must be a tensor", "got ndarray", "torch.from_numpy(x)"]
NO_MODULE = ["torch module is needed", "got function", "torch.nn.Module"]
UNEQUAL = ["the same samples", "6 and 5"]
NOT_SQUARE = ["square matrix", "(6, 3)"]

MISTAKES: dict[str, list[str]] = {
    "ul.tangent_kernel(net, wrong)": OTHER_SHAPE,
    "ul.tangent_kernel(gated, wrong)": [*OTHER_SHAPE, "expected inputs with 3 columns"],
    "ul.layer_kernels(net, wrong)": OTHER_SHAPE,
    "ul.kernels.tangent_diagonal(net, wrong)": OTHER_SHAPE,
    "ul.plan_tangent(net, wrong)": OTHER_SHAPE,
    "ul.overlap_kernel(net, wrong)": OTHER_SHAPE,
    "ul.overlap_kernel(gated, wrong)": [*OTHER_SHAPE, "expected inputs with 3 columns"],
    "ul.kernels.layer_overlap(net, wrong)": OTHER_SHAPE,
    "ul.path_count(net, wrong)": OTHER_SHAPE,
    "ul.tangent_kernel(net, x.int())": ["int32 (x)", "Its parameters are float32"],
    "ul.tangent_kernel(net, x.double())": OTHER_TYPE,
    "ul.tangent_kernel(image, torch.randn(6, 1, 8, 8).double())": ["(1, 8, 8)", *OTHER_TYPE],
    "ul.overlap_kernel(net, x.double())": OTHER_TYPE,
    "ul.tangent_kernel(net, x, torch.randn(2, 4))": ["shape (4,) float32 (x2)"],
    "ul.overlap_kernel(net, x, torch.randn(2, 4))": ["shape (4,) float32 (x2)"],
    "ul.tangent_kernel(nn.Sequential(nn.BatchNorm2d(3)), x)": ["shape (3,) float32 (x)", "expected 4D input"],
    "ul.tangent_kernel(net, x.numpy())": NO_TENSOR,
    "ul.overlap_kernel(net, x.numpy())": NO_TENSOR,
    "ul.tangent_kernel(net, [[1.0, 2.0, 3.0]])": ["x must be a tensor", "got float", "torch.as_tensor(x)"],
    "ul.tangent_kernel(net, torch.tensor(1.0))": ["first axis"],
    "ul.tangent_kernel(lambda x: x, x)": NO_MODULE,
    "ul.tangent_kernel(lambda x: x, x, precision='float64')": NO_MODULE,
    "ul.layer_kernels(lambda x: x, x)": NO_MODULE,
    "ul.overlap_kernel(lambda x: x, x)": NO_MODULE,
    "ul.tangent_kernel(Wrapped(lambda out: {'a': out, 'b': out}), x)": ["dict with a, b", "logits", "out['a']"],
    "ul.overlap_kernel(Wrapped(lambda out: (out, out)), x)": ["tuple of 2", "out[0]"],
    "ul.half_spaces(net)": ["Sequential", "DLGN", "path_count"],
    "ul.kernel_distance(K, torch.eye(5))": UNEQUAL,
    "ul.relative_change(K, torch.eye(5))": UNEQUAL,
    "ul.kernel_distance(K, x)": NOT_SQUARE,
    "ul.alignment(x, torch.ones(6, 1))": NOT_SQUARE,
    "ul.effective_rank(x)": NOT_SQUARE,
    "ul.effective_rank([1, 2])": ["tensor or a numpy array", "list"],
    "ul.alignment(K, torch.ones(5, 1))": ["6 samples", "(5, 1)"],
    "ul.alignment(K, torch.ones(6).long())": ["one-hot", "int64"],
    "ul.kernels.kernel_regression(K, torch.ones(5, 1), K)": ["(6, 6), (5, 1), (6, 6)"],
    "ul.fit(recipe, data, measures=['tangent'], folder='nowhere')": ["list of Measure", "'tangent'", "FixedSteps.at"],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("newcomer")
    done = subprocess.run(
        [sys.executable, "-c", SETTING], input=json.dumps(list(MISTAKES)), capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    found: dict[str, tuple[str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_words(said: dict[str, tuple[str, str]], mistake: str) -> None:
    kind, message = said[mistake]
    assert kind in ("InputError", "Unsupported"), message
    assert "\n" not in message
    for words in MISTAKES[mistake]:
        assert words in message


def test_an_index_out_of_range_is_no_matter_of_precision() -> None:
    with pytest.raises(InputError, match=r"index out of range in self\.$"):
        tangent_kernel(nn.Sequential(nn.Embedding(4, 2)), torch.tensor([[9]]))


def test_errors_that_are_no_matter_of_the_samples_pass_as_they_are() -> None:
    """A model that takes every sample, but not all of them at once."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 1:
                raise KeyError("mine")
            return self.layer(x)  # type: ignore[no-any-return]

    with pytest.raises(KeyError, match="mine"):
        tangent_kernel(Late(), torch.randn(4, 3))


# --- outputs that are more than a tensor -----------------------------------------------------------------------


class Wrapped(nn.Module):
    """A network that hands its outputs over in some wrapping."""

    def __init__(self, net: nn.Module, wrapping: str) -> None:
        super().__init__()
        self.net, self.wrapping = net, wrapping

    def forward(self, x: Tensor) -> Any:
        out = self.net(x)
        wrappings: dict[str, Any] = {
            "dict": {"hidden": out + 1, "logits": out},
            "only entry": {"scores": out, "name": "mine"},
            "tuple": (out,),
            "list": [out],
            "beside a number": (out.sum(), out),
            "object": SimpleNamespace(logits=out, hidden=out + 1),
        }
        return wrappings[self.wrapping]


@pytest.mark.parametrize("wrapping", ["dict", "only entry", "tuple", "list", "beside a number", "object"])
def test_kernels_see_through_a_wrapping(wrapping: str) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x, wrapped = torch.randn(6, 3), Wrapped(net, wrapping)
    for kernel in (tangent_kernel, overlap_kernel, path_count):
        assert torch.equal(kernel(wrapped, x), kernel(net, x))
    assert torch.equal(tangent_kernel(wrapped, x, method="loop"), tangent_kernel(net, x, method="loop"))
    assert [kernel.tolist() for kernel in layer_kernels(wrapped, x).values()] == [
        kernel.tolist() for kernel in layer_kernels(net, x).values()
    ]


def test_a_recurrent_layer_is_its_output_not_its_state() -> None:
    class Output(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return self.layer(x)[0]

    layer, x = nn.LSTM(2, 3, batch_first=True), torch.randn(4, 5, 2)
    assert torch.equal(tangent_kernel(layer, x), tangent_kernel(Output(layer), x))


def test_what_could_be_meant_twice_is_not_guessed() -> None:
    out = torch.zeros(4, 2)
    for several in ({"a": out, "b": out}, (out, out), [], {}, None, "logits", SimpleNamespace(logits=None)):
        assert predictions(several) is None


# --- numpy arrays, as a run keeps them -------------------------------------------------------------------------


def test_comparisons_take_what_a_run_keeps() -> None:
    rows = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    first, second = rows @ rows.mT  # [members, n, n] each
    y = torch.randn(6, 2, dtype=torch.float64)
    for compare in (kernel_distance, relative_change):
        assert torch.equal(compare(first.numpy(), second.numpy()), compare(first, second))
        assert torch.equal(compare(first.numpy(), second), compare(first, second))
    for align in (alignment, centered_alignment):
        assert torch.equal(align(first.numpy(), y.numpy()), align(first, y))
    assert torch.equal(effective_rank(np.asarray(first)), effective_rank(first))


def test_a_column_of_targets_may_be_a_vector() -> None:
    kernel, y = torch.eye(4) + 1, torch.tensor([1.0, -1.0, 1.0, 1.0])
    assert torch.equal(alignment(kernel, y), alignment(kernel, y[:, None]))


# --- the command line ------------------------------------------------------------------------------------------


def test_a_module_beside_the_user_is_found(tmp_path: Path) -> None:
    """The installed command does not have the current folder on its path; python -c does, so it is taken off."""
    (tmp_path / "mine.py").write_text("from torch import nn\ndef Net(): return nn.Linear(3, 2)\n")
    np.save(tmp_path / "x.npy", np.zeros((4, 3), dtype=np.float32))
    code = "import sys; sys.path.remove(''); sys.argv[0] = 'unlazy'; from unlazy.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "gram", "mine:Net", "x.npy", "--dry-run"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 x 4 symmetric" in done.stdout
