"""Eigenpairs, ridge regression, traces and determinants of operators, against dense algebra in float64."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unlazy import InputError, alignment, effective_rank, tangent_kernel, tangent_operator
from unlazy.kernels.gram import TooLittleMemory
from unlazy.kernels.krylov import Nystrom, Samples, conjugate_gradients, lanczos, largest_eigenpairs
from unlazy.kernels.regression import kernel_regression

MEMORY = "2GB"


def net(width: int, outputs: int = 3, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    ).double()


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(model: nn.Module, x: Tensor, outputs: Any = "trace", x2: Tensor | None = None) -> Tensor:
    found = tangent_kernel(model, x, x2, outputs=outputs)
    return found if found.ndim == 2 else found.transpose(1, 2).flatten(2).flatten(0, 1)


def positive(n: int, decay: float = 1.0, seed: int = 0) -> Tensor:
    """A matrix with eigenvalues 1 / i^decay in random directions."""
    turn = torch.linalg.qr(drawn(n, n, seed=seed)).Q
    return turn @ torch.diag(torch.arange(1, n + 1, dtype=torch.float64) ** -decay) @ turn.T


# --- linear systems ------------------------------------------------------------------------------------------


def test_conjugate_gradients_solve_every_column_and_tell_the_true_residual() -> None:
    A = positive(60) + 0.01 * torch.eye(60).double()
    b = drawn(60, 4)
    b[:, 2] = 0  # solved by 0
    b[:, 3] *= 1e-30
    found = conjugate_gradients(lambda v: A @ v, b, tolerance=1e-12)
    torch.testing.assert_close(found.columns, torch.linalg.solve(A, b), rtol=1e-9, atol=0)
    truth = (b - A @ found.columns).norm(dim=0) / b.norm(dim=0).clamp(min=1e-300)
    torch.testing.assert_close(found.residual, truth, rtol=1e-3, atol=1e-15)
    assert float(found.residual.max()) <= 1e-12
    few = conjugate_gradients(lambda v: A @ v, b, tolerance=1e-12, steps=3)
    assert few.iterations == 3
    assert float(few.residual.max()) > 1e-6


def test_a_noisy_product_ends_at_its_rounding_and_says_so() -> None:
    A = positive(200, 3.0) + 1e-6 * torch.eye(200).double()
    found = conjugate_gradients(lambda v: (A.float() @ v.float()).double(), drawn(200, 1), tolerance=1e-12, steps=4000)
    assert 1e-9 < float(found.residual) < 0.5  # told as it is, not as the recurrence believes
    assert found.iterations < 4000


def test_a_sketch_of_the_whole_matrix_solves_at_once() -> None:
    A, shift = positive(40), 1e-3
    b = drawn(40, 2)
    exact = Nystrom(lambda v: A @ v, 40, 40, shift)
    found = conjugate_gradients(lambda v: A @ v + shift * v, b, precondition=exact, tolerance=1e-10)
    assert found.iterations <= 2


def test_a_sketch_takes_far_fewer_iterations() -> None:
    A, shift = positive(400, 2.0), 1e-6
    b = drawn(400, 1)

    def multiply(v: Tensor) -> Tensor:
        return A @ v

    plain, sketched = (
        conjugate_gradients(lambda v: A @ v + shift * v, b, precondition=preconditioner, tolerance=1e-8)
        for preconditioner in (None, Nystrom(multiply, 400, 80, shift))
    )
    assert 4 * sketched.iterations < plain.iterations
    torch.testing.assert_close(sketched.columns, plain.columns, rtol=1e-5, atol=1e-5 * float(plain.columns.abs().max()))


# --- ridge regression ----------------------------------------------------------------------------------------

SPACES = [  # width, samples, outputs, the space in which the system is solved
    (5, 300, 1, "parameters"),
    (5, 200, "full", "parameters"),
    (4, 400, "trace", "parameters"),
    (40, 120, "sum", "samples"),
    (40, 60, "full", "samples"),
    (10, 100, "trace", "samples"),
]


@pytest.mark.parametrize(("width", "n", "outputs", "space"), SPACES)
@pytest.mark.parametrize("rank", [None, 30])
def test_ridge_predictions_are_those_of_the_dense_kernel(
    width: int, n: int, outputs: Any, space: str, rank: int | None
) -> None:
    model, x, new = net(width), drawn(n, 6), drawn(17, 6, seed=5)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2], x[:, 3].abs()], dim=1)
    K = tangent_operator(model, x, outputs=outputs, memory=MEMORY)
    fit = K.fit_ridge(y, 1e-3, tolerance=1e-12, rank=rank)
    columns = y.reshape(-1, 1) if outputs == "full" else y
    wanted = kernel_regression(dense(model, x, outputs), columns, dense(model, new, outputs, x), ridge=1e-3)
    found = fit.predict(new)
    assert found.shape == (17, 3)
    assert float((found - wanted.reshape(17, 3)).abs().max()) < 1e-8 * float(wanted.abs().max())
    assert fit.converged
    assert fit.space == space
    assert ("Cholesky" in fit.preconditioner) == (space == "parameters" and rank is None)
    assert f"after {fit.iterations} iterations" in str(fit)


def test_a_factor_of_all_samples_solves_at_once_and_one_of_few_nearly_so() -> None:
    model, x = net(5), drawn(4000, 6)
    K = tangent_operator(model, x, outputs=0, memory=MEMORY)
    y = x[:, 0].sin()
    plain = conjugate_gradients(
        lambda v: K.apply_transposed(K.apply(v)) + K._shift(1e-4) * v, K.apply_transposed(y[:, None]), tolerance=1e-8
    )
    sub = K.fit_ridge(y, 1e-4, tolerance=1e-8)
    assert sub.preconditioner == f"Cholesky of J^T J on {4 * K.features} samples"
    assert 2 * sub.iterations < plain.iterations
    assert K.fit_ridge(y, 1e-4, tolerance=1e-8).iterations == sub.iterations  # seeded
    small = tangent_operator(model, x[:60], outputs=0, memory=MEMORY)
    assert small.fit_ridge(y[:60], 1e-4, tolerance=1e-8).predict(x[:5]).shape == (5,)


@pytest.mark.parametrize("outputs", [0, "full", "trace"])
def test_the_factor_is_that_of_the_matrix_scaled_to_all_samples(outputs: Any) -> None:
    few, many = (tangent_operator(net(3), drawn(n, 6), outputs=outputs, memory=MEMORY) for n in (50, 400))
    for K, taken in ((few, 50), (many, 200)):
        K.at_once = 16  # several parts
        identity = torch.eye(K.features).double()
        wanted = K.apply_transposed(K.apply(identity)) + 0.5 * identity
        factor = K._subsampled_factor(taken, 0.5, 0)
        found = factor @ factor.T
        if K is few:  # all samples with all outputs
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max()))
        assert float(found.trace() / wanted.trace()) == pytest.approx(1, abs=0.2)
        assert float((found - wanted).norm() / wanted.norm()) < 0.3


def test_a_fit_that_does_not_converge_warns() -> None:
    K = tangent_operator(net(40), drawn(100, 6), outputs=0, memory=MEMORY)
    with pytest.warns(UserWarning, match="reached a relative residual of .* not 1e-14, in 2 iterations"):
        fit = K.fit_ridge(drawn(100), 1e-9, tolerance=1e-14, steps=2, rank=3)
    assert not fit.converged
    assert "NOT converged" in str(fit)


def test_float32_predictions_are_near_those_of_float64() -> None:
    model, x, new = net(8).float(), drawn(500, 6), drawn(20, 6, seed=3)
    y = x[:, :2].sin()
    fit = tangent_operator(model, x, outputs="sum", memory=MEMORY).fit_ridge(y, 1e-2)
    model = model.double()
    wanted = kernel_regression(dense(model, x, "sum"), y, dense(model, new, "sum", x), ridge=1e-2)
    assert float((fit.predict(new) - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


# --- eigenpairs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 60])
@pytest.mark.parametrize("decay", [0.3, 2.0])
def test_eigenpairs_are_those_of_the_matrix(count: int, decay: float) -> None:
    A = positive(60, decay)
    found = largest_eigenpairs(lambda v: A @ v, 60, count, tolerance=1e-10)
    wanted = torch.arange(1, count + 1, dtype=torch.float64) ** -decay
    torch.testing.assert_close(found.values, wanted, rtol=1e-12, atol=1e-13)
    truth = (A @ found.vectors - found.vectors * found.values).norm(dim=0)
    torch.testing.assert_close(found.residuals, truth, rtol=1e-3, atol=1e-13)
    assert found.converged
    torch.testing.assert_close(found.vectors.T @ found.vectors, torch.eye(count).double(), rtol=0, atol=1e-12)


def test_equal_and_missing_eigenvalues_are_found() -> None:
    values = torch.tensor([3.0] * 9 + [1.0] * 3 + [0.0] * 88, dtype=torch.float64)
    turn = torch.linalg.qr(drawn(100, 100)).Q
    A = turn @ torch.diag(values) @ turn.T
    found = largest_eigenpairs(lambda v: A @ v, 100, 14)
    torch.testing.assert_close(found.values, values[:14], rtol=1e-12, atol=1e-12)
    assert found.converged


def test_restarts_hold_few_vectors() -> None:
    A, widest = positive(500, 0.5), 0

    def multiply(v: Tensor) -> Tensor:
        nonlocal widest
        widest = max(widest, v.shape[1])
        return A @ v

    found = largest_eigenpairs(multiply, 500, 10, block=4, basis=24)
    torch.testing.assert_close(found.values, torch.arange(1, 11).double() ** -0.5, rtol=1e-10, atol=0)
    assert widest == 4
    assert found.converged
    assert found.products > 100  # several restarts


@pytest.mark.parametrize(("width", "n", "outputs"), [(5, 300, 1), (30, 90, "trace"), (4, 100, "full")])
def test_eigenpairs_of_the_tangent_kernel(width: int, n: int, outputs: Any) -> None:
    model, x = net(width), drawn(n, 6)
    wanted = torch.linalg.eigvalsh(dense(model, x, outputs)).flip(0)[:12]
    K = tangent_operator(model, x, outputs=outputs, memory=MEMORY)
    found = K.top_eigenpairs(12)
    torch.testing.assert_close(found.values, wanted, rtol=1e-8, atol=0)
    truth = (dense(model, x, outputs) @ found.vectors - found.vectors * found.values).norm(dim=0)
    assert bool((truth <= found.residuals + 1e-10 * wanted[0]).all())
    assert bool((found.residuals <= 1e-6 * wanted[0]).all())
    rough = K.top_eigenpairs(5, tolerance=1e-1)
    truth = (dense(model, x, outputs) @ rough.vectors - rough.vectors * rough.values).norm(dim=0)
    torch.testing.assert_close(rough.residuals, truth, rtol=1e-6, atol=1e-12 * float(wanted[0]))
    assert float(truth.max()) > 1e-8 * float(wanted[0])
    with pytest.raises(InputError, match="rank"):
        K.top_eigenpairs(10**6)


@pytest.mark.slow
def test_top_eigenvalues_of_two_thousand_points() -> None:
    model, x = net(64), drawn(2000, 6)
    wanted, vectors = torch.linalg.eigh(dense(model, x, 0))
    wanted, vectors = wanted.flip(0), vectors.flip(1)
    found = tangent_operator(model, x, outputs=0, memory=MEMORY).top_eigenpairs(50)
    torch.testing.assert_close(found.values, wanted[:50], rtol=1e-8, atol=0)
    gaps = wanted[:49] - wanted[1:50]
    apart = int((gaps > 1e-4 * wanted[0]).nonzero()[-1]) + 1  # the space up to a clear gap
    cosines = torch.linalg.svdvals(vectors[:, :apart].T @ found.vectors[:, :apart])
    assert float(1 - cosines.min()) < 1e-8


# --- estimates -----------------------------------------------------------------------------------------------


def test_lanczos_of_all_steps_gives_exact_functions() -> None:
    A, start = positive(12), drawn(12, 3)
    alpha, beta = lanczos(lambda v: A @ v, start, 12)
    values, vectors = torch.linalg.eigh(
        torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
    )
    found = (vectors[:, 0].square() * values.log()).sum(-1) * start.square().sum(0)
    own, turn = torch.linalg.eigh(A)
    wanted = ((turn.T @ start).square() * own.log()[:, None]).sum(0)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    rest = drawn(1, 30)
    value, error = Samples(torch.tensor([2.0]).double(), rest).combine(lambda sums: sums[0])
    assert value == pytest.approx(2 + float(rest.mean()))
    assert error == pytest.approx(float(rest.std()) / 30**0.5)


def exact_numbers(kernel: Tensor, y: Tensor, ridge: float) -> dict[str, float]:
    n = len(kernel)
    shifted = kernel + ridge * kernel.trace() / n * torch.eye(n).double()
    return {
        "trace": float(kernel.trace()),
        "alignment": float(alignment(kernel, y)),
        "log_determinant": float(torch.linalg.slogdet(shifted)[1]),
        **{kind: float(effective_rank(kernel, kind)) for kind in ("entropy", "participation", "stable")},
    }


SEEDS = 24


@pytest.mark.parametrize(("width", "n", "outputs"), [(4, 150, "full"), (24, 120, "trace")])
@pytest.mark.parametrize("what", ["trace", "alignment", "log_determinant", "entropy", "participation", "stable"])
def test_estimates_are_within_their_errors(width: int, n: int, outputs: Any, what: str) -> None:
    model, x = net(width), drawn(n, 6)
    kernel = dense(model, x, outputs)
    y = drawn(len(kernel), 2)
    wanted = exact_numbers(kernel, y, 1e-3)[what]
    K = tangent_operator(model, x, outputs=outputs, memory=MEMORY)
    product = K._side_product()
    size = K._side_size()
    table = product(torch.eye(size).double())  # the same numbers, quicker for many seeds
    K._side_product = lambda: lambda v: table @ v  # type: ignore[method-assign]
    misses, spread = [], []
    for seed in range(SEEDS):
        few: dict[str, Any] = {"rank": 4, "probes": 16, "seed": seed}
        if what == "alignment":
            found = K.alignment(y, **few)
        elif what == "trace":
            found = K.trace(**few)
        elif what == "log_determinant":
            found = K.log_determinant(1e-3, **few)
        else:
            found = K.effective_rank(what, **few)
        assert found.probes == 16
        assert found.truncation <= max(found.error, 1e-9 * abs(wanted))
        misses.append((found.value - wanted) / found.error)
        spread.append(found.value)
    # 16 probes give a t distribution: |t| > 3 in about one of a hundred draws
    assert sum(abs(miss) > 3 for miss in misses) <= 2
    assert abs(sum(misses)) / SEEDS**0.5 < 3.5  # no bias
    assert math.sqrt(sum(miss**2 for miss in misses) / SEEDS) > 0.5  # and no idle error bars


def test_a_sketch_makes_the_error_small() -> None:
    kernel = dense(net(24), drawn(120, 6))
    K = tangent_operator(net(24), drawn(120, 6), memory=MEMORY)
    with_sketch, without = K.trace(rank=16), K.trace(rank=0)
    assert 5 * with_sketch.error < without.error
    assert with_sketch.value == pytest.approx(float(kernel.trace()), rel=1e-2)
    assert "32 probes" in str(with_sketch)
    assert float(with_sketch) == with_sketch.value


def test_questions_that_exceed_the_memory_or_make_no_sense_are_refused() -> None:
    K = tangent_operator(net(6), drawn(200, 6), outputs=0, memory=MEMORY)
    with pytest.raises(InputError, match="ridge must be positive"):
        K.fit_ridge(drawn(200), 0.0)
    with pytest.raises(InputError, match="targets must be"):
        K.fit_ridge(drawn(100))
    with pytest.raises(InputError, match="one-hot"):
        K.alignment(torch.arange(200))
    with pytest.raises(InputError, match="kind must be"):
        K.effective_rank("numerical")
    with pytest.raises(InputError, match="at least 2 probes"):
        K.trace(probes=1)
    tight = tangent_operator(net(6), drawn(200, 6), outputs=0, memory="80kB")
    with pytest.raises(TooLittleMemory, match="Give more memory, or ask for less"):
        tight.top_eigenpairs(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        K.fit_ridge(drawn(200))
