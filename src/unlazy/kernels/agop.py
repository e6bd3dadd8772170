"""The average gradient outer product (AGOP): which directions of an input the function uses; and the neural feature ansatz.

AGOP(f) = (1/n) sum over samples and outputs of grad f_o(x_i) grad f_o(x_i)^T. The ansatz (Radhakrishnan et al.) says that
in a trained network the W^T W of every layer is proportional to the AGOP of f as a function of what that layer reads.

The gradient at what a layer reads is W^T g, with g the gradient at what it returns: only the way *through this layer*
counts, so that a skip around it, or a second layer that reads the same, has no part in it (in a chain there is none).
Hence the layer's AGOP is W^T M W with M the mean of g g^T, and no gradient by inputs is ever formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unlazy.kernels.capture import (
    Inputs,
    Tap,
    call_model,
    check_numbers,
    evaluation_mode,
    forward_with_taps,
    require_gradients,
    sample_count,
    take_samples,
    tap_gradients,
)
from unlazy.kernels.compare import kernel_distance
from unlazy.kernels.gated import Gated, refuse_stack, with_exact_gradients
from unlazy.models.dense_layers import Affine
from unlazy.models.gates import HardGate
from unlazy.runtime import Unsupported, require

AT_ONCE = 256  # samples in one backward pass
CHECKED_SAMPLES = 2
DENSE = (nn.Linear, Affine)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def agop(model: nn.Module, x: Tensor) -> Float[Tensor, "features features"]:
    """(1/n) sum_i J_i^T J_i, J_i the Jacobian of all outputs by the flattened input x_i; evaluation mode.

    Hard gates are locally constant, so a hard-gated network has the gradient of its experts alone; with constant experts that
    is identically 0, and the call raises.

    >>> line = nn.Linear(2, 1, bias=False)
    >>> line.weight.data = torch.tensor([[1.0, 2.0]])
    >>> agop(line, torch.zeros(5, 2)).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    check_numbers(model, x)
    require(x.is_floating_point(), f"gradients by inputs need real numbers, got {x.dtype}; see layer_agops.")
    refuse_stack(model)
    if isinstance(model, Gated) and model.settings.experts == "constant" and isinstance(model.settings.gate, HardGate):
        raise Unsupported(
            type(model).__name__,
            "hard gates and constant experts make it piecewise constant: its gradient by the input is identically 0",
            "Give it soft gates or linear experts; layer_agops reads the later value layers.",
        )
    own = with_exact_gradients(model)

    def moments(part: Inputs) -> dict[str, Tensor]:
        entered = part.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            out = call_model(own, entered.clone())  # a copy: the model may work in place
        (found,) = tap_gradients(out, [Tap(own, entered, entered, entered._version)], _every_output(out), batched=False)
        rows = torch.cat([gradient.flatten(1) for gradient in found]) if found else entered.new_zeros(1, x[0].numel())
        return {"": rows.T @ rows}

    return _mean_over_samples(own, x, moments)[""]


def layer_agops(model: nn.Module, x: Inputs) -> dict[str, Tensor]:
    """By name, the AGOP of the outputs as a function of what each dense or convolutional layer reads, ``[in, in]``.

    A convolution reads *patches*: ``in`` = channels times taps in the order of its flattened weight (all groups side by side),
    summed over positions, as is every position of a sequence and every call of a reused layer. Left out are layers that the
    outputs do not depend on: unused ones, the gating layers of hard gates (locally constant), the first layer of constant
    experts (it reads no input).
    """
    refuse_stack(model)
    own = with_exact_gradients(model)
    moments = _output_moments(own, x)
    return {
        name: (matrix := _matrix(module)).T @ moments[name] @ matrix
        for name, module in own.named_modules()
        if name in moments
    }


@dataclass(frozen=True)
class Ansatz:
    """How well W^T W matches the AGOP of one layer: Pearson correlation of the entries, and cosine (uncentred)."""

    correlation: float
    cosine: float


