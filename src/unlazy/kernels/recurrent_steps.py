"""Recurrent layers step by step, by elementary operations: the fused functions of torch hide what each step reads.

Each function takes ``linear``, the product to use, and the arguments of the fused one (``torch.lstm`` and so on), and returns
the same; ``None`` for packed sequences and for dropout, which it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
States = tuple[Tensor, ...]
ARGUMENTS = 9  # input, state, weights, biases or not, layers, dropout, training, both ways, batch first
Cell = Callable[[Tensor, Tensor, States], States]  # of the input, of the state, state before -> state after


def lstm_cell(entered: Tensor, fed_back: Tensor, state: States) -> States:
    """One step of an LSTM: output and memory."""
    i, f, g, o = (entered + fed_back).chunk(4, -1)
    memory = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(memory), memory


def gru_cell(entered: Tensor, fed_back: Tensor, state: States) -> States:
    """One step of a GRU."""
    (r, z, n), (hr, hz, hn) = entered.chunk(3, -1), fed_back.chunk(3, -1)
    reset, update = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    new = torch.tanh(n + reset * hn)
    return (new + update * (state[0] - new),)


def plain_cell(function: Callable[[Tensor], Tensor], entered: Tensor, fed_back: Tensor, state: States) -> States:
    """One step of a plain recurrent layer."""
    return (function(entered + fed_back),)


def run_steps(cell: Cell, linear: Product, *arguments: Any) -> tuple[Tensor, ...] | None:
    """All layers and directions: the outputs of the last layer, then the last states."""
    if len(arguments) != ARGUMENTS or not isinstance(arguments[2], list):
        return None
    x, start, weights, has_biases, layers, dropout, train, both_ways, batch_first = arguments
    if train and dropout > 0:
        return None
    starts = (start,) if isinstance(start, Tensor) else tuple(start)
    ways = 2 if both_ways else 1
    each = len(weights) // (layers * ways)
    h = x if batch_first else x.transpose(0, 1)  # [n, t, d]
    last: list[States] = []
    for layer in range(layers):
        found = []
        for way in range(ways):
            number = layer * ways + way
            own = weights[each * number : each * (number + 1)]
            into, back, *further = own
            biases = further[:2] if has_biases else [None, None]
            narrow = further[-1] if len(further) > (2 if has_biases else 0) else None  # LSTM with projections
            entered = linear(h, into, biases[0]).unbind(1)
            state, outs = tuple(part[number] for part in starts), []
            for step in reversed(entered) if way else entered:
                state = cell(step, linear(state[0], back, biases[1]), state)
                if narrow is not None:
                    state = (linear(state[0], narrow, None), *state[1:])
                outs.append(state[0])
            found.append(torch.stack(outs[::-1] if way else outs, dim=1))
            last.append(state)
        h = found[0] if ways == 1 else torch.cat(found, dim=-1)
    return (h if batch_first else h.transpose(0, 1), *(torch.stack(part) for part in zip(*last, strict=True)))


STEPS: dict[str, Callable[..., tuple[Tensor, ...] | None]] = {
    "lstm": partial(run_steps, lstm_cell),
    "gru": partial(run_steps, gru_cell),
    "rnn_tanh": partial(run_steps, partial(plain_cell, torch.tanh)),
    "rnn_relu": partial(run_steps, partial(plain_cell, torch.relu)),
}
