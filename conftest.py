"""Strict in tests only: shapes and types of every annotated function are checked while testing."""

import torch
from jaxtyping import install_import_hook

# not cli: typer's own
ROOMS = "runtime store data models kernels probes theory scope training claims plots bench studies studio"
install_import_hook([f"unlazy.{room}" for room in ROOMS.split()], "strict.typechecker")
torch.set_num_threads(1)  # several test processes share the cores
