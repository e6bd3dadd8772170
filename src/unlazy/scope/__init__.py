"""Watch a training: the scope, its measurements and schedule, the verdict, adapters for other loops, sinks."""

from unlazy.checks import explain_errors
from unlazy.scope.history import History
from unlazy.scope.sinks import MLflowSink, TensorBoardSink, WandbSink
from unlazy.scope.verdict import Evidence

__all__ = ["Evidence", "History", "MLflowSink", "TensorBoardSink", "WandbSink"]

explain_errors(globals())
