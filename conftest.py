"""Strict in tests only: shapes and types of every annotated function are checked while testing."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from _pytest.doctest import DoctestItem
from jaxtyping import install_import_hook

import unlazy

# not cli: typer's own; of the estimators not the classes themselves: scikit-learn wants arguments checked in fit, not before
ROOMS = "runtime store data models kernels probes theory scope training claims plots bench widths studies studio"
PARTS = "path_sum trainer explanations distillation flips exports drawing"
CHECKED = [*ROOMS.split(), *(f"estimators.{part}" for part in PARTS.split())]
install_import_hook([f"unlazy.{name}" for name in CHECKED], "strict.typechecker")
torch.set_num_threads(1)  # several test processes share the cores

# Adapters import their framework; where it is not installed there is nothing to collect.
FRAMEWORKS = {"lightning": "lightning", "huggingface": "transformers", "skorch": "skorch"}
collect_ignore = [
    f"src/unlazy/scope/adapters/{name}.py" for name, module in FRAMEWORKS.items() if not find_spec(module)
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Doctests of names that were loaded as ``unlazy.NAME`` are collected there: they see the file that defines them."""
    for item in items:
        name = item.name.removeprefix("unlazy.")
        if isinstance(item, DoctestItem) and name in unlazy._HOME:
            assert item.dtest is not None
            item.dtest.globs.update(vars(import_module(f"unlazy.{unlazy._HOME[name]}")))
