"""Normalisations. Each is one kernel; statistics are float32, of the input's size with the normalised dimensions 1.

Values are computed in float32 and rounded once. Grade: assumed (the kernels' order of summation is not reproduced).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npusim.ops.operator import SYSTEM_WORKSPACE_BYTES, operator
from npusim.ops.refusal import refusal
from npusim.ops.shapes import INT4, QUINT4X2, broadcast, scalar_type
from npusim.torch_backend.tensors import new_like


def _statistics_size(x: Tensor, gamma: Tensor) -> tuple[int, ...]:
    num_kept = max(x.dim() - gamma.dim(), 0)
    return (*x.shape[:num_kept], *(1,) * (x.dim() - num_kept))


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    wide = x.float()
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * (gamma.float() + offset)).to(x.dtype), rstd


def _sum_and_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    total = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = _rms_norm(total, gamma, epsilon)
    return y, rstd, total


@operator(
    "npu::npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    computes=lambda x, gamma, epsilon=1e-6: _rms_norm(x, gamma, epsilon),
)
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The norm and the reciprocal deviations."""
    return new_like(self), new_like(self, _statistics_size(self, gamma), torch.float32)


@operator(
    "npu::npu_gemma_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    computes=lambda x, gamma, epsilon=1e-6: _rms_norm(x, gamma, epsilon, 1.0),
)
def npu_gemma_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """As ``npu_rms_norm``, scaled by ``1 + gamma``."""
    return new_like(self), new_like(self, _statistics_size(self, gamma), torch.float32)


@operator(
    "_C_ascend::npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)",
    computes=lambda x, gamma, epsilon=1e-6: _rms_norm(x, gamma, epsilon, 1.0),
)
def ascend_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """vllm-ascend's binding of the same kernel, which makes the deviations first."""
    rstd = new_like(x, _statistics_size(x, gamma), torch.float32)
    return new_like(x), rstd


@operator(
    "npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    computes=lambda x1, x2, gamma, epsilon=1e-6: _sum_and_norm(x1, x2, gamma, epsilon),
)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of ``x1 + x2``, the reciprocal deviations, the sum."""
    return new_like(x1), new_like(x1, _statistics_size(x1, gamma), torch.float32), new_like(x1)


def _add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd, total = _sum_and_norm(x1, x2, gamma, epsilon)
    return y if beta is None else (y.float() + beta.float()).to(y.dtype), rstd, total


@operator(
    "_C_ascend::npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6)"
    " -> (Tensor y, Tensor rstd, Tensor x)",
    computes=_add_rms_norm_bias,
    workspace_bytes=lambda *_, **__: SYSTEM_WORKSPACE_BYTES + 256,
)
def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """vllm-ascend's own kernel: as ``npu_add_rms_norm``, plus a bias. Sizes: vllm-ascend v0.22.1rc1, csrc/moe."""
    rstd = new_like(x1, _statistics_size(x1, gamma), torch.float32)
    y = new_like(x1)
    return y, rstd, new_like(x1)


@operator(
    "npu::npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    computes=lambda x1, x2, gamma, epsilon=1e-6: _with_float(*_sum_and_norm(x1, x2, gamma, epsilon)),
)
def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``npu_add_rms_norm``, with the norm in float32 before it."""
    wide = new_like(x1, dtype=torch.float32)
    return wide, new_like(x1), new_like(x1, _statistics_size(x1, gamma), torch.float32), new_like(x1)


def _with_float(y: Tensor, rstd: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    return y.float(), y, rstd, total


@operator(
    "npu::npu_add_rms_norm_v2(Tensor(a!) x1, Tensor(b!) x2, Tensor gamma, float epsilon=1e-06) -> Tensor",
    writes=["x1", "x2"],
    computes=lambda x1, x2, gamma, epsilon=1e-6: _in_place(*_sum_and_norm(x1, x2, gamma, epsilon)),
)
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """The norm into ``x1``, the sum into ``x2``."""
    return new_like(x1, _statistics_size(x1, gamma), torch.float32)


def _in_place(y: Tensor, rstd: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    return y, total, rstd


@operator(
    "npu::npu_add_rms_norm_v2_functional(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor)",
    computes=lambda x1, x2, gamma, epsilon=1e-6: _functional(*_sum_and_norm(x1, x2, gamma, epsilon)),
)
def npu_add_rms_norm_v2_functional(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``npu_add_rms_norm_v2``, on copies."""
    rstd = new_like(x1, _statistics_size(x1, gamma), torch.float32)
    return rstd, new_like(x1), new_like(x2)


