"""Gradients of convolutions: from an input and the gradient at the output to explicit rows, whole or tap by tap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
GROUPED_ENTRIES = 2**20  # numbers of one batched product of grouped filters, so that they stay in the cache
Buffer = Callable[..., Tensor]  # of ``tangent_blocks.Buffers``


@dataclass(frozen=True)
class Windows:
    """A convolution's calls: padded inputs ``[n, c, ...]`` and, per call and direction, gradients ``[n, m, ...]``.

    The explicit gradient of a wide layer is far larger than these: then rows are made while pairing, one tap of the filter at
    a time, and never held.
    """

    module: Convolution
    inputs: tuple[Tensor, ...]
    gradients: tuple[tuple[Tensor, ...], ...]

    @property
    def directions(self) -> int:
        """How many output directions there are."""
        return len(self.gradients[0])

    def tensors(self) -> list[Tensor]:
        """The tensors of the share; samples along the first axis."""
        return [*self.inputs, *(gradient for call in self.gradients for gradient in call)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Windows:
        """The same share with other tensors."""
        calls, k = len(self.inputs), self.directions
        found = [tuple(tensors[calls + k * call : calls + k * (call + 1)]) for call in range(calls)]
        return Windows(self.module, tuple(tensors[:calls]), tuple(found))

    @property
    def row_shape(self) -> tuple[int, int]:
        """Directions, numbers per gradient."""
        return self.directions, self.module.weight.numel()

    def rows_are_small(self) -> bool:
        """Whether explicit rows take little more room than what they are made of."""
        held = sum(tensor[0].numel() for tensor in self.tensors())
        return self.module.groups > 1 or math.prod(self.row_shape) <= 2 * held

    def rows(self) -> Float[Tensor, "n k p"]:
        """Explicit gradients."""
        made = self.inputs[0].new_empty(len(self.inputs[0]), *self.row_shape)
        self.write_rows(made)
        return made

    def write_rows(self, out: Float[Tensor, "n k p"]) -> None:
        """Explicit gradients, one sample at a time.

        A sample's patches and gradients fit the cache: copying them into reused buffers and multiplying there is twice as
        fast as unfolding the whole batch. (Devices with many processors get the whole batch.)
        """
        if out.is_cuda:
            self._write_batch(out)
            return
        if self.module.groups > 1 or self.gradients[0][0].is_contiguous():
            self._write_groups(out)
            return
        module, k = self.module, self.directions
        n, c, m, taps = len(self.inputs[0]), module.in_channels, module.out_channels, math.prod(module.kernel_size)
        rows = out.view(n, k * m, taps * c)
        for number, (entered, gradients) in enumerate(zip(self.inputs, self.gradients, strict=True)):
            seen = window_view(entered, module)  # [n, ..., taps..., channels], a view
            sizes, kernel = seen.shape[1 : 1 + len(module.kernel_size)], module.kernel_size
            gathered_patches = rows.new_empty(*sizes, *kernel, c)
            gathered = rows.new_empty(math.prod(sizes), k, m)
            channels_last = [g.movedim(1, -1).reshape(n, -1, m) for g in gradients]
            for i in range(n):
                gathered_patches.copy_(seen[i])
                for direction, g in enumerate(channels_last):
                    gathered[:, direction] = g[i]
                left, right = gathered.view(-1, k * m).T, gathered_patches.view(-1, taps * c)
                if number == 0:
                    torch.mm(left, right, out=rows[i])
                else:
                    rows[i].addmm_(left, right)

    def _write_groups(self, out: Float[Tensor, "n k p"]) -> None:
        """Explicit gradients where positions are innermost: one batched product for all groups of a few samples.

        The windows of a channel are copied in long pieces. Columns stand in the same order as in :meth:`write_rows`.
        """
        module, k, n, groups = self.module, self.directions, len(self.inputs[0]), self.module.groups
        c, m, taps = module.in_channels // groups, module.out_channels // groups, math.prod(module.kernel_size)
        rows = out.view(n, k, groups, m, taps * c)
        for number, (entered, gradients) in enumerate(zip(self.inputs, self.gradients, strict=True)):
            t = math.prod(gradients[0].shape[2:])
            some = max(1, GROUPED_ENTRIES // (t * groups * max(taps * c, k * m)))
            for start in range(0, n, some):
                part = slice(start, min(start + some, n))
                size = part.stop - start
                windows = channel_windows(entered[part], module).unflatten(1, (groups, c))
                windows = windows.movedim(2, 2 + len(module.kernel_size)).reshape(size * groups, taps * c, t)
                found = rows.new_empty(size, groups, k, m, t)
                for direction, g in enumerate(gradients):
                    found[:, :, direction] = g[part].reshape(size, groups, m, t)
                made = torch.bmm(found.view(size * groups, k * m, t), windows.mT)
                made = made.view(size, groups, k, m, taps * c).transpose(1, 2)
                if number == 0:
                    rows[part] = made
                else:
                    rows[part] += made

    def _write_batch(self, out: Float[Tensor, "n k p"]) -> None:
        module, k, n = self.module, self.directions, len(self.inputs[0])
        groups = module.groups
        c, m = module.in_channels // groups, module.out_channels // groups
        total: Tensor | None = None
        for entered, gradients in zip(self.inputs, self.gradients, strict=True):
            seen = patch_matrix(entered, module).unflatten(-1, (-1, groups, c))  # [n, t, taps, groups, c]
            g = torch.stack([part.movedim(1, -1).reshape(n, -1, groups, m) for part in gradients], dim=1)
            found = torch.einsum("nktgm,ntsgc->nkgmsc", g, seen)
            total = found if total is None else total + found
        assert total is not None
        out.copy_(total.reshape(n, k, -1))

    def tap_rows(self, buffer: Buffer, side: str) -> Iterator[Float[Tensor, "n km c"]]:
        """The part of the gradient that belongs to one tap of the filter, tap after tap, in a reused buffer."""
        module, n, k = self.module, len(self.inputs[0]), self.directions
        assert module.groups == 1, "the taps of grouped filters are not one product; pair their rows"
        m, c = module.out_channels, module.in_channels
        rows = buffer(f"rows {side}", self.inputs[0], n, k * m * c).view(n, k * m, c)
        seen, gathered, shifted = [], [], []
        for number, (entered, gradients) in enumerate(zip(self.inputs, self.gradients, strict=True)):
            view = window_view(entered, module)
            t = math.prod(view.shape[1 : 1 + len(module.kernel_size)])
            together = buffer(f"gradients {side} {number}", entered, n, t * k * m).view(n, t, k, m)
            for direction, g in enumerate(gradients):
                together[:, :, direction] = g.movedim(1, -1).reshape(n, t, m)
            seen.append(view.flatten(1 + len(module.kernel_size), -2))  # [n, positions..., taps, c]
            gathered.append(together.view(n, t, k * m))
            shifted.append(buffer(f"shifted {side} {number}", entered, n, t * c).view(n, t, c))
        for tap in range(math.prod(module.kernel_size)):
            for number, view in enumerate(seen):
                shifted[number].view(*view.shape[:-2], c).copy_(view[..., tap, :])
                if number == 0:
                    torch.bmm(gathered[number].mT, shifted[number], out=rows)
                else:
                    rows.baddbmm_(gathered[number].mT, shifted[number])
            yield rows


def pad_input(module: Convolution, x: Tensor) -> Tensor:
    """The input with the padding of the convolution."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    room = module._reversed_padding_repeated_twice
    return F.pad(x, list(room), mode=mode) if any(room) else x


