"""The linearised network: f_lin(x; theta) = f(x; theta_0) + J(x) (theta - theta_0), of any module.

``linearise(model)`` gives a module whose one trainable parameter is the displacement theta - theta_0, all chosen parameters
in one vector. Train it with any loss and optimiser, or, for squared errors, take the end of training (``solve``) and every
moment of gradient flow (``flow``) in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.kernels.capture import Inputs, check_inputs
from unlazy.kernels.gated import Gated, refuse_stack
from unlazy.kernels.gram import parse_memory
from unlazy.kernels.jacobian import ModuleJacobian
from unlazy.kernels.selection import select_parameters
from unlazy.kernels.tangent import tangent_kernel
from unlazy.models.gates import HardGate
from unlazy.runtime import InputError, Unsupported, require

ROUTES = ("auto", "kernel", "parameters")


def linearise(model: nn.Module, *, parameters: str | Sequence[str] = "trainable") -> Linearised:
    """The model's first-order expansion in the chosen parameters (as in ``tangent_kernel``) around their present values.

    The model is copied and left alone; the copy stays in evaluation mode, its buffers fixed. With hard gates only value
    parameters count: the gates are locally constant.

    >>> x, y, new = (torch.tensor(rows, dtype=torch.float64) for rows in ([[1.0], [2.0]], [[3.0], [6.0]], [[5.0]]))
    >>> fitted = linearise(nn.Linear(1, 1, bias=False).double()).solve(x, y)
    >>> fitted(new).detach().round(decimals=6).tolist()
    [[15.0]]
    """
    refuse_stack(model)
    names = list(select_parameters(model, parameters))
    if isinstance(model, Gated) and isinstance(model.settings.gate, HardGate):
        gates = {name for name, _ in model.branch("gate")}
        names = [name for name in names if name not in gates]
        if not names:
            raise Unsupported(
                type(model).__name__, "hard gates are locally constant in their parameters", "Take parameters='value'."
            )
        model = model.hard()
    return Linearised(ModuleJacobian(model, names))


class Linearised(nn.Module):
    """Made by :func:`linearise`. ``displacement``: theta - theta_0, the parameters ``names`` flattened one after another."""

    displacement: nn.Parameter

    def __init__(self, jacobian: ModuleJacobian) -> None:
        super().__init__()
        self.jacobian = jacobian
        self.displacement = nn.Parameter(torch.zeros_like(jacobian.vector()))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are linearised, in the order of ``displacement``."""
        return self.jacobian.names

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """f(x; theta_0) + J(x) displacement; called as the model is called."""
        start, moved = self.jacobian.jvp(self.displacement, (arguments, options))
        return start + moved

    def theta(self) -> dict[str, Tensor]:
        """theta_0 + displacement, by name."""
        return self.jacobian.split(self.jacobian.vector() + self.displacement.detach())

    def solve(
        self, x: Inputs, y: Tensor, *, ridge: float = 0.0, route: str = "auto", memory: str | int | None = None
    ) -> Linearised:
        """Move to the least-squares solution on all outputs: the end of gradient descent from theta_0, of least norm.

        ``ridge`` penalises the squared displacement, relative to the mean diagonal of the tangent kernel. ``route``: through
        the ``"kernel"`` of all outputs (n o wide) or through J^T J of the ``"parameters"`` (p wide); by default the smaller one.
        Computed in float64, whatever the model's precision; singular values of J below about 1e-7 of the largest count as 0.
        """
        require(ridge >= 0, f"ridge must be at least 0, got {ridge!r}.")
        if ridge == 0:
            moved = self.flow(x, y, route=route, memory=memory).displacement([math.inf])[0]
        else:
            problem = _Problem.build(self.jacobian.in_float64(), _in_float64(x), y.double(), route, memory, matrices=2)
            problem.matrix.diagonal().add_(ridge * problem.matrix.trace() / problem.residual.numel())
            factor, failed = torch.linalg.cholesky_ex(problem.matrix)
            require(
                not int(failed), f"the tangents are dependent to rounding; give a larger ridge than {ridge!r}, or 0."
            )
            moved = problem.displacement(torch.cholesky_solve(problem.right[:, None], factor)[:, 0])
        with torch.no_grad():
            self.displacement.copy_(moved)
        return self

    def flow(self, x: Inputs, y: Tensor, *, route: str = "auto", memory: str | int | None = None) -> GradientFlow:
        """Gradient flow on the mean squared error from theta_0, at all times at once (arguments as in ``solve``)."""
        problem = _Problem.build(self.jacobian.in_float64(), _in_float64(x), y.double(), route, memory, matrices=3)
        return GradientFlow(problem, *torch.linalg.eigh(problem.matrix))


