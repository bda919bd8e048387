"""torch_npu's fused samplers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npusim.ops.operator import SYSTEM_WORKSPACE_BYTES, operator
from npusim.ops.reduction import sorted_places
from npusim.torch_backend.tensors import new_like


def _top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    order = sorted_places(logits, descending=True)
    ranked = logits.gather(-1, order).float()
    hidden = torch.zeros_like(ranked, dtype=torch.bool)
    places = torch.arange(logits.shape[-1])
    if k is not None:
        hidden |= places >= k.long().unsqueeze(-1)
    if p is not None:
        probabilities = torch.softmax(ranked.masked_fill(hidden, float("-inf")), -1)
        before = probabilities.cumsum(-1) - probabilities
        hidden |= (before > p.float().unsqueeze(-1)) & (places > 0)
    return logits.masked_fill(torch.zeros_like(hidden).scatter_(-1, order, hidden), float("-inf"))


@operator("npu::npu_top_k_top_p", computes=_top_k_top_p)
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Logits with all but the top ``k``, and of those all beyond probability ``p``, at minus infinity."""
    return new_like(logits)


def _sorting_workspace(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> int:
    """Sorted logits, their int32 places, and float32 sums if there is no ``k``; the sort's own need is not known."""
    per_logit = logits.itemsize + 4 + (4 if k is None else 0)
    return SYSTEM_WORKSPACE_BYTES + 256 + logits.numel() * per_logit


@operator("_C_ascend::npu_apply_top_k_top_p", computes=_top_k_top_p, workspace_bytes=_sorting_workspace)
def ascend_apply_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """vllm-ascend's own kernel for the same. Workspace, assumed: its v0.22.1rc1, csrc/moe/apply_top_k_top_p_custom."""
    if p is None and k is None:
        raise RuntimeError("apply_top_k_top_p: p and k cannot be None at the same time.")
    return torch.empty_like(logits)


@operator("npu::npu_top_k_top_p_sample")
def npu_top_k_top_p_sample(
    logits: Tensor, top_k: Tensor, top_p: Tensor, q: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Sampled tokens and filtered logits, made even if not asked for; 12 bytes more for each logit meanwhile."""
    rows, width = logits.shape
    selected = new_like(logits, (rows, width), torch.float32)
    order = new_like(logits, (rows, width), torch.int64)
    masked = new_like(logits, (rows, width), torch.float32)
    tokens = new_like(logits, (rows,), torch.int64)
    del masked, order
    return tokens, selected
