"""The allocator's own record of events, as ``torch.npu.memory._record_memory_history`` switches it on."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from npusim.memory.blocks import Block

Frames = list[dict[str, object]]
"""A call stack as the viewer wants it, innermost frame first: ``{"name", "filename", "line"}``."""

_LEVELS: Final = {None: 0, "state": 1, "alloc": 2, "all": 3}
_NPUSIM: Final = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One event.

    Attributes:
        action: ``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``,
            ``segment_unmap``, ``snapshot``, ``oom`` or ``workspace_snapshot``.
        address: Where; for ``oom`` the device's free bytes instead.
        size: Bytes: what the user asked for in ``alloc`` and ``free_*``, else real sizes.
        stream: The stream.
        pool_id: Id of the private pool, or (0, 0).
        frames: The call stack, if it was recorded.
    """

    action: str
    address: int
    size: int
    stream: int
    pool_id: tuple[int, int]
    frames: Frames | None


def python_stack() -> Frames:
    """The present Python call stack without npusim's own frames, innermost first."""
    frames: Frames = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_NPUSIM):
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": frame.f_lineno})
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return frames


class History:
    """Keeps the last events while switched on, with call stacks as far as wished.

    Attributes:
        enabled: Whether events are recorded; ask before calling where time matters.
        entries: The events, oldest first.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.entries: deque[TraceEntry] = deque()
        self._level = 0
        self._gather: Callable[[], Frames] = python_stack
        self._frames: Frames | None = None
        self._block_frames: Final[dict[Block, Frames]] = {}
        self._segment_frames: Final[dict[Block, Frames]] = {}

    def switch(
        self, enabled: str | None, context: str | None, max_entries: int, gather: Callable[[], Frames] = python_stack
    ) -> None:
        """Start recording anew, or stop; what was recorded is dropped.

        Args:
            enabled: ``all``: keep events; ``state``: keep only the last; None: stop.
            context: Stacks of which calls: ``state``: of live blocks; ``alloc``: of allocations in the record too;
                ``all``: of frees too; None: none.
            max_entries: How many events to keep.
            gather: Gives the call stack.

        Raises:
            RuntimeError: A word is none of these; with torch_npu's text.
        """
        if enabled not in ("all", "state", None):
            raise RuntimeError("expected state to be 'state', 'all', or None")
        if context not in _LEVELS:
            raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
        self.enabled = enabled is not None
        self.entries = deque(maxlen=max(1, min(max_entries, sys.maxsize)) if enabled == "all" else 1)
        self._level = _LEVELS[context] if self.enabled else 0
        self._gather = gather
        self._frames = None

    def enter_request(self) -> None:
        """An allocation begins: its stack stands for all that it causes."""
        self._frames = self._gather() if self._level >= _LEVELS["state"] else None

    def enter_release(self) -> None:
        """A free or a release of cached memory begins."""
        self._frames = self._gather() if self._level >= _LEVELS["all"] else None

    def record(self, action: str, address: int, size: int, stream: int, pool_id: tuple[int, int]) -> None:
        """Record one event, if switched on."""
        if self.enabled:
            self._append(action, address, size, stream, pool_id, self._frames)

    def record_block(self, action: str, block: Block) -> None:
        """Record one event of a user's block; its stack is that of the call, or else that of the block's allocation."""
        if action == "alloc" and self._frames is not None:
            self._block_frames[block] = self._frames
        frames = self._frames or self._block_frames.get(block)
        if action == "free_completed":
            self._block_frames.pop(block, None)
        free_list = block.free_list
        self._append(action, block.address, block.requested_bytes, free_list.stream, free_list.pool.pool_id, frames)

    def record_segment(self, action: str, block: Block, address: int, size: int) -> None:
        """Record that the device gave or took back memory of a block's segment."""
        if not self.enabled:
            return
        begins_segment = action == "segment_alloc" or (action == "segment_map" and block.prev is None)
        if begins_segment and self._frames is not None:
            self._segment_frames.setdefault(block, self._frames)
        frames = self._frames or self._segment_frames.get(block)
        if action == "segment_free":
            self._segment_frames.pop(block, None)
        free_list = block.free_list
        self._append(action, address, size, free_list.stream, free_list.pool.pool_id, frames)

    def record_snapshot(self, active_bytes: int, pool_id: tuple[int, int]) -> None:
        """Record that a snapshot was taken."""
        if self.enabled:
            self._append("snapshot", 0, active_bytes, 0, pool_id, None)

    def frames_of(self, block: Block) -> Frames:
        """Stack of the allocation of a block in use, if it was recorded."""
        return self._block_frames.get(block, [])

    def segment_frames_of(self, block: Block) -> Frames:
        """Stack of the request that made the segment.

        As in torch_npu it belongs to the block that was the whole segment, so it is lost to the segment's front once
        that block is split.
        """
        return self._segment_frames.get(block, [])

    def _append(
        self, action: str, address: int, size: int, stream: int, pool_id: tuple[int, int], frames: Frames | None
    ) -> None:
        kept = frames if self._level >= _LEVELS["alloc"] else None
        self.entries.append(TraceEntry(action, address, size, stream, pool_id, kept))
