"""Wrong values in every argument of every public name: the answer is right, or an error in our words names the argument."""

from __future__ import annotations

import importlib
import math
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import unlazy as ul
from public_calls import WRITTEN_BY_US, Call, public_calls, wrong_values
from unlazy.checks import explained

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that compute with the wrong values

SHARE = 10  # every tenth call in make test; all of them in make soak and make test-all
FOREIGN = 0.01  # of the calls may end in an error that is not ours
SECONDS = 10
WORK = {"steps", "seeds", "depth", "members", "rounds", "relevant"}  # asking for much of these is no mistake


def public_names() -> set[str]:
    topics = {f"{topic}.{name}" for topic in ul._TOPICS for name in importlib.import_module(f"unlazy.{topic}").__all__}
    return set(ul.__all__) | topics


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    with torch.random.fork_rng():
        return public_calls(tmp_path_factory.mktemp("calls"))


def test_every_public_name_is_tried(calls: list[Call]) -> None:
    assert {call.name for call in calls} | WRITTEN_BY_US == public_names()


def test_valid_calls_are_answered(calls: list[Call]) -> None:
    for call in calls:
        name = next(iter(call.arguments))
        assert is_finite(call.with_wrong(name, call.arguments[name])), call.name


class TooLong(BaseException):
    """The call did not come back."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_finite(answer: Any) -> bool:
    if isinstance(answer, Tensor) and not answer.is_meta and answer.layout is torch.strided:
        return not (answer.is_floating_point() and bool(answer.isnan().any()))
    if isinstance(answer, np.ndarray) and answer.dtype.kind == "f":
        return not bool(np.isnan(answer).any())
    if isinstance(answer, list | tuple):
        return all(map(is_finite, answer))
    if isinstance(answer, dict):
        return all(map(is_finite, answer.values()))
    return not (isinstance(answer, float) and math.isnan(answer))


def outcome(call: Call, argument: str, value: Any) -> str:
    """What came of a call: a value, NaN in silence, our error, scikit-learn's error on its own ground, or another one."""
    try:
        with limited(SECONDS):
            return "value" if is_finite(call.with_wrong(argument, value)) else "silent"
    except ul.UnlazyError as error:
        return "ours" if str(error) else "foreign"
    except TooLong:
        return "slow"
    except Exception as error:
        trace, last = error.__traceback__, ""
        while trace is not None:
            last, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
        return "scikit-learn" if isinstance(error, ValueError | TypeError) and "sklearn" in last else "foreign"


def tried(calls: list[Call], every: int) -> Iterator[tuple[Call, str, str, Any]]:
    number = 0
    for call in calls:
        for argument, good in call.arguments.items():
            for kind, value in wrong_values(good):
                number += 1
                if number % every == 0 and not (kind == "huge" and argument in WORK):
                    yield call, argument, kind, value


def check_outcomes(calls: list[Call], every: int) -> Counter[str]:
    torch.manual_seed(0)
    found = {
        (call.name, argument, kind): outcome(call, argument, value)
        for call, argument, kind, value in tried(calls, every)
    }
    count = Counter(found.values())
    assert [case for case, end in found.items() if end in ("silent", "slow")] == []
    assert count["foreign"] <= FOREIGN * len(found), [case for case, end in found.items() if end == "foreign"]
    return count


def test_wrong_values_are_named(calls: list[Call]) -> None:
    assert check_outcomes(calls, SHARE)["ours"] > 0


@pytest.mark.slow
def test_all_wrong_values_are_named(calls: list[Call]) -> None:
    assert check_outcomes(calls, 1)["ours"] > 0


# --- what the messages say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("half_spaces", {"net": nn.Linear(3, 2)}, "half_spaces: net must be a network of gates and experts"),
        ("theory.path_sum", {"x": np.ones((2, 3))}, r"x must be a tensor \[n, d\] of real numbers; got a numpy array"),
        (
            "adaptive.laplace_kernel",
            {"z": torch.ones(2, 4)},
            r"z must be a tensor \[m, d\].*got a float32 tensor \[2, 4\]",
        ),
        ("emergence.query_bound", {"patterns": "many"}, "patterns must be a whole number; got str 'many'"),
        ("Circle", {"n": 20.5}, "n must be a whole number; got float 20.5"),
        ("models.to_standard_parametrisation", {"net": None}, "net must be .*got NoneType"),
        ("adaptive.AdaptiveTangents", {"ridge": "little"}, "ridge must be a real number; got str 'little'"),
        ("tangent_kernel", {"x": torch.ones(2, 9)}, "does not take samples of shape"),
    ],
)
def test_the_message_names_argument_kind_and_value(
    calls: list[Call], name: str, wrong: dict[str, Any], told: str
) -> None:
    call = next(call for call in calls if call.name == name)
    ((argument, value),) = wrong.items()
    with pytest.raises(ul.InputError, match=told):
        call.with_wrong(argument, value)


def test_a_fault_of_the_function_stays_what_it_is() -> None:
    def divide(x: float, y: float) -> float:
        return x / y

    with pytest.raises(ZeroDivisionError):
        explained(divide)(1.0, 0.0)
    with pytest.raises(TypeError, match="missing"):
        explained(divide)(1.0)


def test_samples_are_tried_without_a_trace() -> None:
    """Looking for the cause calls the model in evaluation mode, and leaves every part as it was."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def use(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    with pytest.raises(ul.InputError, match="does not take samples of shape"):
        explained(use)(net, torch.ones(2, 5))
    assert [module.training for module in net] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_file_of_a_public_name_is_its_own(tmp_path: Path) -> None:
    import pickle

    assert pickle.loads(pickle.dumps(ul.tangent_kernel)) is ul.tangent_kernel
    assert ul.tangent_kernel.__module__ == "unlazy"
    assert ul.kernels.spectrum(torch.eye(2)).tolist() == [1.0, 1.0]