@dataclass(frozen=True)
class _Problem:
    """Least squares on the tangents, from the side that is smaller.

    ``kernel``: the matrix is J J^T and its right side the residual y - f_0; else J^T J and J^T times the residual.
    """

    jacobian: ModuleJacobian
    x: Inputs
    residual: Float[Tensor, "n o"]
    kernel: bool
    matrix: Float[Tensor, "k k"]
    right: Float[Tensor, "k"]

    @classmethod
    def build(
        cls, jacobian: ModuleJacobian, x: Inputs, y: Tensor, route: str, memory: str | int | None, matrices: int
    ) -> _Problem:
        """Form the smaller matrix; raises if the solver, which holds ``matrices`` of that size, would exceed the memory."""
        require(route in ROUTES, f"route must be one of {', '.join(ROUTES)}; got {route!r}.")
        check_inputs(x)
        start = jacobian.outputs(x)
        y = y[:, None] if y.ndim == 1 else y
        require(y.shape == start.shape, f"targets must be {tuple(start.shape)} as the outputs, got {tuple(y.shape)}.")
        residual, size = y - start, len(jacobian.vector())
        kernel = route == "kernel" or (route == "auto" and residual.numel() <= size)
        side = residual.numel() if kernel else size
        needed, budget = 8 * matrices * side**2, parse_memory(memory)
        if needed > budget:
            raise InputError(
                f"{matrices} matrices of {side} x {side} take {needed / 1e9:.2g} GB of {budget / 1e9:.2g} GB allowed; "
                "give more memory, or train the linearised module with an optimiser."
            )
        if kernel:
            return cls(jacobian, x, residual, True, output_kernel(jacobian, x, memory=memory), residual.flatten())
        matrix, right = residual.new_zeros(side, side), residual.new_zeros(side)
        for part, rows in jacobian.rows(x):
            flat = rows.flatten(0, 1)  # [c o, p]
            matrix.addmm_(flat.T, flat)
            right.addmv_(flat.T, residual[part].flatten())
        return cls(jacobian, x, residual, False, matrix, right)

    def displacement(self, solution: Float[Tensor, "k"]) -> Float[Tensor, "p"]:
        """The displacement that a solution stands for: J^T solution on the kernel's side, else the solution itself."""
        return self.jacobian.vjp(solution.view_as(self.residual), self.x) if self.kernel else solution

    def output_change(self, solutions: Float[Tensor, "t k"], x: Inputs) -> Float[Tensor, "t a"]:
        """J(x) times the displacements of all solutions at once: how they change the outputs."""
        if self.kernel:
            return solutions @ output_kernel(self.jacobian, x, self.x).T
        return torch.cat([solutions @ rows.flatten(0, 1).T for _, rows in self.jacobian.rows(x)], dim=1)


@dataclass(frozen=True)
class GradientFlow:
    """d theta / dt = - gradient of the mean squared error (over samples and outputs) of the linearised model, from theta_0.

    With K = J J^T: f_t = f_0 + (I - exp(-2 K t / (n o))) (y - f_0) on the training points. k steps of gradient descent with
    a small rate arrive at t = k rate; t = inf is the least-squares solution of least norm. All in float64.
    """

    problem: _Problem
    values: Float[Tensor, "k"]
    vectors: Float[Tensor, "k k"]

    def displacement(self, times: Sequence[float] | Tensor) -> Float[Tensor, "t p"]:
        """theta_t - theta_0 at each time."""
        return torch.stack([self.problem.displacement(solution) for solution in self._solutions(times)])

    def outputs(self, times: Sequence[float] | Tensor, x: Inputs | None = None) -> Float[Tensor, "t m o"]:
        """f_lin(x; theta_t) at each time, on the training points or on new ones."""
        x = self.problem.x if x is None else _in_float64(x)
        start = self.problem.jacobian.outputs(x)
        return start + self.problem.output_change(self._solutions(times), x).unflatten(1, start.shape)

    def _solutions(self, times: Sequence[float] | Tensor) -> Float[Tensor, "t k"]:
        """V (1 - exp(-rate values t)) / values V^T right; directions with eigenvalue 0 stay at 0."""
        t = torch.as_tensor(times, dtype=torch.float64, device=self.values.device)
        require(t.ndim == 1 and bool((t >= 0).all()), f"times must be a list of numbers of at least 0, got {times!r}.")
        felt = self.values > len(self.values) * torch.finfo(self.values.dtype).eps * self.values[-1]
        values, vectors = self.values[felt], self.vectors[:, felt]
        rate = 2 / self.problem.residual.numel()
        gains = -torch.expm1(-rate * t[:, None] * values) / values
        return (gains * (vectors.T @ self.problem.right)) @ vectors.T


def output_kernel(
    jacobian: ModuleJacobian, x: Inputs, x2: Inputs | None = None, memory: str | int | None = None
) -> Float[Tensor, "a b"]:
    """J(x) J(x2)^T over all pairs of samples and outputs, ``[n o, m o]``."""
    full = tangent_kernel(jacobian.base, x, x2, outputs="full", parameters=list(jacobian.names), memory=memory)
    return full.transpose(1, 2).flatten(2).flatten(0, 1)


def _in_float64(x: Inputs) -> Inputs:
    """Inputs with their real numbers as float64."""
    return pytree.tree_map(
        lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, x
    )
