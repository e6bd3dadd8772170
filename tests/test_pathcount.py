"""Numbers of common active paths of every kind of network, against paths walked one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cases
import pathnets
from unlazy import InputError, Unsupported
from unlazy.kernels import overlap, reference
from unlazy.kernels.gram import plan_gram
from unlazy.kernels.overlap import gate_ties, layer_overlap, neural_path_kernel, overlap_kernel, path_count
from unlazy.kernels.paths import pairs as path_pairs
from unlazy.kernels.paths.trace import RULES
from unlazy.kernels.paths.walks import active_paths
from unlazy.kernels.record import record, short_name


def check(model: nn.Module, x: Tensor, *, output: int = 0, bias_paths: bool = False) -> Tensor:
    """Counted equals walked, all together, across and one by one."""
    slow = reference.walked_overlap(model, x, output=output, bias_paths=bias_paths)
    options: dict[str, Any] = {"output": output, "bias_paths": bias_paths}
    assert torch.equal(overlap_kernel(model, x, **options), slow)
    assert torch.equal(overlap_kernel(model, x[:1], x[1:], **options), slow[:1, 1:])
    assert torch.equal(path_count(model, x, **options), slow.diagonal())
    torch.testing.assert_close(overlap_kernel(model, x, log=True, **options), slow.log(), rtol=1e-12, atol=1e-12)
    return slow


@pytest.mark.parametrize("bias_paths", [False, True])
@pytest.mark.parametrize("name", pathnets.NETS)
def test_counted_paths_are_the_paths_one_can_walk(name: str, bias_paths: bool) -> None:
    model, x = pathnets.build(name)
    slow = check(model, x, bias_paths=bias_paths)
    assert slow.max() > 1
    assert len(slow.unique()) > 1, "all counts equal: this case would not notice much"


@pytest.mark.parametrize("name", pathnets.NETS)
def test_listed_paths_are_as_many_as_counted(name: str) -> None:
    model, x = pathnets.build(name)
    listed = active_paths(model, x[1:2])
    assert len(listed) == path_count(model, x[1:2], output=0)[0]


@pytest.mark.parametrize("name", ["skip_to_the_output", "grouped_outputs"])
def test_outputs_reached_by_different_paths(name: str) -> None:
    if name == "grouped_outputs":
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv1d(2, 4, 2), nn.ReLU(), nn.Conv1d(4, 2, 3, groups=2), nn.Flatten()).double()
        x = torch.randn(4, 2, 4, dtype=torch.float64)
        with pytest.raises(InputError, match="output=0"):
            overlap_kernel(model, x)
        with pytest.raises(InputError, match="between 0 and 1"):
            overlap_kernel(model, x, output=2)
    else:
        model, x = pathnets.build(name)
    for output in range(2):
        check(model, x, output=output)


LAYERS = st.sampled_from(["conv", "group", "pool", "average", "adaptive", "norm", "skip", "pad", "gate", "join"])


class Random(nn.Module):
    """Layers drawn at random, each with random settings, on one axis of positions."""

    def __init__(self, kinds: list[str], seed: int, channels: int, length: int) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)
        self.kinds, self.layers = kinds, nn.ModuleList()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            x = torch.zeros(2, channels, length)
            for kind in kinds:
                self.layers.append(self.make(kind, x.shape[1]))
                x = self.step(kind, self.layers[-1], x)
            self.last = nn.Linear(x[0].numel(), 1)

    def pick(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=self.draw))]

    def make(self, kind: str, c: int) -> nn.Module:
        if kind in ("conv", "skip", "join"):
            kernel, dilation = (3, 1) if kind != "conv" else (self.pick(1, 2, 3), self.pick(1, 2))
            stride = self.pick(1, 2) if kind == "conv" else 1
            out = c if kind == "skip" else self.pick(1, 2, 3)
            return nn.Conv1d(
                c, out, kernel, stride, padding=1 if kernel == 3 else 0, dilation=dilation, bias=bool(seed_bit(self))
            )
        if kind == "group":
            return nn.Conv1d(c, 2 * c, self.pick(1, 2), groups=c)
        if kind == "pool":
            return nn.MaxPool1d(2, stride=self.pick(1, 2), padding=self.pick(0, 1))
        if kind == "average":
            return nn.AvgPool1d(2, stride=self.pick(1, 2), padding=self.pick(0, 1))
        if kind == "adaptive":
            return self.pick(nn.AdaptiveAvgPool1d(2), nn.AdaptiveMaxPool1d(2), nn.AdaptiveAvgPool1d(1))
        if kind == "norm":
            return nn.BatchNorm1d(c)
        return nn.ZeroPad1d((1, 0)) if kind == "pad" else nn.ReLU()

    def step(self, kind: str, layer: nn.Module, x: Tensor) -> Tensor:
        made = layer(x)
        if kind == "skip":
            made = torch.relu(made) + x
        if kind == "join":
            made = torch.cat([torch.relu(made), x], 1)
        return torch.relu(made) if kind in ("conv", "group") else made

    def forward(self, x: Tensor) -> Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = self.step(kind, layer, x)
        return self.last(x.flatten(1))


def seed_bit(model: Random) -> int:
    return int(model.pick(0, 1))


NETWORKS = (st.lists(LAYERS, min_size=1, max_size=5), st.integers(0, 10_000), st.integers(1, 2), st.integers(3, 5))


@given(*NETWORKS)
@settings(max_examples=12, deadline=None)
def test_random_networks(kinds: list[str], seed: int, channels: int, length: int) -> None:
    check_random(kinds, seed, channels, length)


@pytest.mark.slow
@given(*NETWORKS)
@settings(max_examples=150, deadline=None)
def test_many_random_networks(kinds: list[str], seed: int, channels: int, length: int) -> None:
    check_random(kinds, seed, channels, length)


def check_random(kinds: list[str], seed: int, channels: int, length: int) -> None:
    try:
        model = Random(kinds, seed, channels, length).double().eval()
    except (RuntimeError, ValueError):
        assume(False)  # an image too small for its layers
    x = torch.randn(3, channels, length, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    assume({"conv", "group", "pool", "skip", "gate", "join"} & set(kinds))
    assume(path_count(model, x, bias_paths=True).max() < 2000)  # to be walked in a moment
    for bias_paths in (False, True):
        check(model, x, bias_paths=bias_paths)


# --- properties ----------------------------------------------------------------------------------------------


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
    kernel = overlap._kernel(model, x, log=False, bias_paths=False, output=None, dtype=torch.float64)
    assert kernel.program.numbers == 36
    model = nn.Sequential(nn.Conv2d(1, 9, 3), nn.ReLU(), pathnets.Block(9, 9), nn.Flatten(), nn.Linear(9 * 36, 3))
    kernel = overlap._kernel(model, x, log=False, bias_paths=False, output=None, dtype=torch.float64)
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
    kernel = overlap._kernel(model, x, log=False, bias_paths=False, output=None, dtype=torch.float64)
    plans = (plan_gram(kernel, 9, None, memory) for memory in range(200_000, 0, -500))
    tight = next(plan for plan in plans if not plan.keep)
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


# --- beyond float64 ------------------------------------------------------------------------------------------


def deep(kind: str, depth: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 90), nn.Linear(90, 1)
            self.middle = nn.ModuleList(nn.Linear(90, 90, bias=False) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            for layer in self.middle:
                new = torch.relu(layer(x) * 6**0.5)
                x = x + 0.1 * new if kind == "residual" else new
            return self.last(x)

    return Deep().double(), torch.randn(3, 4, dtype=torch.float64)


def whole_logarithms(model: nn.Module, x: Tensor, kind: str, biases: tuple[bool, bool] = (False, False)) -> Tensor:
    """Counts of any length, unit by unit, in Python's whole numbers. ``biases``: of the first and of the last layer."""
    gates = [gate.open.tolist() for gate in record(model, x)]
    logarithms = torch.empty(len(x), len(x), dtype=torch.float64)
    for i in range(len(x)):
        for j in range(len(x)):
            first, *later = [[a and b for a, b in zip(gate[i], gate[j], strict=True)] for gate in gates]
            paths = [(1 + biases[0]) * unit_open for unit_open in first]
            for layer in later:
                total = sum(paths)
                new = [total * unit_open for unit_open in layer]
                paths = [a + b for a, b in zip(paths, new, strict=True)] if kind == "residual" else new
            total = sum(paths) + biases[1]
            shift = max(0, total.bit_length() - 60)
            logarithms[i, j] = math.log(total >> shift) + shift * math.log(2) if total else -math.inf
    return logarithms


