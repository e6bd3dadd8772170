"""A small transformer on text made on the spot: after "7+5=" comes "2" (the last digit of the sum).

python examples/transformer.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlazy as ul

LETTERS = "0123456789+="


class Adder(nn.Module):
    """Reads four letters, says the next one."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Parameter(torch.randn(4, width) / 10)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.body(self.letters(text) + self.places)[:, -1])


def sums() -> tuple[Tensor, Tensor]:
    """All hundred sums as letters, and the last digit of each."""
    pairs = [(first, second) for first in range(10) for second in range(10)]
    text = [[LETTERS.index(letter) for letter in f"{first}+{second}="] for first, second in pairs]
    return torch.tensor(text), torch.tensor([(first + second) % 10 for first, second in pairs])


def main(steps: int = 400, run: str | None = None) -> ul.Verdict:
    torch.manual_seed(0)
    text, answer = sums()
    model = Adder()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with ul.Scope(model, probe=(text, answer), run=run, steps=steps) as scope:
        for step in range(1, steps + 1):
            batch = torch.randint(len(text), (64,))
            loss = cross_entropy(model(text[batch]), answer[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            scope.step(step, batch_loss=loss)
    return scope.verdict()


if __name__ == "__main__":
    print(main())
