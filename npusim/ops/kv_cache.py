"""Writes to and reads from key/value caches.

A cache in order (``Norm``) is [pages, page size, heads, size]; a slot is a row of it counted over all pages. Values of
caches in the blocked order (``PA_NZ``) are not modelled: such a write leaves the cache without numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.atb import launch
from npusim.ops.attention_math import from_pages
from npusim.ops.operator import IN_BODY, Hosts, operator
from npusim.ops.refusal import refusal
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like


def _written(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    result = cache.clone()
    places = slots.flatten().long()
    kept = places >= 0
    flat = result.view(cache.shape[0] * cache.shape[1], -1)
    flat[places[kept]] = rows.reshape(rows.shape[0], -1)[: len(places)][kept].to(cache.dtype)
    return result


def _reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    return _written(key_cache, key, slot_indices), _written(value_cache, value, slot_indices)


@operator(
    "atb::_npu_reshape_and_cache",
    computes=_reshape_and_cache,
    writes=["key_cache", "value_cache"],
    hosts=Hosts.TAKEN,
)
def npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Rows into their slots."""
    launch([key, value, key_cache, value_cache, slot_indices], [key_cache, value_cache])


def _siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> Tensor:
    return _written(key_cache, key, slot_indices)


@operator("atb::_npu_reshape_and_cache_siso", computes=_siso, writes=["key_cache"], hosts=Hosts.TAKEN)
def npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor) -> None:
    """The same for one cache."""
    launch([key, key_cache, slot_indices], [key_cache])


@operator("npu::npu_scatter_pa_kv_cache", computes=IN_BODY)
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
    **_: Any,
) -> None:
    """Rows into their slots, strided or not."""
    values = platform().values
    if cache_mode == "Norm" and compress_lens is None and key_cache.dim() == 4:
        inputs = (key, value, key_cache, value_cache, slot_mapping)
        values.update((key_cache, value_cache), inputs, _reshape_and_cache)
    else:
        values.forget((key_cache, value_cache))


def _scatter_pa_cache(key: Tensor, slot_mapping: Tensor, *, key_cache: Tensor, **_: Any) -> Tensor:
    return _written(key_cache, key, slot_mapping)


@operator("npu::npu_scatter_pa_cache.value", computes=_scatter_pa_cache, writes=["key_cache"])
def npu_scatter_pa_cache(key: Tensor, slot_mapping: Tensor, *, key_cache: Tensor, **_: Any) -> Tensor:
    """Rows of one cache into their slots."""
    return key_cache


# ---- reads


def _gathered(cache: Tensor, tables: Tensor, lengths: Sequence[int], target: Tensor) -> Tensor:
    rows = [from_pages(cache, tables[i], length, cache.shape[2]) for i, length in enumerate(lengths)]
    result = target.clone()
    packed = torch.cat(rows).reshape(-1, *target.shape[1:])
    result[: len(packed)] = packed
    return result