@pytest.mark.parametrize("kind", ["chain", "residual"])
def test_logarithms_survive_two_hundred_layers(kind: str) -> None:
    model, x = deep(kind, 200)
    slow = whole_logarithms(model, x, kind)
    assert slow.max() > math.log(torch.finfo(torch.float64).max)
    logs = overlap_kernel(model, x, log=True)
    torch.testing.assert_close(logs, slow, rtol=0, atol=2e-12 * float(slow.max()))
    torch.testing.assert_close(path_count(model, x, log=True), slow.diagonal(), rtol=0, atol=2e-12 * float(slow.max()))
    with pytest.raises(InputError, match="log=True"):
        overlap_kernel(model, x)
    with_biases = overlap_kernel(model, x, log=True, bias_paths=True)
    wanted = whole_logarithms(model, x, kind, (True, True))
    torch.testing.assert_close(with_biases, wanted, rtol=0, atol=2e-12 * float(slow.max()))


def test_small_counts_stay_whole_where_large_ones_are_possible() -> None:
    """So deep that numbers are carried with powers of two, yet with one open unit a layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(2, 40), nn.ReLU()]
    for _ in range(200):
        layers += [nn.Linear(40, 40), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(40, 1)).double()
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight.data.zero_()
            layer.bias.data[: layer.out_features] = -1.0
            layer.bias.data[:1] = 1.0
    model[0].bias.data[:3] = 1.0
    x = torch.randn(3, 2, dtype=torch.float64)
    assert torch.equal(overlap_kernel(model, x), torch.full((3, 3), 3.0, dtype=torch.float64))
    assert torch.equal(overlap_kernel(model, x, log=True), torch.full((3, 3), math.log(3.0), dtype=torch.float64))


def test_paths_may_begin_anew_where_a_deep_net_was_closed() -> None:
    """Far more than float64 holds arrives at a layer that is closed; what begins at biases after it is counted exactly."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.closing = nn.Linear(2, 200), nn.Linear(200, 200), nn.Linear(200, 200)
            self.one, self.last = nn.Linear(200, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            for _ in range(280):
                x = torch.relu(self.again(x))
            return self.last(torch.relu(self.one(torch.relu(self.closing(x)))))

    model = Deep().double()
    for parameter in model.parameters():
        parameter.data.fill_(1.0 if parameter.ndim == 1 else 0.0)
    x = torch.randn(2, 2, dtype=torch.float64)
    assert overlap_kernel(model, x, log=True, bias_paths=True).min() > 2000 * math.log(2)
    model.closing.bias.data.fill_(-1.0)
    model.one.bias.data[1] = -1.0
    assert torch.equal(overlap_kernel(model, x), torch.zeros(2, 2, dtype=torch.float64))
    assert torch.equal(overlap_kernel(model, x, bias_paths=True), torch.full((2, 2), 2.0, dtype=torch.float64))


def test_no_common_path_has_no_logarithm() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    kernel = overlap_kernel(model, torch.tensor([[1.0], [-1.0]]), log=True)
    assert torch.equal(kernel, torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]], dtype=torch.float64))


