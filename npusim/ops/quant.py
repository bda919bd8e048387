"""Quantisation, and products of quantised matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.atb import launch
from npusim.ops.operator import Hosts, operator
from npusim.ops.refusal import INVALID_TYPE, NOT_SUPPORTED, refusal
from npusim.ops.shapes import INT4, QUINT4X2, broadcast, scalar_type
from npusim.torch_backend.tensors import new_like

_INT4_IN_INT32 = 8
_MAX_INT8 = 127


def _quantised(x: Tensor, code: int | None) -> tuple[tuple[int, ...], torch.dtype]:
    """Size and type of the quantised tensor; eight 4-bit numbers make one int32."""
    size = tuple(x.shape)
    if code in (INT4, QUINT4X2):
        if size[-1] % _INT4_IN_INT32:
            raise refusal("input shape last dim must be divded by 8")
        return (*size[:-1], size[-1] // _INT4_IN_INT32), torch.int32
    return size, torch.int8 if code is None else scalar_type(code)


def _clamped(x: Tensor) -> Tensor:
    return x.round().clamp(-128, _MAX_INT8).to(torch.int8)


def _int8_only(code: int | None, *unmodelled: object) -> None:
    if code not in (None, 1) or any(option is not None for option in unmodelled):
        raise UnmodelledCallError("values of quantisation are modelled for int8 without groups only")


# ---- dynamic


def _dynamic(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _int8_only(dst_type, group_index, None if quant_mode in ("pertoken", "pertensor") else quant_mode)
    wide = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    scale = wide.abs().amax(-1) / _MAX_INT8
    if quant_mode == "pertensor":
        scale = scale.amax().view(1)
    return _clamped(wide / scale.clamp(min=1e-30).view(*scale.shape, 1) if scale.numel() > 1 else wide / scale), scale


def _scales_size(x: Tensor, quant_mode: str) -> tuple[int, ...]:
    return (*x.shape[:-2], x.shape[-1]) if quant_mode == "perchannel" else tuple(x.shape[:-1])


@operator("npu::npu_dynamic_quant", computes=_dynamic)
def npu_dynamic_quant(
    input: Tensor, *, dst_type: int | None = None, quant_mode: str = "pertoken", **_: Any
) -> tuple[Tensor, Tensor]:
    """Quantised rows and their scales, which are made before, also if there is one scale for all in the end."""
    if input.dim() < 2:
        raise refusal("Input shape dim should be greater than 1")
    scale = new_like(input, _scales_size(input, quant_mode), torch.float32)
    quantised = new_like(input, *_quantised(input, dst_type))
    if quant_mode == "pertensor":
        scale = new_like(input, (1,), torch.float32)
    return quantised, scale


@operator("npu::npu_dynamic_quant_asymmetric")
def npu_dynamic_quant_asymmetric(
    input: Tensor, *, dst_type: int | None = None, quant_mode: str = "pertoken", **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with offsets."""
    if input.dim() < 2:
        raise refusal("Input shape dim should be greater than 1")
    scale = new_like(input, _scales_size(input, quant_mode), torch.float32)
    offset = new_like(input, _scales_size(input, quant_mode), torch.float32)
    quantised = new_like(input, *_quantised(input, dst_type))
    if quant_mode == "pertensor":
        scale = new_like(input, (1,), torch.float32)
        offset = new_like(input, (1,), torch.float32)
    return quantised, scale, offset


