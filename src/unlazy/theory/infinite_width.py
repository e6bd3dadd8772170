"""What random dense networks become as their width grows: closed-form kernels, in float64.

A network of ``depth`` hidden layers of m units reads h_0 = x in R^d and computes, for l = 1 .. L = depth + 1,

    z_l = W_l h_(l-1) + b_l,        h_l = relu(z_l)            (ReLU network)
                                    h_l = 1[eta_l >= 0] z_l    (DLGN: eta_l = V_l eta_(l-1) + a_l, eta_0 = x)

with independent entries of mean 0, Var W_l = weights[l] / fan_in and Var b_l = biases[l]; the output is z_L. As m grows
with d fixed, z_l becomes a Gaussian process of covariance S_l, the same for every unit (its NNGP kernel):

    S_1 = weights[1] <x, x'> / d + biases[1],    S_(l+1) = weights[l+1] E[h_l h_l'] + biases[l+1].

The tangent kernel becomes deterministic. In the *NTK parametrisation* (W = sqrt(weights / fan_in) w, b = sqrt(biases) c;
w, c of variance 1; gradients by w and c) its limit is T_L with

    T_1 = S_1,    T_(l+1) = S_(l+1) + weights[l+1] E[dh_l/dz_l dh_l'/dz_l'] T_l.

In the *standard* parametrisation (gradients by W and b themselves, as PyTorch and our networks have them) the kernel grows
like m: divided by m it tends to the sum over l >= 2 of E[h_(l-1) h_(l-1)'] prod over k >= l of weights[k+1] E[dh_k dh_k'].
The first matrix and all biases add only a share of order 1/m to it, so they are absent from that limit.

The deviation at finite m: the mean is off by order 1/m, a single draw by order 1/sqrt(m). Only second moments of the entries
count, with one exception: units of the *first* layer sum over d fixed inputs, so they are Gaussian, as relu and gates are
assumed to find them, only if W_1 and b_1 are Gaussian or d is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unlazy.models.spec import NetSpec
from unlazy.runtime import InputError, Unsupported, require

Points = Float[Tensor, "n d"]
OtherPoints = Float[Tensor, "m e"]  # as many columns as the points: checked, so that the error says so
PARAMETRISATIONS = ("ntk", "standard")


@dataclass(frozen=True)
class Variances:
    """How far the starting numbers of each layer spread: Var W_l = weights[l] / fan_in, Var b_l = biases[l]."""

    weights: tuple[float, ...]
    biases: tuple[float, ...]

    def __post_init__(self) -> None:
        require(len(self.weights) >= 1, "variances need at least one layer.")
        require(
            len(self.weights) == len(self.biases),
            f"need a bias variance per layer: {len(self.weights)} weights, {len(self.biases)} biases.",
        )
        for value in (*self.weights, *self.biases):
            require(math.isfinite(value) and value >= 0, f"a variance is a number of at least 0, got {value!r}.")

    @classmethod
    def equal(cls, layers: int, weights: float = 2.0, biases: float = 0.0) -> Variances:
        """The same in every layer; ``weights=2`` keeps the size of the signal in a ReLU network."""
        return cls((weights,) * layers, (biases,) * layers)


def starting_variances(spec: NetSpec, branch: str = "value") -> Variances:
    """How a network's own starting numbers spread as its width grows, in its ``"value"`` branch (with readout) or its ``"gate"``.

    With s = ``init.scale``: ``he`` draws Gaussian weights of variance 2 s^2 / fan_in (1 s^2 / fan_in in the gating branch
    and in linear networks) and biases 0: every limit here is exact. ``torch`` draws weights *and* biases from
    U(-s/sqrt(fan_in), s/sqrt(fan_in)), of variance s^2 / (3 fan_in): weights s^2/3 in every layer; biases s^2/(3 d) in the
    first and s^2/(3 m) -> 0 in all later ones. Its first layer is uniform, so ReLU kernels and the first layer of linear gates
    are approximate, the better the more inputs; the values of a DLGN, which pass through no nonlinearity, are exact.
    """
    require(branch in ("gate", "value"), f"a branch is 'gate' or 'value', got {branch!r}.")
    if spec.parametrisation == "mup":
        raise Unsupported("GatedNet", "under mup the output vanishes as the width grows", "Take 'standard' or 'ntk'.")
    if branch == "gate" and not spec.has_half_space_gates:
        raise Unsupported("GatedNet", f"{spec.gating_words} has no linear gating branch", "Take branch='value'.")
    layers = spec.depth if branch == "gate" else spec.depth + 1
    square = float(spec.init.scale) ** 2
    biased = spec.gate_bias if branch == "gate" else spec.value_bias
    if spec.init.scheme == "he":
        gain = 1.0 if branch == "gate" or spec.gating == "open" else 2.0
        return Variances.equal(layers, gain * square)
    single = branch == "value" and spec.experts == "constant" and spec.constant_input == "one"
    first = square / (3 * (1 if single else spec.inputs)) if biased else 0.0
    return Variances((square / 3,) * layers, (first, *(0.0,) * (layers - 1)))


# --- ReLU networks -------------------------------------------------------------------------------------------


def nngp_kernel(x: Points, x2: OtherPoints | None = None, *, variances: Variances) -> Float[Tensor, "n m"]:
    """S_L(x, x'): covariance of each output of a random ReLU network of unbounded width, depth = layers - 1.

    The limit of E[f(x) f(x')] for ``ReLUNet`` with ``variances=starting_variances(spec)``, in either parametrisation.

    >>> opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    >>> nngp_kernel(opposite, variances=Variances.equal(2)).tolist()  # relu(z) relu(-z) = 0
    [[1.0, 0.0], [0.0, 1.0]]
    """
    moments, _ = _relu_layers(x, x2, variances)
    return variances.weights[-1] * moments[-1] + variances.biases[-1]


def ntk_limit(
    x: Points, x2: OtherPoints | None = None, *, variances: Variances, parametrisation: str = "ntk"
) -> Float[Tensor, "n m"]:
    """The tangent kernel of one output of a ReLU network of unbounded width; two outputs share nothing of it.

    ``"ntk"``: the limit for gradients by parameters of variance 1. ``"standard"``: the limit of
    ``tangent_kernel(net, x) / width`` for ``net = ReLUNet(...)`` with ``variances=starting_variances(spec)``, and likewise for
    PyTorch's own layers of equal width.
    """
    return _tangent(*_relu_layers(x, x2, variances), variances, parametrisation)


def _relu_layers(x: Points, x2: OtherPoints | None, variances: Variances) -> tuple[list[Tensor], list[Tensor]]:
    """E[h_l h_l'] for l = 0 .. depth and E[relu'(z_l) relu'(z_l')] for l = 1 .. depth."""
    pairs = _inputs(x, x2)
    moments, slopes = [pairs.across], []
    for weight, bias in zip(variances.weights[:-1], variances.biases[:-1], strict=True):
        pairs = pairs.affine(weight, bias)
        cosine, length = pairs.cosine(), pairs.length()
        share = _both_positive(cosine)
        across = length * ((1 - cosine.square()).sqrt() / (2 * math.pi) + share * cosine)
        slopes.append(share.masked_fill(length == 0, 0.0))  # relu is closed at 0
        pairs = _Pairs(across, pairs.left / 2, pairs.right / 2)
        moments.append(across)
    return moments, slopes


# --- deep linearly gated networks ----------------------------------------------------------------------------


def overlap_limit(
    x: Points, x2: OtherPoints | None = None, *, depth: int, gates: Variances | None = None
) -> Float[Tensor, "n m"]:
    """The limit of Lambda(x, x') / width^depth for a DLGN with random gates: the share of paths open on both inputs.

    Gating layers are linear: each sees the angle of the inputs again, so without biases it is ((pi - angle) / (2 pi))^depth.
    ``gates=starting_variances(spec, "gate")`` lets biases turn the angle layer by layer. Exact for Gaussian gates (``he``);
    under ``torch`` the first of the ``depth`` factors is approximate. Always with hard gates, whatever the network's rule.

    >>> float(overlap_limit(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, -1.0]]), depth=2))  # a quarter in each layer
    0.0625
    """
    return torch.stack(_open_on_both(x, x2, depth, gates)).prod(0)


def value_kernel_limit(
    x: Points,
    x2: OtherPoints | None = None,
    *,
    values: Variances,
    gates: Variances | None = None,
    experts: str = "linear",
    parametrisation: str = "ntk",
) -> Float[Tensor, "n m"]:
    """The tangent kernel by the value weights of a hard-gated DLGN of unbounded width, for one output.

    Values and gates are independent, so this is the neural path law with the limiting overlap: without biases
    L prod(weights) (<x, x'> / d) ((pi - angle) / (2 pi))^depth in the NTK parametrisation; constant experts have 1 in place of
    <x, x'> / d. ``"standard"``: the limit of ``tangent_kernel(net, x, parameters="value") / width``.
    """
    require(experts in ("linear", "constant"), f"experts must be 'linear' or 'constant', got {experts!r}.")
    slopes = _open_on_both(x, x2, len(values.weights) - 1, gates)
    start = _inputs(x, x2).across
    moments = [torch.ones_like(start) if experts == "constant" else start]
    for weight, bias, slope in zip(values.weights[:-1], values.biases[:-1], slopes, strict=True):
        moments.append(slope * (weight * moments[-1] + bias))
    return _tangent(moments, slopes, values, parametrisation)


def _open_on_both(x: Points, x2: OtherPoints | None, depth: int, gates: Variances | None) -> list[Tensor]:
    """Per layer the probability that a random gate is open on both inputs; a gate is open at 0."""
    require(depth >= 1, f"a gated network has at least one hidden layer, got depth {depth!r}.")
    gates = Variances.equal(depth, 1.0) if gates is None else gates
    require(len(gates.weights) == depth, f"need the variances of {depth} gating layers, got {len(gates.weights)}.")
    pairs, shares = _inputs(x, x2), []
    for weight, bias in zip(gates.weights, gates.biases, strict=True):
        pairs = pairs.affine(weight, bias)
        zeros = (pairs.left == 0).double()[:, None] + (pairs.right == 0).double()
        shares.append(torch.where(zeros > 0, zeros / 2, _both_positive(pairs.cosine())))
    return shares


# --- their common parts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Pairs:
    """Covariance of one unit across two sets of points, and its variance on each of them."""

    across: Float[Tensor, "n m"]
    left: Float[Tensor, "n"]
    right: Float[Tensor, "m"]

    def affine(self, weight: float, bias: float) -> _Pairs:
        """After a layer of random weights and biases."""
        return _Pairs(*(weight * part + bias for part in (self.across, self.left, self.right)))

    def length(self) -> Float[Tensor, "n m"]:
        """Product of the two standard deviations."""
        return (self.left[:, None] * self.right).sqrt()

    def cosine(self) -> Float[Tensor, "n m"]:
        """Their correlation, within [-1, 1]; 0 where one of them is constant. Rounding blurs angles below about 1e-8."""
        length = self.length()
        return (self.across / length).masked_fill(length == 0, 0.0).clamp(-1, 1)


def _both_positive(cosine: Tensor) -> Tensor:
    """Probability that two Gaussians of this correlation are both positive: (pi - angle) / (2 pi)."""
    return (math.pi - cosine.arccos()) / (2 * math.pi)


def _inputs(x: Points, x2: OtherPoints | None) -> _Pairs:
    """<x, x'> / d; exact on the diagonal of one set."""
    other = x if x2 is None else x2
    require(x.ndim == other.ndim == 2, "points are rows of a matrix [n, d]; flatten images first.")
    require(x.shape[1] == other.shape[1], f"both sets need as many columns: {x.shape[1]} and {other.shape[1]}.")
    x, other = x.double(), other.double()
    across, left, right = x @ other.T, x.square().sum(1), other.square().sum(1)
    if x2 is None:
        across.fill_diagonal_(0).diagonal().copy_(left)
    return _Pairs(across / x.shape[1], left / x.shape[1], right / x.shape[1])


def _tangent(
    moments: list[Tensor], slopes: list[Tensor], variances: Variances, parametrisation: str
) -> Float[Tensor, "n m"]:
    """Adds up the layers' shares of the tangent kernel, first to last."""
    if parametrisation not in PARAMETRISATIONS:
        raise InputError(f"parametrisation must be one of {', '.join(PARAMETRISATIONS)}; got {parametrisation!r}.")
    ntk = parametrisation == "ntk"
    require(
        ntk or len(slopes) > 0, "without a hidden layer there is no width to divide by; take parametrisation='ntk'."
    )
    weights, biases = variances.weights, variances.biases
    total = weights[0] * moments[0] + biases[0] if ntk else torch.zeros_like(moments[0])
    for weight, bias, moment, slope in zip(weights[1:], biases[1:], moments[1:], slopes, strict=True):
        share = weight * moment + bias if ntk else moment
        total = share + weight * slope * total
    return total
