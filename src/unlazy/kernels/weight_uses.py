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
    """Stands for one parameter that functions read: as ``weight`` (of a product or a table) or as ``bias``. Never called."""

    def __init__(self, parameter: nn.Parameter, kind: str, name: str) -> None:
        super().__init__()
        self.register_parameter(kind, parameter)
        self.kind, self.name = kind, name

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


def find_uses(run: Callable[[], Any], candidates: dict[str, nn.Parameter]) -> list[WeightUse]:
    """Which of the parameters are read as a weight or as a bias, by calling ``run``, which runs the model."""
    uses = [
        WeightUse(parameter, kind, name)
        for name, parameter in candidates.items()
        for kind, axes in (("weight", 2), ("bias", 1))
        if parameter.ndim == axes and parameter.is_floating_point()
    ]
    seen: set[WeightUse] = set()

    def note(use: WeightUse, entered: Tensor, out: Tensor, rows: tuple[int, int] | None) -> Tensor:
        seen.add(use)
        return out

    with watch_uses(uses, note), torch.no_grad():
        run()
    return [use for use in uses if use in seen]


@contextmanager
def watch_uses(uses: Sequence[WeightUse], note: Note) -> Iterator[None]:
    """Inside the block ``note`` is told of every call that reads one of the parameters, and returns the output to go on with.

    ``rows``: where the call reads some rows of a weight only, the first of them and how many the weight has.
    """
    if not uses:
        yield
        return
    by_parameter = {id(use.parameter): use for use in uses}
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
        return told(weight, input, out)

    def stepwise(name: str, whole: Any) -> Any:
        def layer(*arguments: Any) -> Any:
            weights = next((part for part in arguments if isinstance(part, list)), [])
            if not any(id(weight) in by_parameter for weight in weights):
                return whole(*arguments)
            found = STEPS[name](linear, *arguments)
            return whole(*arguments) if found is None else found

        return layer

    replacements = [linear, embedding, *(stepwise(name, whole) for _, name, whole in places[2:])]
    try:
        for (where, name, _), replacement in zip(places, replacements, strict=True):
            where[name] = replacement
        yield
    finally:
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
