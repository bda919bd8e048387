"""Latent, sparse and linear attention: shapes and memory; their numbers are not modelled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.aclop import copy_parts
from npusim.ops.operator import Hosts, operator
from npusim.ops.refusal import refusal
from npusim.torch_backend.tensors import new_like

_FULL_QUANTISATION = (2, 3, 4, 5)


def _new(size: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    return new_like(like, size, dtype)


# ---- the projections before latent attention


def _check_dims(name: str, tensor: Tensor, *allowed: int) -> None:
    if tensor.dim() not in allowed:
        raise refusal(
            f"{name} dim num should be {' or '.join(map(str, allowed))}, but the actual value is {tensor.dim()}"
        )


def _queries(token_x: Tensor, weight_uk: Tensor, last: int) -> tuple[int, ...]:
    return (*token_x.shape[:-1], weight_uk.shape[0], last)


@operator("npu::npu_mla_prolog")
def npu_mla_prolog(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **scales: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first form: it copies both caches, and inputs that are parts of a storage."""
    required = dict(list(locals().items())[:12])
    for name in sorted(required):
        if not required[name].numel():
            raise refusal(f"{name} should not be null, but the actual value is null")
    _check_dims("token_x", token_x, 2, 3)
    _check_dims("weight_uk", weight_uk, 3)
    _check_dims("rope_sin", rope_sin, 2, 3)
    query = _new(_queries(token_x, weight_uk, weight_uk.shape[2]), token_x, token_x.dtype)
    query_rope = _new(_queries(token_x, weight_uk, rope_sin.size(token_x.dim() - 1)), token_x, token_x.dtype)
    caches = new_like(kv_cache), new_like(kr_cache)
    copy_parts(*required.values())
    return query, query_rope, *caches


