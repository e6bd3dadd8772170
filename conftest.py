"""Strict in tests only: shapes and types of every annotated function are checked while testing."""

from importlib.util import find_spec

import torch
from jaxtyping import install_import_hook

# not cli: typer's own
ROOMS = "runtime store data models kernels probes theory scope training claims plots bench studies studio"
install_import_hook([f"unlazy.{room}" for room in ROOMS.split()], "strict.typechecker")
torch.set_num_threads(1)  # several test processes share the cores

# Adapters import their framework; where it is not installed there is nothing to collect.
FRAMEWORKS = {"lightning": "lightning", "huggingface": "transformers", "skorch": "skorch"}
collect_ignore = [
    f"src/unlazy/scope/adapters/{name}.py" for name, module in FRAMEWORKS.items() if not find_spec(module)
]