def test_single_precision_results_do_not_overflow_unseen() -> None:
    model, x = deep("chain", 30)
    assert overlap_kernel(model, x).max() > torch.finfo(torch.float32).max
    with pytest.raises(InputError, match="log=True"):
        overlap_kernel(model, x, dtype=torch.float32)


# --- our own networks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias_paths", [False, True])
@pytest.mark.parametrize("name", cases.SPECS)
def test_the_value_branch_followed_is_the_product_over_gates(name: str, bias_paths: bool) -> None:
    """The way of networks with positions, taken by dense ones: given gates are found where units are multiplied by them."""
    net, x = cases.net(name), cases.points(name)
    graph = overlap._trace_gated(net, x[:2]).graph
    kernel = overlap._foreign(net, x, graph, log=False, dtype=torch.float64, bias_paths=bias_paths)
    assert torch.equal(overlap._gram(kernel, x), overlap_kernel(net, x, bias_paths=bias_paths))


@pytest.mark.parametrize("name", ["relu", "dlgn", "pwc-no-bias", "linear"])
@pytest.mark.parametrize("bias_paths", [False, True])
def test_paths_of_our_networks_can_be_listed(name: str, bias_paths: bool) -> None:
    net, x = cases.net(name), cases.points(name)
    found = [set(active_paths(net, x[i : i + 1], bias_paths=bias_paths)) for i in range(len(x))]
    slow = torch.tensor([[float(len(a & b)) for b in found] for a in found], dtype=torch.float64)
    assert torch.equal(overlap_kernel(net, x, bias_paths=bias_paths), slow)
    assert torch.equal(path_count(net, x, bias_paths=bias_paths), slow.diagonal())
    logs = overlap_kernel(net, x, bias_paths=bias_paths, log=True)
    torch.testing.assert_close(logs, slow.log(), rtol=1e-14, atol=1e-14)


