"""Sizes and types of results, as torch derives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError

Number = bool | int | float | complex


def broadcast(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """The size that two sizes broadcast to.

    Raises:
        RuntimeError: They do not, in torch's words.
    """
    if a == b:
        return tuple(a)
    num_dims = max(len(a), len(b))
    size = [1] * num_dims
    for back in range(1, num_dims + 1):
        one = a[-back] if back <= len(a) else 1
        two = b[-back] if back <= len(b) else 1
        if one != two and one != 1 and two != 1:
            raise RuntimeError(
                f"The size of tensor a ({one}) must match the size of tensor b ({two}) at non-singleton dimension "
                f"{num_dims - back}"
            )
        size[-back] = two if one == 1 else one
    return tuple(size)


def operands(a: Tensor, b: Tensor | Number) -> tuple[Tensor, tuple[int, ...], torch.dtype]:
    """Of two operands: one that is on a device, the size that they broadcast to, the type that they promote to."""
    if not isinstance(b, Tensor):
        return a, tuple(a.shape), torch.result_type(a, b)
    size = broadcast(a.shape, b.shape)
    dtype = a.dtype if a.dtype is b.dtype else torch.result_type(a, b)
    return (b if a.is_cpu else a), size, dtype


def wrap(dim: int, num_dims: int) -> int:
    """A dimension counted from the front.

    Raises:
        IndexError: There is no such dimension, in torch's words.
    """
    limit = num_dims or 1
    if not -limit <= dim < limit:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})")
    return dim % limit


def reduced(size: Sequence[int], dims: int | Sequence[int] | None, *, keepdim: bool = False) -> tuple[int, ...]:
    """The size after reducing some dimensions; all of them if none is given."""
    num_dims = len(size)
    if dims is None or (not isinstance(dims, int) and not dims):
        gone = set(range(num_dims))
    else:
        gone = {wrap(dim, num_dims) for dim in ((dims,) if isinstance(dims, int) else dims)}
    if keepdim:
        return tuple(1 if dim in gone else extent for dim, extent in enumerate(size))
    return tuple(extent for dim, extent in enumerate(size) if dim not in gone)


def with_dim(size: Sequence[int], dim: int, extent: int) -> tuple[int, ...]:
    """The size with one dimension changed."""
    changed = list(size)
    changed[wrap(dim, len(size))] = extent
    return tuple(changed)


def floating(dtype: torch.dtype) -> torch.dtype:
    """The type of a function that has no whole results: integers become float32."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


_SCALAR_TYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    285: torch.int32,  # int4, eight in each element
    290: torch.uint8,  # hifloat8
    291: torch.float8_e5m2,
    292: torch.float8_e4m3fn,
    296: torch.uint8,  # float4_e2m1, two in each element
    297: torch.uint8,  # float4_e1m2, two in each element
}
INT4 = 285
QUINT4X2 = 16


def scalar_type(code: int) -> torch.dtype:
    """The type behind an ``int dst_type``: torch's numbers, and torch_npu's own from 256 on.

    Raises:
        UnmodelledCallError: A number that is not known here.
    """
    if code not in _SCALAR_TYPES:
        raise UnmodelledCallError(f"data type number {code} is not modelled; there are {sorted(_SCALAR_TYPES)}")
    return _SCALAR_TYPES[code]
