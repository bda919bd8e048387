"""Selection and placement of elements by tensors of numbers; int32 ones are taken as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.operator import IN_BODY, Hosts, operator
from npusim.ops.refusal import INVALID_TYPE, refusal, type_name
from npusim.ops.shapes import Number, broadcast, with_dim
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like


@operator("aten::index_select", computes=lambda self, dim, index: self.index_select(dim, index.flatten()))
def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows, or other slices, by their numbers."""
    if index.dim() > 1:
        raise UnmodelledCallError("index_select with an index of more than one dimension")
    return new_like(self, with_dim(self.shape, dim, index.numel()) if self.dim() else ())


def _embedding(weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    return torch.nn.functional.embedding(indices, weight)


@operator("aten::embedding", computes=_embedding)
def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows by their numbers."""
    return new_like(weight, (*indices.shape, weight.shape[-1]))


def _gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    return self.gather(dim, index.long())


@operator("aten::gather", computes=_gather)
def gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """One element for each index."""
    return new_like(self, index.shape)


# ---- placement


def _index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return self.clone().index_copy_(dim, index.flatten().long(), source)


@operator("aten::index_copy_", computes=_index_copy, writes=["self"])
def index_copy_(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Slices into their places."""
    return self


@operator("aten::index_add_", writes=["self"], hosts=Hosts.TAKEN)
def index_add_(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    """Slices added in their places."""
    _check_index_add(self, dim, index, source)
    return self


def _check_index_add(self: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    if any(tensor.is_cpu for tensor in (self, index, source)):
        raise RuntimeError(
            f"index_add_(): self, index and source expected to be in the same device, but got (self) {self.device}, "
            f"(index) {index.device}, and (source) {source.device}"
        )
    if index.dim() > 1:
        raise IndexError(
            f"index_add_(): Index is supposed to be a vector, but got dim: {index.dim()} with type: "
            f"{type_name(index.dtype)} and size: {list(index.shape)}"
        )
    if self.dtype != source.dtype:
        raise RuntimeError(
            f"index_add_(): self ({type_name(self.dtype)}) and source ({type_name(source.dtype)}) must "
            "have the same scalar type"
        )
    rows = source.shape[dim] if source.dim() else 1
    if index.numel() != rows:
        raise RuntimeError(
            f"index_add_(): Number of indices ({index.numel()}) should be equal to source.size(dim): ({rows}), for "
            f"dim: {dim}"
        )
    if source.dim() and with_dim(self.shape, dim, 0) != with_dim(source.shape, dim, 0):
        raise RuntimeError(
            "source tensor shape must match self tensor shape, excluding the specified dimension. Got self.shape = "
            f"{list(self.shape)} source.shape = {list(source.shape)}"
        )


@operator("aten::index_fill_.int_Scalar", writes=["self"], hosts=Hosts.NUMBERS)
def index_fill_(self: Tensor, dim: int, index: Tensor, value: Number) -> Tensor:
    """One number into some slices."""
    return self


def _scatter(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return self.scatter(dim, index.long(), src)


@operator("aten::scatter_.src", computes=_scatter, writes=["self"])
def scatter_src_(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Elements into their places."""
    return self


@operator("aten::scatter_.value", writes=["self"])
def scatter_value_(self: Tensor, dim: int, index: Tensor, value: Number) -> Tensor:
    """One number into some places."""
    return self


def _scatter_into(self: Tensor, dim: int, index: Tensor, src: Tensor | Number, *, out: None) -> Tensor:
    return self.scatter(dim, index.long(), src)


@operator("aten::scatter.src_out", computes=_scatter_into, writes=["out"], overwrites=["out"])
def scatter_src(self: Tensor, dim: int, index: Tensor, src: Tensor, *, out: Tensor) -> Tensor:
    """Elements into their places of a copy."""
    return out if out.shape == self.shape else out.resize_(self.shape)


@operator("aten::scatter.value_out", computes=_scatter_into, writes=["out"], overwrites=["out"])
def scatter_value(self: Tensor, dim: int, index: Tensor, value: Number, *, out: Tensor) -> Tensor:
    """One number into some places of a copy."""
    return out if out.shape == self.shape else out.resize_(self.shape)


@operator("aten::scatter_add_", writes=["self"])
def scatter_add_(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Elements added in their places."""
    return self


# ---- search and comparison


@operator("aten::isin.Tensor_Tensor")
def isin(elements: Tensor, test_elements: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each element occurs among others."""
    if elements.dtype is torch.complex64:
        raise refusal("isin does not take complex numbers", INVALID_TYPE)
    result = new_like(elements, dtype=torch.bool)
    if elements.numel():
        equal = new_like(elements, (*elements.shape, test_elements.numel()), torch.bool)
        found = new_like(elements, dtype=torch.bool)
        del found, equal
    return result


@operator("aten::equal", computes=IN_BODY)
def equal(self: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in size and elements; waits for the device."""
    answer = new_like(self, (1,), torch.bool)
    values = platform().values
    same = self.shape == other.shape and torch.equal(values.read(self), values.read(other).to(self.dtype))
    del answer
    return same


def _masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return self.masked_scatter(mask.bool(), source.to(self.dtype))


@operator("aten::masked_scatter_", computes=_masked_scatter, writes=["self"])
def masked_scatter_(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements under a mask from others, in order."""
    return self


@operator("aten::masked_scatter", computes=IN_BODY, hosts=Hosts.TAKEN)
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The same on a copy."""
    size = broadcast(mask.shape, self.shape)
    result = self.expand(size).clone(memory_format=torch.contiguous_format)
    return result.masked_scatter_(mask.expand(size), source)


@operator("aten::searchsorted.Tensor")
def searchsorted(
    sorted_sequence: Tensor, self: Tensor, *, out_int32: bool = False, right: bool = False, **_: Any
) -> Tensor:
    """Where elements would stand in an ordered sequence."""
    if sorted_sequence.dim() > 1 and sorted_sequence.shape[:-1] != self.shape[:-1]:
        raise RuntimeError(
            "torch.searchsorted(): boundaries tensor should be 1 dimension or the first N-1 dimensions of boundaries "
            f"tensor and input value tensor must match, but we got boundaries tensor {list(sorted_sequence.shape)} and "
            f"input value tensor {list(self.shape)}"
        )
    return new_like(self, dtype=torch.int32 if out_int32 else torch.int64)


@operator("aten::bucketize.Tensor")
def bucketize(self: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """The same, asked the other way round."""
    if boundaries.dim() != 1:
        raise refusal(f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")
    return new_like(self, dtype=torch.int32 if out_int32 else torch.int64)
