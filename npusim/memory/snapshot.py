"""Pictures of the allocators' memory in the vendor's format, which the viewer at pytorch.org/memory_viz opens."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.history import TraceEntry
from npusim.memory.pools import NO_POOL, PoolId
from npusim.memory.segment_snapshot import SegmentSnapshot, workspace_segments
from npusim.memory.workspace import WorkspaceAllocator

PICKLE_PROTOCOL: Final = 4
"""The newest that the viewer reads. Exact: MemoryViz.js of torch 2.13."""


class Snapshot(TypedDict):
    """The segments of all devices, and of each device the recorded events."""

    segments: list[SegmentSnapshot]
    device_traces: list[list[dict[str, Any]]]


def take_snapshot(allocators: Sequence[CachingAllocator], pool_id: PoolId = NO_POOL) -> Snapshot:
    """What ``torch.npu.memory._snapshot()`` returns.

    Args:
        allocators: One per device, by device number.
        pool_id: Show only the segments of this private pool, and no workspaces.
    """
    segments: list[SegmentSnapshot] = []
    traces = []
    for allocator in allocators:
        traces.append([_entry(entry, allocator) for entry in allocator.history.entries])
        segments += allocator.snapshot(pool_id)
    if pool_id == NO_POOL:
        for allocator, trace in zip(allocators, traces, strict=True):
            if allocator.workspaces is not None:
                segments += workspace_segments(allocator.workspaces, allocator.device_index)
                if allocator.history.enabled:
                    entries = _workspace_entries(allocator.workspaces)
                    trace[:0] = [_entry(entry, allocator) for entry in entries]
    return Snapshot(segments=segments, device_traces=traces)


def dump_snapshot(snapshot: Snapshot, path: Path | str) -> None:
    """Write a snapshot as the viewer reads it."""
    Path(path).write_bytes(pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL))


def _workspace_entries(workspaces: WorkspaceAllocator) -> list[TraceEntry]:
    return [
        TraceEntry(action, workspace.address, workspace.size, stream, NO_POOL, None)
        for stream, workspace in workspaces.blocks.items()
        for action in ("workspace_snapshot", "segment_alloc", "alloc")
    ]


def _entry(entry: TraceEntry, allocator: CachingAllocator) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "action": entry.action,
        "device_free" if entry.action == "oom" else "addr": entry.address,
        "size": entry.size,
        "stream": entry.stream,
    }
    if allocator.version.pool_id_in_traces:
        shown["pool_id"] = entry.pool_id
    if entry.frames is not None:
        shown["frames"] = entry.frames
    return shown
