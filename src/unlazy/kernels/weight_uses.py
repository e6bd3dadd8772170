"""Weights that a model reads by functions, not by calling a layer with a rule: attention, recurrent layers, tied weights.

``torch.nn.functional.linear`` and ``embedding`` are watched while the model runs. Attention layers call ``linear`` themselves,
and recurrent layers run step by step here (:mod:`unlazy.kernels.recurrent_steps`), so that each step calls it. A call that reads
a weight is to the weight what a call of a dense layer is to the layer; a weight that several layers share has all their calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unlazy.kernels.recurrent_steps import STEPS

Note = Callable[["WeightUse", Tensor, Tensor, tuple[int, int] | None], Tensor]  # use, input, output, rows -> output


class WeightUse(nn.Module):
    """Stands for one parameter that functions read: as ``weight`` (of a product or a table) or as ``bias``. Never called.

    ``shared``: all samples share what is read, the rows of a table for positions, or a parameter ``[1, ...]`` that is added to
    every sample. Then every sample gets a view of its own, so that gradients of samples stay apart. ``place``: of such a
    parameter, its module and name there.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        kind: str,
        name: str,
        *,
        shared: bool = False,
        place: tuple[nn.Module, str] | None = None,
    ) -> None:
        super().__init__()
        self.register_parameter(kind, parameter)
        self.kind, self.name, self.shared, self.place = kind, name, shared, place

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        found = self._parameters[self.kind]
        assert found is not None
        return found

    @property
    def picked(self) -> tuple[bool, bool]:
        """Whether it is a weight, whether it is a bias."""
        return self.kind == "weight", self.kind == "bias"


def find_uses(run: Callable[[int], Any], candidates: dict[str, nn.Parameter]) -> list[WeightUse]:
    """Which of the parameters are read as a weight or as a bias; ``run(n)`` runs the model on ``n`` samples, one or two.

    A table that is asked for the same rows by one sample and by two holds what all samples share.
    """
    uses = [
        WeightUse(parameter, kind, name)
        for name, parameter in candidates.items()
        for kind, axes in (("weight", 2), ("bias", 1))
        if parameter.ndim == axes and parameter.is_floating_point()
    ]
    seen: dict[int, dict[WeightUse, list[Any]]] = {1: {}, 2: {}}
    for n, shapes in seen.items():

        def note(use: WeightUse, entered: Tensor, out: Tensor, rows: Any, shapes: dict[Any, Any] = shapes) -> Tensor:
            shapes.setdefault(use, []).append(entered.shape)
            return out

        with watch_uses(uses, note, n), torch.no_grad():
            run(n)
    for use, shapes_of_two in seen[2].items():
        use.shared = use.kind == "weight" and seen[1].get(use) == shapes_of_two
    return [use for use in uses if use in seen[2]]


def find_added(model: nn.Module, candidates: dict[str, nn.Parameter]) -> list[WeightUse]:
    """Parameters ``[1, ...]`` of the model: every sample may get a view of its own of such a parameter."""
    found = []
    for name, parameter in candidates.items():
        path, _, own = name.rpartition(".")
        if parameter.ndim > 1 and parameter.shape[0] == 1 and parameter.is_floating_point():
            place = (model.get_submodule(path), own)
            found.append(WeightUse(parameter, "weight", name, shared=True, place=place))
    return found


@contextmanager
def watch_uses(uses: Sequence[WeightUse], note: Note, n: int) -> Iterator[None]:
    """Inside the block ``note`` is told of every call that reads one of the parameters, and returns the output to go on with.

    ``n``: how many samples the model is about to see.

    ``rows``: where the call reads some rows of a weight only, the first of them and how many the weight has.
    """
    if not uses:
        yield
        return
    by_parameter = {id(use.parameter): use for use in uses if use.place is None}
    places: list[tuple[Any, str, Any]] = [(vars(F), name, getattr(F, name)) for name in ("linear", "embedding")]
    places += [(vars(torch._VF), name, getattr(torch._VF, name)) for name in STEPS]
    before = [(where, name, where.get(name)) for where, name, _ in places]
    product, look_up = places[0][2], places[1][2]

    def told(parameter: Tensor | None, entered: Tensor, out: Tensor) -> Tensor:
        found = None if parameter is None else _find_use(by_parameter, parameter)
        return out if found is None else note(found[0], entered, out, found[1])

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = product(input, weight, bias)
        return told(bias, input, told(weight, input, out))

    def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *rest: Any, **options: Any) -> Tensor:
        out: Tensor = look_up(input, weight, padding_idx, *rest, **options)
        if any(rest[:1]) or any(rest[2:]) or any(v for k, v in options.items() if k != "norm_type"):
            return out  # renormalised rows, or scaled gradients
        if padding_idx is not None:
            input = input.masked_fill(input == padding_idx % len(weight), -1)
        use = by_parameter.get(id(weight))
        if use is not None and use.shared:  # the rows of every sample: a first axis of one is theirs, or a new one
            wide = out if len(out) == 1 and out.ndim > 2 else out[None]
            out = wide.expand(n, *wide.shape[1:])
            input = input.reshape(1, -1).expand(n, -1)
        return told(weight, input, out)

    def stepwise(name: str, whole: Any) -> Any:
        def layer(*arguments: Any) -> Any:
            weights = next((part for part in arguments if isinstance(part, list)), [])
            if not any(id(weight) in by_parameter for weight in weights):
                return whole(*arguments)
            found = STEPS[name](linear, *arguments)
            return whole(*arguments) if found is None else found

        return layer

    added = [(use, vars(use.place[0]), use.place[1]) for use in uses if use.place is not None]
    replacements = [linear, embedding, *(stepwise(name, whole) for _, name, whole in places[2:])]
    try:
        for (where, name, _), replacement in zip(places, replacements, strict=True):
            where[name] = replacement
        for use, where, name in added:  # an attribute of its own hides the parameter
            wide = use.parameter.expand(n, *use.parameter.shape[1:])
            where[name] = note(use, wide, wide, None)
        yield
    finally:
        for _, where, name in added:
            where.pop(name, None)
        for where, name, earlier in before:
            if earlier is None:
                where.pop(name, None)
            else:
                where[name] = earlier


def _find_use(uses: dict[int, WeightUse], read: Tensor) -> tuple[WeightUse, tuple[int, int] | None] | None:
    """The use that a tensor stands for, whole or by some rows of it."""
    use = uses.get(id(read))
    if use is not None:
        return use, None
    use = uses.get(id(read._base)) if read._base is not None else None
    if use is None:
        return None
    whole = use.parameter
    down = whole.stride(0)
    is_rows = read.shape[1:] == whole.shape[1:] and read.stride() == whole.stride()
    if not is_rows or down == 0 or read.storage_offset() % down:
        return None
    return use, (read.storage_offset() // down, len(whole))