def window_view(x: Tensor, module: Any) -> Tensor:
    """All windows of ``x [n, c, ...]`` as a view ``[n, positions..., taps..., c]``: nothing is copied but the layout."""
    x = x.movedim(1, -1).contiguous()  # free where x is channels-last already
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    axes = range(len(kernel))
    sizes = [(x.shape[1 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in axes]
    steps = x.stride()
    strides = [steps[0], *(steps[1 + i] * stride[i] for i in axes), *(steps[1 + i] * dilation[i] for i in axes), 1]
    return x.as_strided([x.shape[0], *sizes, *kernel, x.shape[-1]], strides)


def channel_windows(x: Tensor, module: Any) -> Tensor:
    """All windows of ``x [n, c, ...]`` as a view ``[n, c, taps..., positions...]``."""
    x = x.contiguous()
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    axes = range(len(kernel))
    sizes = [(x.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in axes]
    steps = x.stride()
    strides = [*steps[:2], *(steps[2 + i] * dilation[i] for i in axes), *(steps[2 + i] * stride[i] for i in axes)]
    return x.as_strided([*x.shape[:2], *kernel, *sizes], strides)


def patch_matrix(x: Tensor, module: Any) -> Float[Tensor, "n t d"]:
    """The windows as a matrix ``[n, positions, taps * c]``."""
    return window_view(x, module).reshape(x.shape[0], -1, math.prod(module.kernel_size) * x.shape[1])
