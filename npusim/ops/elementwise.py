"""Element-wise operators: one kernel each, for strided and broadcast operands as they are; results are contiguous."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npusim.ops.operator import Hosts, operator
from npusim.ops.refusal import type_name
from npusim.ops.shapes import Number, broadcast, floating, operands, with_dim, wrap
from npusim.torch_backend.tensors import new_like

SAME_TYPE = (
    "abs bitwise_not ceil clamp clamp.Tensor clamp_max clamp_min elu floor hardtanh leaky_relu nan_to_num neg relu "
    "round sgn sign silu softplus square trunc"
)
FLOATING = "acos asin atan cos cosh erf exp expm1 log log10 log1p log2 reciprocal rsqrt sigmoid sin sinh sqrt tan tanh"
BOOLEAN = "isfinite isnan isneginf isposinf logical_not"
ARITHMETIC = (
    "add.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor floor_divide fmod.Tensor "
    "mul.Tensor pow.Tensor_Tensor remainder.Tensor rsub.Tensor sub.Tensor"
)
WITH_SCALAR = (
    "add.Scalar bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar floor_divide.Scalar fmod.Scalar mul.Scalar "
    "pow.Tensor_Scalar remainder.Scalar rsub.Scalar sub.Scalar"
)
COMPARISONS = "eq ge gt le lt ne"
LOGICAL = "logical_and logical_or logical_xor"
IN_PLACE = (
    "abs_ add_.Scalar add_.Tensor bitwise_and_.Tensor bitwise_not_ bitwise_or_.Tensor ceil_ clamp_ clamp_max_ "
    "clamp_min_ cos_ div_.Tensor exp_ floor_ floor_divide_.Tensor gelu_ log_ logical_not_ mul_.Scalar mul_.Tensor "
    "neg_ pow_.Scalar reciprocal_ relu_ remainder_.Tensor round_ rsqrt_ sigmoid_ silu_ sin_ sqrt_ square_ sub_.Scalar "
    "sub_.Tensor tanh_"
)


def _same_type(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return new_like(self)


def _floating(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return new_like(self, dtype=floating(self.dtype))


def _boolean(self: Tensor) -> Tensor:
    return new_like(self, dtype=torch.bool)


def _arithmetic(self: Tensor, other: Tensor | Number, **kwargs: Any) -> Tensor:
    return new_like(*operands(self, other))


def _comparison(self: Tensor, other: Tensor | Number) -> Tensor:
    device, size, _ = operands(self, other)
    return new_like(device, size, torch.bool)


def _in_place(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        _fits(self, args[0])
    return self


def _fits(self: Tensor, other: Tensor) -> None:
    _, size, dtype = operands(self, other)
    if size != self.shape:
        raise RuntimeError(f"output with shape {list(self.shape)} doesn't match the broadcast shape {list(size)}")
    if not torch.can_cast(dtype, self.dtype):
        raise RuntimeError(
            f"result type {type_name(dtype)} can't be cast to the desired output type {type_name(self.dtype)}"
        )


def _declare() -> None:
    for names, allocate in (
        (SAME_TYPE, _same_type),
        (FLOATING, _floating),
        (BOOLEAN, _boolean),
        (ARITHMETIC, _arithmetic),
        (WITH_SCALAR, _arithmetic),
        (LOGICAL, _comparison),
        (" ".join(f"{name}.Tensor {name}.Scalar" for name in COMPARISONS.split()), _comparison),
    ):
        for name in names.split():
            operator(f"aten::{name}", hosts=Hosts.NUMBERS)(allocate)
    for name in IN_PLACE.split():
        operator(f"aten::{name}", writes=["self"], hosts=Hosts.NUMBERS)(_in_place)


_declare()


@operator("aten::div.Tensor", hosts=Hosts.NUMBERS)
def div(self: Tensor, other: Tensor) -> Tensor:
    """True division; of integers in float32."""
    device, size, dtype = operands(self, other)
    return new_like(device, size, floating(dtype))


@operator("aten::div.Tensor_mode", hosts=Hosts.NUMBERS)
def div_mode(self: Tensor, other: Tensor, *, rounding_mode: str | None) -> Tensor:
    """Division rounded as asked."""
    device, size, dtype = operands(self, other)
    return new_like(device, size, floating(dtype) if rounding_mode is None else dtype)


@operator("aten::pow.Scalar", hosts=Hosts.NUMBERS)
def pow_scalar(self: Number, exponent: Tensor) -> Tensor:
    """A number to the power of each element."""
    return new_like(*operands(exponent, self))


@operator("aten::gelu")
def gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    """Keeps dense strides."""
    return torch.empty_like(self)


@operator("aten::maximum", hosts=Hosts.NUMBERS)
def maximum(self: Tensor, other: Tensor) -> Tensor:
    """The larger of each pair; a number on the host is copied to the device first."""
    device, size, dtype = operands(self, other)
    number = new_like(self, (), other.dtype) if other.is_cpu else None
    result = new_like(device, size, dtype)
    del number
    return result


@operator("aten::minimum", hosts=Hosts.NUMBERS)
def minimum(self: Tensor, other: Tensor) -> Tensor:
    """The smaller of each pair; a number on the host is copied to the device afterwards."""
    device, size, dtype = operands(self, other)
    result = new_like(device, size, dtype)
    number = new_like(self, (), other.dtype) if other.is_cpu else None
    del number
    return result


@operator("aten::glu")
def glu(self: Tensor, dim: int = -1) -> Tensor:
    """``first half * sigmoid(second half)``."""
    return new_like(self, with_dim(self.shape, dim, self.shape[wrap(dim, self.dim())] // 2))


@operator("aten::isinf", hosts=Hosts.NUMBERS)
def isinf(self: Tensor) -> Tensor:
    """Compares the absolute value, which is made first."""
    absolute = new_like(self) if self.is_floating_point() else self
    return new_like(absolute, dtype=torch.bool)


@operator("aten::addcmul", hosts=Hosts.NUMBERS)
def addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Number = 1) -> Tensor:
    """``self + value * tensor1 * tensor2``."""
    _, size, dtype = operands(self, tensor1)
    return new_like(self, broadcast(size, tensor2.shape), torch.promote_types(dtype, tensor2.dtype))


@operator("aten::lerp.Scalar", hosts=Hosts.NUMBERS)
def lerp(self: Tensor, end: Tensor, weight: Number) -> Tensor:
    """``self + weight * (end - self)``."""
    device, size, _ = operands(self, end)
    return new_like(device, size, self.dtype)


@operator("aten::where.self", hosts=Hosts.NUMBERS)
def where(condition: Tensor, self: Tensor, other: Tensor) -> Tensor:
    """Elements of one or the other."""
    device, size, dtype = operands(self, other)
    size = broadcast(condition.shape, size)
    return new_like(condition if device.is_cpu else device, size, dtype)


@operator("aten::masked_fill.Scalar", hosts=Hosts.NUMBERS)
def masked_fill(self: Tensor, mask: Tensor, value: Number) -> Tensor:
    """A copy with some elements replaced."""
    return new_like(self, broadcast(mask.shape, self.shape))


@operator("aten::masked_fill_.Scalar", writes=["self"], hosts=Hosts.NUMBERS)
def masked_fill_(self: Tensor, mask: Tensor, value: Number) -> Tensor:
    """Replaces some elements."""
    broadcast(self.shape, mask.shape)
    return self
