"""Gated activations of feed-forward layers, and activations that torch_npu has names of its own for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from npusim.ops.operator import operator
from npusim.ops.refusal import refusal
from npusim.ops.shapes import scalar_type, with_dim
from npusim.torch_backend.tensors import new_like


def halved(x: Tensor, dim: int = -1) -> tuple[int, ...]:
    """The size with one dimension halved."""
    if not -x.dim() <= dim < x.dim():
        raise refusal(f"dim out of range{dim}")
    return with_dim(x.shape, dim, x.shape[dim] // 2)


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (functional.silu(gate) * up).to(input.dtype)


@operator("npu::npu_swiglu", computes=_swiglu)
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(first half) * second half`` along a dimension."""
    return new_like(input, halved(input, dim))


@operator("npu::npu_clipped_swiglu")
def npu_clipped_swiglu(x: Tensor, *, dim: int = -1, **_: Any) -> Tensor:
    """The same with clipped halves, which may alternate."""
    return new_like(x, halved(x, dim))


@operator("npu::npu_swiglu_quant")
def npu_swiglu_quant(x: Tensor, *, quant_mode: int = 0, **_: Any) -> tuple[Tensor, Tensor]:
    """Gated activation, quantised to int8, with a scale per row."""
    if x.shape[-1] > 8192:
        raise refusal(f"x last dim size should not be larger than 8192, but got {x.shape[-1]}")
    size = halved(x)
    return new_like(x, size, torch.int8), new_like(x, size[:-1], torch.float32)


@operator("npu::npu_dequant_swiglu_quant")
def npu_dequant_swiglu_quant(x: Tensor, *, dst_type: int | None = None, **_: Any) -> tuple[Tensor, Tensor]:
    """As ``npu_swiglu_quant``, on the int32 result of a quantised product."""
    if x.dim() < 2:
        raise refusal("x dim should larger than 1")
    size = halved(x)
    quantised = torch.int8 if dst_type is None else scalar_type(dst_type)
    return new_like(x, size, quantised), new_like(x, size[:-1], torch.float32)


def _fast_gelu(input: Tensor) -> Tensor:
    wide = input.float()
    return (wide * torch.sigmoid(1.702 * wide)).to(input.dtype)


for _name in ("npu::npu_fast_gelu", "npu::fast_gelu"):
    operator(_name, computes=_fast_gelu)(lambda input: new_like(input))


@operator(
    "npu::npu_gelu", computes=lambda input, *, approximate="none": functional.gelu(input, approximate=approximate)
)
def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit."""
    return new_like(input)


@operator("npu::npu_silu", computes=functional.silu)
def npu_silu(input: Tensor) -> Tensor:
    """An operator of the older kind, which copies a strided input."""
    result = new_like(input)
    copy = None if input.is_contiguous() else new_like(input)
    del copy
    return result
