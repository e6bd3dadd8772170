"""Declarations of claims: a statement, the quantities that test it, and the side of a threshold on which they must lie.

Claims are declared before a study runs. A part without numbers stays declared and counts as not measured.
"""

from __future__ import annotations

import ast
import inspect
import symtable
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unlazy.runtime import InputError, require

Vector = NDArray[np.float64]
Setting = str | int | float | None


@runtime_checkable
class SeedTable(Protocol):
    """A table of results from which a claim selects one number per seed."""

    def select(self, quantity: str, at: Setting = None, *, seeds: Sequence[int], **where: Setting) -> Vector:
        """The numbers of these seeds, in their order; NaN where there is none."""
        ...


@dataclass(frozen=True, init=False)
class Quantity:
    """One number per seed: a quantity of the table at a moment (``at``), of the rows whose columns have the values ``where``.

    >>> Quantity("allocation", at=3, preset="author", arm="pwc")
    Quantity(name='allocation', at=3, where={'preset': 'author', 'arm': 'pwc'})
    """

    name: str
    at: Setting
    where: Mapping[str, Setting] = field(hash=False)

    def __init__(self, name: str, at: Setting = None, **where: Setting) -> None:
        for key, value in {"name": name, "at": at, "where": where}.items():
            object.__setattr__(self, key, value)

    def select(self, table: SeedTable, seeds: Sequence[int]) -> Vector:
        """The numbers of these seeds, in their order."""
        return table.select(self.name, self.at, seeds=seeds, **self.where)

    def meaning(self) -> list[Any]:
        """Name, moment and columns as plain values, for the hash of a claim's rule."""
        return [self.name, self.at, sorted(self.where.items())]


Function = Callable[..., Vector]
Quantities = Quantity | tuple[Quantity, ...]


@dataclass(frozen=True)
class Shown:
    """Numbers that are shown beside a claim and have no verdict."""

    says: str
    of: Quantities
    by: Function | None = None
    unit: str = ""
    seeds: int | None = None

    def values(self, table: SeedTable, seeds: Sequence[int]) -> Vector:
        """One number per declared seed; NaN where one is missing."""
        return self._compute(self.of, table, seeds)

    def declared_seeds(self, seeds: Sequence[int]) -> Sequence[int]:
        """The seeds for which these numbers are declared: all of the scale, or the first few."""
        return seeds if self.seeds is None else seeds[: self.seeds]

    def _compute(self, of: Quantities, table: SeedTable, seeds: Sequence[int]) -> Vector:
        """The numbers of these quantities, or what ``by`` makes of them.

        No function can hide a gap: a seed without one of its numbers has none, and a time that was never reached gives no
        finite number.
        """
        columns = np.array([one.select(table, self.declared_seeds(seeds)) for one in _as_tuple(of)])
        if self.by is None:
            return np.asarray(columns[0])
        try:
            with np.errstate(invalid="ignore", divide="ignore"):
                numbers = np.asarray(self.by(*columns), dtype=np.float64)
        except Exception as error:  # whatever a study's own function raises
            name = self.by.__name__
            raise InputError(f"{self.says!r}: its function {name} raised {type(error).__name__}: {error}") from error
        if numbers.shape == columns.shape[1:]:
            never = np.isinf(columns).any(axis=0) & np.isfinite(numbers)
            return np.where(np.isnan(columns).any(axis=0) | never, np.nan, numbers)
        counts_seeds = (
            isinstance(self, Part) and not self.identity
        )  # other numbers may be the worst of all cases, for example
        expected = f"one number per seed, {columns.shape[1:]}"
        fits = numbers.ndim == 1 and not counts_seeds
        require(fits, f"{self.says!r}: its function must return {expected}; it returned {numbers.shape}.")
        return numbers


