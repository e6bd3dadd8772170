"""Is my network lazy? Three lines around a plain training loop, on scikit-learn's digits.

python examples/digits.py            # the usual start
python examples/digits.py 100        # the same network, its output scaled up 100 times: the weights hardly need to move
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss, one_hot

import unlazy as ul


class Scaled(nn.Module):
    """A network minus its start, times a factor: the larger the factor, the closer to its linearisation it stays."""

    def __init__(self, body: nn.Module, factor: float) -> None:
        super().__init__()
        self.body, self.start, self.factor = body, copy.deepcopy(body).requires_grad_(False), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (self.body(x) - self.start(x))


def main(factor: float = 1.0, steps: int = 600, run: str | None = None) -> ul.Verdict:
    torch.manual_seed(0)
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x, y = pixels.float() / 16, one_hot(digits).float()
    body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = Scaled(body, factor)
    optimiser = torch.optim.SGD(model.body.parameters(), lr=0.5 / factor**2, momentum=0.9)

    scope = ul.Scope(model, probe=(x[:256], y[:256]), run=run, steps=steps)  # 1: what to look at
    for step in range(1, steps + 1):
        batch = torch.randint(len(x), (128,))
        loss = mse_loss(model(x[batch]), y[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        scope.step(step, batch_loss=loss)  # 2: tell it that time passes
    scope.finish()
    return scope.verdict()  # 3: ask


if __name__ == "__main__":
    print(main(*map(float, sys.argv[1:])))
