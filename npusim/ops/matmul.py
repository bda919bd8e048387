"""Matrix products. torch_npu runs each as one kernel that takes strided operands as they are and allocates only its result."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from npusim.ops.operator import operator
from npusim.torch_backend.tensors import new_like


@operator("aten::linear", computes=functional.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    """``input @ weight.T + bias``, the bias fused."""
    return new_like(input, (*input.shape[:-1], weight.shape[0]))


@operator("aten::mm", computes=torch.mm)
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    """``self @ mat2``."""
    return new_like(self, (self.shape[0], mat2.shape[1]))