@dataclass(frozen=True)
class Part(Shown):
    """One statement that each seed passes or fails: its number lies ``above`` or ``below`` a threshold.

    ``of``: the quantity, or several from which the pure function ``by`` computes one number. ``seeds``: declare only the first so
    many seeds of the scale. ``identity``: the rows are random cases of an exact statement, not seeds of an experiment.
    ``within``: for quantities that are times, how long the training was watched. A time that was not found is infinite; it counts
    only where the training was watched long enough. With a function ``by``, ``within`` has as many quantities as ``of``, and
    ``by`` computes from them the number that the part would have had at the last moment.
    """

    above: float | None = None
    below: float | None = None
    within: Quantities | None = None
    identity: bool = False

    def __post_init__(self) -> None:
        one_side = (self.above is None) != (self.below is None)
        require(one_side, f"part {self.says!r} needs above= or below=, and only one of them.")
        several, what = isinstance(self.of, tuple), f"part {self.says!r}"
        require(not several or self.by is not None, f"{what} has several quantities and no function by=.")
        named = self.by is None or (isinstance(self.by, FunctionType) and self.by.__name__ != "<lambda>")
        require(named, f"{what}: by= is a function defined with def, whose code is part of the rule; got {self.by!r}.")
        if self.by is not None and self.within is not None:
            wanted, given = len(_as_tuple(self.of)), len(_as_tuple(self.within))
            require(wanted == given, f"{what}: by= takes {wanted} quantities, and within= gives it {given}.")

    @property
    def threshold(self) -> float:
        """The number that ``above`` or ``below`` gives."""
        return float(self.above if self.above is not None else self.below)  # type: ignore[arg-type]

    @property
    def rule(self) -> str:
        """The condition as text, such as ``> 0.5``."""
        return f"{'>' if self.above is not None else '<'} {self.threshold:g}"

    def horizon(self, table: SeedTable, seeds: Sequence[int]) -> Vector | None:
        """How long each declared seed was watched, in the unit of its number; ``None`` for quantities that are no times."""
        if self.within is None:
            return None
        return self._compute(self.within, table, seeds)

    def meaning(self) -> dict[str, Any]:
        """Everything that decides the verdict, as plain values for a hash; wording is left out."""
        return {
            "of": [one.meaning() for one in _as_tuple(self.of)],
            "by": None if self.by is None else function_meaning(self.by),
            "within": None if self.within is None else [one.meaning() for one in _as_tuple(self.within)],
            "rule": self.rule,
            "seeds": self.seeds,
            "identity": self.identity,
        }


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and the parts that decide it.

    ``id``: C and F belong to the half-space paper, B to the emergence paper, L to the tangent paper, X to questions that the
    papers leave open; a study of your own may use any other. ``where``: theorem, figure, table or section. ``paper``: what the
    paper gives, in a few words. ``parts``: the paper's own set-up; the first one gives the headline number. ``controls``: the
    same statement under other set-ups, slopes and controls. ``shows``: further numbers without a verdict. ``figure``: the name of
    the figure that shows it.
    """

    id: str
    says: str
    where: str
    paper: str
    parts: tuple[Part, ...]
    controls: tuple[Part, ...] = ()
    shows: tuple[Shown, ...] = ()
    figure: str | None = None

    def __init__(
        self,
        id: str,
        *,
        says: str,
        where: str,
        paper: str,
        parts: Sequence[Part],
        controls: Sequence[Part] = (),
        shows: Sequence[Shown] = (),
        figure: str | None = None,
    ) -> None:
        require(len(parts) > 0, f"claim {id} declares no part, so nothing could decide it.")
        given = (id, says, where, paper, tuple(parts), tuple(controls), tuple(shows), figure)
        for key, value in zip(self.__dataclass_fields__, given, strict=True):
            object.__setattr__(self, key, value)

    def quantities(self) -> list[Quantity]:
        """Every quantity of the parts and controls."""
        return [one for part in (*self.parts, *self.controls) for one in quantities_of(part)]

    def meaning(self) -> dict[str, Any]:
        """Everything that decides the verdicts, as plain values for a hash."""
        parts, controls = ([part.meaning() for part in chosen] for chosen in (self.parts, self.controls))
        return {"id": self.id, "parts": parts, "controls": controls}


def quantities_of(shown: Shown) -> list[Quantity]:
    """Every quantity that a part or a shown number reads."""
    within = shown.within if isinstance(shown, Part) else None
    return [*_as_tuple(shown.of), *_as_tuple(within or ())]


def function_meaning(function: Function) -> list[Any]:
    """The name and syntax tree of a function, and of what it uses of its file; layout, comments and docstring do not count."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    require(isinstance(tree, ast.FunctionDef), f"{function!r}: a part's function is a named one, defined with def.")
    assert isinstance(tree, ast.FunctionDef)
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    own = [tree.name, ast.dump(tree.args, annotate_fields=False), *(ast.dump(line) for line in body)]
    return [*own, *(_value_meaning(name, value) for name, value in _used_values(function, tree, body))]


def _used_values(function: Function, tree: ast.FunctionDef, body: Sequence[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Names and values that a function takes from outside, other than modules and itself, in alphabetical order."""
    defaults = [default for default in (*tree.args.defaults, *tree.args.kw_defaults) if default is not None]
    used = {node.id for default in defaults for node in ast.walk(default) if isinstance(node, ast.Name)}
    plain = ast.FunctionDef(tree.name, tree.args, [*body], decorator_list=[], returns=None)
    scopes = symtable.symtable(ast.unparse(ast.fix_missing_locations(plain)), "part", "exec").get_children()
    own = next(scope for scope in scopes if scope.get_name() == tree.name)
    used |= set(_outside_names(own))  # an argument may be called like something outside
    outside = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for name in sorted(used & outside.keys()):
        if not isinstance(outside[name], ModuleType) and outside[name] is not function:
            yield name, outside[name]


def _outside_names(scope: symtable.SymbolTable) -> Iterator[str]:
    """Names that a function and the functions inside it read and do not bind."""
    yield from (symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global())
    for inner in scope.get_children():
        yield from _outside_names(inner)


def _value_meaning(name: str, value: Any) -> list[Any]:
    """A function or plain value that a part's function uses, as texts."""
    if isinstance(value, FunctionType):
        return [name, function_meaning(value)]
    plain = isinstance(value, str | int | float | tuple | None)
    require(plain, f"a part's function may use modules, functions and plain values; {name} is {type(value).__name__}.")
    return [name, repr(value)]


def _as_tuple(of: Quantities) -> tuple[Quantity, ...]:
    return of if isinstance(of, tuple) else (of,)
