"""Scope: three lines around any training loop. Our own training loop uses it too, with measures named beforehand."""

from __future__ import annotations

import atexit
import copy
import html
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import evaluating
from unlazy.kernels.gated import is_stack
from unlazy.runtime import InputError, StoreError, require
from unlazy.scope.history import History
from unlazy.scope.measures import VIEWS
from unlazy.scope.probe import Choice, Groups, Loss, as_probe
from unlazy.scope.schedule import Fixed
from unlazy.scope.session import Session
from unlazy.scope.verdict import Verdict, judge
from unlazy.store import Tensors, Writer

Probe = Callable[[Any, Dataset], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Measure:
    """What to look at, on which samples, and when. ``batch=None``: the scope's own probe set."""

    probe: Probe
    schedule: Fixed
    batch: Dataset | None = None

    def describe(self) -> dict[str, Any]:
        samples = None if self.batch is None else self.batch.fingerprint
        return {"probe": self.probe.__name__, "steps": self.schedule.describe(), "batch": samples}


class Scope(AbstractContextManager["Scope"]):
    """Looks at a network while it trains, and tells whether it is lazy or learns features, when, and on which samples.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x, y = torch.randn(16, 2), torch.arange(16) % 2
    >>> optimiser = torch.optim.SGD(net.parameters(), 0.1)
    >>> with Scope(net, probe=(x, y)) as scope:
    ...     for step in range(1, 21):
    ...         optimiser.zero_grad()
    ...         nn.functional.cross_entropy(net(x), y).backward()
    ...         optimiser.step()
    ...         scope.step(step)
    >>> scope.history.steps[0], scope.history.steps[-1]
    (0, 20)

    ``probe``: a fixed set of samples ``(x, y)``; x a tensor, a tuple of arguments or a mapping of keyword arguments; y class
    numbers ``[n]``, one-hot or real targets. ``run``: a folder to keep everything in, or ``None`` for memory only; a scope goes
    on with what it finds there where that is the same training, and refuses another one unless ``overwrite=True`` says that it
    may be replaced. ``views``: what to look at. ``budget``: the share of training time that looking may take (or one second in
    all, if that is more, so that short trainings are seen too). ``groups``: parts of the probe set by name, masks or sample
    numbers; by default its classes. ``loss(output, y)``: what is reported as the loss on the probe set; by default cross-entropy
    for class numbers, else squared error. ``output``: picks the tensor that counts from what the model returns. ``sinks``: where
    numbers go besides. ``steps``: how many steps training will take, if known: then looks are spread over all of them. ``seed``:
    of random projections. ``measures``: a fixed list of measures instead.

    Looking changes nothing: parameters, gradients, buffers, random streams, flags and hooks are bit for bit as without it. A
    scope that fails says why in one warning and goes silent; with ``strict=True`` it raises. Under distributed training only
    the first process looks.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Dataset | tuple[Any, Any],
        run: str | Path | Writer | None = None,
        *,
        views: Sequence[str] = VIEWS,
        budget: float = 0.05,
        groups: Groups | None = None,
        loss: Loss | None = None,
        output: Choice | None = None,
        sinks: Iterable[Any] = (),
        strict: bool = False,
        measures: Sequence[Measure] | None = None,
        steps: int | None = None,
        seed: int = 0,
        overwrite: bool = False,
    ) -> None:
        self.model, self.strict = model, strict
        self._session: Session | None = None
        self._fixed: FixedScope | None = None
        self._failed: str | None = None
        if measures is not None:
            require(run is not None, "a scope with named measures writes to a run folder: give run=.")
            assert run is not None
            self._fixed = FixedScope(model, _as_dataset(probe), run, list(measures))
            return
        if isinstance(run, Writer):
            raise InputError("a Writer belongs to a scope with named measures; give a folder.")
        looked_at = as_probe(probe, groups, loss)
        if not _is_first_process():
            self._failed = "another process looks"
            return
        folder = None if run is None else Path(run)
        self._session = Session(
            model,
            looked_at,
            folder,
            views=(views,) if isinstance(views, str) else tuple(views),
            budget=budget,
            output=output,
            sinks=sinks,
            steps=steps,
            seed=seed,
            strict=strict,
            overwrite=overwrite,
        )
        self._finalizer = weakref.finalize(self, _finish_at_end, self._session)
        _notice_the_end()

    # --- while training ----------------------------------------------------------------------------------------

    def step(self, step: Any, **scalars: Any) -> None:
        """Tell the scope that ``step`` updates are done; ``scalars`` are kept beside whatever is measured.

        A loop that counts from 0 and tells *after* its update is understood: its steps are shifted by one. One that begins anew
        every epoch is counted on, with a warning. A scalar named
        like one of the scope's own is kept as ``train_NAME``. With named measures ``checkpoint`` may be a function that returns
        tensors, which are written with the same line, due or not.
        """
        if self._fixed is not None:
            self._fixed.step(step, **scalars)
        elif self._session is not None:
            self._guarded(lambda session: session.step(step, scalars))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside this block (validation, say) is no training time: it neither pays for looking nor counts as looking."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._session is not None:
                self._session.away(time.perf_counter() - began)

    def finish(self) -> None:
        """Measure the last step seen, write the verdict, mark the run finished. Further steps are ignored."""
        self._end(None)

    close = finish

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._end(error)

    # --- what it saw -------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Every number so far, and the arrays of the first and the last measurement."""
        return History() if self._session is None else self._session.history

    def verdict(self) -> Verdict:
        """Lazy, rich, mixed or cannot tell, with the evidence; the last step seen is measured first if it was not."""
        if self._session is not None and self._failed is None:
            self._guarded(lambda session: session.settle())
        found = judge(self.history)
        unseen = self._failed is not None and not self.history.steps
        return replace(found, reasons=(f"The scope stopped looking: {self._failed}",)) if unseen else found

    def overhead(self) -> dict[str, Any]:
        """Seconds measuring and training, their ratio, measurements done and put off; construction apart."""
        return {} if self._session is None else self._session.overhead()

    def report(self) -> str:
        """A page of text: the verdict, the numbers of the first and the last measurement, what is missing, what it cost."""
        verdict = self.verdict()
        said = [f"Verdict: {verdict.label}. {verdict.words()['meaning']}", *verdict.reasons, verdict.when_text()]
        return "\n".join([*(line for line in said if line), *self._numbers()])

    def __deepcopy__(self, memo: dict[int, Any]) -> SeenScope:
        return SeenScope(copy.deepcopy(self.history, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return SeenScope, (self.history,)

    def __repr__(self) -> str:
        seen = self.history.steps
        span = f"steps {seen[0]} to {seen[-1]}, {len(seen)} measurements" if seen else "nothing seen yet"
        return f"Scope({type(self.model).__name__}: {self._failed or span})"

    def _repr_html_(self) -> str:
        drawn = judge(self.history)._repr_html_() if self.history.steps else ""
        return f"{drawn}<pre>{html.escape(chr(10).join(self._numbers()))}</pre>"

    # --- how ---------------------------------------------------------------------------------------------------

    def _guarded(self, do: Callable[[Session], None]) -> None:
        """Run a part of the scope; an error must not end the user's training."""
        session = self._session
        if session is None or session.finished or session.looking or self._failed is not None:
            return  # while looking: the model's own hooks may tell a step
        try:
            do(session)
        except Exception as error:
            if self.strict:
                raise
            self._failed = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(f"the scope stopped looking; training goes on. {self._failed}", stacklevel=3)
            _let_go(session, error)

    def _end(self, error: BaseException | None) -> None:
        if self._fixed is not None:
            self._fixed.end(error)
        elif self._session is not None:
            self._guarded(lambda session: session.finish(error))

    def _numbers(self) -> list[str]:
        """Every number at its first and last measurement, what is missing and why, and what looking cost."""
        history, lines = self.history, [repr(self)]
        names = [name for name in history.scalars if "@" not in name and name not in ("overhead", "step_shift")]
        width = max((len(name) for name in names), default=0)
        lines += [f"  {'':<{width}}  {'first':>11}  {'last':>11}"] if names else []
        lines += [f"  {name:<{width}}  {history.first(name):>11.4g}  {history.last(name):>11.4g}" for name in names]
        lines += [f"  no {quantity}: {why}" for quantity, why in history.left_out.items()]
        return [*lines, f"  {_cost_text(self.overhead())}"] if self.overhead() else lines


def _cost_text(cost: Mapping[str, Any]) -> str:
    """What looking cost, in a sentence: as a share, or beside the time that is always allowed where that was the limit."""
    spent, trained, always = cost["seconds_measuring"], cost["seconds_training"], cost["seconds_always_allowed"]
    said = f"Looking took {spent:.2f} s beside {trained:.2f} s of training"
    if cost["budget"] * trained < always:
        said += f" (up to {'one second' if always == 1 else f'{always:g} s'} in all is always allowed)"
    else:
        said += f", {100 * cost['share']:.1f} % of it"
    return f"{said}; the first look, before training, took {cost['seconds_at_construction']:.2f} s."


class SeenScope(Scope):
    """What copies and pickles of a scope are: they hold what was seen, and look no more. Two scopes must not write one run."""

    def __init__(self, history: History) -> None:
        self.model, self.strict = nn.Identity(), False
        self._session, self._fixed, self._failed = None, None, "a copy, which does not look"
        self._seen = history

    @property
    def history(self) -> History:
        return self._seen


class FixedScope:
    """Measures named beforehand, at steps named beforehand: what our own training loop uses."""

    def __init__(self, model: nn.Module, probe: Dataset, run: str | Path | Writer, measures: list[Measure]) -> None:
        self.model, self.probe, self.measures = model, probe, measures
        require(isinstance(run, Writer), "named measures write to the run of a training: give its Writer.")
        assert isinstance(run, Writer)
        self.writer = run

    def step(self, step: int, checkpoint: Callable[[], Tensors] | None = None, **scalars: Any) -> None:
        """Run the measures that are due; a checkpoint is written, due or not."""
        due = [measure for measure in self.measures if measure.schedule.due(step)]
        if not due and checkpoint is None:
            return
        curves = {name: np.atleast_1d(np.asarray(torch.as_tensor(value).detach())) for name, value in scalars.items()}
        arrays: dict[str, np.ndarray] = {}
        for measure in due:
            for name, value in self._look(measure).items():
                (curves if value.ndim == 1 else arrays)[name] = value
        self.writer.record(step, curves, arrays, checkpoint() if checkpoint else None)

    def end(self, error: BaseException | None) -> None:
        """The writer belongs to the training, which ends it."""

    def _look(self, measure: Measure) -> dict[str, np.ndarray]:
        batch = self.probe if measure.batch is None else measure.batch
        with evaluating(self.model):
            seen = measure.probe(self.model, batch)
        return {
            name: (value if is_stack(self.model) else value[None]).detach().cpu().numpy()
            for name, value in seen.items()
        }


def _as_dataset(probe: Dataset | tuple[Tensor, Tensor]) -> Dataset:
    if isinstance(probe, Dataset):
        return probe
    x, y = probe
    return Dataset("probe", x, y[:, None] if y.ndim == 1 else y)


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _finish_at_end(session: Session) -> None:
    """The handle is gone, or Python ends: an open scope finishes itself, as failed where an error ended Python."""
    by_itself = _python_ends.is_set() and not hasattr(sys, "ps1")  # a prompt keeps its last error for ever
    try:
        session.finish(getattr(sys, "last_value", None) if by_itself else None)
    except Exception as trouble:
        warnings.warn(f"the scope could not finish: {trouble}", stacklevel=2)
        _let_go(session, trouble)


_python_ends = threading.Event()


@cache
def _notice_the_end() -> None:
    """Functions of atexit run last in, first out: registered behind the finalizers, this one runs before them."""
    atexit.register(_python_ends.set)


def _let_go(session: Session, error: Exception) -> None:
    try:
        session.finish(error)
    except (StoreError, OSError):
        session.finished = True
