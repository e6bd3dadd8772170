"""Strict in tests only: shapes and types of every annotated function are checked while testing."""

from jaxtyping import install_import_hook

install_import_hook("unlazy", "strict.typechecker")
