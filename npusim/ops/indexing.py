"""Selection, placement and joining of elements. int32 indices are taken as they are, except where a copy is noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.ops.operator import IN_BODY, Hosts, operator
from npusim.ops.refusal import INVALID_TYPE, refusal, type_name
from npusim.ops.shapes import Number, broadcast, with_dim, wrap
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

_MASKS = (torch.bool, torch.uint8)


@operator("aten::index_select", computes=lambda self, dim, index: self.index_select(dim, index.flatten()))
def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows, or other slices, by their numbers."""
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


# ---- advanced indexing


def _expand(self: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The indices without masks: each mask becomes the places of its true elements, dimension by dimension."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            expanded.append(index)
            continue
        for offset, extent in enumerate(index.shape):
            size = self.shape[len(expanded) + offset] if len(expanded) + offset < self.dim() else None
            if extent != size:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {offset} does not match the shape of the indexed tensor "
                    f"{list(self.shape)} at index {len(expanded) + offset}"
                )
        expanded += nonzero(index).unbind(1)
    return expanded


def _indexed_size(size: Sequence[int], indices: Sequence[Tensor | None]) -> tuple[int, ...]:
    places = [dim for dim, index in enumerate(indices) if index is not None]
    picked: tuple[int, ...] = ()
    for dim in places:
        index = indices[dim]
        assert index is not None
        picked = broadcast(picked, index.shape)
    kept = [extent for dim, extent in enumerate(size) if dim not in places]
    together = places[-1] - places[0] + 1 == len(places)
    start = places[0] if together else 0
    return (*kept[:start], *picked, *kept[start:])


@operator("aten::index.Tensor", computes=IN_BODY, hosts=Hosts.NUMBERS)
def index_tensor(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``self[indices]``; masks are turned into places first, which waits for the device."""
    expanded = _expand(self, indices)
    result = new_like(self, _indexed_size(self.shape, expanded))
    given = [index is not None for index in expanded]
    tensors = [index for index in expanded if index is not None]
    platform().values.compute((result,), (self, *tensors), lambda host, *hosts: host[_subscript(given, hosts)])
    return result


def _subscript(given: Sequence[bool], hosts: Sequence[Tensor]) -> tuple[Any, ...]:
    rest = iter(hosts)
    return tuple(next(rest).long() if has else slice(None) for has in given)


@operator("aten::index_put_", computes=IN_BODY, hosts=Hosts.NUMBERS)
def index_put_(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``self[indices] = values``; int32 indices are copied to int64, one value under a mask is filled in."""
    if values.numel() == 1 and not accumulate and all(index is None or index.dtype in _MASKS for index in indices):
        mask = _single_mask(self, indices)
        if mask is not None:
            return self.masked_fill_(mask, values.flatten()[0].item())
    expanded = _expand(self, indices)
    tensors = []
    for index in expanded:
        if index is not None:
            cast = new_like(index, dtype=torch.int64) if index.dtype is torch.int32 else index
            tensors.append((index, cast))
    given = [index is not None for index in expanded]

    def compute(old: Tensor, new: Tensor, *hosts: Tensor) -> Tensor:
        return old.clone().index_put_(_put_indices(given, hosts), new.to(old.dtype), accumulate)

    sources = (self, *([] if values.is_cpu else [values]), *(index for index, _ in tensors))
    if values.is_cpu:
        number = values
        platform().values.update((self,), sources, lambda old, *hosts: compute(old, number, *hosts))
    else:
        platform().values.update((self,), sources, compute)
    del tensors
    return self


def _put_indices(given: Sequence[bool], hosts: Sequence[Tensor]) -> tuple[Any, ...]:
    rest = iter(hosts)
    return tuple(next(rest).long() if has else None for has in given)


def _single_mask(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    masks = [index for index in indices if index is not None]
    if len(masks) != 1 or masks[0].is_cpu:
        return None
    mask = masks[0]
    num_seen = indices.index(mask) if indices[0] is not mask else 0
    for _ in range(self.dim() - num_seen - mask.dim()):
        mask = mask.unsqueeze(-1)
    return mask


@operator("aten::nonzero", computes=IN_BODY)
def nonzero(self: Tensor) -> Tensor:
    """Places of what is not zero. Memory for as many as there are elements is taken and kept with the result."""
    result = new_like(self, (self.numel(), self.dim()), torch.int64)
    places = platform().values.read(self).nonzero()
    # All of it is written, since a storage that is known in part only would count as unknown.
    platform().values.write(result, torch.nn.functional.pad(places, (0, 0, 0, len(result) - len(places))))
    return result[: len(places)]


@operator("aten::masked_select", computes=IN_BODY)
def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    """What lies under a mask. Memory for everything is taken and kept with the result."""
    size = broadcast(mask.shape, self.shape)
    result = new_like(self, (torch.Size(size).numel(),))
    chosen = platform().values.read(mask).expand(size)
    num_chosen = int(chosen.sum())

    def compute(host: Tensor) -> Tensor:
        return torch.nn.functional.pad(host.expand(size)[chosen], (0, chosen.numel() - num_chosen))

    platform().values.update((result,), (self,), compute)
    return result[:num_chosen]


# ---- placement


def _index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return self.clone().index_copy_(dim, index.flatten().long(), source)


@operator("aten::index_copy_", computes=_index_copy, writes=["self"])
def index_copy_(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Slices into their places."""
    return self


@operator("aten::index_add_", writes=["self"], hosts=Hosts.NUMBERS)
def index_add_(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Number = 1) -> Tensor:
    """Slices added in their places."""
    _check_index_add(self, dim, index, source)
    return self


def _check_index_add(self: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    if any(tensor.is_cpu for tensor in (self, index, source)):
        raise RuntimeError(
            f"index_add_(): self, index and source expected to be in the same device, but got (self) {self.device}, (index) "
            f"{index.device}, and (source) {source.device}"
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


@operator("aten::scatter_add_", writes=["self"])
def scatter_add_(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Elements added in their places."""
    return self


# ---- joining and repeating


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
                f"Sizes of tensors must match except in dimension {dim}. Expected size {expected} but got size {found} for "
                f"tensor number {number} in the list."
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
                f"stack expects each tensor to be equal size, but got {list(first.shape)} at entry 0 and {list(tensor.shape)} at "
                f"entry {number}"
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


@operator("aten::equal")
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