def test_listed_paths_name_their_units() -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    model[2].weight.data, model[2].bias.data = torch.eye(2), torch.tensor([-10.0, 0.5])
    assert active_paths(model, torch.tensor([[2.0]])) == [(("0", (0,)), ("2", (1,)), ("4", (0,)))]
    with pytest.raises(InputError, match="one input at a time"):
        active_paths(model, torch.zeros(2, 1))


def test_too_many_paths_are_not_listed() -> None:
    net, x = cases.net("linear"), cases.points("linear")
    with pytest.raises(InputError, match="path_count"):
        active_paths(net, x[:1], limit=26)
    model, x = pathnets.build("residual")
    with pytest.raises(InputError, match="path_count"):
        active_paths(model, x[:1], limit=100)


# --- neural path kernel --------------------------------------------------------------------------------------


def unbiased(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose1d):
            module.bias = None
    return model


@pytest.mark.parametrize(
    "name", ["dense", "conv1d", "conv2d", "grouped", "residual_from_the_input", "concatenated", "padded"]
)
def test_the_neural_path_kernel_sums_over_input_nodes(name: str) -> None:
    model, x = pathnets.build(name)
    model = unbiased(model)
    slow = reference.walked_path_kernel(model, x)
    torch.testing.assert_close(neural_path_kernel(model, x), slow, rtol=1e-12, atol=1e-12)
    assert slow.abs().max() > 0
    if name == "dense":
        torch.testing.assert_close(slow, (x @ x.T) * overlap_kernel(model, x), rtol=1e-12, atol=1e-12)


def test_no_neural_path_kernel_where_inputs_are_not_inputs() -> None:
    with pytest.raises(Unsupported, match=r"^0: .*bias"):
        neural_path_kernel(*pathnets.build("dense"))
    pooled = nn.Sequential(nn.AvgPool1d(2), nn.Conv1d(1, 2, 2, bias=False), nn.ReLU(), nn.Flatten())
    with pytest.raises(Unsupported, match="changed before the first weights"):
        neural_path_kernel(pooled, torch.randn(2, 1, 6))


@pytest.mark.parametrize("space", [torch, F, Tensor])
def test_a_function_is_known_under_each_of_its_names(space: Any) -> None:
    """Torch has many doors to one function, and its own idea of what that is called."""
    found = 0
    for name, rule in RULES.items():
        function = getattr(space, name, None)
        if callable(function):
            assert RULES.get(short_name(function)) is rule, name
            found += 1
    assert found > 10


# --- what is refused -----------------------------------------------------------------------------------------


class Made(nn.Module):
    """A small network with anything in the middle."""

    def __init__(self, middle: Any) -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(4, 4), middle, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(torch.relu(self.a(x))))


def overwritten(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :2] = h[:, :2]
    return out


def overwritten_view(h: Tensor) -> Tensor:
    out = torch.zeros(len(h), 4)
    out[:, :2].copy_(h[:, :2])
    return out


def changed_behind(h: Tensor) -> Tensor:
    h[:, :2].mul_(2.0)
    return h


REFUSED = {
    "layer_norm": nn.LayerNorm(4),
    "softmax": lambda h: h.softmax(-1),
    "squared": lambda h: h * h,
    "divided": lambda h: 1 / (h + 1),
    "normalised": lambda h: h / h.sum(1, keepdim=True),
    "attention": lambda h: h @ (h.mT @ h),
    "sorted": lambda h: h.sort(1)[0],
    "largest": lambda h: torch.maximum(h, h.flip(1)),
    "mean of samples": lambda h: h - h.mean(0, keepdim=True),
    "mask": lambda h: torch.where(h > 1, h, 0.0),
    "chosen samples": lambda h: h[torch.arange(len(h))],
    "samples moved": lambda h: h.reshape(-1, 2, len(h)).mean(1).reshape(len(h), -1).repeat(1, 2),
    "value": lambda h: h * float(h.max()),
    "branch": lambda h: h if bool(h.sum() > 0) else -h,
    "overwritten": overwritten,
    "overwritten view": overwritten_view,
    "changed behind": changed_behind,
    "batch statistics": nn.BatchNorm1d(4, track_running_stats=False),
    "gelu": nn.GELU(),
    "whole product": lambda h: torch.einsum("ni,ij->nj", h, torch.eye(4)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    model = Made(REFUSED[name])
    with pytest.raises(Unsupported) as caught:
        overlap_kernel(model, torch.randn(4, 4))
    assert caught.value.module in ("middle", "the model", "b")
    assert caught.value.remedy


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_compiled_code_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.ReLU(), torch.zeros(1, 2)), nn.ReLU())
    with pytest.raises(Unsupported, match=r"^1: compiled"):
        overlap_kernel(model, torch.zeros(1, 2))