def _functional(y: Tensor, rstd: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    return rstd, y, total


@operator(
    "npu::npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1, "
    "Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, float epsilon=1e-06, "
    "bool div_mode=True, int? dst_type=None) -> (Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a sum, quantised with one or two scales (the second result is made either way), and the sum."""
    if axis != -1:
        raise refusal("axis only support -1.")
    quantised = torch.int8 if dst_type is None else scalar_type(dst_type)
    return new_like(x1, dtype=quantised), new_like(x1, dtype=quantised), new_like(x1)


@operator(
    "npu::npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None, "
    "Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=1e-06, bool[2]? output_mask=None, int? y_dtype=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: Sequence[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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


@operator(
    "npu::npu_rms_norm_quant(Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, float epsilon=1e-06, *, "
    "int? dst_dtype=None) -> Tensor"
)
def npu_rms_norm_quant(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    scale: Tensor,
    offset: Tensor,
    epsilon: float = 1e-6,
    *,
    dst_dtype: int | None = None,
) -> Tensor:
    """The norm, quantised with one scale and offset."""
    return new_like(x, dtype=torch.int8 if dst_dtype is None else scalar_type(dst_dtype))


@operator(
    "npu::npu_rms_norm_quant_v2(Tensor x, Tensor gamma, Tensor scale, *, Tensor? offset=None, Tensor? beta=None, "
    "float epsilon=1e-06, bool div_mode=True, int? dst_dtype=None) -> (Tensor, Tensor)"
)
def npu_rms_norm_quant_v2(
    x: Tensor,
    gamma: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm, quantised, and an empty place for deviations."""
    return new_like(x, dtype=torch.int8 if dst_dtype is None else scalar_type(dst_dtype)), new_like(
        x, (0,), torch.float32
    )


@operator(
    "npu::npu_deep_norm(Tensor x, Tensor gx, Tensor beta, Tensor gamma, float alpha=0.3, float epsilon=1e-06)"
    " -> (Tensor, Tensor, Tensor)"
)
def npu_deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float = 0.3, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, reciprocal deviation and layer norm of ``alpha * x + gx``."""
    y = new_like(x)
    size = _statistics_size(x, gamma)
    return new_like(x, size, torch.float32), new_like(x, size, torch.float32), y


@operator(
    "npu::npu_add_layer_norm(Tensor x1, Tensor x2, Tensor gamma, Tensor beta, float epsilon=1e-05, "
    "bool additional_output=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
def npu_add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer norm of a sum, mean, reciprocal deviation, and the sum, for which memory is taken even if it is not asked for."""
    y, total = new_like(x1), new_like(x1)
    size = _statistics_size(x1, gamma)
    return y, new_like(x1, size, torch.float32), new_like(x1, size, torch.float32), total


@operator("aten::native_layer_norm")
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm, mean and reciprocal deviation."""
    num_kept = input.dim() - len(normalized_shape)
    if tuple(input.shape[num_kept:]) != tuple(normalized_shape):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected input with shape "
            f"[*, {', '.join(str(extent) for extent in normalized_shape)}], but got input of size{list(input.shape)}"
        )
    size = (*input.shape[:num_kept], *(1,) * len(normalized_shape))
    y = new_like(input)
    return y, new_like(input, size, torch.float32), new_like(input, size, torch.float32)


@operator("aten::rms_norm", checks_devices=False)
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Torch's own norm has no kernel of its own: it is composed in float32."""
    wide = new_like(input, dtype=torch.float32)
    squares = new_like(wide)
    mean = new_like(wide, _statistics_size(input, torch.empty(normalized_shape, device="meta")))
    shifted = new_like(mean)
    del mean, squares
    rstd = shifted
    normed = new_like(wide)
    if weight is not None:
        broadcast(normed.shape, weight.shape)
        scaled = new_like(wide)
        del normed
        normed = scaled
    del wide
    result = new_like(input)
    del normed, rstd, shifted
    return result
