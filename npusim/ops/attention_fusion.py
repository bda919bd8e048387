"""The other fused attention operators: the older pair for inference, the one made for training, and torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops import attention
from npusim.ops.attention_math import Masking, attend, spans
from npusim.ops.operator import operator
from npusim.ops.refusal import NOT_SUPPORTED, refusal, type_name
from npusim.torch_backend.tensors import new_like

_SOFTMAX_LANES = 8
"""Each row's maximum and sum are kept this many times."""


# ---- npu_prompt_flash_attention, npu_incre_flash_attention


def _older(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    renamed = {"scale_value": "scale"}
    return attention.compute(query, key, value, **{renamed.get(name, name): given for name, given in options.items()})[
        0
    ]


def _output_type(query: Tensor, quant_scale: Tensor | None) -> torch.dtype:
    if quant_scale is not None:
        return torch.int8
    return torch.float16 if query.dtype is torch.int8 else query.dtype


@operator("npu::npu_prompt_flash_attention", computes=_older)
def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale2: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention for prompts: a tensor like the query is made before the output; two for BNSD_BSND."""
    sized = new_like(query)
    if not input_layout:
        raise refusal("input_layout is empty")
    size = tuple(query.shape)
    if input_layout == "BNSD_BSND":
        size = (size[0], size[2], size[1], size[3])
        sized = new_like(query, size)
    elif input_layout == "TND" and query.dim() == 3:
        size = (size[0], size[1], value.shape[2])
        sized = new_like(query, size)
    output = new_like(query, size, _output_type(query, quant_scale2))
    del sized
    return output


@operator("npu::npu_incre_flash_attention", computes=_older)
def npu_incre_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, quant_scale2: Tensor | None = None, **_: Any
) -> Tensor:
    """Attention for single tokens."""
    return new_like(query, dtype=_output_type(query, quant_scale2))


# ---- npu_fusion_attention


def _check_fusion(inputs: dict[str, Tensor | None], head_num: int, input_layout: str, keep_prob: float) -> None:
    if head_num <= 0:
        raise refusal(f"head_num must > 0, but got {head_num}")
    for name, tensor in inputs.items():
        if tensor is not None and tensor.dim() not in (3, 4):
            raise refusal(
                f"The shapes of the input {name} should be 3 or 4 dimensional, but got {tensor.dim()}-dimensional"
            )
    if not 0 < keep_prob <= 1:
        raise refusal(f"The keep_prob value must be in range of (0, 1], but got {keep_prob:g}")
    if not input_layout:
        raise refusal("input_layout is empty")
    if input_layout not in ("BSH", "SBH", "BNSD", "BSND", "TND"):
        raise refusal(f"The input_layout should be BSH/SBH/BNSD/BSND/TND(case-insensitive), but got {input_layout}")
    if keep_prob != 1:
        raise UnmodelledCallError("npu_fusion_attention with dropout is not modelled")


def _statistics_size(query: Tensor, key: Tensor, head_num: int, layout: str, ends: Any) -> tuple[tuple[int, ...], int]:
    """Size of the softmax's maxima and sums, and how many scores there are."""
    if layout == "TND":
        query_ends, key_ends = ends
        pairs = zip(spans(query_ends), spans(key_ends), strict=True)
        scores = sum((q_end - q) * (k_end - k) for (q, q_end), (k, k_end) in pairs)
        heads = query.shape[1]
        return (query.shape[0], heads, _SOFTMAX_LANES), heads * scores
    places = {letter: dim for dim, letter in enumerate(layout)}
    batch, rows = query.shape[places["B"]], query.shape[places["S"]]
    return (batch, head_num, rows, _SOFTMAX_LANES), batch * head_num * rows * key.shape[places["S"]]


def _fusion(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *args: Any, **kwargs: Any
) -> Any:
    names = "pse padding_mask atten_mask scale keep_prob pre_tockens next_tockens inner_precise prefix actual_seq_qlen "
    options = {**dict(zip((names + "actual_seq_kvlen sparse_mode").split(), args, strict=False)), **kwargs}
    if (
        options.get("pse") is not None
        or options.get("query_rope") is not None
        or input_layout not in ("BNSD", "BSND", "TND", "BSH")
    ):
        raise UnmodelledCallError(
            f"values of npu_fusion_attention in layout {input_layout} or with pse are not modelled"
        )
    given = {
        "input_layout": input_layout,
        "num_heads": head_num,
        "num_key_value_heads": head_num * key.shape[-1] // query.shape[-1]
        if input_layout == "BSH"
        else key.shape[input_layout.index("N")],
        "scale": options.get("scale", 1.0),
        "atten_mask": options.get("atten_mask"),
        "sparse_mode": options.get("sparse_mode", 0),
        "softmax_lse_flag": True,
    }
    if input_layout == "TND":
        given |= {
            "actual_seq_lengths": options["actual_seq_qlen"],
            "actual_seq_lengths_kv": options["actual_seq_kvlen"],
        }
    output, lse = attention.compute(query, key, value, **given)
    lanes = lse.expand(*lse.shape[:-1], _SOFTMAX_LANES)
    return (
        output,
        lanes,
        torch.ones_like(lanes),
        output.new_empty(0),
    )  # maximum and sum as exp(lse) * 1: only both count


@operator("npu::npu_fusion_attention", computes=_fusion)
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    *args: Any,
) -> tuple[Any, ...]:
    """Attention, the softmax's maxima and sums, an empty tensor, and seed, offset and number of the dropout mask."""
    _check_fusion({"query": query, "key": key, "value": value}, head_num, input_layout, keep_prob)
    size, num_scores = _statistics_size(query, key, head_num, input_layout, (actual_seq_qlen, actual_seq_kvlen))
    width = value.shape[-1] if input_layout in ("TND", "BNSD", "BSND") else query.shape[-1]
    output = new_like(query, (*query.shape[:-1], width))
    maxima, sums = new_like(query, size, torch.float32), new_like(query, size, torch.float32)
    return output, maxima, sums, new_like(query, (0,)), 0, 0, num_scores


