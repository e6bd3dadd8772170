"""Fine-tuning by hand: adapters of rank 4 (LoRA) beside a frozen body, and the body itself from the middle of training on.

python examples/fine_tuning.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlazy as ul


class Adapted(nn.Module):
    """A frozen dense layer plus a trained product of two thin matrices, which is 0 at first."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def train(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, scope: ul.Scope | None = None, unfreeze_at: int = 0
) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        if step == unfreeze_at:
            model.requires_grad_(True)
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()
        if scope is not None:
            scope.step(step)


def main(steps: int = 300, run: str | None = None) -> ul.Verdict:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    train(body, x, (x[:, 0] > 0).long(), steps)  # the pretrained model; yours comes from a checkpoint

    model = nn.Sequential(Adapted(body[0]), nn.ReLU(), Adapted(body[2]), nn.ReLU(), nn.Linear(64, 2))
    new_task = (x[:, 1] * x[:, 2] > 0).long()
    with ul.Scope(model, probe=(x[:128], new_task[:128]), run=run, steps=steps) as scope:
        train(model, x, new_task, steps, scope, unfreeze_at=steps // 2)
    return scope.verdict()


if __name__ == "__main__":
    print(main())
