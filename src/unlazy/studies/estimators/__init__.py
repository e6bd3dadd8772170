"""Studies of the estimators for tables."""
