"""Gated activations of feed-forward layers, fused and plain."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from npusim.ops.operator import operator
from npusim.ops.refusal import refusal
from npusim.ops.shapes import scalar_type, with_dim, wrap
from npusim.torch_backend.tensors import new_like


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.float().chunk(2, dim)
    return (functional.silu(gate) * up).to(input.dtype)


@operator("npu::npu_swiglu(Tensor self, int dim=-1) -> Tensor", computes=_swiglu)
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """``silu(first half) * second half`` along a dimension."""
    return new_like(self, with_dim(self.shape, dim, self.shape[wrap(dim, self.dim())] // 2))
