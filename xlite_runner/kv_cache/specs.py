"""What the KV cache of one attention layer needs, by kind of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """The cache of one layer on one worker, in pages of ``block_size`` tokens."""

    block_size: int

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block."""

    @abstractmethod
    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        """Bytes that one request of ``max_model_len`` tokens can occupy, in whole pages."""


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of all tokens, ``num_kv_heads`` heads of ``head_size`` elements on this rank."""

    num_kv_heads: int
    head_size: int
    dtype_size: int

    @property
    def page_size_bytes(self) -> int:  # noqa: D102 - inherited
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_size

    def max_memory_usage_bytes(self, max_model_len: int) -> int:  # noqa: D102 - inherited
        return -(-max_model_len // self.block_size) * self.page_size_bytes