@operator("npu::npu_dynamic_block_quant")
def npu_dynamic_block_quant(
    x: Tensor, *, dst_type: int = 1, row_block_size: int = 1, col_block_size: int = 128, **_: Any
) -> tuple[Tensor, Tensor]:
    """Quantised blocks and their scales."""
    if x.dim() not in (2, 3):
        raise refusal("x must be 2 or 3 dimensional.", NOT_SUPPORTED)
    *batch, rows, columns = x.shape
    blocks = (*batch, -(-rows // row_block_size), -(-columns // col_block_size))
    return new_like(x, dtype=scalar_type(dst_type)), new_like(x, blocks, torch.float32)


# ---- with given scales

_QUANTISED_TYPES = {12: torch.int8, 13: torch.uint8, 14: torch.int32}
"""torch's numbers of quantised types, and what holds their numbers."""


def _quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    if dtype not in (1, 12) or axis != -1:
        raise UnmodelledCallError("values of npu_quantize are modelled for int8 along the last dimension only")
    wide = input.float() / scales.float() if div_mode else input.float() * scales.float()
    return _clamped(wide if zero_points is None else wide + zero_points.float())


@operator("npu::npu_quantize", computes=_quantize)
def npu_quantize(
    input: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: int, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """Quantised with a scale for each column, or one for all."""
    if dtype in _QUANTISED_TYPES:
        return new_like(input, dtype=_QUANTISED_TYPES[dtype])
    return new_like(input, *_quantised(input, dtype))


@operator("npu::npu_group_quant")
def npu_group_quant(
    x: Tensor, scale: Tensor, group_index: Tensor, *, dst_dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """Quantised with a row of scales for each group of rows."""
    if dst_dtype is torch.quint4x2:
        return new_like(x, *_quantised(x, QUINT4X2))
    return new_like(x, dtype=torch.int8)


def _anti_quant(
    x: Tensor, scale: Tensor, *, offset: Tensor | None = None, dst_dtype: int | None = None, **_: Any
) -> Tensor:
    wide = x.float() if offset is None else x.float() + offset.float()
    return (wide * scale.float()).to(torch.float16 if dst_dtype is None else scalar_type(dst_dtype))


@operator("npu::npu_anti_quant", computes=_anti_quant)
def npu_anti_quant(x: Tensor, scale: Tensor, *, dst_dtype: int | None = None, **_: Any) -> Tensor:
    """Back to floating point."""
    size = tuple(x.shape)
    if x.dtype is torch.int32:
        size = (*size[:-1], size[-1] * _INT4_IN_INT32)
    return new_like(x, size, torch.float16 if dst_dtype is None else scalar_type(dst_dtype))


def _per_tensor(x: Tensor, scale: Tensor, zero_point: Tensor, y: None) -> Tensor:
    return _clamped(x.float() / scale.float() + zero_point.float())


@operator("atb::_npu_quantize_per_tensor", computes=_per_tensor, writes=["y"], overwrites=["y"], hosts=Hosts.TAKEN)
def npu_quantize_per_tensor(x: Tensor, scale: Tensor, zero_point: Tensor, y: Tensor) -> None:
    """Into ``y``, with one scale."""
    launch([x, scale, zero_point], [y])


@operator("atb::_npu_quant_rms_norm", writes=["output"], overwrites=["output"], hosts=Hosts.TAKEN)
def npu_quant_rms_norm(
    self: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, offset: Tensor, output: Tensor, eps: float = 1e-5
) -> None:
    """The quantised norm into ``output``."""
    launch([self, gamma, beta, scale, offset], [output])


@operator("npu::npu_trans_quant_param")
def npu_trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """Scales and offsets in the form that products take."""
    size = tuple(scale.shape) if offset is None else broadcast(scale.shape, offset.shape)
    return new_like(scale, size, torch.int64)


# ---- products


def _dequantised_type(output_dtype: int | None) -> torch.dtype:
    return torch.int8 if output_dtype is None else scalar_type(output_dtype)


def _quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **options: Any,
) -> Tensor:
    if x1.dtype is not torch.int8 or x2.dtype is not torch.int8 or options or scale.dtype is torch.int64:
        raise UnmodelledCallError("values of npu_quant_matmul are modelled for int8 with scales in floating point only")
    product = x1.double() @ x2.double()
    if bias is not None and bias.dtype is torch.int32:
        product = product + bias
    product = product * scale.double()
    if pertoken_scale is not None:
        product = product * pertoken_scale.double().unsqueeze(-1)
    if bias is not None and bias.dtype is not torch.int32:
        product = product + bias.double()
    dtype = _dequantised_type(output_dtype)
    return _clamped(product) if dtype is torch.int8 else product.to(dtype)


@operator("npu::npu_quant_matmul", computes=_quant_matmul)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    **_: Any,
) -> Tensor:
    """A product of int8 matrices, scaled; a single float32 scale is converted first."""
    if x1_dtype is not None or x2_dtype is not None or group_sizes:
        raise UnmodelledCallError("npu_quant_matmul with x1_dtype, x2_dtype or group_sizes is not modelled")
    if x1.dim() < 2 or x2.dim() < 2:
        raise refusal(f"x1 and x2 dim should be at least 2, but got {min(x1.dim(), x2.dim())}")
    columns = x2.shape[-1] * (_INT4_IN_INT32 if x2.dtype is torch.int32 and x2.stride(-1) == 1 else 1)
    result = new_like(
        x1, (*broadcast(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], columns), _dequantised_type(output_dtype)
    )
    is_single = scale.dtype is torch.float32 and scale.numel() == 1 and pertoken_scale is None
    is_single &= result.dtype is not torch.int32
    converted = new_like(scale, dtype=torch.int64) if is_single else None
    del converted
    return result


def _weight_quant(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> Tensor:
    bias = options.get("bias", rest[2] if len(rest) > 2 else None)
    if weight.dtype is not torch.int8 or options.get("antiquant_group_size") or any(rest[:2]):
        raise UnmodelledCallError("values of npu_weight_quant_batchmatmul are modelled for int8 without groups only")
    wide = weight.float() if antiquant_offset is None else weight.float() + antiquant_offset.float()
    product = x.float() @ (wide * antiquant_scale.float())
    return (product if bias is None else product + bias.float()).to(x.dtype)


@operator("npu::npu_weight_quant_batchmatmul", computes=_weight_quant)
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    *args: Any,
    **_: Any,
) -> Tensor:
    """A product with a quantised weight, in the other factor's type unless quantised again."""
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() < 2:
            raise refusal(f"{name} shape do not support dim num less than 2, but it is {tensor.dim()}")
    packed = weight.dtype is torch.int32
    rows, columns = weight.shape[-2:]
    if packed and weight.is_contiguous():
        columns *= _INT4_IN_INT32
    elif packed:
        rows *= _INT4_IN_INT32
    if x.shape[-1] != rows:
        raise refusal(f"The k of x and weight should be equal. but x_k_dim is {x.shape[-1]}, weight_k_dim is {rows}")
    size = (*broadcast(x.shape[:-2], weight.shape[:-2]), x.shape[-2], columns)
    return new_like(x, size, x.dtype if quant_scale is None else torch.int8)


def _dequant_bias(
    x: Tensor,
    weight_scale: Tensor,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    *,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    wide = (x if bias is None or bias.dtype is not torch.int32 else x + bias).double() * weight_scale.double()
    if activation_scale is not None:
        wide = wide * activation_scale.double().unsqueeze(-1)
    if bias is not None and bias.dtype is not torch.int32:
        wide = wide + bias.double()
    return wide.to(output_dtype or torch.float16)


@operator("npu::npu_dequant_bias", computes=_dequant_bias)
def npu_dequant_bias(
    x: Tensor,
    weight_scale: Tensor,
    activation_scale: Tensor | None,
    bias: Tensor | None,
    *,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The int32 result of a product, scaled."""
    dtype = output_dtype or torch.float16
    if dtype not in (torch.float16, torch.bfloat16):
        raise refusal("output_dtype should be float16 or bfloat16", INVALID_TYPE)
    return new_like(x, dtype=dtype)


@operator("npu::npu_quant_matmul_dequant")
def npu_quant_matmul_dequant(x: Tensor, quantized_weight: Tensor, weight_scale: Tensor, **_: Any) -> Tensor:
    """Quantises rows, multiplies, and gives the input's type back."""
    return new_like(x, (x.shape[0], weight_scale.shape[0]))
