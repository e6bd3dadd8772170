"""Strict in tests only: shapes and types of every annotated function are checked while testing."""

import torch
from jaxtyping import install_import_hook

ROOMS = "runtime store data models kernels probes scope training claims plots studies studio"  # not cli: typer's own
install_import_hook([f"unlazy.{room}" for room in ROOMS.split()], "strict.typechecker")
torch.set_num_threads(1)  # several test processes share the cores
