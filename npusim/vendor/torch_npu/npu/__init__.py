"""The double of ``torch_npu.npu``, which is also ``torch.npu``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from npusim.errors import UnmodelledNameError
from npusim.torch_backend.registration import has_platform, platform
from npusim.torch_backend.runtime import device_index
from torch_npu.npu import memory
from torch_npu.npu.graphs import NPUGraph, graph, graph_pool_handle, is_current_stream_capturing
from torch_npu.npu.memory import (
    empty_cache,
    empty_virt_addr_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from torch_npu.npu.streams import Event, Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "Event",
    "NPUGraph",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "empty_cache",
    "empty_virt_addr_cache",
    "get_device_name",
    "get_device_properties",
    "get_soc_version",
    "graph",
    "graph_pool_handle",
    "init",
    "is_available",
    "is_current_stream_capturing",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "set_stream",
    "stream",
    "synchronize",
]


class DeviceProperties(NamedTuple):
    """What ``get_device_properties`` answers. Sizes in bytes."""

    name: str
    total_memory: int
    cube_core_num: int
    vector_core_num: int
    L2_cache_size: int

    @property
    def multi_processor_count(self) -> int:
        """torch's name for the vector cores."""
        return self.vector_core_num


def device_count() -> int:
    """How many devices the world has; 0 without a world."""
    return len(platform().runtimes) if has_platform() else 0


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def current_device() -> int:
    """Index of the current device."""
    return platform().current_device()


def set_device(device: torch.device | int | str) -> None:
    """Make a device the current one."""
    active = platform()
    active.set_device(device_index(active, device))


def synchronize(device: torch.device | int | str | None = None) -> None:
    """Wait until every stream of a device is idle."""
    active = platform()
    active.runtimes[device_index(active, device)].synchronize_device()


def get_device_name(device: torch.device | int | str | None = None) -> str:
    """The chip's name, e.g. ``Ascend910_9382``."""
    active = platform()
    return active.runtimes[device_index(active, device)].card.profile.soc_name.value


def get_device_properties(device: torch.device | int | str | None = None) -> DeviceProperties:
    """Name, memory and core counts of a device."""
    active = platform()
    card = active.runtimes[device_index(active, device)].card
    profile = card.profile
    return DeviceProperties(
        profile.soc_name.value,
        card.hbm.total_bytes,
        profile.num_aicore.value,
        profile.num_vector_cores.value,
        profile.l2_cache_bytes.value,
    )


def get_soc_version() -> int:
    """The chip's number in torch_npu's enumeration."""
    return platform().runtimes[current_device()].card.profile.soc_version.value


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    platform().runtimes[current_device()].random.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices that this rank uses: its current one.

    On a card each rank is a process that would seed all its visible devices; here other ranks' devices are theirs.
    """
    manual_seed(seed)


def init() -> None:
    """Nothing to do: devices are open as soon as there is a world."""


def is_initialized() -> bool:
    """Whether there is a world."""
    return has_platform()


def _lazy_init() -> None:
    """Asked by torch before it uses the device."""


def _is_in_bad_fork() -> bool:
    """Asked by torch: whether the device was opened before a fork."""
    return False


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch.npu.{name} is not modelled on the simulated device")