@operator("npu::npu_mla_prolog_v2", writes=["kv_cache", "kr_cache"])
def npu_mla_prolog_v2(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **scales: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The second form writes into the caches."""
    _check_dims("token_x", token_x, 2, 3)
    _check_dims("weight_uk", weight_uk, 3)
    _check_dims("rope_sin", rope_sin, 2, 3)
    is_quantised = token_x.dtype is torch.int8 and scales.get("quant_scale_ckv") is not None
    size = _queries(token_x, weight_uk, weight_uk.shape[2])
    query = _new(size, token_x, token_x.dtype if is_quantised else rope_sin.dtype)
    rows = token_x.shape[:-1].numel()
    scale = _new((rows, weight_uk.shape[0], 1) if is_quantised else (1,), token_x, torch.float32)
    query_rope = _new(_queries(token_x, weight_uk, rope_sin.size(token_x.dim() - 1)), token_x, torch.bfloat16)
    return query, query_rope, kv_cache, kr_cache, scale


def _prolog_v3(
    token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, rope_sin: Tensor, options: Any
) -> list[Tensor]:
    weights, caches = options.get("weight_quant_mode", 0), options.get("kv_cache_quant_mode", 0)
    if weights in (3, 5):
        raise UnmodelledCallError("npu_mla_prolog_v3 with 8-bit floating point weights")
    dims = token_x.dim()
    _check_dims("token_x", token_x, 2, 3)
    _check_dims("weight_uk", weight_uk, 3)
    if rope_sin.dim() != dims:
        raise refusal(
            f"when token_x dim num is {dims}, rope_sin dim num should be {dims}, but the actual value is "
            f"{rope_sin.dim()}"
        )
    rows = token_x.shape[:-1].numel()
    is_quantised = weights in _FULL_QUANTISATION and caches == 1
    size = _queries(token_x, weight_uk, weight_uk.shape[2])
    query = _new(size, token_x, token_x.dtype if is_quantised else torch.bfloat16)
    query_scale = _new((rows, weight_uk.shape[0], 1) if is_quantised else (0,), token_x, torch.float32)
    query_rope = _new(_queries(token_x, weight_uk, rope_sin.shape[-1]), token_x, torch.bfloat16)
    has_norm = options.get("query_norm_flag", False)
    norm = _new((*token_x.shape[:-1], weight_dq.shape[1]) if has_norm else (0,), token_x, weight_uq_qr.dtype)
    norm_scale = _new((rows, 1) if has_norm and weights in (1, 2, 4) else (0,), token_x, torch.float32)
    return [query, query_rope, query_scale, norm, norm_scale]


@operator("npu::npu_mla_prolog_v3", writes=["kv_cache", "kr_cache"])
def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The third form returns only what is new."""
    return tuple(_prolog_v3(token_x, weight_dq, weight_uq_qr, weight_uk, rope_sin, options))


@operator("npu::npu_mla_prolog_v3_functional")
def npu_mla_prolog_v3_functional(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The same on copies of the caches."""
    new = _prolog_v3(token_x, weight_dq, weight_uq_qr, weight_uk, rope_sin, options)
    return *new, kv_cache.clone(), kr_cache.clone()


@operator("atb::npu_mla_preprocess", hosts=Hosts.TAKEN)
def npu_mla_preprocess(
    input: Tensor,
    gamma0: Tensor,
    beta0: Tensor,
    wdqkv: Tensor,
    descale0: Tensor,
    gamma1: Tensor,
    beta1: Tensor,
    wuq: Tensor,
    descale1: Tensor,
    gamma2: Tensor,
    cos: Tensor,
    sin: Tensor,
    wuk: Tensor,
    kv_cache: Tensor,
    kv_cache_rope: Tensor,
    slotmapping: Tensor,
    *,
    cache_mode: str | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ATB's form: caches of the same size as those given, but not them."""
    if cache_mode in ("int8_nzcache", "nzcache"):
        raise UnmodelledCallError(f"npu_mla_preprocess with cache_mode {cache_mode}")
    tokens, heads = input.shape[0], wuk.shape[0]
    query = _new((tokens, heads, 512), kv_cache, kv_cache.dtype)
    query_rope = torch.empty((tokens, heads, 64), dtype=input.dtype, device=input.device)
    return query, new_like(kv_cache), query_rope, new_like(kv_cache_rope)


# ---- sparse attention


def _check_filled(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.numel():
            raise RuntimeError(f"Tensor {name} is empty.")


def _selected(query: Tensor, key: Tensor, layout_query: str, layout_key: str, count: int) -> tuple[int, ...]:
    _check_filled(query=query, key=key)
    if count <= 0:
        raise RuntimeError(f"sparse count should be greater than 0, but now is {count}")
    heads = key.shape[1] if layout_key == "TND" and layout_query != "BSND" else key.shape[2]
    return (*query.shape[: 2 if layout_query == "BSND" else 1], heads, count)


@operator("npu::npu_lightning_indexer")
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    return_value: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The keys that matter to each query, and how much."""
    size = _selected(query, key, layout_query, layout_key, sparse_count)
    return _new(size, query, torch.int32), _new(size if return_value else (0,), query, query.dtype)


@operator("npu::npu_quant_lightning_indexer")
def npu_quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    **options: Any,
) -> Tensor:
    """The same on 8-bit queries and keys."""
    return _new(_selected(query, key, layout_query, layout_key, sparse_count), query, torch.int32)


def _check_layout(query: Tensor, layout: str) -> None:
    if layout not in ("BSND", "TND"):
        raise refusal(f"The layout of query only support BSND and TND, but got {layout}")
    if query.dim() != len(layout):
        raise refusal(
            f"When the layout of query is {layout}, the query dimension must be {len(layout)}, but got {query.dim()}"
        )


@operator("npu::npu_sparse_flash_attention")
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    layout_query: str = "BSND",
    return_softmax_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to the selected keys; maximum and sum of the softmax if asked for."""
    for name, tensor in (("query", query), ("key", key)):
        if not tensor.numel():
            raise refusal(f"Tensor {name} is empty.")
    _check_filled(sparse_indices=sparse_indices)
    _check_layout(query, layout_query)
    result = _new(tuple(query.shape), query, query.dtype)
    size: tuple[int, ...] = (0,)
    if return_softmax_lse and query.dim() == 3:
        size = key.shape[1], query.shape[0], query.shape[1] // key.shape[1]
    elif return_softmax_lse:
        size = query.shape[0], key.shape[2], query.shape[1], query.shape[2] // key.shape[2]
    return result, _new(size, query, torch.float32), _new(size, query, torch.float32)


@operator("npu::npu_kv_quant_sparse_flash_attention")
def npu_kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    layout_query: str = "BSND",
    rope_head_dim: int = 64,
    **options: Any,
) -> Tensor:
    """The same with 8-bit keys and values; the queries' rotary part gives no result."""
    _check_filled(query=query, key=key, sparse_indices=sparse_indices)
    _check_layout(query, layout_query)
    return _new((*query.shape[:-1], query.shape[-1] - rope_head_dim), query, query.dtype)


# ---- linear attention


def _check_value(value: Tensor, scale: float | None) -> None:
    if value.dim() != 3:
        raise refusal("value dim should be 3")
    if scale is None:
        raise refusal("scale cannot be empty")


@operator("npu::npu_recurrent_gated_delta_rule", writes=["state"])
def npu_recurrent_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, *, scale: float | None = None, **options: Any
) -> Tensor:
    """One step of each sequence, into its state."""
    _check_value(value, scale)
    return _new(tuple(value.shape), value, torch.bfloat16)


@operator("npu::npu_chunk_gated_delta_rule")
def npu_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Whole sequences; returns their states."""
    if not value.numel():
        raise refusal("value cannot be empty")
    _check_value(value, scale)
    for name, given in (("beta", beta), ("initial_state", initial_state), ("actual_seq_lengths", actual_seq_lengths)):
        if given is None:
            raise refusal(f"{name} cannot be empty")
    assert initial_state is not None
    return _new(tuple(value.shape), value, torch.bfloat16), initial_state.clone()
