"""What users are told when a public function cannot use an argument.

Nothing is tried beforehand, so a valid call costs nothing: after an error that is not ours, or an answer with NaN, the arguments
are compared with the annotations of the function, and the first that does not fit is named in an ``InputError``. If all fit, the
error is a fault of the function, and is raised as it is.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import numbers
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unlazy.runtime import InputError, UnlazyError, Unsupported

F = TypeVar("F", bound=Callable[..., Any])
LARGEST = 2**63 - 1
MARK = "__explained__"  # of functions that are wrapped already
SHOWN = 60  # characters of a value in a message
KINDS = {"bool": "true or false", "int": "a whole number", "float": "a real number", "str": "text", "Path": "a path"}


def explain_errors(names: dict[str, Any]) -> None:
    """Put :func:`explained` around what the ``__all__`` of a topic names."""
    for name in names["__all__"]:
        names[name] = explained(names[name])


def explained(public: Any) -> Any:
    """A function with errors that name the argument to blame; of a class its constructor and its public methods.

    Modules are left alone, since they are called inside trainings. Of estimators only the settings are explained: scikit-learn
    has its own words for tables.
    """
    if inspect.isfunction(public):
        return _explained_function(public)
    if inspect.isclass(public) and not issubclass(public, nn.Module | Exception):
        for kind in public.__mro__:
            for name, method in list(vars(kind).items()) if kind.__module__.startswith("unlazy") else ():
                if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                    setattr(kind, name, _explained_function(method))
    return public


def _explained_function(function: F) -> F:
    if hasattr(function, MARK):
        return function

    is_method = "self" in inspect.signature(function).parameters

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            answer = function(*args, **options)
        except (UnlazyError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise_if_wrong(function, args, options, error)
            raise
        if isinstance(answer, types.GeneratorType):
            return _explained_steps(function, args, options, answer)
        if not is_method and not all(map(_is_finite, answer if isinstance(answer, tuple) else (answer,))):
            raise_if_wrong(function, args, options)  # a method may return NaN that was stored
        return answer

    setattr(call, MARK, True)
    return call  # type: ignore[return-value]


def _explained_steps(function: Callable[..., Any], args: Any, options: Any, steps: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from steps
    except UnlazyError:
        raise
    except Exception as error:
        raise_if_wrong(function, args, options, error)
        raise


def raise_if_wrong(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    error: Exception | None = None,
) -> None:
    """Raise an ``InputError`` if an argument does not fit its annotation, or contains NaN.

    Of a method, also if the object was made with settings that do not fit.
    """
    try:
        bound = inspect.signature(function).bind(*args, **options)
    except TypeError:
        return  # an argument too many, or one that is missing: Python's own words are good
    called, owner = function.__qualname__.removesuffix(".__init__"), bound.arguments.get("self")
    given = [] if hasattr(owner, "get_params") else list(_arguments(bound, annotations_of(function)))
    if owner is not None:
        given += _settings(owner)
    with jaxtyped("context"):  # so that n of one tensor is n of the next
        for name, value, wanted in given:
            problem = find_mismatch(value, wanted) or _find_bad_numbers(value)
            if problem:
                raise InputError(f"{called}: {name} {problem}") from error
    values = {name: value for name, value, _ in given}
    found = None if error is None else _find_unusable_samples(values) or _find_mixed_precision(values)
    if found:
        raise InputError(f"{called}: {found}") from error


def _arguments(bound: inspect.BoundArguments, wanted: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and annotation of every argument given, those of ``*args`` and ``**options`` one by one."""
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, one, wanted.get(name, Any)) for one in value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((key, one, wanted.get(name, Any)) for key, one in value.items())
        elif name != "self":
            yield name, value, wanted.get(name, Any)


