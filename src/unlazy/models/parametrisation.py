"""How a network's numbers scale with its width m: the standard, the NTK and the maximal-update parametrisation.

A layer computes z = W h + b with *effective* numbers W = (after before) w and b = after c; an optimiser moves w and c.
Only products matter to the function, but the split decides how fast each layer learns (Yang and Hu 2021 call the exponents
of m in multiplier, start and learning rate a, b, c).

    name       layer     W / w          b / c      W starts as          gradient descent   Adam
    standard   all       1              1          drawn                1                  1
    ntk        all       1/sqrt(fan_in) 1          drawn                1                  m^(-axes/2)
    mup        first     sqrt(m)        sqrt(m)    drawn                1                  m^(-axes/2)
               hidden    1              sqrt(m)    drawn                1                  m^(-axes/2)
               readout   1/sqrt(m)      1          drawn / sqrt(m)      1                  m^(-axes/2)

Where widths differ (all growing in proportion), a hidden layer that reads m and makes m' units has sqrt(m'/m) in place of 1 and
sqrt(m') for its bias, and m^(-axes/2) is one over the root of the product of the widths that a tensor's axes have. The width of
a convolution is its number of channels; filter sizes do not grow. Scale and shift of a batch-norm are biases here: b / c, and
m^(-1/2) under Adam.

"Drawn": what ``Init`` says, the same numbers for a seed in every parametrisation, so that a standard and an NTK network of
one seed start as the same function. The last columns multiply the learning rate; ``axes`` counts the axes of a tensor that
grow with the width (hidden weights 2, first and readout weights and hidden biases 1, the readout's bias 0): gradients have
a norm that does not depend on m, and Adam makes each of the m^axes entries of order 1.

In the limit of infinite width an NTK network is lazy: its tangent kernel does not change (Jacot, Gabriel and Hongler 2018).
Under ``mup`` every layer moves its outputs by order 1 whatever the width (Yang and Hu 2021, Table 1: a = (-1/2, 0, .., 0, 1/2),
b = 1/2, c = 0); with one hidden layer that is the mean-field parametrisation, so ``mean-field`` is another name for it.
Under ``standard`` a learning rate that works at one width is too large at a greater one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unlazy.runtime import require

PARAMETRISATIONS = ("standard", "ntk", "mup")
ALSO_CALLED = {"mean-field": "mup"}
OPTIMISERS = ("sgd", "adam")
ROLES = ("first", "hidden", "readout", "norm")
AXES: Mapping[tuple[str, str], int] = {  # of a tensor, that grow with the width
    ("first", "weight"): 1,
    ("first", "bias"): 1,
    ("hidden", "weight"): 2,
    ("hidden", "bias"): 1,
    ("readout", "weight"): 1,
    ("readout", "bias"): 0,
}


@dataclass(frozen=True)
class Scaling:
    """The multipliers of a layer: W = before after w, b = after c; W starts as ``start`` times the drawn numbers."""

    before: float = 1.0
    after: float = 1.0
    start: float = 1.0

    @property
    def is_one(self) -> bool:
        """Whether all multipliers are 1, as in the standard parametrisation."""
        return self == Scaling()


def canonical_parametrisation(name: str) -> str:
    """The name of a parametrisation in stored specs: ``mean-field`` becomes ``mup``; unknown names raise ``InputError``."""
    name = ALSO_CALLED.get(name, name)
    require(name in PARAMETRISATIONS, f"parametrisation must be one of {', '.join(PARAMETRISATIONS)}; got {name!r}.")
    return name


def scaling_of(
    parametrisation: str, role: str, fan_in: int, widths: tuple[int, int], *, constant: bool = False
) -> Scaling:
    """The multipliers of a layer by its ``role``: ``first``, ``hidden``, ``readout`` or ``norm``.

    ``widths``: how many units (channels) the layer reads and makes. ``constant``: the layer reads a constant instead of the
    state before it, so ``after`` holds all its scaling.
    """
    require(role in ROLES, f"a layer is {', '.join(ROLES[:-1])} or {ROLES[-1]}, got {role!r}.")
    if parametrisation == "standard":
        return Scaling()
    if parametrisation == "ntk":
        small = 1.0 if role == "norm" else 1 / math.sqrt(fan_in)
        return Scaling(after=small) if constant else Scaling(before=small)
    reads, makes = (math.sqrt(width) for width in widths)
    if role == "readout":
        return Scaling(before=1 / reads, start=1 / reads)
    return Scaling(before=1 / reads, after=makes) if role == "hidden" else Scaling(after=makes)


def growing_axes(name: str) -> int:
    """How many axes of a parameter of a dense network grow with its width, by the parameter's name."""
    branch, number, *_ = name.split(".")
    role = "readout" if branch == "readout" else ("first" if number == "0" else "hidden")
    return AXES[role, name.rpartition(".")[2]]


def rate_multiplier(parametrisation: str, optimiser: str, axes: Sequence[int]) -> float:
    """What multiplies the learning rate of a parameter; ``axes``: the sizes of those axes that grow with the width."""
    require(optimiser in OPTIMISERS, f"optimiser must be one of {', '.join(OPTIMISERS)}; got {optimiser!r}.")
    if parametrisation == "standard" or optimiser == "sgd":
        return 1.0
    return float(math.prod(axes) ** -0.5)
