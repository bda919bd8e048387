"""The engine's plan of the KV cache: blocks, tensors and capacity, from the memory that each worker has left.

Rules, checks and wording of vLLM 0.23 (``vllm/v1/core/kv_cache_utils.py``), for models whose layers all need the same
cache: they form one group, and one block is a page of every layer. All sizes in bytes, lengths in tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xlite_runner.budget import format_gib
from xlite_runner.config.runner_config import RunnerConfig
from xlite_runner.kv_cache.specs import KVCacheSpec

logger = logging.getLogger(__name__)

_MORE_DETAILS = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."


@dataclass(frozen=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table, and the cache that each of them needs."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.kv_cache_spec.page_size_bytes * len(self.layer_names)

    def blocks_per_request(self, max_model_len: int) -> int:
        """Blocks that one request of ``max_model_len`` tokens can occupy."""
        spec = self.kv_cache_spec
        return -(-spec.max_memory_usage_bytes(max_model_len) // spec.page_size_bytes)

    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        """Bytes that one request of ``max_model_len`` tokens can occupy over all layers."""
        return self.blocks_per_request(max_model_len) * self.bytes_per_block

    def estimate_max_model_len(self, available_memory: int, upper_bound: int) -> int:
        """The longest request, up to ``upper_bound``, that fits; 0 if not even one token does."""
        fits, too_long = 0, upper_bound + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.max_memory_usage_bytes(middle) <= available_memory:
                fits = middle
            else:
                too_long = middle
        return fits


@dataclass(frozen=True, kw_only=True)
class KVCacheTensor:
    """One layer's memory for keys and values together."""

    layer_name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """One worker's plan."""

    num_blocks: int
    group: KVCacheGroupSpec
    tensors: tuple[KVCacheTensor, ...]

    def max_concurrency(self, max_model_len: int) -> float:
        """How many requests of ``max_model_len`` tokens the cache can hold at once."""
        return self.num_blocks / self.group.blocks_per_request(max_model_len)

    def num_tokens(self, max_model_len: int) -> int:
        """Capacity in tokens, derived from the concurrency as upstream does."""
        return int(self.max_concurrency(max_model_len) * max_model_len)


def get_kv_cache_configs(
    kv_cache_specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
    runner_config: RunnerConfig,
) -> list[KVCacheConfig]:
    """Plan the KV cache of all workers and log its capacity.

    Every worker gets as many blocks as the poorest one can hold; what the others have left over stays unused.

    Args:
        kv_cache_specs: For each worker, its layers and what they need.
        available_memory: For each worker, the memory for the cache.
        runner_config: Gives the maximum length, and the override of the number of blocks, which replaces the available
            memory in every check.

    Returns:
        One plan per worker.

    Raises:
        ValueError: A worker has no memory for the cache, or too little for one request of maximum length; upstream's
            text, with the estimated maximum length.
        NotImplementedError: The layers differ in what they need.
    """
    max_model_len = runner_config.scheduler.max_model_len
    override = runner_config.cache.num_gpu_blocks_override
    groups = [_single_group(specs) for specs in kv_cache_specs]
    memory = list(available_memory)
    if override is not None:
        for worker, group in enumerate(groups):
            logger.info(
                "Overriding num_gpu_blocks=%d with num_gpu_blocks_override=%d",
                memory[worker] // group.bytes_per_block,
                override,
            )
            memory[worker] = override * group.bytes_per_block
    for group, available in zip(groups, memory, strict=True):
        _check_enough_kv_cache_memory(group, available, max_model_len)

    num_blocks = min(available // group.bytes_per_block for group, available in zip(groups, memory, strict=True))
    configs = [_plan(group, num_blocks) for group in groups]
    logger.info("GPU KV cache size: %s tokens", f"{configs[0].num_tokens(max_model_len):,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{max_model_len:,}",
        configs[0].max_concurrency(max_model_len),
    )
    return configs


def plan_kv_cache(specs: Mapping[str, KVCacheSpec], num_blocks: int) -> KVCacheConfig:
    """The plan of a worker for a given number of blocks, unchecked.

    Raises:
        NotImplementedError: The layers differ in what they need.
    """
    return _plan(_single_group(specs), num_blocks)


def _single_group(specs: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    first = next(iter(specs.values()))
    if any(spec != first for spec in specs.values()):
        raise NotImplementedError("the KV cache of layers with different needs is not planned here")
    return KVCacheGroupSpec(layer_names=tuple(specs), kv_cache_spec=first)


def _plan(group: KVCacheGroupSpec, num_blocks: int) -> KVCacheConfig:
    tensor_bytes = num_blocks * group.kv_cache_spec.page_size_bytes
    tensors = tuple(KVCacheTensor(layer_name=name, num_bytes=tensor_bytes) for name in group.layer_names)
    return KVCacheConfig(num_blocks=num_blocks, group=group, tensors=tensors)


def _check_enough_kv_cache_memory(group: KVCacheGroupSpec, available: int, max_model_len: int) -> None:
    if available <= 0:
        raise ValueError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine (this flag also controls CPU memory reservation on the CPU backend, despite its name). "
            f"{_MORE_DETAILS}"
        )
    needed = group.max_memory_usage_bytes(max_model_len)
    if needed <= available:
        return
    estimated_max_len = group.estimate_max_model_len(available, max_model_len)
    estimate = (
        f"Based on the available memory, the estimated maximum model length is {estimated_max_len}. "
        if estimated_max_len > 0
        else ""
    )
    # The unbalanced parenthesis is upstream's.
    raise ValueError(
        f"To serve at least one request with the model's max seq len ({max_model_len}), ({format_gib(needed)} GiB KV "
        f"cache is needed, which is larger than the available KV cache memory ({format_gib(available)} GiB). {estimate}"
        "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
        f"`max_model_len` when initializing the engine. {_MORE_DETAILS}"
    )
