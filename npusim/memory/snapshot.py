"""Pictures of the allocator's memory, in the vendor's format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

from npusim.memory.blocks import ALLOCATED, PENDING, UNMAPPED, Block
from npusim.memory.pools import NO_POOL, PoolId

if TYPE_CHECKING:
    from npusim.memory.history import Frames

_STATE_NAMES = {ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


class BlockSnapshot(TypedDict):
    """One block; ``requested_size`` of an inactive one is that of its last user."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: Frames


class SegmentSnapshot(TypedDict):
    """One segment, or one contiguous mapped range of an expandable segment."""

    device: int
    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_pool_id: PoolId
    segment_type: str
    is_expandable: bool
    frames: Frames
    blocks: list[BlockSnapshot]


def take_snapshot(blocks: Iterable[Block], device_index: int, pool_id: PoolId = NO_POOL) -> list[SegmentSnapshot]:
    """The segments that the given blocks belong to, by address.

    Args:
        blocks: All mapped blocks.
        device_index: The device's number.
        pool_id: Only the segments of this private pool.
    """
    segments = []
    for head in blocks:
        if head.prev is not None and head.prev.state != UNMAPPED:
            continue
        if pool_id in (NO_POOL, head.free_list.pool.pool_id):
            segments.append(_segment(head, device_index))
    return sorted(segments, key=lambda segment: segment["address"])


def _segment(head: Block, device_index: int) -> SegmentSnapshot:
    pool = head.free_list.pool
    segment = SegmentSnapshot(
        device=device_index,
        address=head.address,
        total_size=0,
        allocated_size=0,
        active_size=0,
        requested_size=0,
        stream=head.free_list.stream,
        segment_pool_id=pool.pool_id,
        segment_type="small" if pool.is_small else "large",
        is_expandable=head.segment is not None,
        frames=[],
        blocks=[],
    )
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        segment["total_size"] += block.size
        if block.state == ALLOCATED:
            segment["allocated_size"] += block.size
        if block.state in _STATE_NAMES:
            segment["active_size"] += block.size
            segment["requested_size"] += block.requested_bytes
        segment["blocks"].append(
            BlockSnapshot(
                address=block.address,
                size=block.size,
                requested_size=block.requested_bytes,
                state=_STATE_NAMES.get(block.state, "inactive"),
                frames=[],
            )
        )
        block = block.next
    return segment
