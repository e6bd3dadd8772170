"""Scope: three lines around any training loop."""

from __future__ import annotations

import atexit
import copy
import html
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unlazy.data.dataset import Dataset
from unlazy.kernels.capture import Inputs
from unlazy.runtime import InputError, StoreError, require, warn
from unlazy.scope.history import History
from unlazy.scope.layer_experiments import EXPERIMENTS, LayerTrainings, train_by_layer
from unlazy.scope.layer_table import LayerTable, layer_table
from unlazy.scope.measurements import VIEWS
from unlazy.scope.memory import is_out_of_memory
from unlazy.scope.probe_set import Groups, Loss, parse_probe_set
from unlazy.scope.processes import ShardedModel, check_sharding, is_first_process, is_sharded
from unlazy.scope.samples import Samples, find_samples
from unlazy.scope.session import Session, parse_step
from unlazy.scope.summary import TWIN_NUMBERS
from unlazy.scope.twin import (
    Held,
    Optimiser,
    Scheduler,
    held_or_probe,
    record_point,
    simulate,
    start_model,
    start_twin,
    train_twin,
)
from unlazy.scope.user_model import OutputChoice, unwrap_model
from unlazy.scope.verdict import Verdict, judge
from unlazy.training.twin import LinearisedTwin

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Scope(AbstractContextManager["Scope"]):
    """Measures a network while it trains, and judges whether it is lazy or learns features, when, and on which samples.

    >>> import torch
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

    ``probe``: the probe set, a fixed set of samples ``(x, y)``; x a tensor, a tuple of arguments or a mapping of keyword
    arguments; y class numbers ``[n]``, one-hot or real targets. ``run``: a folder to keep everything in, or ``None`` for memory
    only; a run of the same training in that folder is resumed, another one is refused unless ``overwrite=True`` allows to
    replace it. ``views``: what to measure, some of paths, tangents and neurons. ``budget``: the share of training time that
    measuring may take. A short training may take more, so that it is measured too: a tenth of a second and a fifth of its
    length, at most one second in all. ``groups``: parts of the probe set by name, as masks or sample numbers; by default its
    classes. ``loss(output, y)``: what is reported as the loss on the probe set; by default cross-entropy for classes (binary for
    one output and targets 0 and 1), else squared error. ``output``: picks the tensor that counts from what the model returns.
    ``sinks``: further places to write numbers to. ``steps``: how many steps training will take, if
    known: then measurements are spread over all of them. ``seed``: of random projections. ``memory``: the memory that one
    measurement may take, such as ``"2GB"`` or a number of bytes; by default at most 10 % of the graphics card (of the machine's
    memory, if the model is not on a card) and at most a quarter of what is free there after a training step. Copies of the
    parameters come on top: one that is kept, and up to three while measuring. A measure that needs more takes fewer samples at
    a time, then fewer samples, and the tangent kernel is estimated at last; ``scope.history.notes`` says so.

    What the run folder says about the training: ``config``, its settings (a dict, a dataclass or an ``argparse.Namespace``),
    which lists of runs show as columns; ``tags``, some words; ``notes``, a text. Tags and notes can be changed later.
    ``texts``: every sample of the probe set as people read it, such as ``tokenizer.batch_decode(tokens)``; the page shows the
    samples that stand out with them.

    Measuring changes nothing: parameters, gradients, buffers, random streams, flags and hooks are bit for bit as without it. A
    scope that fails says why in one warning and measures no more; with ``strict=True`` it raises. Of several processes only
    the first one measures and writes. Make the scope and call its methods on all of them: a model that ``fully_shard`` (FSDP2)
    has sharded is gathered by all processes at a measurement.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Dataset | tuple[Any, Any],
        run: str | Path | None = None,
        *,
        views: Sequence[str] = VIEWS,
        budget: float = 0.05,
        groups: Groups | None = None,
        loss: Loss | None = None,
        output: OutputChoice | None = None,
        sinks: Iterable[Any] = (),
        strict: bool = False,
        steps: int | None = None,
        seed: int = 0,
        overwrite: bool = False,
        memory: str | int | None = None,
        config: Any = None,
        tags: Iterable[str] = (),
        notes: str = "",
        texts: Sequence[str] = (),
    ) -> None:
        self.model, self.strict = model, strict
        self._session: Session | None = None
        self._failed: str | None = None
        self._twin: LinearisedTwin | None = None
        probe_set = parse_probe_set(probe, groups, loss, texts)
        self._shards = self._gather_shards(model)
        if not (is_first_process() if self._shards is None else self._shards.is_first):
            self._failed = "another process measures"
        if self._failed is not None:
            return
        folder = None if run is None else Path(run)
        try:
            with self._others_informed():
                self._session = Session(
                    model,
                    probe_set,
                    folder,
                    views=(views,) if isinstance(views, str) else tuple(views),
                    budget=budget,
                    output=output,
                    sinks=sinks,
                    steps=steps,
                    seed=seed,
                    strict=strict,
                    overwrite=overwrite,
                    memory=memory,
                    shards=self._shards,
                    config=config,
                    tags=tags,
                    notes=notes,
                )
        except Exception as error:
            if strict or not is_out_of_memory(error):
                raise
            self._failed = f"memory did not suffice for the first measurement ({error})".splitlines()[0]
            warn(f"the scope does not measure; training goes on. {self._failed}")
            return
        self._finalizer = weakref.finalize(self, _finish_session, self._session)
        _watch_for_exit()

    # --- while training ----------------------------------------------------------------------------------------

    def step(self, step: Any, **scalars: Any) -> None:
        """Report that ``step`` updates are done; the scope measures if it is time. ``scalars`` are kept with the measurement.

        The steps of a loop that reports 0 *after* its first update are shifted by one. A loop that begins at 0 every epoch is
        counted on, with a warning. A scalar named like one of the scope's own is kept as ``train_NAME``.
        """
        if self._shards is not None and self._shards.meetings.stopped is None:
            self._step_together(step, scalars)
        elif self._session is not None:
            self._run_guarded(lambda session: session.step(step, scalars))
        if self._twin is not None:
            with self.paused():
                self._run_guarded(self._compare_twin)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside this block, such as validation, as training time or as measuring."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._session is not None:
                self._session.exclude_seconds(time.perf_counter() - began)

    def finish(self) -> None:
        """Measure the last reported step, write the verdict, mark the run finished. Further steps are ignored."""
        self._finish(None)

    close = finish

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._finish(error)

    # --- results ------------------------------------------------------------------------------------------------

    @property
    def history(self) -> History:
        """Every number so far, and the arrays of the first and the last measurement (without a run folder: of all)."""
        return History() if self._session is None else self._session.history

    def verdict(self) -> Verdict:
        """Lazy, rich, mixed or cannot tell, with the evidence; the last reported step is measured first if it was not."""
        if self._session is not None and self._failed is None:
            self._run_guarded(lambda session: session.measure_pending())
            self._run_guarded(self._compare_twin)
        is_copy = self._session is None and bool(self.history.steps)
        return judge(self.history, stopped=None if is_copy else self._failed)

    # --- the linearised twin ------------------------------------------------------------------------------------

    def twin(
        self,
        optimiser: Optimiser,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        held: Held | None = None,
        batches: Iterable[tuple[Inputs, Tensor]] | None = None,
        scheduler: Scheduler | None = None,
        linear: str | Sequence[str] = "trainable",
        clip_norm: float | None = None,
        say: Callable[[str], None] = print,
    ) -> LinearisedTwin:
        """The network linearised at its start, trained alike; the verdict then quotes it in place of an estimate.

        Beside the training: give the ``optimiser`` before the first step, and call ``twin.step(x, y)`` after every
        ``optimiser.step()``, before ``scope.step``. Afterwards: give ``batches``, all that the network saw in their order, and as
        ``optimiser`` a function that makes one from a list of parameters; ``scheduler`` likewise makes a scheduler from that
        optimiser. What it will cost is measured and told (``say``) before it starts.

        ``loss(outputs, targets)``: the training loss. ``held``: held-out inputs, or inputs and targets, on which network and twin
        are compared; by default the probe set. ``linear``: the parameters that are linearised; others train as they do.
        ``clip_norm``: the norm to which training clips gradients.

        >>> twin = scope.twin(optimiser, nn.functional.cross_entropy, held=(x_new, y_new))  # doctest: +SKIP
        """
        session = self._require_session()
        options = {"linear": linear, "clip_norm": clip_norm}
        if isinstance(optimiser, torch.optim.Optimizer):
            require(batches is None, "with batches=, give a function that makes the optimiser, as it was at the start.")
            self._twin = start_twin(session, optimiser, loss, held, options)
            self._note_twin(session, self._twin)
            return self._twin
        require(batches is not None, "give batches= to train the twin afterwards, or the optimiser to train it beside.")
        assert batches is not None
        with self.paused(), session.reopened():
            session.measure_pending()
            twin = train_twin(session, optimiser, loss, batches, held, scheduler, say, options)
            self._note_twin(session, twin)
            record_point(session, session.last_measured, twin.curve[-1])
        return twin

    # --- by layer and by sample -----------------------------------------------------------------------------------

    def layers(
        self,
        train: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        batches: Iterable[tuple[Inputs, Tensor]] | None = None,
        held: Held | None = None,
        scheduler: Scheduler | None = None,
        clip_norm: float | None = None,
        only: Sequence[str] | None = None,
        frozen_from: int = 0,
        experiments: Sequence[str] = EXPERIMENTS,
        say: Callable[[str], None] = print,
    ) -> LayerTable:
        """Which layers learn: one line a layer, from what was measured, or from training the network again by layer.

        With ``train``, a function that makes the optimiser from a list of parameters, and ``loss`` and ``batches`` as in
        :meth:`twin`: for each layer the network is trained again from its start with this layer *frozen* after ``frozen_from``
        steps, and with this layer *linear* (the network linearised in it alone). What that will cost is measured and told
        (``say``) before it starts. ``only``: names of layers, by default all. ``held``: inputs and targets on which losses are
        compared; by default the probe set.

        >>> print(scope.layers())  # doctest: +SKIP
        >>> make = lambda parameters: torch.optim.SGD(parameters, 0.1)  # doctest: +SKIP
        >>> print(scope.layers(make, nn.functional.cross_entropy, batches=batches))  # doctest: +SKIP
        """
        if train is None:
            if self._session is not None and self._failed is None:
                self._run_guarded(lambda session: session.measure_pending())
            return layer_table(self.history) or LayerTable(())
        session = self._require_session()
        if loss is None or batches is None:
            raise InputError(
                "training again by layer needs loss= and batches=, all that the network saw in their order."
            )
        samples = held_or_probe(session, held)
        how = LayerTrainings(train, loss, list(batches), samples, scheduler, clip_norm, only, frozen_from, experiments)
        with self.paused(), session.reopened():
            session.measure_pending()
            start, measurements = start_model(session), session.measurements
            found = train_by_layer(start, measurements.start.parameters, measurements.blocks.blocks, how, say)
            session.log.write(session.last_measured, {}, found)
        return layer_table(self.history) or LayerTable(())

    def samples(self) -> Samples:
        """Samples of the probe set that stand out now: easiest, hardest, most moved, most influential, and closest pairs."""
        if self._session is not None and self._failed is None:
            self._run_guarded(lambda session: session.measure_pending())
        return find_samples(self.history) or Samples()

    def simulate_twin(
        self,
        train: tuple[Inputs, Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        rates: Sequence[float],
        *,
        momentum: float = 0.0,
        decay: float = 0.0,
        batches: Sequence[Tensor] | None = None,
        held: Held | None = None,
    ) -> None:
        """After training by SGD: compute what the linearised twin would have reached, from the tangent kernel at the start.

        ``train``: the training set; the kernel of all its outputs must fit into memory. ``rates``: the learning rate of every
        step. ``batches``: the sample numbers of every step, if known. For Adam, batch-norm in training mode and steps beyond the
        largest stable one there is only :meth:`twin`. See :func:`unlazy.training.twin.simulate_twin`.
        """
        session = self._require_session()
        options = {"momentum": momentum, "decay": decay, "batches": batches}
        with self.paused(), session.reopened():
            session.measure_pending()
            point = simulate(session, train, loss, rates, held, options)
            record_point(session, session.last_measured, point, simulated=True)

    @staticmethod
    def _note_twin(session: Session, twin: LinearisedTwin) -> None:
        """Note what of the network the twin does not have."""
        for note in twin.notes:
            session.measurements.add_note(note)

    def _require_session(self) -> Session:
        """The session, or an error that says why there is no twin."""
        if self._session is None or self._failed is not None:
            raise InputError(f"this scope cannot train the network again: {self._failed or 'it measures nothing'}.")
        if self._shards is not None:
            raise InputError(
                "the model is sharded over processes, so no process can train it again; use linearised_twin on one device."
            )
        return self._session

    def _compare_twin(self, session: Session) -> None:
        """Compare network and twin at a step that was just measured, if that has not been done."""
        twin = self._twin
        step = session.last_measured
        if twin is not None and 0 < step == session.last_step == twin.steps and not self._has_twin_point(step):
            record_point(session, step, twin.compare())

    def _has_twin_point(self, step: int) -> bool:
        return step in self.history.scalars.get(TWIN_NUMBERS["gap"], {})

    def overhead(self) -> dict[str, Any]:
        """Seconds measuring and training, their ratio, measurements done and put off; construction apart."""
        return {} if self._session is None else self._session.overhead()

    def plot(self, panel: str | None = None, *, ax: Axes | None = None) -> Figure:
        """A matplotlib figure of what was measured: loss, gap, kernels and parameters, with the phases of the verdict.

        ``panel``: only that panel, or the name of any number. ``ax``: draw the panel (default: the loss) there.
        """
        phases = [asdict(phase) for phase in judge(self.history).phases] if self.history.steps else []
        return self.history.plot(panel, ax=ax, phases=phases)

    def report(self) -> str:
        """A page of text: the verdict, the numbers of the first and the last measurement, what is left out, what it cost."""
        verdict = self.verdict()
        said = (f"Verdict: {verdict.label}. {verdict.words()['meaning']}", *verdict.reasons)
        said += (verdict.gap_text(), verdict.when_text())
        return "\n".join([*(line for line in said if line), *self._number_lines()])

    def __deepcopy__(self, memo: dict[int, Any]) -> ScopeCopy:
        return ScopeCopy(copy.deepcopy(self.history, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return ScopeCopy, (self.history,)

    def __repr__(self) -> str:
        steps = self.history.steps
        span = f"steps {steps[0]} to {steps[-1]}, {len(steps)} measurements" if steps else "nothing measured yet"
        return f"Scope({type(self.model).__name__}: {self._failed or span})"

    def _repr_html_(self) -> str:
        card = judge(self.history)._repr_html_() if self.history.steps else ""
        return f"{card}<pre>{html.escape(chr(10).join(self._number_lines()))}</pre>"

    # --- several processes --------------------------------------------------------------------------------------

    def _gather_shards(self, model: nn.Module) -> ShardedModel | None:
        """The sharded model that all processes gather at a measurement, or ``None`` where every process has it whole."""
        require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}.")
        plain = unwrap_model(model)
        check_sharding(plain)
        if not is_sharded(plain):
            return None
        shards = ShardedModel(plain)
        if not shards.begin():
            self._stop_together(shards)
        return shards

    def _stop_together(self, shards: ShardedModel) -> None:
        """Say why the processes meet no more; only the first one knows why, and only it warns."""
        self._failed = shards.meetings.stopped or ""
        if shards.is_first:
            error = InputError(f"{self._failed}.")
            if self.strict:
                raise error
            self._fail(error)

    @contextmanager
    def _others_informed(self) -> Iterator[None]:
        """After this block the other processes know at which step they are needed next; after an error, that they are not."""
        shards = self._shards
        try:
            yield
        except BaseException:
            if shards is not None:
                shards.meetings.stop("an error")
            raise
        if shards is not None:
            shards.meetings.announce(None if self._session is None else self._session.next_meeting())

    def _step_together(self, step: Any, scalars: Mapping[str, Any]) -> None:
        """One step of a sharded model: all processes gather it if a measurement may be due, and the first one measures."""
        shards = self._shards
        assert shards is not None
        try:
            met = shards.meet(parse_step(step))
        except Exception as error:
            shards.meetings.stop(str(error))
            if self.strict:
                raise
            self._fail(error)
            return
        if shards.meetings.stopped is not None:
            self._stop_together(shards)
        elif shards.is_first:
            self._run_guarded(lambda session: session.step(step, scalars))
            if self._failed is not None:
                shards.meetings.stop(self._failed)
            elif met and self._session is not None:
                shards.meetings.announce(self._session.next_meeting())

    # --- inside ------------------------------------------------------------------------------------------------

    def _run_guarded(self, do: Callable[[Session], None]) -> None:
        """Run a part of the session; an error in it stops the scope, not the user's training, unless ``strict``."""
        session = self._session
        if session is None or session.finished or session.measuring or self._failed is not None:
            return  # while measuring, hooks of the model itself may report a step
        try:
            do(session)
        except Exception as error:
            if self.strict:
                raise
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Measure no more, say why in one warning, and mark the run failed."""
        self._failed = f"{type(error).__name__}: {error}".splitlines()[0]
        warn(f"the scope stopped measuring; training goes on. {self._failed}")
        if self._session is not None:
            _close_failed(self._session, error)

    def _finish(self, error: BaseException | None) -> None:
        shards = self._shards
        if shards is not None and shards.meetings.stopped is None:
            try:
                if error is None:
                    shards.meet()
            except Exception as trouble:  # a process died: what was measured before is kept
                warn(f"the last step could not be measured: {trouble}")
            shards.meetings.stop("finished")
        self._run_guarded(lambda session: session.finish(error))

    def _number_lines(self) -> list[str]:
        """Lines of text: every number at its first and last measurement, what is left out and why, and what measuring cost."""
        history, lines = self.history, [repr(self)]
        names = [name for name in history.scalars if "@" not in name and name not in ("overhead", "step_shift")]
        width = max((len(name) for name in names), default=0)
        lines += [f"  {'':<{width}}  {'first':>11}  {'last':>11}"] if names else []
        lines += [f"  {name:<{width}}  {history.first(name):>11.4g}  {history.last(name):>11.4g}" for name in names]
        lines += [f"  no {quantity}: {why}" for quantity, why in history.left_out.items()]
        return [*lines, f"  {_cost_text(self.overhead())}"] if self.overhead() else lines


def _cost_text(cost: Mapping[str, Any]) -> str:
    """A sentence on what measuring cost: as a share, or beside the time that is always allowed if that was the limit."""
    spent, trained, always = cost["seconds_measuring"], cost["seconds_training"], cost["seconds_always_allowed"]
    said = f"Measuring took {spent:.2f} s beside {trained:.2f} s of training"
    if cost["budget"] * trained < always:
        said += f" (up to {'one second' if always == 1 else f'{always:.2g} s'} in all is always allowed)"
    else:
        said += f", {100 * cost['share']:.1f} % of it"
    return f"{said}; the first measurement, before training, took {cost['seconds_at_construction']:.2f} s."


class ScopeCopy(Scope):
    """A copy or a pickle of a scope: it holds the history and measures no more, since two scopes must not write one run."""

    def __init__(self, history: History) -> None:
        self.model, self.strict = nn.Identity(), False
        self._session, self._shards, self._failed = None, None, "a copy, which does not measure"
        self._twin = None
        self._history = history

    @property
    def history(self) -> History:
        return self._history


def _finish_session(session: Session) -> None:
    """Finish an open session when its scope is deleted or Python ends.

    The run is failed if an error ended Python, interrupted if Ctrl-C did.
    """
    by_itself = _python_is_ending.is_set() and not hasattr(sys, "ps1")  # a prompt keeps its last error for ever
    try:
        session.finish(getattr(sys, "last_value", None) if by_itself else None)
    except Exception as trouble:
        warn(f"the scope could not finish: {trouble}")
        _close_failed(session, trouble)


_python_is_ending = threading.Event()


@cache
def _watch_for_exit() -> None:
    """Note when Python ends. Functions of atexit run last in, first out: registered after the finalizers, this runs first."""
    atexit.register(_python_is_ending.set)


def _close_failed(session: Session, error: Exception) -> None:
    """Mark the run failed and close it; give up if that fails too."""
    try:
        session.finish(error)
    except (StoreError, OSError):
        session.finished = True
