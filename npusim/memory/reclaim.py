"""The ways in which cached memory goes back to the device."""

from __future__ import annotations

from typing import Final

from npusim.memory.blocks import Block
from npusim.memory.config_parser import SIZE_MAX
from npusim.memory.expandable import ExpandableSegments
from npusim.memory.pending import PendingFrees
from npusim.memory.pools import NO_POOL, BlockPool, PoolId, PrivatePool
from npusim.memory.segments import Segments
from npusim.memory.state import AllocatorState


class Reclaimer:
    """Gives cached blocks back to the device."""

    def __init__(
        self, state: AllocatorState, segments: Segments, expandable: ExpandableSegments, pending: PendingFrees
    ) -> None:
        self._state: Final = state
        self._segments: Final = segments
        self._expandable: Final = expandable
        self._pending: Final = pending

    def release_cached(self, pool_id: PoolId = NO_POOL, *, keep_physical: bool = False) -> None:
        """Give back all that is free in the default pools (unless in a capture) and in private pools that nobody holds.

        Args:
            pool_id: Only this private pool, and only if nobody holds it.
            keep_physical: Unmap expandable segments, but keep their physical memory for the pool.

        Raises:
            RuntimeError: During a capture, in torch_npu 2.10.
        """
        pools = self._state.pools
        if self._state.version.capture_by_scope and self._state.in_capture:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED, please report a bug to PyTorch. ")
        if pool_id == NO_POOL and not self._state.in_capture:
            self.wait_for_pending()
            self._release_pool(pools.large, keep_physical=keep_physical)
            self._release_pool(pools.small, keep_physical=keep_physical)
        for _, private in sorted(pools.freeable.items()):
            if pool_id != NO_POOL:
                if private.pool_id != pool_id:
                    continue
                self.wait_for_pending(private)
            self._release_pool(private.small, keep_physical=keep_physical)
            self._release_pool(private.large, keep_physical=keep_physical)
            if private.num_segments <= 0 and not private.reserved_bytes:
                pools.drop(private.pool_id)

    def wait_for_pending(self, pool: PrivatePool | None = None) -> None:
        """Wait for the events of all pending blocks, or of those of one private pool."""
        self._state.statistics.num_sync_all_streams += 1
        self._pending.wait(pool)

    def release_available(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Give back oversize blocks, just enough for a request; only with ``max_split_size_mb``.

        Returns:
            Whether enough was given back; if not, some may have been.
        """
        max_split_size = self._state.config.max_split_size
        if max_split_size == SIZE_MAX:
            return False
        needed = max(size, max_split_size)
        self._state.driver.synchronize_device()
        free_list = pool.free_list(stream)
        block = free_list.smallest_from(needed)
        if block is not None:
            self._segments.give_back(block)
            return True
        released = 0
        while released < needed:
            block = free_list.largest()
            if block is None or block.size < max_split_size:
                return False
            released += block.size
            self._segments.give_back(block)
        return True

    def collect_garbage(self) -> None:
        """Give back whole large segments, those unused for longest first, until the threshold is met."""
        state = self._state
        assert state.allowed_bytes is not None
        threshold = int(state.config.garbage_collection_threshold * state.allowed_bytes)
        target = state.statistics.total_reserved_bytes - threshold
        if target <= 0:
            return
        pool = state.pools.large
        candidates = [block for block in pool.blocks() if not block.is_split]
        if not candidates:
            return
        state.driver.synchronize_device()
        ages = {block: pool.searches - block.searches for block in candidates}
        reclaimed = 0
        freed_some = True
        while reclaimed < target and freed_some and ages:
            age_limit = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= age_limit]
            freed_some = bool(old)
            for block in old:
                reclaimed += block.size
                del ages[block]
                self._segments.give_back(block)

    def _release_pool(self, pool: BlockPool, *, keep_physical: bool) -> None:
        shrinkable: list[Block] = []
        for block in list(pool.blocks()):
            if block.segment is not None:
                shrinkable.append(block)
            elif not block.is_split:
                self._segments.give_back(block)
        for block in shrinkable:
            self._expandable.shrink(block, keep_physical=keep_physical)
        if not keep_physical:
            while pool.free_physical:
                self._state.hbm.destroy_physical(pool.free_physical.pop())
