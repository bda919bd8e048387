"""Mixture of experts: which experts each token goes to, and with what weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npusim.ops.operator import SYSTEM_WORKSPACE_BYTES, operator
from npusim.ops.refusal import refusal, type_name
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

_FLOATING = (torch.float16, torch.bfloat16, torch.float32)


def _gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.sigmoid(x.float()) if norm_type == 1 else torch.softmax(x.float(), -1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        groups = choice.unflatten(-1, (group_count, -1))
        worth = groups.topk(2, -1).values.sum(-1) if group_select_mode == 1 else groups.amax(-1)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(k_group, -1).indices, True)
        choice = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., :k]
    weights = scores.gather(-1, experts)
    if renorm or norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.int(), scores


def _gating_results(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    if x.dim() != 2:
        raise RuntimeError("The x should be 2D")
    if x.dtype not in _FLOATING:
        raise RuntimeError(
            f"float16、float32 or bfloat16 tensor expected but got a tensor with dtype: {type_name(x.dtype)}"
        )
    rows = x.shape[0]
    weights, experts = new_like(x, (rows, k)), new_like(x, (rows, k), torch.int32)
    platform().values.tell_choices(experts, x.shape[1])
    return weights, experts, new_like(x, dtype=torch.float32)


@operator("npu::npu_moe_gating_top_k", computes=_gating_top_k)
def npu_moe_gating_top_k(x: Tensor, k: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and experts of each token, and the normalised scores, which are made even if not asked for."""
    return _gating_results(x, k)


_ASCEND_PARAMETERS = (
    *("k_group", "group_count", "group_select_mode", "renorm", "norm_type", "out_flag", "routed_scaling_factor", "eps"),
    "bias",
)


def _ascend_gating_top_k(
    x: Tensor, k: int, *args: Any, bias_opt: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _gating_top_k(x, k, **{"bias": bias_opt, **dict(zip(_ASCEND_PARAMETERS, args, strict=False))})


@operator(
    "_C_ascend::moe_gating_top_k",
    computes=_ascend_gating_top_k,
    workspace_bytes=lambda *_, **__: SYSTEM_WORKSPACE_BYTES,
)
def ascend_moe_gating_top_k(x: Tensor, k: int, *args: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """vllm-ascend's own kernel for the same. Sizes: vllm-ascend v0.22.1rc1, csrc/moe/moe_gating_top_k."""
    return _gating_results(x, k)


def _gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    weights, experts, _ = _gating_top_k(x, k)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    rows = x.shape[:-1].numel()
    entries = torch.arange(rows * k, dtype=torch.int32).view(k, rows).T.reshape(experts.shape)
    return weights, experts, entries


@operator("npu::npu_moe_gating_top_k_softmax", computes=_gating_top_k_softmax)
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, experts, and numbers of the entries, choice by choice."""
    if x.dim() not in (2, 3):
        raise refusal("The x should be 2D or 3D")
    if x.dtype not in _FLOATING:
        raise refusal(f"float16, float32 or bfloat16 tensor expected but got a tensor with dtype: {type_name(x.dtype)}")
    if not 0 <= k <= x.shape[-1]:
        raise refusal(f"The k should be in [0, {x.shape[-1]}]")
    size = (*x.shape[:-1], k)
    return new_like(x, size), new_like(x, size, torch.int32), new_like(x, size, torch.int32)


def _gating_top_k_softmax_v2(
    x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int = 0, output_softmax: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    weights, experts, scores = _gating_top_k(x, k, renorm=renorm)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    return weights, experts, scores if output_softmax and not renorm else scores.new_empty(0)


@operator("npu::npu_moe_gating_top_k_softmax_v2", computes=_gating_top_k_softmax_v2)
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor, *, k: int = 1, renorm: int | None = 0, output_softmax: bool | None = False, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, experts and, if asked for, the softmax."""
    if x.dim() not in (2, 3):
        raise refusal("The x's shape should be 2D or 3D")
    if x.dtype not in _FLOATING:
        raise refusal(f"float16, float32 or bfloat16 tensor expected but got a tensor with dtype: {type_name(x.dtype)}")
    size = (*x.shape[:-1], k)
    weights, experts = new_like(x, size), new_like(x, size, torch.int32)
    return weights, experts, new_like(x, x.shape if output_softmax and not renorm else (0,), torch.float32)
