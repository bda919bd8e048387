"""The double of ``torch_npu.npu.memory``: the caching allocator's figures. All sizes in bytes."""

from __future__ import annotations

from typing import Any

import torch

from npusim.errors import UnmodelledNameError
from npusim.memory.caching_allocator import CachingAllocator
from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import DeviceRuntime, device_index

Device = torch.device | int | str | None


def _runtime(device: Device) -> DeviceRuntime:
    active = platform()
    return active.runtimes[device_index(active, device)]


def _allocator(device: Device) -> CachingAllocator:
    return _runtime(device).allocator


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of the whole device."""
    return _runtime(device).card.hbm.mem_get_info()


def memory_stats(device: Device = None) -> dict[str, Any]:
    """All counters of the caching allocator, sorted by name."""
    return dict(_allocator(device).memory_stats())


def memory_allocated(device: Device = None) -> int:
    """Bytes in blocks that tensors hold."""
    return _allocator(device).memory_allocated


def max_memory_allocated(device: Device = None) -> int:
    """Peak of :func:`memory_allocated` since the start or the last reset."""
    return _allocator(device).max_memory_allocated


def memory_reserved(device: Device = None) -> int:
    """Bytes that the allocator holds from the device."""
    return _allocator(device).memory_reserved


def max_memory_reserved(device: Device = None) -> int:
    """Peak of :func:`memory_reserved` since the start or the last reset."""
    return _allocator(device).max_memory_reserved


def reset_peak_memory_stats(device: Device = None) -> None:
    """Start all peaks anew from the current figures."""
    _allocator(device).reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Start all totals and counters anew."""
    _allocator(device).reset_accumulated_memory_stats()


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """torch_npu's table of the counters."""
    return memory_summary_text(_allocator(device), abbreviated=abbreviated)


def empty_cache() -> None:
    """Give cached memory, operator workspaces included, back to the device.

    torch_npu does so on every device the process has used; here that is the calling rank's.
    """
    _allocator(None).empty_cache()


def empty_virt_addr_cache() -> None:
    """Unmap cached memory of expandable segments but keep the physical pages."""
    _allocator(None).empty_virt_addr_cache()


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit what the allocator may hold to a fraction of the device."""
    _allocator(device).set_per_process_memory_fraction(fraction)


def __getattr__(name: str) -> Any:
    raise UnmodelledNameError(f"torch.npu.memory.{name} is not modelled on the simulated device")
