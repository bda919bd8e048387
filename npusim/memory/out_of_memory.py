"""What torch_npu says when memory runs out."""

from __future__ import annotations

from typing import Final

from npusim.memory.rounding import GIB, KIB, MIB
from npusim.memory.state import AllocatorState

MORE_THAN_1EB: Final = "NPU out of memory. Tried to allocate more than 1EB memory."


class OutOfMemoryError(RuntimeError):
    """Stands for ``torch.OutOfMemoryError`` where torch is absent."""


def format_size(num_bytes: int) -> str:
    """Bytes as the C++ prints them: two decimals of the largest unit that the number exceeds."""
    if num_bytes <= KIB:
        return f"{num_bytes} bytes"
    if num_bytes <= MIB:
        return f"{num_bytes / KIB:.2f} KiB"
    if num_bytes <= GIB:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def out_of_memory_text(state: AllocatorState, segment_bytes: int) -> str:
    """The message when neither cached blocks nor the device can serve a request.

    Args:
        state: The allocator.
        segment_bytes: What the device was asked for.
    """
    free_bytes, total_bytes = state.hbm.mem_get_info()
    allowed = "" if state.allowed_bytes is None else f"{format_size(state.allowed_bytes)} allowed; "
    statistics = state.statistics
    return (
        f"NPU out of memory. Tried to allocate {format_size(segment_bytes)} (NPU {state.device_index}; "
        f"{format_size(total_bytes)} total capacity; {format_size(statistics.total_allocated_bytes)} already allocated; "
        f"{format_size(statistics.total_active_bytes)} current active; {format_size(free_bytes)} free; {allowed}"
        f"{format_size(statistics.total_reserved_bytes)} reserved in total by PyTorch)."
        "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
    )


def rejection_text(num_bytes: int) -> str:
    """The message when ``throw_on_npumalloc_oom`` rejects a request of ``num_bytes`` before the device is asked."""
    return (
        "NPU out of memory. Allocation was preemptively rejected because it would exceed "
        f"per_process_memory_fraction limit. Requested size: {format_size(num_bytes)}"
    )
