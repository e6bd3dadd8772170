"""A scope inside skorch's ``NeuralNet``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unlazy.scope.run_origin import add_config
from unlazy.scope.scope import Scope
from unlazy.scope.sinks import MissingFrameworkError

try:
    from skorch import NeuralNet
    from skorch.callbacks import Callback
except ImportError as error:
    raise MissingFrameworkError("skorch", "skorch", error) from error


class ScopeCallback(Callback):
    """``NeuralNetClassifier(..., callbacks=[("scope", ScopeCallback(probe=(x, y), run="runs/mine"))])``.

    Every ``fit`` is a run of its own, in ``fit-0001``, ``fit-0002``, ... below ``run``: a grid search fits many times;
    ``callback.scope_`` is the scope of the last one.
    ``options`` go to ``Scope``; they are one argument because scikit-learn copies callbacks by the names of their arguments.
    ``steps`` is ``max_epochs`` times the batches of an epoch unless given, and ``config`` also gets the parameters of the net.
    """

    def __init__(self, probe: Any, run: str | Path | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.probe, self.run, self.options = probe, run, options
        self.scope_: Scope | None = None
        self.steps_ = 0

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **more: Any) -> None:  # noqa: N803
        self.steps_, self.scope_ = 0, None

    def on_epoch_begin(self, net: NeuralNet, dataset_train: Any = None, **more: Any) -> None:
        if self.scope_ is None:  # the first epoch: only now skorch has split the data, so that batches can be counted
            folder = None if self.run is None else _next_folder(Path(self.run))
            known = _count_steps(net, dataset_train)
            options = add_config(self.options or {}, _settings(net))
            self.scope_ = Scope(net.module_, self.probe, folder, **{**known, **options})

    def on_batch_end(self, net: NeuralNet, batch: Any = None, training: bool | None = None, **more: Any) -> None:
        if training and self.scope_ is not None:
            self.steps_ += 1
            loss = more.get("loss")
            self.scope_.step(self.steps_, **({} if loss is None else {"batch_loss": loss}))

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **more: Any) -> None:  # noqa: N803
        if self.scope_ is not None:
            self.scope_.finish()


def _count_steps(net: NeuralNet, dataset_train: Any) -> dict[str, int]:
    """``{"steps": epochs x batches}``, empty if the batches cannot be counted."""
    try:
        batches = len(net.get_iterator(dataset_train, training=True))
    except TypeError:  # a stream of samples has no length
        return {}
    return {"steps": net.max_epochs * batches} if batches > 0 else {}


def _settings(net: NeuralNet) -> dict[str, Any]:
    """The parameters of the net that are numbers, texts or classes."""
    parameters = net.get_params(deep=False)
    return {name: value for name, value in parameters.items() if isinstance(value, bool | int | float | str | type)}


def _next_folder(run: Path) -> Path:
    """The first of ``fit-0001``, ``fit-0002``, ... that is not there yet."""
    number = 1
    while (folder := run / f"fit-{number:04d}").exists():
        number += 1
    return folder
