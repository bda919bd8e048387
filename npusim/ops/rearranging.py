"""Elements in another order, or with others around them; each into new memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.ops.aclop import copy_parts
from npusim.ops.operator import IN_BODY, operator
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like


@operator("aten::roll")
def roll(self: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Elements shifted along dimensions, around their ends."""
    return new_like(self, self.shape)


@operator("aten::flip")
def flip(self: Tensor, dims: Sequence[int]) -> Tensor:
    """Elements in reverse order along dimensions."""
    return new_like(self, self.shape)


@operator("aten::tril")
def tril(self: Tensor, diagonal: int = 0) -> Tensor:
    """What stands on and below a diagonal; zeros above it."""
    return new_like(self, self.shape)


@operator("aten::triu")
def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    """What stands on and above a diagonal; zeros below it."""
    return new_like(self, self.shape)


def _one_hot(self: Tensor, num_classes: int) -> Tensor:
    return torch.nn.functional.one_hot(self.long(), num_classes).to(self.dtype)


@operator("aten::one_hot", computes=IN_BODY)
def one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """One element of each row is 1. Two numbers are made on the device first."""
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    on, off = new_like(self, ()), new_like(self, ())
    result = new_like(self, (*self.shape, num_classes))
    platform().values.compute((result,), (self,), lambda host: _one_hot(host, num_classes))
    del on, off
    return result


def _filled_from(self: Tensor, size: Sequence[int]) -> Tensor:
    result = new_like(self, tuple(size))
    copy_parts(self)
    return result


def _sliced(self: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    return self[tuple(slice(start, start + extent) for start, extent in zip(offsets, size, strict=True))].contiguous()


@operator("npu::npu_slice", computes=_sliced)
def npu_slice(self: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    """A copy of a part."""
    return _filled_from(self, size)


def _broadcast(self: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    return self.expand(tuple(size)).contiguous()


@operator("npu::npu_broadcast", computes=_broadcast)
def npu_broadcast(self: Tensor, size: Sequence[int]) -> Tensor:
    """A copy of the tensor for each place along new or longer dimensions."""
    return _filled_from(self, size)