def feature_ansatz(model: nn.Module, x: Inputs, *, power: float = 1.0) -> dict[str, Ansatz]:
    """The neural feature ansatz layer by layer: W^T W against AGOP^power (1, or 1/2 in some versions of the ansatz).

    A last layer agrees exactly at power 1, trained or not: the gradient of W h by h is W. Compare with initialisation. A layer
    whose AGOP is 0, or that reads a single number, has no correlation: NaN.
    """
    require(power > 0, f"power must be positive, got {power!r}.")
    modules = dict(with_exact_gradients(model).named_modules())
    result = {}
    for name, product in layer_agops(model, x).items():
        matrix = _matrix(modules[name])
        own, other = (matrix.T @ matrix).double(), _matrix_power(product.double(), power)
        correlation = 1 - kernel_distance(own - own.mean(), other - other.mean())
        result[name] = Ansatz(float(correlation), float(1 - kernel_distance(own, other)))
    return result


# --- their parts ---------------------------------------------------------------------------------------------


def _output_moments(model: nn.Module, x: Inputs) -> dict[str, Tensor]:
    """(1/n) sum of g g^T at what each layer returns, ``[out, out]``, for the layers that the outputs depend on."""
    check_numbers(model, x)
    names = {module: name for name, module in model.named_modules() if _is_readable(module)}
    if not names:
        raise Unsupported(
            type(model).__name__, "it has no dense or convolutional layer", "agop gives the gradient by its inputs."
        )

    def moments(part: Inputs) -> dict[str, Tensor]:
        out, taps = forward_with_taps(model, part, set(names))
        sums: dict[str, Tensor] = {}
        for tap, found in zip(taps, tap_gradients(out, taps, _every_output(out), batched=False), strict=True):
            for gradient in found or []:
                rows = _units_last(tap.module, gradient)
                name = names[tap.module]
                sums[name] = sums.get(name, 0) + rows.T @ rows
        return sums

    return _mean_over_samples(model, x, moments)


def _mean_over_samples(
    model: nn.Module, x: Inputs, moments: Callable[[Inputs], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Mean over samples of sums over samples, made many samples at a time where that is the same as one by one.

    It is not where samples meet, or where all of them share a layer's call (a layer applied to a learned token).
    """
    n = sample_count(x)
    with evaluation_mode(model), require_gradients([], list(model.parameters())):
        few = min(n, CHECKED_SAMPLES)
        together, apart = moments(take_samples(x, slice(0, few))), _sum_over_samples(moments, x, few, 1)
        size = AT_ONCE if _agree(together, apart) else 1
        return {name: total / n for name, total in _sum_over_samples(moments, x, n, size).items()}


def _sum_over_samples(
    moments: Callable[[Inputs], dict[str, Tensor]], x: Inputs, n: int, size: int
) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for start in range(0, n, size):
        for name, moment in moments(take_samples(x, slice(start, min(n, start + size)))).items():
            totals[name] = totals[name] + moment if name in totals else moment
    return totals


def _agree(together: dict[str, Tensor], apart: dict[str, Tensor]) -> bool:
    if together.keys() != apart.keys():
        return False
    tolerances = {name: 1e4 * torch.finfo(own.dtype).eps * float(own.abs().max()) for name, own in apart.items()}
    return all(torch.allclose(together[name], apart[name], rtol=0, atol=tolerances[name]) for name in apart)


def _every_output(out: Tensor) -> Tensor:
    return torch.eye(out.shape[1], dtype=out.dtype, device=out.device)


def _is_readable(module: nn.Module) -> bool:
    """A dense or convolutional layer whose forward pass is that of its kind."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in (*DENSE, *CONVOLUTIONS))


def _units_last(module: nn.Module, gradient: Tensor) -> Float[Tensor, "rows out"]:
    if isinstance(module, CONVOLUTIONS):
        gradient = gradient.movedim(-1 - len(module.kernel_size), -1)
    return gradient.reshape(-1, gradient.shape[-1])


def _matrix(module: nn.Module) -> Float[Tensor, "out in"]:
    """The layer as a matrix on what it reads; the groups of a convolution read channels of their own."""
    weight: Tensor = module.weight.detach().flatten(1)  # type: ignore[operator]
    groups = module.groups if isinstance(module, CONVOLUTIONS) else 1
    return weight if groups == 1 else torch.block_diag(*weight.chunk(groups))


def _matrix_power(matrix: Float[Tensor, "d d"], power: float) -> Float[Tensor, "d d"]:
    if power == 1:
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).pow(power)) @ vectors.T