@operator("npu::npu_fusion_attention_v2", computes=_fusion)
def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    keep_prob: float = 1.0,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    """The same with rotary parts of their own; takes two tensors of the output's size on the way."""
    inputs = {"query": query, "key": key, "value": value, "query_rope": query_rope, "key_rope": key_rope}
    _check_fusion(inputs, head_num, input_layout, keep_prob)
    size, num_scores = _statistics_size(query, key, head_num, input_layout, (actual_seq_qlen, actual_seq_kvlen))
    output_size = (*query.shape[:-1], value.shape[-1])
    first = new_like(query)
    second = new_like(query, output_size)
    del first
    output = new_like(query, output_size)
    maxima, sums = new_like(query, size, torch.float32), new_like(query, size, torch.float32)
    del second
    return output, maxima, sums, new_like(query, (0,)), 0, 0, num_scores


# ---- combining partial results


def _attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> tuple[Tensor, ...]:
    sums = torch.stack(lse)
    total = torch.logsumexp(sums, 0)
    weights = torch.exp(sums - total).unsqueeze(-1)
    output = (torch.stack(local_out).float() * weights).sum(0).to(local_out[0].dtype)
    return (output, total) if update_type else (output,)


@operator("npu::npu_attention_update", computes=_attention_update)
def npu_attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int) -> tuple[Any, ...]:
    """Attention over all keys from attention over parts of them; the combined logarithms too for ``update_type`` 1."""
    output = new_like(local_out[0])
    return output, new_like(lse[0]) if update_type else None


# ---- torch's


_BUILT_IN = {torch.float32: "float", torch.float64: "double", torch.int32: "int", torch.int64: "long int"}


def _check_sdpa(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.dtype == key.dtype == value.dtype:
        names = [_BUILT_IN.get(t.dtype, f"c10::{type_name(t.dtype)}") for t in (query, key, value)]
        raise refusal(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {names[0]} key.dtype: "
            f"{names[1]} and value.dtype: {names[2]} instead.",
            NOT_SUPPORTED,
        )
    if not query.dim() == key.dim() == value.dim() == 4 or query.shape[1] % key.shape[1]:
        raise UnmodelledCallError(
            "scaled_dot_product_attention is modelled in its fused form, [batch, heads, tokens, size]"
        )


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    masking = Masking(2 if is_causal else 0, None if attn_mask is None else ~attn_mask)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    sequences = zip(*(x.transpose(1, 2) for x in (query, key, value)), strict=True)
    outputs = [attend(q, k, v, factor, masking, index)[0] for index, (q, k, v) in enumerate(sequences)]
    return torch.stack(outputs).transpose(1, 2)


@operator("aten::scaled_dot_product_attention", computes=_sdpa)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One kernel behind it: makes the causal mask (twice) or the inverse of a boolean one, maxima and sums."""
    _check_sdpa(query, key, value)
    mask = None
    if is_causal:
        ones = new_like(query, (2048, 2048), torch.bool)
        mask = new_like(ones)
        del ones
    elif attn_mask is not None:
        if attn_mask.dtype is not torch.bool or dropout_p:
            raise UnmodelledCallError("scaled_dot_product_attention is modelled for boolean masks and without dropout")
        mask = new_like(attn_mask)
    output = new_like(query, (*query.shape[:-1], value.shape[-1]))
    size = (*query.shape[:-1], _SOFTMAX_LANES)
    maxima, sums = new_like(query, size, torch.float32), new_like(query, size, torch.float32)
    del sums, maxima, mask
    return output
