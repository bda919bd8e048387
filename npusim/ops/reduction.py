"""Reductions, running sums, softmax, sorting and selection. One kernel each; results are contiguous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npusim.ops.operator import operator
from npusim.ops.shapes import Number, floating, reduced, with_dim, wrap
from npusim.torch_backend.tensors import new_like

Dims = int | Sequence[int] | None


def _summed(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    if wanted is not None:
        return wanted
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


@operator("aten::sum")
def sum_all(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of everything."""
    return new_like(self, (), _summed(self.dtype, dtype))


@operator("aten::sum.dim_IntList")
def sum_dims(self: Tensor, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Sums; of integers in int64."""
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim), _summed(self.dtype, dtype))


@operator("aten::mean")
def mean_all(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean of everything."""
    return new_like(self, (), dtype or self.dtype)


@operator("aten::mean.dim")
def mean_dims(self: Tensor, dim: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Means."""
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim), dtype or self.dtype)


@operator("aten::prod")
def prod_all(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product of everything."""
    return new_like(self, (), _summed(self.dtype, dtype))


def _extreme(self: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim))


def _extreme_of_all(self: Tensor) -> Tensor:
    return new_like(self, ())


def _extreme_with_index(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    size = reduced(self.shape, dim, keepdim=keepdim)
    return new_like(self, size), new_like(self, size, torch.int64)


def _truth(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    dtype = self.dtype if self.dtype is torch.uint8 else torch.bool
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim), dtype)


_BY_SHAPE: dict[str, Callable[..., Any]] = {
    "amax": _extreme,
    "amin": _extreme,
    "max": _extreme_of_all,
    "min": _extreme_of_all,
    "max.dim": _extreme_with_index,
    "min.dim": _extreme_with_index,
    "any": _truth,
    "any.dim": _truth,
    "all": _truth,
    "all.dim": _truth,
}
for _name, _allocate in _BY_SHAPE.items():
    operator(f"aten::{_name}")(_allocate)


@operator("aten::argmax")
def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Places of maxima; a strided input is copied first."""
    if self.dtype is torch.bool:
        raise RuntimeError("argmax(): does not support bool input")
    result = new_like(self, reduced(self.shape, dim, keepdim=keepdim), torch.int64)
    copy = None if self.is_contiguous() else new_like(self)
    del copy
    return result


@operator("aten::argmin")
def argmin(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Places of minima."""
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim), torch.int64)


@operator("aten::cumsum")
def cumsum(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running sums; of integers in int64."""
    wrap(dim, self.dim())
    return new_like(self, dtype=_summed(self.dtype, dtype))


@operator("aten::cumsum_", writes=["self"])
def cumsum_(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The whole result is made, then copied back."""
    new_like(self)
    return self


@operator("aten::logsumexp")
def logsumexp(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """Logarithms of sums of exponentials."""
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim), floating(self.dtype))


def _softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return new_like(self, dtype=torch.float32 if half_to_float else self.dtype)


for _name in ("_softmax", "_log_softmax"):
    operator(f"aten::{_name}")(_softmax)


# ---- sorting


def sorted_places(x: Tensor, *, descending: bool) -> Tensor:
    """Indices that sort each row, equal numbers in order; float rows through integer keys, which sort much faster."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.int32) or not 0 < x.shape[-1] < 1 << 31:
        return torch.sort(x, dim=-1, descending=descending, stable=True).indices
    if x.is_floating_point():
        wide = x.float().numpy() + np.float32(0)  # -0 becomes 0
        bits = wide.view(np.int32)
        keys = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))  # the order of the floats
        keys[np.isnan(wide)] = np.iinfo(np.int32).max
    else:
        keys = x.numpy()
    packed = keys.astype(np.int64)
    if descending:
        np.invert(packed, out=packed)
    packed <<= 32
    packed |= np.arange(x.shape[-1], dtype=np.int64)
    packed.sort(axis=-1)
    packed &= 0xFFFFFFFF
    return torch.from_numpy(packed)


def _sorted(x: Tensor, dim: int, *, descending: bool, count: int | None = None) -> tuple[Tensor, Tensor]:
    if not x.dim():
        return x.clone(), torch.zeros((), dtype=torch.int64)
    rows = x.movedim(dim, -1).contiguous()
    places = sorted_places(rows, descending=descending)[..., :count]
    return rows.gather(-1, places).movedim(-1, dim), places.movedim(-1, dim)


def _sort(self: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    return _sorted(self, dim, descending=descending)


def _sort_stable(
    self: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    return _sorted(self, dim, descending=descending)


@operator("aten::sort", computes=_sort)
def sort(self: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sorted numbers and their former places."""
    wrap(dim, self.dim())
    return new_like(self), new_like(self, dtype=torch.int64)


@operator("aten::sort.stable", computes=_sort_stable)
def sort_stable(
    self: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """The same, equal numbers in their order."""
    wrap(dim, self.dim())
    return new_like(self), new_like(self, dtype=torch.int64)


def _topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    return _sorted(self, dim, descending=largest, count=k)


@operator("aten::topk", computes=_topk)
def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """The largest (or smallest) numbers and their places."""
    size = with_dim(self.shape, dim, k) if self.dim() else ()
    return new_like(self, size), new_like(self, size, torch.int64)


# ---- counting


def _histc(self: Tensor, bins: int = 100, min: Number = 0, max: Number = 0) -> Tensor:
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


@operator("aten::histc", computes=_histc)
def histc(self: Tensor, bins: int = 100, min: Number = 0, max: Number = 0) -> Tensor:
    """How many numbers fall into each of equal bins; counts in the type of the numbers."""
    return new_like(self, (bins,))


@operator("aten::bincount")
def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each whole number occurs; smallest and largest are read first, so it waits for the device."""
    length = minlength
    if self.numel():
        self.min().item()
        length = max(int(self.max().item()) + 1, minlength)
    return new_like(self, (length,), torch.int64 if weights is None else torch.float64)


@operator("aten::count_nonzero.dim_IntList")
def count_nonzero(self: Tensor, dim: Sequence[int]) -> Tensor:
    """Counts the elements that a comparison with 0 has marked."""
    marks = new_like(self, dtype=torch.bool)
    result = new_like(self, reduced(self.shape, dim), torch.int64)
    del marks
    return result


@operator("aten::var.correction")
def var(self: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False) -> Tensor:
    """Variance."""
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim))


@operator("aten::std.correction")
def std(self: Tensor, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False) -> Tensor:
    """Standard deviation."""
    return new_like(self, reduced(self.shape, dim, keepdim=keepdim))


def _vector_norm(
    self: Tensor,
    ord: Number = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: None,
) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(self, ord, dim, keepdim, dtype=dtype)
    return result


@operator("aten::linalg_vector_norm.out", computes=_vector_norm, writes=["out"], overwrites=["out"])
def vector_norm(
    self: Tensor,
    ord: Number = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor,
) -> Tensor:
    """The root of a sum of powers."""
    size = reduced(self.shape, dim, keepdim=keepdim)
    return out if out.shape == size else out.resize_(size)


def _norm(self: Tensor, p: Number | None, dim: Sequence[int], keepdim: bool = False, *, out: None) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(self, 2 if p is None else p, dim, keepdim)
    return result


@operator("aten::norm.out", computes=_norm, writes=["out"], overwrites=["out"])
def norm(self: Tensor, p: Number | None, dim: Sequence[int], keepdim: bool = False, *, out: Tensor) -> Tensor:
    """The same by its older name."""
    size = reduced(self.shape, dim, keepdim=keepdim)
    return out if out.shape == size else out.resize_(size)
