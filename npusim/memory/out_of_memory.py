"""What torch_npu says when memory runs out, and npusim's explanation of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from npusim.device.ledger import Owner
from npusim.memory.blocks import FREE, PENDING, Block
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


def out_of_memory_text(state: AllocatorState, device_bytes: int) -> str:
    """The message when neither cached blocks nor the device can serve a request.

    Args:
        state: The allocator.
        device_bytes: What the device was asked for.
    """
    free_bytes, total_bytes = state.hbm.mem_get_info()
    allowed = "" if state.allowed_bytes is None else f"{format_size(state.allowed_bytes)} allowed; "
    statistics = state.statistics
    return (
        f"NPU out of memory. Tried to allocate {format_size(device_bytes)} (NPU {state.device_index}; "
        f"{format_size(total_bytes)} total capacity; "
        f"{format_size(statistics.total_allocated_bytes)} already allocated; "
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


def explanation(state: AllocatorState, size: int, device_bytes: int, blocks: Sequence[Block]) -> str:
    """Who holds the memory, how it lies, and what would have helped; the note on an out-of-memory error.

    Args:
        state: The allocator.
        size: Rounded size of the request.
        device_bytes: What the device was asked for.
        blocks: All mapped blocks of the allocator.
    """
    ledger = state.hbm.ledger
    lines = [f"A block of {size} bytes was needed, {device_bytes} bytes were asked of the device.", "Holders:"]
    lines += [
        f"  {owner.value}: {num_bytes} bytes ({format_size(num_bytes)})"
        for owner, num_bytes in ledger.bytes_by_owner().items()
    ]
    lines.append(f"  nobody: {ledger.free_bytes} bytes ({format_size(ledger.free_bytes)})")
    free_sizes = sorted((block.size for block in blocks if block.state == FREE), reverse=True)
    cached_bytes = sum(free_sizes)
    lines.append(
        f"Cached and free: {cached_bytes} bytes in {len(free_sizes)} blocks, the largest {free_sizes[:5]}; "
        f"fragmentation {1 - free_sizes[0] / cached_bytes if cached_bytes else 0:.0%} (1 - largest/total)."
    )
    lines += [f"Would have helped: {remedy}." for remedy in _remedies(state, size, device_bytes, blocks, cached_bytes)]
    return "\n".join(lines)


def _remedies(
    state: AllocatorState, size: int, device_bytes: int, blocks: Sequence[Block], cached_bytes: int
) -> list[str]:
    remedies = []
    ledger = state.hbm.ledger
    needed_bytes = state.statistics.total_reserved_bytes + device_bytes
    if state.allowed_bytes is not None and state.allowed_bytes < needed_bytes <= state.hbm.total_bytes:
        remedies.append(f"a memory fraction of at least {needed_bytes / state.hbm.total_bytes:.4f}")
    missing_bytes = device_bytes - ledger.free_bytes
    if missing_bytes > 0:
        remedies.append(f"{missing_bytes} bytes less held by anyone")
        other_bytes = ledger.bytes_by_owner().get(Owner.OTHER_PROCESS, 0)
        if other_bytes >= missing_bytes:
            remedies.append(f"the end of the other processes on the card, which hold {other_bytes} bytes")
    room_bytes = ledger.free_bytes
    if state.allowed_bytes is not None:
        room_bytes = min(room_bytes, state.allowed_bytes - state.statistics.total_reserved_bytes)
    if not state.config.expandable_segments and 0 < size - room_bytes <= cached_bytes:
        remedies.append("expandable_segments:True, since the free pieces would suffice together")
    pending_bytes = sum(block.size for block in blocks if block.state == PENDING)
    if pending_bytes:
        remedies.append(f"an earlier end of the streams that still use {pending_bytes} freed bytes")
    held_bytes = sum(block.size for block in blocks if block.state == FREE and block.free_list.pool.owner is not None)
    if held_bytes:
        remedies.append(f"giving up private pools, in which {held_bytes} bytes are free")
    return remedies
