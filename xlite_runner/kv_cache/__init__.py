"""KV cache: what layers need (``specs``) and how the engine divides the memory (``planning``)."""

from xlite_runner.kv_cache.planning import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, get_kv_cache_configs
from xlite_runner.kv_cache.specs import FullAttentionSpec, KVCacheSpec

__all__ = [
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "get_kv_cache_configs",
]
