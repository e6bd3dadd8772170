"""How estimators read tables: rows as finite arrays, errors that name the column."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import issparse
from sklearn.utils.validation import validate_data

from unlazy.runtime import InputError


class NamedColumns:
    """Checks of rows for an estimator; columns have the names of a frame, or x0, x1, ..."""

    def _check_rows(self, X: Any, y: Any = "no_validation", *, reset: bool = False, **checks: Any) -> Any:
        """Rows (and targets) as finite arrays; an error names the columns that hold NaN or infinity."""
        if issparse(X):
            raise TypeError(
                f"Sparse data was passed for X: a {type(X).__name__} of shape {X.shape}. Dense rows are expected, because every "
                "half-space weighs all columns; pass X.toarray(), or reduce the columns first, for example with "
                "sklearn.decomposition.TruncatedSVD in a pipeline."
            )
        found = validate_data(self, X, y, reset=reset, dtype=np.float64, ensure_all_finite=False, **checks)
        x = found[0] if isinstance(found, tuple) else found
        finite = np.isfinite(x)
        if not finite.all():
            columns = np.flatnonzero(~finite.all(0))
            names = ", ".join(str(self._column_name(column)) for column in columns[:5])
            kind = "NaN" if np.isnan(x).any() else "infinity"
            raise InputError(
                f"Input X contains {kind} in column {names}; fill or drop such values first, for example with "
                "sklearn.impute.SimpleImputer in a pipeline."
            )
        return found

    def _column_name(self, column: int) -> str:
        names = getattr(self, "feature_names_in_", None)
        return f"x{column}" if names is None else str(names[column])
