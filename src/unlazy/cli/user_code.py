"""Names in the user's own Python files, such as ``mine:Net``. To look one up runs the file, as importing it does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from unlazy.runtime import InputError


def find_object(module: str, name: str) -> Any:
    """What a module holds under a name; modules in the current folder are found too. Imports the module, so its code runs."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        where = "mine:Net means Net in mine.py of this folder, or in an installed package mine"
        raise InputError(f"{module}:{name}: {error}; {where}.") from error
