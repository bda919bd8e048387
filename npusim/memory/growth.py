"""What happens when no cached block fits: ask the device, borrow, give cached memory up and ask again."""

from __future__ import annotations

from typing import Final

from npusim.memory.blocks import Block
from npusim.memory.expandable import ExpandableSegments
from npusim.memory.fit import BestFit
from npusim.memory.pending import PendingFrees
from npusim.memory.pools import BlockPool
from npusim.memory.reclaim import Reclaimer
from npusim.memory.rounding import MAX_REQUEST_BYTES, segment_bytes
from npusim.memory.segments import Segments
from npusim.memory.state import AllocatorState
from npusim.memory.workspace import WorkspaceAllocator

MAX_LAZY_EVENTS: Final = 512
"""Pending events beyond which ``multi_stream_lazy_reclaim`` looks at them before a search. Exact: kLazyQuerySize."""


class ExhaustedError(Exception):
    """Neither cached memory nor the device can serve a request.

    Attributes:
        size: Size of the block.
        device_bytes: What the device was asked for.
    """

    def __init__(self, size: int, device_bytes: int) -> None:
        super().__init__(size, device_bytes)
        self.size = size
        self.device_bytes = device_bytes


class RejectedError(Exception):
    """``throw_on_npumalloc_oom`` forbids to ask the device."""


class Growth:
    """Finds memory for requests that no cached block fits."""

    def __init__(
        self,
        state: AllocatorState,
        fit: BestFit,
        segments: Segments,
        expandable: ExpandableSegments,
        pending: PendingFrees,
        reclaimer: Reclaimer,
        workspaces: WorkspaceAllocator | None,
    ) -> None:
        self._state: Final = state
        self._fit: Final = fit
        self._segments: Final = segments
        self._expandable: Final = expandable
        self._pending: Final = pending
        self._reclaimer: Final = reclaimer
        self._workspaces: Final = workspaces

    def reap_before_search(self) -> bool:
        """Let go pending blocks that are done with, unless that can wait for the search; whether it was done."""
        lazy = self._state.config.multi_stream_lazy_reclaim
        if self._state.in_capture or (lazy and self._pending.num_events <= MAX_LAZY_EVENTS):
            return False
        self._pending.reap()
        return True

    def obtain(self, pool: BlockPool, size: int, stream: int, *, reaped: bool) -> Block:
        """A free block of at least ``size`` bytes, in its pool, which may be another than ``pool``.

        Args:
            pool: The pool in which the search failed.
            size: Rounded size of the request.
            stream: Its stream.
            reaped: Pending blocks were looked at before the search.

        Raises:
            ExhaustedError: There is none.
            RejectedError: The device must not be asked.
        """
        state = self._state
        config = state.config
        if size >= MAX_REQUEST_BYTES:
            raise ExhaustedError(size, size)
        if config.multi_stream_lazy_reclaim and not reaped and not state.in_capture:
            self._pending.reap()
            block = self._fit.find(pool.free_list(stream), size)
            if block is not None:
                return block
        device_bytes = segment_bytes(
            size, is_small=pool.is_small, large_segment_bytes=config.large_segment_size, page_1g=config.page_size_1g
        )
        if state.tracks_ages:
            self._reclaimer.collect_garbage()
        block = self._ask_device(pool, size, device_bytes, stream) or self._borrow(pool, size, stream)
        if block is None and self._reclaimer.release_available(pool, size, stream):
            block = self._ask_device(pool, size, device_bytes, stream)
        if block is None and not state.in_capture:
            state.driver.synchronize_device()
            if self._workspaces is not None:
                self._workspaces.empty_cache()
            self._reclaimer.release_cached()
            state.statistics.num_alloc_retries += 1
            block = self._ask_device(pool, size, device_bytes, stream)
        if block is None:
            state.statistics.num_ooms += 1
            state.history.record("oom", state.hbm.mem_get_info()[0], size, stream, pool.pool_id)
            raise ExhaustedError(size, device_bytes)
        return block

    def _ask_device(self, pool: BlockPool, size: int, device_bytes: int, stream: int) -> Block | None:
        state = self._state
        config = state.config
        wanted_bytes = state.statistics.total_reserved_bytes + device_bytes
        if state.allowed_bytes is not None and wanted_bytes > state.allowed_bytes:
            return None
        if config.throw_on_npumalloc_oom and wanted_bytes > int(
            config.per_process_memory_fraction * state.hbm.total_bytes
        ):
            state.statistics.num_oom_rejections += 1
            raise RejectedError
        if not config.expandable_segments:
            return self._segments.make(pool, device_bytes, stream)
        block = self._expandable.grow(pool, size, stream)
        if block is not None and pool.owner is not None:
            pool.owner.num_segments += 1
        return block

    def _borrow(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """A cached block of a private pool made with ``use_on_oom``, for a request to a default pool."""
        if pool.owner is None:
            for private in self._state.pools.private.values():
                if private.use_on_oom:
                    lent = private.small if pool.is_small else private.large
                    block = self._fit.find(lent.free_list(stream), size)
                    if block is not None:
                        return block
        return None