def _gather_pa(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> tuple[Tensor, Tensor]:
    if seq_offset is not None or key_cache.dim() != 4 or key_cache.shape[2:] != key.shape[1:]:
        raise UnmodelledCallError(
            "values of npu_gather_pa_kv_cache from blocked caches or with offsets are not modelled"
        )
    lengths = (seq_lens.diff() if is_seq_lens_cumsum else seq_lens).tolist()
    return (
        _gathered(key_cache, block_tables, lengths, key),
        _gathered(value_cache, block_tables, lengths, value),
    )


@operator("npu::npu_gather_pa_kv_cache", computes=_gather_pa, writes=["key", "value"])
def npu_gather_pa_kv_cache(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor, **_: Any
) -> None:
    """Sequences out of their pages, one after another."""


@operator("npu::npu_gather_pa_kv_cache_functional", computes=_gather_pa)
def npu_gather_pa_kv_cache_functional(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """The same into copies."""
    return key.clone(), value.clone()


def _cache_load(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, cumsum: bool = False, **_: Any
) -> list[Tensor]:
    lengths = (context_lens.diff() if cumsum else context_lens).tolist()
    return [
        torch.cat([from_pages(cache, block_table[i], length, cache.shape[2]) for i, length in enumerate(lengths)])
        for cache in (key_cache, value_cache)
    ]


@operator("atb::npu_paged_cache_load", computes=_cache_load, hosts=Hosts.TAKEN)
def npu_paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    cumsum: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sequences out of their pages; how many rows that makes is read from ``context_lens``."""
    lengths = context_lens if context_lens.is_cpu else platform().values.read(context_lens)
    num_rows = int(lengths[-1] if cumsum else lengths.sum())
    key = new_like(key_cache, (num_rows, key_cache.size(2), key_cache.size(3)))
    value = new_like(value_cache, (num_rows, value_cache.size(2), value_cache.size(3)))
    launch([key_cache, value_cache, block_table, context_lens, seq_starts], [key, value])
    return key, value


@operator("atb::npu_paged_cache_load.out", writes=["key", "value"], hosts=Hosts.TAKEN)
def npu_paged_cache_load_out(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    seq_starts: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The same into given tensors; modelled by its shapes."""
    launch([key_cache, value_cache, block_table, context_lens, key, value, seq_starts], [key, value])
    return key, value


# ---- norm, rotary embedding and write in one


def _rope_results(kv: Tensor, gamma: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    for name, tensor, num_dims in (("kv", kv, 4), ("gamma", gamma, 1), ("cos", cos, 4)):
        if tensor.dim() != num_dims:
            raise refusal(f"{num_dims}D tensor expected for input {name}")
    size = kv.shape[:3]
    return new_like(kv, (*size, cos.shape[-1])), new_like(kv, (*size, gamma.shape[0]))


@operator("npu::npu_kv_rmsnorm_rope_cache", computes=IN_BODY)
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The caches themselves, and the rotary and the compressed part; modelled by its shapes."""
    rope, compressed = _rope_results(kv, gamma, cos)
    platform().values.forget((k_cache, ckv_cache))
    return k_cache, ckv_cache, rope, compressed


@operator("npu::npu_kv_rmsnorm_rope_cache_v2", writes=["k_cache", "ckv_cache"])
def npu_kv_rmsnorm_rope_cache_v2(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """The same without the caches among the results."""
    return _rope_results(kv, gamma, cos)


# ---- scattered writes


def _scatter_nd(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    result = input.clone()
    result[tuple(indices.long().unbind(-1))] = updates.to(input.dtype)
    return result


@operator("npu::npu_scatter_nd_update", computes=_scatter_nd)
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Slices into their places in a copy of the whole."""
    return input.clone()


@operator("npu::npu_scatter_nd_update_", computes=_scatter_nd, writes=["input"])
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Slices into their places."""
    return input


def _scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    result = input.clone()
    extent = updates.shape[axis]
    for batch, start in enumerate(indices.flatten().tolist()):
        if start >= 0:
            result[batch].narrow(axis if axis < 0 else axis - 1, start, extent).copy_(updates[batch])
    return result


@operator("npu::scatter_update", computes=_scatter_update)
def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """For each batch, rows from a place on, in a copy of the whole."""
    return input.clone()


@operator("npu::scatter_update_", computes=_scatter_update, writes=["input"])
def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """For each batch, rows from a place on."""
    return input


@operator("npu::npu_quant_scatter")
def npu_quant_scatter(input: Tensor, indices: Tensor, updates: Tensor, *args: Any, **_: Any) -> Tensor:
    """Quantises rows and puts them into their places in a copy of the whole."""
    return input.clone()


@operator("npu::npu_quant_scatter_", writes=["input"])
def npu_quant_scatter_(input: Tensor, indices: Tensor, updates: Tensor, *args: Any, **_: Any) -> Tensor:
    """Quantises rows and puts them into their places."""
    return input
