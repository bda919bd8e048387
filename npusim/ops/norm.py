"""Normalisations. Each is one kernel; statistics are float32, of the input's size with the normalised dimensions 1.

Values are computed in float32 and rounded once. Grade: assumed (the kernels' order of summation is not reproduced).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.ops.operator import SYSTEM_WORKSPACE_BYTES, Hosts, operator
from npusim.ops.refusal import refusal, type_name
from npusim.ops.shapes import INT4, QUINT4X2, scalar_type
from npusim.torch_backend.tensors import new_like


def _statistics(x: Tensor, gamma: Tensor) -> Tensor:
    num_kept = max(x.dim() - gamma.dim(), 0)
    return new_like(x, (*x.shape[:num_kept], *(1,) * (x.dim() - num_kept)), torch.float32)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def _gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _rms_norm(x, 1 + gamma.float(), epsilon)


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = _rms_norm(total, gamma, epsilon)
    return y, rstd, total


def _add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, total = _add_rms_norm(x1, x2, gamma, epsilon)
    return y if beta is None else (y.float() + beta.float()).to(y.dtype), rstd, total


def _add_rms_norm_cast(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    y, rstd, total = _add_rms_norm(*args, **kwargs)
    return y.float(), y, rstd, total


def _add_rms_norm_v2(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    y, rstd, total = _add_rms_norm(*args, **kwargs)
    return y, total, rstd


def _add_rms_norm_v2_functional(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    y, rstd, total = _add_rms_norm(*args, **kwargs)
    return rstd, y, total


def _not_bigger(gamma: Tensor, x: Tensor) -> None:
    if gamma.dim() > x.dim():
        raise refusal("The gamma shape should not be bigger than self shape.")


@operator("npu::npu_rms_norm", computes=_rms_norm)
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The norm and the reciprocal deviations."""
    _not_bigger(gamma, input)
    return new_like(input), _statistics(input, gamma)


@operator("npu::npu_gemma_rms_norm", computes=_gemma_rms_norm)
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """As ``npu_rms_norm``, scaled by ``1 + gamma``."""
    _not_bigger(gamma, input)
    return new_like(input), _statistics(input, gamma)


@operator("_C_ascend::npu_gemma_rms_norm", computes=_gemma_rms_norm)
def ascend_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """vllm-ascend's binding of the same kernel, which makes the deviations first."""
    rstd = _statistics(x, gamma)
    return new_like(x), rstd


@operator("npu::npu_add_rms_norm", computes=_add_rms_norm)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of ``x1 + x2``, the reciprocal deviations, the sum."""
    return new_like(x1), _statistics(x1, gamma), new_like(x1)


@operator(
    "_C_ascend::npu_add_rms_norm_bias",
    computes=_add_rms_norm_bias,
    workspace_bytes=lambda *_, **__: SYSTEM_WORKSPACE_BYTES + 256,
)
def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """vllm-ascend's own kernel: as ``npu_add_rms_norm``, plus a bias. Sizes: vllm-ascend v0.22.1rc1, csrc/moe."""
    rstd = _statistics(x1, gamma)
    y = new_like(x1)
    return y, rstd, new_like(x1)


@operator("npu::npu_add_rms_norm_cast", computes=_add_rms_norm_cast)
def npu_add_rms_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    """As ``npu_add_rms_norm``, with the norm in float32 before it."""
    return new_like(x1, dtype=torch.float32), new_like(x1), _statistics(x1, gamma), new_like(x1)


@operator("npu::npu_add_rms_norm_v2", computes=_add_rms_norm_v2, writes=["x1", "x2"])
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """The norm into ``x1``, the sum into ``x2``."""
    return _statistics(x1, gamma)


