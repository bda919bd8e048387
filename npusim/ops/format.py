"""Memory formats: FRACTAL_NZ, in which weights are stored in blocks, and casts to and from it.

A cast tensor keeps its visible size; its storage has the bytes of the blocks, and the format goes with the storage.
Values are kept in plain order all the same, since nothing can see the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.operator import IN_BODY, operator
from npusim.ops.shapes import scalar_type
from npusim.torch_backend.factories import set_tensor
from npusim.torch_backend.registration import platform
from npusim.torch_backend.storage import ND, contiguous_stride
from npusim.torch_backend.tensors import new_like, new_on, runtime_of

NCHW, FRACTAL_NZ, NCDHW, FRACTAL_NZ_C0_16, FRACTAL_NZ_C0_32 = 0, 29, 30, 50, 51
PLAIN = (ND, NCHW, NCDHW)
_BLOCKED = {FRACTAL_NZ: 0, FRACTAL_NZ_C0_16: 16, FRACTAL_NZ_C0_32: 32}
"""Formats in blocks, and the width of a block; 0: by the type."""
_UNMODELLED = (1, 3, 4, 27, 32, 33)


def format_of(tensor: Tensor) -> int:
    """The format of a tensor's storage. Plain ones have a name by the number of dimensions."""
    stored = platform().storages.of(tensor).npu_format
    if stored != ND:
        return stored
    return {4: NCHW, 5: NCDHW}.get(tensor.dim(), ND)


def blocked_size(size: Sequence[int], itemsize: int, width: int = 0) -> tuple[int, ...]:
    """Size of the blocks: [.., columns of blocks, rows of blocks, 16, width], the last two dimensions padded."""
    width = width or (32 if itemsize == 1 else 16)
    *batch, rows, columns = size
    return (*batch, -(-columns // width), -(-rows // 16), 16, width)


def _check(acl_format: int) -> None:
    if acl_format in _UNMODELLED:
        raise UnmodelledCallError(
            f"memory format {acl_format} is not modelled; only plain ones and FRACTAL_NZ (29, 50, 51)"
        )
    if acl_format not in PLAIN and acl_format not in _BLOCKED:
        raise RuntimeError(f"unknown format type:{acl_format}")


def _base_size(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The size that the storage was made for: of a tensor with cut rows, that with whole ones."""
    if len(size) > 1 and stride[-1] == 1 and stride[-2] > size[-1]:
        return (*size[:-1], stride[-2])
    return size


def _blocked(
    device: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, acl_format: int
) -> Tensor:
    base = _base_size(size, stride)
    storages = platform().storages
    num_bytes = torch.Size(blocked_size(base, dtype.itemsize, _BLOCKED[acl_format])).numel() * dtype.itemsize
    storage = storages.allocate(platform().runtimes[device], num_bytes)
    storages.of_storage(storage).npu_format = acl_format
    return storages.tensor(storage, dtype, size, stride)


def cast(tensor: Tensor, acl_format: int) -> Tensor:
    """The tensor in another format: itself if there is nothing to do, else over new memory."""
    _check(acl_format)
    current = platform().storages.of(tensor).npu_format
    if tensor.dim() < 2 or current == acl_format or (current in PLAIN and acl_format in PLAIN):
        return tensor
    if acl_format in PLAIN:
        result = new_like(tensor)
    elif tensor.is_contiguous() or _base_size(tuple(tensor.shape), tensor.stride()) != tuple(tensor.shape):
        result = _blocked(tensor.device.index, tuple(tensor.shape), tensor.stride(), tensor.dtype, acl_format)
    else:
        copy = new_like(tensor)
        result = _blocked(copy.device.index, tuple(copy.shape), copy.stride(), copy.dtype, acl_format)
    platform().values.update((result,), (tensor,), _same)
    return result


@operator("npu::empty_with_format", computes=IN_BODY)
def empty_with_format(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    acl_format: int = ND,
    **_: Any,
) -> Tensor:
    """New memory in a format."""
    _check(acl_format)
    runtime = runtime_of(device)
    kind = dtype or torch.get_default_dtype()
    if acl_format in PLAIN or len(size) < 2:
        return new_on(runtime, size, kind)
    return _blocked(runtime.card.index, tuple(size), contiguous_stride(tuple(size)), kind, acl_format)


def _same(host: Tensor) -> Tensor:
    return host


@operator("npu::npu_format_cast", computes=IN_BODY)
def npu_format_cast(input: Tensor, acl_format: int, **_: Any) -> Tensor:
    """The tensor in another format."""
    return cast(input, acl_format)


@operator("npu::npu_format_cast.Tensor", computes=IN_BODY)
def npu_format_cast_like(input: Tensor, dst: Tensor, **_: Any) -> Tensor:
    """The tensor in another one's format."""
    return cast(input, platform().storages.of(dst).npu_format)


def _cast_in_place(input: Tensor, acl_format: int) -> Tensor:
    result = cast(input, acl_format)
    if result is not input:
        set_tensor(input, result)
    return input


@operator("npu::npu_format_cast_.acl_format", computes=IN_BODY)
def npu_format_cast_(input: Tensor, acl_format: int, **_: Any) -> Tensor:
    """The same tensor over memory in another format."""
    return _cast_in_place(input, acl_format)


@operator("npu::npu_format_cast_", computes=IN_BODY)
def npu_format_cast_from(input: Tensor, src: Tensor, **_: Any) -> Tensor:
    """Takes another tensor's numbers, which are brought into plain order on the way."""
    plain = new_like(src) if platform().storages.of(src).npu_format not in PLAIN else src
    size = input.shape
    platform().values.update((input,), (src,), lambda host: host.reshape(size))
    del plain
    return input


@operator("npu::get_npu_format")
def get_npu_format(input: Tensor) -> int:
    """The format's number."""
    return format_of(input)


@operator("npu::get_storage_size")
def get_storage_size(input: Tensor) -> int:
    """Elements that the storage holds, those of padding included."""
    return platform().storages.of(input).num_bytes // input.element_size()


@operator("npu::npu_transpose", computes=lambda input, perm, require_contiguous=True: input.permute(*perm))
def npu_transpose(input: Tensor, perm: Sequence[int], require_contiguous: bool = True) -> Tensor:
    """A permuted copy."""
    return new_like(input, [input.shape[dim] for dim in perm])


def _cast_type(input: Tensor, dtype: int | torch.dtype, *args: Any, **_: Any) -> Tensor:
    return input.to(dtype if isinstance(dtype, torch.dtype) else scalar_type(dtype))


@operator("npu::_npu_dtype_cast", computes=_cast_type)
def npu_dtype_cast_internal(input: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of another type."""
    return new_like(input, dtype=dtype)


@operator("npu::npu_dtype_cast", computes=_cast_type)
def npu_dtype_cast(input: Tensor, dtype: int, *args: Any) -> Tensor:
    """A copy of another type."""
    return new_like(input, dtype=scalar_type(dtype))
