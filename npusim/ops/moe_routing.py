"""Mixture of experts on one rank: rows in the experts' order, and back.

An *entry* is one choice of one token; entries are numbered token by token (``token * k + choice``) unless said
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.operator import SYSTEM_WORKSPACE_BYTES, operator
from npusim.ops.refusal import refusal, type_name
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

COUNTS, CUMULATIVE_COUNTS, KEYS_AND_COUNTS = 1, 0, 2
UNQUANTISED, DYNAMIC_QUANT = -1, 1
DROP_PAD = 1
_FLOATING = (torch.float16, torch.bfloat16, torch.float32)


# ---- to the experts' order


def _order(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Entries in the experts' order, and each entry's place in it."""
    order = torch.argsort(experts.flatten(), stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    return order, places


def _token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    order, places = _order(indices)
    num_rows = _num_permuted(indices, num_out_tokens)
    return tokens[order[:num_rows] // (indices.shape[1] if indices.dim() == 2 else 1)], places.int()


def _num_permuted(indices: Tensor, num_out_tokens: int | None) -> int:
    num_entries = indices.numel()
    wanted = num_out_tokens or 0
    return num_entries + wanted if wanted <= 0 else min(wanted, num_entries)


@operator("npu::npu_moe_token_permute", computes=_token_permute)
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """A row for each entry, by expert, and the place of each entry."""
    if tokens.dim() != 2:
        raise refusal(f"The dims of input tokens should be 2 dimensional, but got {tokens.dim()}-dimensional.")
    if indices.dim() not in (1, 2):
        raise refusal(f"The dims of input indices should be 2 or 1 dimensional, but got {indices.dim()}-dimensional.")
    num_rows = _num_permuted(indices, num_out_tokens)
    return new_like(tokens, (num_rows, tokens.shape[1])), new_like(tokens, (indices.numel(),), torch.int32)


def _init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    experts, order = torch.sort(expert_idx.flatten(), stable=True)
    rows = row_idx.flatten()[order].long()
    num_active = min(active_num, x.shape[0]) * expert_idx.shape[1]
    places = torch.empty(rows.numel(), dtype=torch.int32)
    places[rows] = torch.arange(rows.numel(), dtype=torch.int32)
    return x[rows[:num_active] % x.shape[0]], places, experts.int()


@operator("npu::npu_moe_init_routing", computes=_init_routing)
def npu_moe_init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, ...]:
    """The older form: entries are numbered choice by choice, as ``row_idx`` says."""
    for name, tensor in (("x", x), ("row_idx", row_idx), ("expert_idx", expert_idx)):
        if tensor.dim() != 2:
            raise RuntimeError(f"The {name} should be 2D")
    if x.dtype not in _FLOATING:
        raise RuntimeError(
            f"float16、float32 or bfloat16 tensor expected but got a tensor with dtype: {type_name(x.dtype)}"
        )
    for tensor in (row_idx, expert_idx):
        if tensor.dtype is not torch.int32:
            raise RuntimeError(f"int32 tensor expected but got a tensor with dtype: {type_name(tensor.dtype)}")
    if row_idx.shape != expert_idx.shape:
        raise RuntimeError("The shape of expert_idx and row_idx should be same.")
    if x.shape[0] != row_idx.shape[0]:
        raise RuntimeError("Input rows shoud be same.")
    num_active = min(active_num, x.shape[0]) * expert_idx.shape[1]
    expanded = new_like(x, (num_active, x.shape[1]))
    return expanded, new_like(x, (expert_idx.numel(),), torch.int32), new_like(x, (expert_idx.numel(),), torch.int32)


def _init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if (
        drop_pad_mode == DROP_PAD
        or quant_mode not in (UNQUANTISED, DYNAMIC_QUANT)
        or expert_tokens_num_type == KEYS_AND_COUNTS
    ):
        raise UnmodelledCallError(
            "values of moe_init_routing with capacity, static scales or key-value counts are not modelled"
        )
    first, last = active_expert_range or (0, expert_num)
    flat = expert_idx.flatten().long()
    active = (flat >= first) & (flat < last)
    order, places = _order(torch.where(active, flat, expert_num))
    num_rows = min(active_num, flat.numel()) if active_num > 0 else flat.numel()
    num_active = int(active.sum())
    rows = x[order[:num_rows] // expert_idx.shape[1]]
    rows[num_active:] = 0
    counts = torch.bincount(flat[active] - first, minlength=last - first)
    row_idx = order if row_idx_type else places.masked_fill(~active, -1)
    scales = torch.zeros(num_rows) if scale is None else scale.flatten()[order[:num_rows] // expert_idx.shape[1]]
    if quant_mode == DYNAMIC_QUANT:
        scales = rows.float().abs().amax(-1) / 127
        rows = (rows.float() / scales.clamp(min=1e-30).unsqueeze(-1)).round().to(torch.int8)
    return rows, row_idx.int(), counts if expert_tokens_num_type == COUNTS else counts.cumsum(0), scales.float()


def _init_routing_results(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for name, tensor in (("x", x), ("expert_idx", expert_idx)):
        if tensor.dim() != 2:
            raise refusal(f"The {name} should be 2-Dimension, current is {tensor.dim()}-Dimension.")
    if quant_mode not in (UNQUANTISED, 0, DYNAMIC_QUANT):
        raise UnmodelledCallError(f"moe_init_routing with quant_mode {quant_mode} is not modelled")
    first, last = active_expert_range or (0, expert_num)
    num_entries = x.shape[0] * expert_idx.shape[1]
    rows: tuple[int, ...] = (min(num_entries, active_num) if active_num > 0 else num_entries,)
    if drop_pad_mode == DROP_PAD:
        rows = (expert_num, expert_capacity)
    expanded = new_like(x, (*rows, x.shape[1]), x.dtype if quant_mode == UNQUANTISED else torch.int8)
    row_idx = new_like(expert_idx, (num_entries,))
    keyed = expert_tokens_num_type == KEYS_AND_COUNTS
    counts = new_like(x, (expert_num, 2) if keyed else (last - first,), torch.int64)
    return expanded, row_idx, counts, new_like(x, (torch.Size(rows).numel(),), torch.float32)


@operator("npu::npu_moe_init_routing_v2", computes=_init_routing_v2)
def npu_moe_init_routing_v2(x: Tensor, expert_idx: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Rows by expert, places of the entries, tokens of each expert in the range, scales."""
    return _init_routing_results(x, expert_idx, **options)


def _init_routing_workspace(
    x: Tensor, expert_idx: Tensor, *, expert_num: int = -1, drop_pad_mode: int = 0, quant_mode: int = 0, **options: Any
) -> int:
    first, last = options.get("active_expert_range") or (0, expert_num)
    num_vector_cores = platform().runtimes[x.device.index].card.profile.num_vector_cores.value
    num_bytes = SYSTEM_WORKSPACE_BYTES + 28 * expert_idx.numel() + 64 * num_vector_cores + 4 * (last - first) + 32
    if quant_mode == DYNAMIC_QUANT:
        num_bytes += 4 * num_vector_cores * x.shape[1]
    return num_bytes + (8 * num_vector_cores if drop_pad_mode == DROP_PAD else 0)


@operator("_C_ascend::npu_moe_init_routing_custom", computes=_init_routing_v2, workspace_bytes=_init_routing_workspace)
def npu_moe_init_routing_custom(
    x: Tensor, expert_idx: Tensor, *, quant_mode: int = 0, **options: Any
) -> tuple[Tensor, ...]:
    """vllm-ascend's own kernel for the same. Sizes: vllm-ascend v0.22.1rc1, csrc/moe/moe_init_routing_custom."""
    return _init_routing_results(x, expert_idx, quant_mode=quant_mode, **options)


def _re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_ranks, num_experts = expert_token_num_per_rank.shape
    experts = torch.arange(num_experts).repeat(num_ranks).repeat_interleave(expert_token_num_per_rank.flatten().long())
    order, places = _order(experts)
    counts = expert_token_num_per_rank.sum(0)
    scales = torch.zeros(len(tokens)) if per_token_scales is None else per_token_scales[order]
    counts = counts if expert_token_num_type == COUNTS else counts.cumsum(0)
    return tokens[order], scales, (places if idx_type else order).int(), counts.to(expert_token_num_per_rank.dtype)


@operator("npu::npu_moe_re_routing", computes=_re_routing)
def npu_moe_re_routing(
    tokens: Tensor, expert_token_num_per_rank: Tensor, *, per_token_scales: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that lie by rank and expert, by expert and rank."""
    if tokens.dim() < 2:
        raise refusal("tokens dim should larger than 1")
    if expert_token_num_per_rank.dim() < 2:
        raise refusal("expert_token_num_per_rank dim should larger than 1")
    permuted = new_like(tokens)
    scales_type = torch.float32 if per_token_scales is None else per_token_scales.dtype
    scales = new_like(tokens, tokens.shape[:1], scales_type)
    indices = new_like(tokens, tokens.shape[:1], torch.int32)
    return permuted, scales, indices, new_like(expert_token_num_per_rank, expert_token_num_per_rank.shape[1:2])


# ---- and back


def _token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    weighted: Tensor = rows.unflatten(0, (-1, probs.shape[1])).float() * probs.float().unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype)


@operator("npu::npu_moe_token_unpermute", computes=_token_unpermute)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """The weighted sum of each token's rows; without weights, the rows in the entries' order."""
    for name, tensor, num_dims in (
        ("permuted_tokens", permuted_tokens, 2),
        ("sorted_indices", sorted_indices, 1),
        ("probs", probs, 2),
    ):
        if tensor is not None and tensor.dim() != num_dims:
            raise refusal(
                f"The dims of input {name} should be {num_dims} dimensional, but got {tensor.dim()}-dimensional."
            )
    num_choices = 1 if probs is None else probs.shape[1]
    return new_like(permuted_tokens, (sorted_indices.shape[0] // num_choices, permuted_tokens.shape[1]))


def _finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    num_choices = (k or 1) if scales is None else scales.shape[1]
    rows = expanded_permuted_rows.flatten(0, -2)
    num_tokens = expanded_src_to_dst_row.numel() // num_choices
    places = expanded_src_to_dst_row.long()
    by_choice = (drop_pad_mode or 0) < 2
    places = places.view(num_choices, num_tokens).T if by_choice else places.view(num_tokens, num_choices)
    chosen = rows[places.clamp(min=0)].float() * (places >= 0).unsqueeze(-1)
    if bias is not None and export_for_source_row is not None:
        chosen = chosen + bias[export_for_source_row.long()].float()
    if scales is not None:
        chosen = chosen * scales.float().unsqueeze(-1)
    total = chosen.sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(expanded_permuted_rows.dtype)


@operator("npu::npu_moe_finalize_routing", computes=_finalize_routing)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """The weighted sum of each token's rows, with biases of the experts and residuals."""
    rows = expanded_permuted_rows
    hidden_size = rows.size(1) if rows.dim() < 3 else rows.shape[2]
    num_tokens = scales.shape[0] if scales is not None else expanded_src_to_dst_row.shape[0] // (k or 1)
    return new_like(rows, (num_tokens, hidden_size))


def _compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    return torch.bincount(sorted_expert_for_source_row.flatten(), minlength=num_expert).cumsum(0).int()


@operator("npu::npu_moe_compute_expert_tokens", computes=_compute_expert_tokens)
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Cumulative tokens of the experts."""
    return new_like(sorted_expert_for_source_row, (num_expert,))


@operator("npu::npu_moe_update_expert")
def npu_moe_update_expert(expert_ids: Tensor, eplb_table: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Physical experts for logical ones, and which entries are active."""
    active = (expert_ids.size(0), expert_ids.size(1))
    return new_like(expert_ids), new_like(expert_ids, active, torch.bool)
