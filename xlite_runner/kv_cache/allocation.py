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


def allocate_kv_caches(config: KVCacheConfig, dtype: torch.dtype, device: torch.device) -> KVCaches:
    """Make the tensors of a plan: per layer an int8 buffer for keys and one for values, viewed in the model's dtype.

    Raises:
        torch.OutOfMemoryError: The plan does not fit.
    """
    caches: KVCaches = []
    for tensor in config.tensors:
        spec = config.group.kv_cache_spec
        assert isinstance(spec, FullAttentionSpec)
        shape = (config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
        half_bytes = tensor.num_bytes // 2
        keys, values = (torch.zeros(half_bytes, dtype=torch.int8, device=device) for _ in range(2))
        caches.append((keys.view(dtype).view(shape), values.view(dtype).view(shape)))
    return caches


def bind_kv_caches(config: KVCacheConfig, kv_caches: KVCaches, layers: Mapping[str, Attention]) -> None:
    """Hand the tensors of a plan to the layers that it names."""
    for tensor, kv_cache in zip(config.tensors, kv_caches, strict=True):
        layers[tensor.layer_name].kv_cache = kv_cache