def test_ways_that_depend_on_the_input_are_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.calls = nn.Linear(2, 3), nn.Linear(3, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = torch.relu(self.a(x))
            return h.sum(1) if self.calls < 2 else torch.relu(self.b(h)).sum(1)

    with pytest.raises(Unsupported, match="depend on the input"):
        overlap_kernel(Fickle(), torch.randn(3, 2))


def test_what_does_not_reach_the_output_does_not_matter() -> None:
    class Monitored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            self.entropy = h.softmax(1).log().sum()
            torch.relu(h - 1)
            return self.b(h)

    torch.manual_seed(0)
    model, x = Monitored(), torch.randn(4, 2)
    (first, _) = record(model, x)
    assert torch.equal(overlap_kernel(model, x), (first.open.double() @ first.open.double().T))


def test_counting_changes_nothing() -> None:
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 1)
    )
    x = torch.randn(5, 3)
    before, state = x.clone(), {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    overlap_kernel(model, x)
    path_count(model, x)
    active_paths(model, x[:1])
    assert torch.equal(x, before)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# --- ties ----------------------------------------------------------------------------------------------------


def test_ties_are_counted_per_layer_and_input() -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 2, 2, bias=False), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 3), nn.ReLU6()
    )
    model[0].weight.data = torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]])
    model[4].weight.data.zero_()
    model[4].bias.data = torch.tensor([6.0, 0.0, 1.0])
    x = torch.tensor([[[0.0, 0.0, 0.0, 0.0, 0.0]], [[1.0, 2.0, 1.0, 5.0, 0.0]]])
    ties = gate_ties(model, x)
    assert {name: values.tolist() for name, values in ties.items()} == {"1#1": [8, 0], "2#1": [0, 1], "5#1": [2, 2]}


def test_ties_of_pools_of_every_geometry() -> None:
    """Cells whose maximum is reached twice, found by looking at each window."""
    x = torch.randint(0, 3, (3, 2, 7, 6), generator=torch.Generator().manual_seed(0)).float()
    for kernel, stride, padding, dilation, ceil in (
        ((2, 3), (1, 2), (1, 1), (2, 1), True),
        ((3, 3), (2, 2), (0, 0), (1, 1), False),
    ):
        pool = nn.MaxPool2d(kernel, stride, padding, dilation, ceil_mode=ceil)
        out = pool(x)
        wanted = [0, 0, 0]
        for n in range(3):
            for c in range(2):
                for i in range(out.shape[2]):
                    for j in range(out.shape[3]):
                        seen = [
                            float(x[n, c, p, q])
                            for p in range(
                                i * stride[0] - padding[0],
                                i * stride[0] - padding[0] + kernel[0] * dilation[0],
                                dilation[0],
                            )
                            for q in range(
                                j * stride[1] - padding[1],
                                j * stride[1] - padding[1] + kernel[1] * dilation[1],
                                dilation[1],
                            )
                            if 0 <= p < 7 and 0 <= q < 6
                        ]
                        wanted[n] += max(seen) > 0 and seen.count(max(seen)) > 1
        assert gate_ties(nn.Sequential(pool, nn.ReLU()), x)["0#1"].tolist() == wanted
        assert min(wanted) > 0


def test_a_tie_is_closed_for_relu() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1))
    assert path_count(model, torch.zeros(2, 2)).tolist() == [0.0, 0.0]
    assert gate_ties(model, torch.zeros(2, 2))["1#1"].tolist() == [3, 3]


def test_ties_of_our_networks() -> None:
    net = cases.net("pwc-no-bias")
    ties = gate_ties(net, torch.zeros(2, 2, dtype=torch.float64))
    assert {name: values.tolist() for name, values in ties.items()} == {f"layer {i}": [3, 3] for i in (1, 2, 3)}
    assert path_count(net, torch.zeros(2, 2, dtype=torch.float64)).tolist() == [27.0, 27.0]  # eta >= 0 is open
    assert gate_ties(cases.net("linear"), cases.points("linear")) == {}
