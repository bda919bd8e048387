"""The segments of an allocator and their blocks, as ``torch.npu.memory_snapshot()`` tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypedDict

from npusim.memory.blocks import ALLOCATED, PENDING, UNMAPPED, Block
from npusim.memory.history import Frames, History
from npusim.memory.pools import NO_POOL, PoolId

if TYPE_CHECKING:
    from npusim.memory.workspace import WorkspaceAllocator

_ACTIVE_STATES: Final = {ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


class BlockSnapshot(TypedDict):
    """One block; the ``requested_size`` of an inactive one is that of its last user."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: Frames


class SegmentSnapshot(TypedDict):
    """One segment, or one contiguous mapped range of an expandable segment, or one stream's operator workspace."""

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


def segments_of(
    blocks: Sequence[Block], history: History, device_index: int, pool_id: PoolId = NO_POOL
) -> list[SegmentSnapshot]:
    """The segments that the given blocks belong to, by address.

    Args:
        blocks: All mapped blocks.
        history: Knows the call stacks.
        device_index: The device's number.
        pool_id: Only the segments of this private pool.
    """
    heads = [block for block in blocks if block.prev is None or block.prev.state == UNMAPPED]
    if pool_id != NO_POOL:
        heads = [head for head in heads if head.free_list.pool.pool_id == pool_id]
    heads.sort(key=lambda head: head.address)
    return [_segment(head, history, device_index) for head in heads]


def _segment(head: Block, history: History, device_index: int) -> SegmentSnapshot:
    blocks = []
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        blocks.append(block)
        block = block.next
    active = [block for block in blocks if block.state in _ACTIVE_STATES]
    pool = head.free_list.pool
    return SegmentSnapshot(
        device=device_index,
        address=head.address,
        total_size=sum(block.size for block in blocks),
        allocated_size=sum(block.size for block in active if block.state == ALLOCATED),
        active_size=sum(block.size for block in active),
        requested_size=sum(block.requested_bytes for block in active),
        stream=head.free_list.stream,
        segment_pool_id=pool.pool_id,
        segment_type="small" if pool.is_small else "large",
        is_expandable=head.segment is not None,
        frames=history.segment_frames_of(head),
        blocks=[
            BlockSnapshot(
                address=block.address,
                size=block.size,
                requested_size=block.requested_bytes,
                state=_ACTIVE_STATES.get(block.state, "inactive"),
                frames=history.frames_of(block),
            )
            for block in blocks
        ],
    )


def workspace_segments(workspaces: WorkspaceAllocator, device_index: int) -> list[SegmentSnapshot]:
    """One segment per stream with a workspace; it shows as inactive even while an operator uses it, as in torch_npu."""
    return [
        SegmentSnapshot(
            device=device_index,
            address=workspace.address,
            total_size=workspace.size,
            allocated_size=0,
            active_size=0,
            requested_size=0,
            stream=stream,
            segment_pool_id=NO_POOL,
            segment_type="large",
            is_expandable=False,
            frames=[],
            blocks=[
                BlockSnapshot(
                    address=workspace.address,
                    size=workspace.size,
                    requested_size=workspace.requested_bytes,
                    state="inactive",
                    frames=[],
                )
            ],
        )
        for stream, workspace in workspaces.blocks.items()
    ]
