"""The allocator's own record of events, as ``torch.npu.memory._record_memory_history`` switches it on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Frames = list[dict[str, object]]
"""A call stack as the viewer wants it: ``{"name", "filename", "line"}``, innermost first."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One event.

    Attributes:
        action: ``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``,
            ``segment_unmap``, ``snapshot`` or ``oom``.
        address: Where; for ``oom`` the device's free bytes instead.
        size: Bytes: what the user asked for in ``alloc`` and ``free_*``, else real sizes.
        stream: The stream.
        pool_id: Id of the private pool, or (0, 0).
        frames: The call stack, if it was to be recorded.
    """

    action: str
    address: int
    size: int
    stream: int
    pool_id: tuple[int, int]
    frames: Frames | None


class History:
    """Keeps the last events, while switched on.

    Attributes:
        enabled: Whether events are recorded; ask before :meth:`record` where time matters.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.entries: deque[TraceEntry] = deque()
        self._gather: Callable[[], Frames] | None = None
        self._block_frames: Final[dict[int, Frames]] = {}

    def record(self, action: str, address: int, size: int, stream: int, pool_id: tuple[int, int]) -> None:
        """Record one event, if switched on."""
        if self.enabled:
            self.entries.append(TraceEntry(action, address, size, stream, pool_id, None))
