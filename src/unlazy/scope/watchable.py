"""Which models can be watched; the others are refused before training, in words."""

from __future__ import annotations

from torch import nn

from unlazy.kernels.gated import is_stack
from unlazy.runtime import require


def check_model(model: nn.Module) -> None:
    """Whole real parameters with known shapes, some of which train, of one network."""
    require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}.")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    require(not lazy, f"{', '.join(lazy)} have no shape yet; call the model once before you make the scope.")
    complex_ones = [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]
    require(not complex_ones, f"{', '.join(complex_ones[:3])}: tangents by complex parameters are not defined here.")
    some = any(p.requires_grad and p.is_floating_point() for p in model.parameters())
    require(some, "the model has no trainable parameters, so there is no training to watch.")
    sharded = type(model).__name__ in ("FullyShardedDataParallel", "FSDPModule")
    require(not sharded, "a sharded model has no whole parameters on any process; watch an unsharded copy.")
    require(not is_stack(model), "a scope of a stack needs its measures named.")