def _settings(owner: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and annotation of what an object was made with and keeps under the same name."""
    wanted = annotations_of(type(owner).__init__)
    for name in inspect.signature(type(owner).__init__).parameters:
        if name in vars(owner):
            yield name, vars(owner)[name], wanted.get(name, Any)


# --- annotations ---------------------------------------------------------------------------------------------------


def annotations_of(function: Any) -> dict[str, Any]:
    """The annotations of a function or a class; without those that name what is imported for type checkers only."""
    with suppress(Exception):
        return typing.get_type_hints(function)
    found = {}
    for part in reversed(function.__mro__) if inspect.isclass(function) else (function,):
        place = vars(inspect.getmodule(part))
        for name, text in inspect.get_annotations(part).items():
            with suppress(Exception):
                found[name] = eval(text, place) if isinstance(text, str) else text
    return found


def find_mismatch(value: Any, wanted: Any) -> str | None:
    """What the value must be and what it is, or ``None`` if it fits."""
    if _fits(value, wanted):
        return None
    return f"must be {describe_kind(wanted)}; got {describe_value(value)}."


def _fits(value: Any, wanted: Any) -> bool:
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return True
    if isinstance(wanted, TypeVar):
        choices = wanted.__constraints__ or ((wanted.__bound__,) if wanted.__bound__ else ())
        return not choices or any(_fits(value, one) for one in choices)
    if wanted is None or wanted is types.NoneType:
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is typing.Annotated:
        return _fits(value, inner[0])
    if wanted in _SIMPLE:
        return _SIMPLE[wanted](value)
    if inspect.isclass(wanted) and issubclass(wanted, Tensor | AbstractArray):
        return isinstance(value, wanted) and not (isinstance(value, Tensor) and _odd_tensor(value))
    if origin is collections.abc.Callable or wanted is collections.abc.Callable:
        return callable(value)
    if inspect.isclass(origin):
        return _fits_container(value, origin, inner)
    if getattr(wanted, "_is_protocol", False):
        members = {*inspect.get_annotations(wanted), *vars(wanted)}
        public = [name for name in members if not name.startswith("_")]
        return not inspect.isclass(value) and all(hasattr(value, name) for name in public)
    return not inspect.isclass(wanted) or isinstance(value, wanted)


def _fits_container(value: Any, origin: type, inner: tuple[Any, ...]) -> bool:
    if not isinstance(value, origin) and not (origin is tuple and isinstance(value, list)):
        return False
    if isinstance(value, str | bytes):
        return False
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    if isinstance(value, Mapping):
        return len(inner) != 2 or all(_fits(key, inner[0]) and _fits(part, inner[1]) for key, part in value.items())
    if not isinstance(value, Sequence) or not inner:
        return True
    if origin is tuple and inner[-1] is not ...:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(part, inner[0]) for part in value)


def _is_whole(value: Any) -> bool:
    try:
        return not isinstance(value, bool | Tensor) and abs(operator.index(value)) <= LARGEST
    except TypeError:
        return False


def _is_real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


_SIMPLE: dict[Any, Callable[[Any], bool]] = {
    int: _is_whole,
    float: _is_real,
    str: _is_text,
    bool: lambda value: isinstance(value, bool | np.bool_),
    Path: lambda value: isinstance(value, Path),
}


# --- words ---------------------------------------------------------------------------------------------------------


def describe_kind(wanted: Any) -> str:
    """An annotation in words."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        kinds = list(dict.fromkeys(describe_kind(one) for one in inner))
        return " or ".join(kinds)
    if wanted is None or wanted is types.NoneType:
        return "None"
    if isinstance(wanted, TypeVar):
        return " or ".join(map(describe_kind, wanted.__constraints__ or (wanted.__bound__,)))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if inspect.isclass(wanted) and issubclass(wanted, AbstractArray):
        numbers_of = {"Float": "real numbers", "Float64": "float64 numbers", "Bool": "true and false"}
        held = numbers_of.get(wanted.__name__.split("[")[0], "whole numbers")
        return f"a tensor [{', '.join(wanted.dim_str.split())}] of {held}"
    if wanted is Tensor:
        return "a tensor"
    if wanted is nn.Module:
        return "a torch module (derive a class from torch.nn.Module, with forward(self, x))"
    if getattr(wanted, "__name__", "") == "GatedNet":
        return "a network of gates and experts (DLGN, ReLUNet or build make one; for any module: tangent_kernel, overlap_kernel)"
    if origin is collections.abc.Callable or wanted is collections.abc.Callable:
        return "a function"
    if inspect.isclass(origin) and origin is not np.ndarray:
        return f"a {'mapping' if issubclass(origin, Mapping) else 'sequence'}{_of(inner, mapping=issubclass(origin, Mapping))}"
    name = getattr(origin or wanted, "__name__", str(wanted))
    return KINDS.get(name, "a numpy array" if name == "ndarray" else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def _of(inner: tuple[Any, ...], *, mapping: bool) -> str:
    if not inner or inner[-1] is Any:
        return ""
    return f" to {describe_kind(inner[-1])}" if mapping else f", each {describe_kind(inner[0])}"


def describe_value(value: Any) -> str:
    """A value in words, short."""
    if isinstance(value, Tensor):
        return f"a {_odd_tensor(value)}{_dtype_name(value.dtype)} tensor {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"a numpy array {list(value.shape)} of {value.dtype}"
    if inspect.isclass(value):
        return f"the class {value.__name__}; an object of it is meant, {value.__name__}(...)"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= SHOWN else text[:SHOWN] + '...'}"


def _odd_tensor(value: Tensor) -> str:
    """Why nothing can be computed with the tensor, or an empty text."""
    if value.is_meta:
        return "meta (without numbers) "
    if value.layout is not torch.strided:
        return "sparse "
    return "complex " if value.is_complex() else ""


# --- numbers and samples -------------------------------------------------------------------------------------------


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.is_meta or value.layout is not torch.strided or not (value.is_floating_point() or value.is_complex()):
            return True
        return bool(torch.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)


def _find_bad_numbers(value: Any) -> str | None:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor) and _odd_tensor(value):
        return f"must be plain real numbers; got {describe_value(value)}."
    if isinstance(value, Tensor) and not _is_finite(value):
        return f"has {int((~torch.isfinite(value)).sum())} numbers that are NaN or infinite; clean them first."
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number; got {value}."
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"must be a number of at most 64 bits; got {value:.3g}."
    if isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                return f"has no numbers in {name} yet; pass one batch through it."
            if parameter.is_meta:
                return f"is on the device meta, without numbers ({name})."
            if not _is_finite(parameter.detach()):
                return f"has NaN or infinite numbers in {name}: training has diverged."
    return None


