"""The study ``table1``."""

from __future__ import annotations

from functools import partial

from unlazy.studies.halfspace.tables.claims import claims
from unlazy.studies.halfspace.tables.study import reproduce_table

__all__ = ["claims", "reproduce"]

reproduce = partial(reproduce_table, 1)
