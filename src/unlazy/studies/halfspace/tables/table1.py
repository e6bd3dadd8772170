"""The study ``table1``."""

from __future__ import annotations

from functools import partial

from unlazy.studies.halfspace.tables.study import reproduce_table

reproduce = partial(reproduce_table, 1)
