"""The double of ``torch_npu.npu``, which is also ``torch.npu``."""

from __future__ import annotations

from typing import Any

from torch_npu.npu import memory, random
from torch_npu.npu.config import config
from torch_npu.npu.devices import (
    current_device,
    device,
    device_count,
    device_of,
    get_device_name,
    get_device_properties,
    get_soc_version,
    init,
    is_available,
    is_initialized,
    mem_get_info,
    set_device,
    synchronize,
)
from torch_npu.npu.graphs import (
    ExternalEvent,
    NPUGraph,
    graph,
    graph_pool_handle,
    graph_task_group_begin,
    graph_task_group_end,
    graph_task_update_begin,
    graph_task_update_end,
    is_current_stream_capturing,
)
from torch_npu.npu.memory import (
    MemPool,
    NPUPluggableAllocator,
    caching_allocator_alloc,
    caching_allocator_delete,
    change_current_allocator,
    empty_cache,
    empty_virt_addr_cache,
    get_allocator_backend,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    use_mem_pool,
)
from torch_npu.npu.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_npu.npu.streams import Event, Stream, StreamContext, current_stream, default_stream, set_stream, stream

from npusim.errors import UnmodelledNameError

__all__ = [
    "Event",
    "ExternalEvent",
    "MemPool",
    "NPUGraph",
    "NPUPluggableAllocator",
    "Stream",
    "StreamContext",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "change_current_allocator",
    "config",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "empty_virt_addr_cache",
    "get_allocator_backend",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "get_soc_version",
    "graph",
    "graph_pool_handle",
    "graph_task_group_begin",
    "graph_task_group_end",
    "graph_task_update_begin",
    "graph_task_update_end",
    "init",
    "initial_seed",
    "is_available",
    "is_current_stream_capturing",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "random",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "use_mem_pool",
]


def _lazy_init() -> None:
    """Asked by torch before it uses the device."""


def _is_in_bad_fork() -> bool:
    """Asked by torch: whether the device was opened before a fork."""
    return False


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch.npu.{name} is not modelled on the simulated device")