@operator("npu::npu_add_rms_norm_v2_functional", computes=_add_rms_norm_v2_functional)
def npu_add_rms_norm_v2_functional(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    """As ``npu_add_rms_norm_v2``, on copies."""
    return _statistics(x1, gamma), x1.clone(), x2.clone()


@operator("npu::npu_add_rms_norm_quant")
def npu_add_rms_norm_quant(x1: Tensor, *args: Any, axis: int = -1, dst_type: int | None = None, **_: Any) -> Any:
    """The norm of a sum, quantised with one or two scales (the second result is made either way), and the sum."""
    if axis != -1:
        raise refusal("axis only support -1.")
    quantised = torch.int8 if dst_type is None else scalar_type(dst_type)
    return new_like(x1, dtype=quantised), new_like(x1, dtype=quantised), new_like(x1)


@operator("npu::npu_add_rms_norm_dynamic_quant")
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    output_mask: Sequence[bool] | None = None,
    y_dtype: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    """The norm of a sum, quantised per row once or twice; a result that is not asked for has no dimensions."""
    if output_mask is not None and not any(output_mask):
        raise refusal("When the output_mask is not empty, at least one of y1 and y2 must be output. ")
    wanted = output_mask or (True, smooth_scale1 is not None and smooth_scale2 is not None)
    for name, x in (("x1", x1), ("x2", x2)):
        if not 2 <= x.dim() <= 8:
            raise refusal(f"The {name} should be in 2~8D")
    if x1.shape != x2.shape:
        raise refusal("The shape of x1 and x2 must be the same")
    size = tuple(x1.shape)
    quantised = torch.int8
    if y_dtype in (INT4, QUINT4X2):
        size, quantised = (*size[:-1], size[-1] // 8), torch.int32
    elif y_dtype is not None:
        quantised = scalar_type(y_dtype)
    y1 = new_like(x1, size if wanted[0] else (), quantised)
    scale1 = new_like(x1, size[:-1] if wanted[0] else (), torch.float32)
    y2 = new_like(x1, size if wanted[1] else (), quantised)
    scale2 = new_like(x1, size[:-1] if wanted[1] else (), torch.float32)
    return y1, y2, new_like(x1), scale1, scale2


@operator("npu::npu_rms_norm_quant")
def npu_rms_norm_quant(x: Tensor, *args: Any, dst_dtype: int | None = None) -> Tensor:
    """The norm, quantised with one scale and offset."""
    return new_like(x, dtype=torch.int8 if dst_dtype is None else scalar_type(dst_dtype))


@operator("npu::npu_rms_norm_quant_v2")
def npu_rms_norm_quant_v2(
    x: Tensor, gamma: Tensor, scale: Tensor, *, dst_dtype: int | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The norm, quantised, and an empty place for deviations."""
    y = new_like(x, dtype=torch.int8 if dst_dtype is None else scalar_type(dst_dtype))
    return y, new_like(x, (0,), torch.float32)


@operator("npu::npu_deep_norm")
def npu_deep_norm(x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, reciprocal deviation and layer norm of ``alpha * x + gx``."""
    y = new_like(x)
    return _statistics(x, gamma), _statistics(x, gamma), y


@operator("npu::npu_add_layer_norm")
def npu_add_layer_norm(x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Layer norm of a sum, mean, reciprocal deviation, and the sum, which is made even if it is not asked for."""
    types = {x1.dtype, x2.dtype, gamma.dtype}
    dtype = x1.dtype if len(types) == 1 else torch.float32
    y, total = new_like(x1, dtype=dtype), new_like(x1, dtype=dtype)
    return y, _statistics(x1, gamma), _statistics(x1, gamma), total


def _check_parameters(normalized_shape: Sequence[int], **parameters: Tensor | None) -> None:
    for name, tensor in parameters.items():
        if tensor is not None and tuple(tensor.shape) != tuple(normalized_shape):
            raise refusal(_differs(name, tensor, normalized_shape))


def _differs(name: str, tensor: Tensor, normalized_shape: Sequence[int]) -> str:
    return (
        f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(tensor.shape)} and "
        f"normalized_shape = {list(normalized_shape)}"
    )


@operator("aten::native_layer_norm")
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, mean and reciprocal deviation."""
    num_kept = input.dim() - len(normalized_shape)
    if tuple(input.shape[max(num_kept, 0) :]) != tuple(normalized_shape):
        raise refusal(
            f"Given normalized_shape={list(normalized_shape)}, expected input with shape "
            f"[*, {', '.join(str(extent) for extent in normalized_shape)}], but got input of size{list(input.shape)}"
        )
    _check_parameters(normalized_shape, weight=weight, bias=bias)
    size = (*input.shape[:num_kept], *(1,) * len(normalized_shape))
    statistics = input.dtype if input.dtype is torch.float64 else torch.float32
    y = new_like(input)
    return y, new_like(input, size, statistics), new_like(input, size, statistics)


@operator("aten::rms_norm", hosts=Hosts.NUMBERS)
def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *args: Any) -> Tensor:
    """Torch's own norm has no kernel of its own: it is composed in float32."""
    wanted = tuple(normalized_shape)
    if tuple(input.shape[max(input.dim() - len(wanted), 0) :]) != wanted:
        raise RuntimeError(
            f"Given normalized_shape={list(wanted)}, expected input with shape [*{', '.join(map(str, wanted))}], but "
            f"got input of size{list(input.shape)}"
        )
    if weight is not None and tuple(weight.shape) != wanted:
        raise RuntimeError(_differs("weight", weight, wanted))
    if not input.is_floating_point():
        raise NotImplementedError(f"\"rms_norm\" not implemented for '{type_name(input.dtype)}'")
    wide = new_like(input, dtype=torch.float32)
    squares = new_like(wide)
    num_kept = input.dim() - len(normalized_shape)
    size = (*input.shape[:num_kept], *(1,) * len(normalized_shape))
    mean = new_like(wide, size)
    rstd = new_like(wide, size)
    del mean, squares
    normed = new_like(wide)
    if weight is not None:
        scaled = new_like(wide)
        del normed
        normed = scaled
        del scaled
    del wide
    result = new_like(input)
    del normed, rstd
    return result
