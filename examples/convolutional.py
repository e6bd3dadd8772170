"""A small convolutional net on the digits: which classes get its paths and its kernel, and which are starved?

python examples/convolutional.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import unlazy as ul


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def main(steps: int = 400, run: str | None = None) -> ul.Verdict:
    torch.manual_seed(0)
    pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = pixels.float().reshape(-1, 1, 8, 8) / 16
    often = digits != 8  # the eights are rare in training: one in twenty of them is kept
    kept = torch.nonzero(often | (torch.rand(len(digits)) < 0.05))[:, 0]
    model = network()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with ul.Scope(model, probe=(images[:256], digits[:256]), run=run, steps=steps) as scope:
        for step in range(1, steps + 1):
            batch = kept[torch.randint(len(kept), (64,))]
            loss = cross_entropy(model(images[batch]), digits[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            scope.step(step, batch_loss=loss)
    return scope.verdict()


if __name__ == "__main__":
    print(main())
