"""The run-time type checker of the tests: shapes and types, an int passing for a float."""

from beartype import BeartypeConf, beartype

typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
