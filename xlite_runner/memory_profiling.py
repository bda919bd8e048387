"""What upstream reads of the device's memory, and when: snapshots, weights meter, profiling window. Sizes in bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
import torch_npu


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """The device at one moment.

    Attributes:
        torch_peak: Peak of allocated bytes since the last reset.
        free_memory: Free on the whole device.
        total_memory: Memory of the device.
        torch_memory: Reserved by torch's caching allocator.
    """

    torch_peak: int
    free_memory: int
    total_memory: int
    torch_memory: int

    @property
    def non_torch_memory(self) -> int:
        """In use on the device, by anybody, but not by torch's caching allocator."""
        return self.total_memory - self.free_memory - self.torch_memory

    @classmethod
    def measure(cls, device: torch.device) -> MemorySnapshot:
        """Read the device, in upstream's order."""
        torch_peak = torch_npu.npu.memory_stats(device).get("allocated_bytes.all.peak", 0)
        free_memory, total_memory = torch_npu.npu.mem_get_info(device)
        return cls(
            torch_peak=torch_peak,
            free_memory=free_memory,
            total_memory=total_memory,
            torch_memory=torch_npu.npu.memory_reserved(device),
        )


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What is in use at one moment.

    Attributes:
        allocated_bytes: In torch's tensors.
        reserved_bytes: Held by torch's caching allocator.
        free_bytes: Free on the whole device.
    """

    allocated_bytes: int
    reserved_bytes: int
    free_bytes: int

    @classmethod
    def measure(cls, device: torch.device) -> MemoryUse:
        """Read the device; nothing changes by that."""
        return cls(
            allocated_bytes=torch_npu.npu.memory_allocated(device),
            reserved_bytes=torch_npu.npu.memory_reserved(device),
            free_bytes=torch_npu.npu.mem_get_info(device)[0],
        )


class DeviceMemoryProfiler:
    """Meters what a block of code leaves allocated; upstream measures the weights with it.

    Attributes:
        consumed_memory: Bytes, after the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.consumed_memory = 0
        self._before = 0

    def _current_memory_usage(self) -> int:
        gc.collect()
        torch_npu.npu.reset_peak_memory_stats(self._device)
        allocated: int = torch_npu.npu.max_memory_allocated(self._device)
        return allocated

    def __enter__(self) -> Self:
        self._before = self._current_memory_usage()
        return self

    def __exit__(self, *exception: object) -> None:
        self.consumed_memory = self._current_memory_usage() - self._before


@dataclass(kw_only=True)
class MemoryProfilingResult:
    """What the profiling window measured.

    Attributes:
        before_create: The snapshot of the worker's start.
        before_profile: When the window opened; its torch peak is what was allocated then.
        after_profile: When it had closed.
        weights_memory: From the weights meter.
        non_torch_increase: Growth of non-torch memory since the worker's start.
    """

    before_create: MemorySnapshot
    before_profile: MemorySnapshot
    after_profile: MemorySnapshot = field(init=False)
    weights_memory: int
    non_torch_increase: int = 0


@contextmanager
def memory_profiling(
    baseline: MemorySnapshot, weights_memory: int, device: torch.device
) -> Iterator[MemoryProfilingResult]:
    """Open the profiling window: peaks start anew inside, and what is cached is given back before and after."""
    gc.collect()
    torch_npu.npu.empty_cache()
    torch_npu.npu.reset_peak_memory_stats(device)
    result = MemoryProfilingResult(
        before_create=baseline, before_profile=MemorySnapshot.measure(device), weights_memory=weights_memory
    )
    yield result
    gc.collect()
    torch_npu.npu.empty_cache()
    result.after_profile = MemorySnapshot.measure(device)
    result.non_torch_increase = result.after_profile.non_torch_memory - baseline.non_torch_memory
