"""The KV cache's tensors on one worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from xlite_runner.kv_cache.planning import KVCacheConfig
from xlite_runner.kv_cache.specs import FullAttentionSpec

if TYPE_CHECKING:
    from xlite_runner.models.attention import Attention

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer, keys and values, each [blocks, block size, KV heads, head size]."""


TRANSFER_ALIGNMENT_BYTES = 2 << 20
"""Where KV caches are transferred between engines (exact, vllm-ascend 0.23.0 ``_allocate_kv_cache_tensors``)."""


def allocate_kv_caches(
    config: KVCacheConfig, dtype: torch.dtype, device: torch.device, *, aligned_for_transfer: bool = False
) -> KVCaches:
    """Make the tensors of a plan: per layer an int8 buffer for keys and one for values, viewed in the model's dtype.

    Args:
        config: The plan.
        dtype: The model's.
        device: Where the tensors go.
        aligned_for_transfer: Each buffer begins at a multiple of 2 MiB. For that it takes 2 MiB more, of which the plan
            knows nothing.

    Raises:
        torch.OutOfMemoryError: The plan does not fit.
    """
    caches: KVCaches = []
    for tensor in config.tensors:
        spec = config.group.kv_cache_spec
        assert isinstance(spec, FullAttentionSpec)
        shape = (config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        half_bytes = tensor.num_bytes // 2
        keys, values = (_buffer(half_bytes, device, aligned=aligned_for_transfer) for _ in range(2))
        caches.append((keys.view(dtype).view(shape), values.view(dtype).view(shape)))
    return caches


def _buffer(num_bytes: int, device: torch.device, *, aligned: bool) -> torch.Tensor:
    if not aligned:
        return torch.zeros(num_bytes, dtype=torch.int8, device=device)
    buffer = torch.zeros(num_bytes + TRANSFER_ALIGNMENT_BYTES, dtype=torch.int8, device=device)
    start = -buffer.data_ptr() % TRANSFER_ALIGNMENT_BYTES
    return buffer[start : start + num_bytes]


def bind_kv_caches(config: KVCacheConfig, kv_caches: KVCaches, layers: Mapping[str, Attention]) -> None:
    """Hand the tensors of a plan to the layers that it names."""
    for tensor, kv_cache in zip(config.tensors, kv_caches, strict=True):
        layers[tensor.layer_name].kv_cache = kv_cache
