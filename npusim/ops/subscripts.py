"""``tensor[indices]``: tensors as indices, masks included, on the device or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.ops.operator import IN_BODY, Hosts, operator
from npusim.ops.refusal import INVALID_PARAMETER, INVALID_TYPE, INVALID_VALUE, refusal, wrong_device
from npusim.ops.shapes import broadcast, wrap
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

_MASKS = (torch.bool, torch.uint8)


def _expand(self: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The indices on the device and without masks: a mask becomes the places of its true elements."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype in (torch.int64, torch.int32):
            expanded.append(index)
        elif index.dtype in _MASKS:
            _check_mask(self, index, len(expanded))
            expanded += (index.nonzero() if index.is_cpu else nonzero(index)).unbind(1)
        else:
            raise _invalid("tensors used as indices must be long, int, byte, or bool tensors", INVALID_TYPE)
    for dim, index in enumerate(expanded):
        wrap(dim, self.dim())
        if index is not None and not self.shape[dim] and index.numel():
            raise _invalid("index is out of bounds for dimension with size 0.", INVALID_PARAMETER)
    return [index.to(self.device) if index is not None and index.is_cpu else index for index in expanded]


def _check_mask(self: Tensor, mask: Tensor, num_before: int) -> None:
    for offset, extent in enumerate(mask.shape):
        dim = num_before + offset
        if extent != (self.shape[dim] if dim < self.dim() else None):
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {offset} does not match the shape of the indexed "
                f"tensor {list(self.shape)} at index {dim}"
            )


def _invalid(text: str, code: str) -> IndexError:
    return IndexError(str(refusal(text, code)))


def _indexed_size(size: Sequence[int], indices: Sequence[Tensor | None]) -> tuple[int, ...]:
    places = [dim for dim, index in enumerate(indices) if index is not None]
    picked: tuple[int, ...] = ()
    shapes = [index.shape for index in indices if index is not None]
    for shape in shapes:
        try:
            picked = broadcast(picked, shape)
        except RuntimeError:
            given = ", ".join(str(list(one)) for one in shapes)
            raise _invalid(
                f"shape mismatch: indexing tensors could not be broadcast together with shapes {given}", INVALID_VALUE
            ) from None
    kept = [extent for dim, extent in enumerate(size) if dim not in places]
    together = places[-1] - places[0] + 1 == len(places)
    start = places[0] if together else 0
    return (*kept[:start], *picked, *kept[start:])


@operator("aten::index.Tensor", computes=IN_BODY, hosts=Hosts.TAKEN)
def index_tensor(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``self[indices]``; masks are turned into places first, which waits for the device."""
    if self.is_cpu:
        wrong_device([self])
    expanded = _expand(self, indices)
    result = new_like(self, _indexed_size(self.shape, expanded))
    given = [index is not None for index in expanded]
    tensors = [index for index in expanded if index is not None]
    platform().values.compute((result,), (self, *tensors), lambda host, *hosts: host[_subscript(given, hosts)])
    return result


def _subscript(given: Sequence[bool], hosts: Sequence[Tensor]) -> tuple[Any, ...]:
    rest = iter(hosts)
    return tuple(next(rest).long() if has else slice(None) for has in given)


@operator("aten::index_put_", computes=IN_BODY, hosts=Hosts.TAKEN)
def index_put_(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``self[indices] = values``; int32 indices are copied to int64, one value under a mask is filled in."""
    if self.is_cpu:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu!"
        )
    if values.numel() == 1 and not accumulate and all(index is None or index.dtype in _MASKS for index in indices):
        mask = _single_mask(self, indices)
        if mask is not None:
            return self.masked_fill_(mask, values.flatten()[0].item())
    expanded = _expand(self, indices)
    size = _indexed_size(self.shape, expanded)
    if not _stretches(values.shape, size):
        raise refusal(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of "
            f"shape {list(size)}"
        )
    tensors = []
    for index in expanded:
        if index is not None:
            cast = new_like(index, dtype=torch.int64) if index.dtype is torch.int32 else index
            tensors.append((index, cast))
    if values.is_cpu:
        wrong_device([values])
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


def _stretches(size: Sequence[int], target: Sequence[int]) -> bool:
    given = tuple(size)[::-1]
    return len(given) <= len(target) and all(a in (1, b) for a, b in zip(given, tuple(target)[::-1], strict=False))


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