def _find_mixed_precision(given: Mapping[str, Any]) -> str | None:
    kinds = {
        name: str(value.dtype)
        for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    if len(set(kinds.values())) > 1 or "torch.float16" in kinds.values():
        held = " and ".join(f"{name} is {kind.removeprefix('torch.')}" for name, kind in kinds.items())
        return f"{held}; convert them to one precision, float32 or float64."
    return None


def _find_unusable_samples(given: Mapping[str, Any]) -> str | None:
    """Why the module among the arguments does not take the samples among them, or ``None``."""
    model = next((value for value in given.values() if isinstance(value, nn.Module)), None)
    name = next((name for name in ("x", "data", "held") if name in given), None)
    if model is None or name is None:
        return None
    x = given[name]
    if name == "held" and isinstance(x, tuple | list) and len(x) == 2:
        x = x[0]
    leaves = pytree.tree_leaves(x)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        return f"{name} must be a tensor, a tuple or a mapping of them, samples first; got {describe_value(x)}."
    if not all(len(leaf) for leaf in leaves):
        return f"there are no samples in {name}."
    return find_refusal(model, name, pytree.tree_map(lambda leaf: leaf[:1], x))


def find_refusal(model: nn.Module, name: str, one: Any) -> str | None:
    """Why a model does not take a sample, in words, or ``None``; every part of it keeps its mode. ``name``: of the argument."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            _ = (
                model(**one)
                if isinstance(one, Mapping)
                else model(*one)
                if isinstance(one, tuple | list)
                else model(one)
            )
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:
        told = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        leaves = [leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, Tensor)]
        shapes = " and ".join(f"{tuple(leaf.shape[1:])} {_dtype_name(leaf.dtype)}" for leaf in leaves)
        wanted = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        other = "type" in told and len(wanted) == 1 and any(leaf.dtype not in wanted for leaf in leaves)
        remedy = f" Its parameters are {_dtype_name(wanted.pop())}: convert {name}, or the model." if other else ""
        return f"{type(model).__name__} does not take samples of shape {shapes} ({name}): {told}.{remedy}"
    finally:
        for module, training in modes:
            module.training = training
    return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
