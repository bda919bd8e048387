"""Tensors joined with others, and repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.ops.operator import operator
from npusim.ops.refusal import refusal
from npusim.ops.shapes import with_dim, wrap
from npusim.torch_backend.tensors import new_like


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat([tensor for tensor in tensors if tensor.shape != (0,)] or list(tensors), dim)


@operator("aten::cat", computes=_cat)
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors one after another; types are promoted."""
    parts = [tensor for tensor in tensors if tensor.shape != (0,)] or list(tensors)[:1]
    first = parts[0]
    dim = wrap(dim, first.dim())
    total = 0
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    for number, part in enumerate(parts):
        _fits(first, part, dim, number)
        total += part.shape[dim] if part.dim() else 1
    return new_like(first, with_dim(first.shape, dim, total), dtype)


def _fits(first: Tensor, part: Tensor, dim: int, number: int) -> None:
    if part.dim() != first.dim():
        raise RuntimeError(f"Tensors must have same number of dimensions: got {first.dim()} and {part.dim()}")
    for axis, (expected, found) in enumerate(zip(first.shape, part.shape, strict=True)):
        if axis != dim and expected != found:
            raise RuntimeError(
                f"Sizes of tensors must match except in dimension {dim}. Expected size {expected} but got size {found} "
                f"for tensor number {number} in the list."
            )


@operator("aten::stack")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors side by side along a new dimension."""
    first = tensors[0]
    dtype = first.dtype
    for number, tensor in enumerate(tensors):
        dtype = torch.promote_types(dtype, tensor.dtype)
        if tensor.shape != first.shape:
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(first.shape)} at entry 0 and "
                f"{list(tensor.shape)} at entry {number}"
            )
    dim = wrap(dim, first.dim() + 1)
    return new_like(first, (*first.shape[:dim], len(tensors), *first.shape[dim:]), dtype)


@operator("aten::repeat")
def repeat(self: Tensor, repeats: Sequence[int]) -> Tensor:
    """The whole tensor several times in each dimension."""
    if len(repeats) < self.dim():
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    padded = (*(1,) * (len(repeats) - self.dim()), *self.shape)
    return new_like(self, tuple(count * extent for count, extent in zip(repeats, padded, strict=True)))


@operator("aten::repeat_interleave.self_int")
def repeat_interleave_int(
    self: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each slice several times."""
    if dim is None:
        return new_like(self, (self.numel() * repeats,))
    return new_like(self, with_dim(self.shape, dim, self.shape[dim] * repeats))


def _repeat_interleave(self: Tensor, repeats: Tensor, dim: int | None = None, **_: Any) -> Tensor:
    return torch.repeat_interleave(self, repeats.long(), dim)


@operator("aten::repeat_interleave.self_Tensor", computes=_repeat_interleave)
def repeat_interleave_tensor(
    self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each slice as often as a number says; without ``output_size`` their sum is read, which waits for the device."""
    extent = self.numel() if dim is None else self.shape[dim]
    if repeats.dim() > 1 or (repeats.dim() == 1 and repeats.shape[0] not in (1, extent)):
        raise refusal("repeats must have the same size as input along dim")
    total = output_size or int(repeats.sum().item()) * (extent if repeats.numel() == 1 else 1)
    return new_like(self, (total,) if dim is None else with_dim(self.shape, dim, total))


@operator("aten::repeat_interleave.Tensor", computes=lambda repeats, **_: torch.repeat_interleave(repeats.long()))
def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """The number of each entry as often as it says."""
    ends = repeats.cumsum(0)
    total = int(ends[-1].item()) if output_size is None else output_size
    return new_like(repeats, (total,))
