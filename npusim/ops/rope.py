"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError
from npusim.ops.atb import launch
from npusim.ops.operator import IN_BODY, Hosts, operator
from npusim.ops.refusal import refusal
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """``x`` turned by angles whose cosines and sines are repeated over both elements of each pair."""
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        other = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    return (x.float() * cos.float() + other.float() * sin.float()).to(x.dtype)


class _Kept:
    """What ``_npu_rotary_embedding`` keeps for the rest of the process: one per rank."""

    def __init__(self, cos_sin_cache: Tensor) -> None:
        cos, sin = cos_sin_cache.chunk(2, -1)
        self.cos = cos.repeat_interleave(2, 1)
        self.sin = sin.repeat_interleave(2, 1)
        self.cos_neox = cos.repeat(1, 2)
        self.sin_neox = sin.repeat(1, 2)
        self.num_tokens: Tensor | None = None
        self.last_num_tokens = -1


@operator("atb::_npu_rotary_embedding", computes=IN_BODY, hosts=Hosts.TAKEN)
def npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> None:
    """In place; angles come from caches that the first call made of its ``cos_sin_cache``, for good."""
    ranks = platform().ranks
    slot = "_npu_rotary_embedding", ranks.current
    kept: _Kept = ranks.attached.get(slot) or ranks.attached.setdefault(slot, _Kept(cos_sin_cache))
    flat = positions.flatten()
    cos = (kept.cos_neox if is_neox_style else kept.cos).index_select(0, flat)
    sin = (kept.sin_neox if is_neox_style else kept.sin).index_select(0, flat)
    if kept.last_num_tokens != flat.size(0):
        kept.num_tokens = torch.tensor([flat.size(0)], dtype=torch.int32, device="cpu").to(cos.device)
        kept.last_num_tokens = flat.size(0)
    launch([query, key, cos, sin], [tensor for tensor in (query, key) if not tensor.is_cpu])
    interleaved = not is_neox_style

    def compute(*hosts: Tensor) -> list[Tensor]:
        *heads, cos, sin = hosts
        return [
            rotated(
                x.view(-1, x.numel() // len(cos) // head_size, head_size),
                cos[:, None],
                sin[:, None],
                interleaved=interleaved,
            ).view(x.shape)
            for x in heads
        ]

    if not query.is_cpu and not key.is_cpu:
        platform().values.update((query, key), (query, key, cos, sin), compute)


def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    return rotated(x, r1, r2, interleaved=rotary_mode == "interleave")


@operator("npu::npu_rotary_mul", computes=_rotary_mul)
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """A new tensor; cosines and sines of another type are cast first."""
    if rotary_mode not in ("half", "interleave"):
        raise refusal(f"The rotary_mode of npu_rotary_mul should be half or interleave, but got {rotary_mode}")
    result = new_like(input)
    casts = [new_like(angles, dtype=input.dtype) for angles in (r1, r2) if angles.dtype != input.dtype]
    del casts[::-1]
    return result


def _apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    interleaved = rotary_mode == "interleave"
    return rotated(query, cos, sin, interleaved=interleaved), rotated(key, cos, sin, interleaved=interleaved)


@operator("npu::npu_apply_rotary_pos_emb", computes=_apply_rotary_pos_emb, writes=["query", "key"])
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """In place, strided or not; returns its arguments."""
    if rotary_mode not in ("half", "interleave"):
        raise UnmodelledCallError(f"npu_apply_rotary_pos_emb with rotary_mode {rotary_mode!r} is not modelled")
    return query, key


def _mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> list[Tensor]:
    angles = cos_sin_cache[positions.long()]
    cos, sin = angles.chunk(2, -1)
    if positions.dim() == 2 and mrope_section and sum(mrope_section):
        cos, sin = (
            torch.cat([part[axis] for axis, part in enumerate(half.split(list(mrope_section), -1))], -1)
            for half in (cos, sin)
        )
    elif positions.dim() == 2:
        cos, sin = cos[0], sin[0]
    interleaved = rotary_mode == "interleave"
    cos, sin = (
        (half.repeat_interleave(2, -1) if interleaved else half.repeat(1, 2)).unsqueeze(1) for half in (cos, sin)
    )
    rotary_dim = cos_sin_cache.shape[-1]
    results = []
    for x in (query, key):
        heads = x.view(len(cos), -1, head_size)
        turned = rotated(heads[..., :rotary_dim], cos, sin, interleaved=interleaved)
        results.append(torch.cat((turned, heads[..., rotary_dim:]), -1).view(x.shape))
    return results


@operator("npu::npu_mrope", computes=_mrope)
def npu_mrope(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """New queries and keys, each axis of the positions turning its section of the head."""
    if options.get("cache_mode") not in (None, "default"):
        raise UnmodelledCallError(f"npu_mrope with cache_mode {options['cache_mode']!r} is not modelled")
    return new_like(query), new_like(key)


def _interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    return rotated(torch.cat((pairs[..., 0], pairs[..., 1]), -1), cos, sin)


@operator("npu::npu_interleave_rope", computes=_interleave_rope)
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs that lie side by side are put half a head apart, then turned."""
    return new_like(x)
