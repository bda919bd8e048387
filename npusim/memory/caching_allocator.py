"""``NPUCachingAllocator``: serves requests from cached blocks, and from the device when none fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from npusim.device.hbm import Hbm
from npusim.memory.blocks import ALLOCATED, FREE, UNMAPPED, Block, FreeList
from npusim.memory.config import AllocatorConfig, change_allocator_settings
from npusim.memory.driver import StreamDriver
from npusim.memory.expandable import ExpandableSegments
from npusim.memory.out_of_memory import MORE_THAN_1EB, OutOfMemoryError, out_of_memory_text, rejection_text
from npusim.memory.pending import PendingFrees
from npusim.memory.pools import NO_POOL, BlockPool, PoolId, PoolRegistry, SegmentAllocator, StreamPredicate
from npusim.memory.reclaim import Reclaimer
from npusim.memory.rounding import (
    MAX_REQUEST_BYTES,
    MIN_BLOCK_BYTES,
    PAD_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    round_to_power_of_two_division,
    segment_bytes,
)
from npusim.memory.segments import Segments
from npusim.memory.snapshot import SegmentSnapshot, take_snapshot
from npusim.memory.state import AllocatorState
from npusim.memory.statistics import Statistics
from npusim.memory.versions import VERSIONS
from npusim.memory.workspace import WorkspaceAllocator

MAX_LAZY_EVENTS: Final = 512
"""Pending events from which ``multi_stream_lazy_reclaim`` looks at them before a search. Exact: kLazyQuerySize."""

OutOfMemoryObserver = Callable[[int, int, int, int], None]
"""Called with device, bytes asked of the device, the limit or the device's total, and the device's free bytes."""


class _Rejected(Exception):
    """``throw_on_npumalloc_oom`` refused to ask the device."""


class CachingAllocator:
    """Device memory of one NPU as torch_npu manages it.

    Addresses, statistics, device calls and texts are those of torch_npu on the same device. A freed block stays cached and
    serves later requests on its stream; adjacent free blocks merge.

    Args:
        hbm: The device's memory.
        driver: The device's streams and events.
        config: Settings, by default those of an empty ``PYTORCH_NPU_ALLOC_CONF``.
        device_index: The device's number in texts and snapshots.
        version: Release of torch_npu: ``2.13`` or ``2.10``.
        pad_bytes: Bytes added to each request, see :func:`npusim.memory.rounding.pad_bytes`.
        out_of_memory_error: Class of the out-of-memory error.
        workspaces: The operator workspaces, which are given up before memory runs out.
    """

    def __init__(
        self,
        hbm: Hbm,
        driver: StreamDriver,
        config: AllocatorConfig | None = None,
        *,
        device_index: int = 0,
        version: str = "2.13",
        pad_bytes: int = PAD_BYTES,
        out_of_memory_error: type[Exception] = OutOfMemoryError,
        workspaces: WorkspaceAllocator | None = None,
    ) -> None:
        config = config if config is not None else AllocatorConfig()
        behaviour = VERSIONS[version]
        self.statistics: Final = Statistics(config.max_split_size, extra_counters=behaviour.extra_counters)
        self.pools: Final = PoolRegistry(self.statistics, innermost_scope_first=behaviour.innermost_scope_first)
        self.out_of_memory_observers: Final[list[OutOfMemoryObserver]] = []
        self.workspaces: Final = workspaces
        self._state: Final = AllocatorState(
            hbm=hbm,
            driver=driver,
            config=config,
            statistics=self.statistics,
            pools=self.pools,
            device_index=device_index,
            capture_by_scope=behaviour.capture_by_scope,
        )
        self._out_of_memory_error: Final = out_of_memory_error
        self._pad_bytes: Final = pad_bytes
        self._allocated: Final[dict[int, Block]] = {}
        self._history: Final = self._state.history
        self._segments: Final = Segments(self._state)
        self._expandable_segments: Final = ExpandableSegments(self._state)
        self._pending: Final = PendingFrees(driver, self._end_pending)
        self._reclaimer: Final = Reclaimer(self._state, self._segments, self._expandable_segments, self._pending)
        self._small_pool: Final = self.pools.small
        self._large_pool: Final = self.pools.large
        self._skips_expandable = False
        self._round_bytes: Final = pad_bytes + MIN_BLOCK_BYTES - 1
        self.set_per_process_memory_fraction(config.per_process_memory_fraction)

    # ---- requests

    def malloc(self, num_bytes: int, stream: int) -> int:
        """Allocate device memory for use on ``stream`` and return its address; 0 for 0 bytes.

        Raises:
            Exception: Of the class given to the constructor, when memory runs out; the allocator stays usable.
        """
        if num_bytes <= 0:
            return self._malloc_nothing(num_bytes)
        reaped = self._reap_before_search() if self._pending.blocks else False
        size = (num_bytes + self._round_bytes) & -MIN_BLOCK_BYTES
        if self._divisions is not None:
            size = round_to_power_of_two_division(num_bytes + self._pad_bytes, self._divisions)
        is_small = size <= SMALL_BYTES
        if self.pools.scopes:
            pool = self.pools.route(stream, is_small=is_small)
        else:
            pool = self._small_pool if is_small else self._large_pool
        block = self._find(pool, size, stream)
        if block is None:
            block = self._obtain(pool, size, num_bytes, stream, reaped=reaped)
            pool = block.free_list.pool
        if size >= ROUND_LARGE_BYTES and self._alignment and block.address % self._alignment:
            block = self._align(block, size)
        free_list = block.free_list
        counters = pool.counters
        rest = block.size - size
        if (
            rest >= (MIN_BLOCK_BYTES if is_small else self._min_large_rest)
            and size < self._max_split_size
            and not pool.no_split
        ):
            remainder = block
            address = remainder.address
            block = Block(address, size, ALLOCATED, free_list, remainder.segment)
            free_list.replace(remainder, remainder, address + size, rest)
            prev = remainder.prev
            if remainder.segment is None:
                if prev is None and remainder.next is None:
                    self.statistics.change_inactive_split(counters, 1, rest)
                else:
                    counters.inactive_split_bytes -= size
            block.next = remainder
            if prev is not None:
                block.prev = prev
                prev.next = block
            remainder.prev = block
            remainder.address = address + size
            remainder.size = rest
            remainder.searches = pool.searches
        else:
            address = block.address
            free_list.remove(block)
            size = block.size
            block.state = ALLOCATED
            if block.segment is None and (block.prev is not None or block.next is not None):
                counters.inactive_splits -= 1
                counters.inactive_split_bytes -= size
        block.requested_bytes = num_bytes
        self._allocated[address] = block
        peaks = self.statistics.both
        other = counters.other
        value = counters.allocations + 1
        counters.allocations = value
        counters.allocations_rises += 1
        if value > counters.allocations_peak:
            counters.allocations_peak = value
        value += other.allocations
        if value > peaks.allocations_peak:
            peaks.allocations_peak = value
        value = counters.allocated_bytes + size
        counters.allocated_bytes = value
        counters.allocated_bytes_rises += size
        if value > counters.allocated_bytes_peak:
            counters.allocated_bytes_peak = value
        value += other.allocated_bytes
        if value > peaks.allocated_bytes_peak:
            peaks.allocated_bytes_peak = value
        value = counters.requested_bytes + num_bytes
        counters.requested_bytes = value
        counters.requested_bytes_rises += num_bytes
        if value > counters.requested_bytes_peak:
            counters.requested_bytes_peak = value
        value += other.requested_bytes
        if value > peaks.requested_bytes_peak:
            peaks.requested_bytes_peak = value
        if self._pending.blocks:
            self.statistics.note_active_peak(counters)
        if size >= self._max_split_size:
            self.statistics.oversize_allocations.add(1)
        if self._history.enabled:
            self._history.record("alloc", address, num_bytes, stream, pool.pool_id)
        return address

    def free(self, address: int) -> None:
        """Give a block back. It is cached at once, or, if other streams used it, when they are done.

        Raises:
            RuntimeError: No allocated block starts at ``address``.
        """
        block = self._allocated.pop(address, None)
        if block is None:
            self._free_nothing(address)
            return
        counters = block.free_list.pool.counters
        size = block.size
        counters.allocations -= 1
        counters.allocated_bytes -= size
        if size >= self._max_split_size:
            self.statistics.oversize_allocations.add(-1)
        if self._history.enabled:
            free_list = block.free_list
            self._history.record(
                "free_requested", address, block.requested_bytes, free_list.stream, free_list.pool.pool_id
            )
        if block.stream_uses is not None:
            counters.pending += 1
            counters.pending_bytes += size
            self._pending.hold(block, in_capture=self._state.in_capture)
        else:
            self._cache(block)

    def _cache(self, block: Block) -> None:
        """Merge a block that nobody uses any more with its free neighbours and put it into its pool."""
        free_list = block.free_list
        pool = free_list.pool
        counters = pool.counters
        if self._history.enabled:
            self._history.record("free_completed", block.address, block.requested_bytes, free_list.stream, pool.pool_id)
        counters.requested_bytes -= block.requested_bytes
        address = block.address
        size = block.size
        block.state = FREE
        block.searches = pool.searches
        prev, after = block.prev, block.next
        num_merged = 0
        merged_bytes = 0
        if prev is not None and prev.state == FREE:
            num_merged = 1
            merged_bytes = prev.size
            address = prev.address
        else:
            prev = None
        if after is not None and after.state == FREE:
            num_merged += 1
            merged_bytes += after.size
            free_list.replace(after, block, address, size + merged_bytes)
            block.next = after.next
            if after.next is not None:
                after.next.prev = block
            if prev is not None:
                free_list.remove(prev)
        elif prev is not None:
            free_list.replace(prev, block, address, size + merged_bytes)
        else:
            free_list.add(block)
        if prev is not None:
            block.prev = prev.prev
            if prev.prev is not None:
                prev.prev.next = block
        if num_merged:
            block.address = address
            block.size = size + merged_bytes
        if block.segment is None:
            if block.prev is not None or block.next is not None:
                self.statistics.change_inactive_split(counters, 1 - num_merged, size)
            elif num_merged:
                counters.inactive_splits -= num_merged
                counters.inactive_split_bytes -= merged_bytes

    def _end_pending(self, block: Block) -> None:
        counters = block.free_list.pool.counters
        counters.pending -= 1
        counters.pending_bytes -= block.size
        self._cache(block)

    def _find(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """The cached block that a request gets, still in its pool."""
        if self._tracks_ages:
            pool.searches += 1
        free_list = pool.free_lists.get(stream)
        if free_list is None:
            return None
        block = free_list.smallest_from(size)
        if block is None:
            return None
        if self._expandable:
            after = block.next
            if after is not None and after.state == UNMAPPED:
                block = self._least_expandable(free_list, block)
        elif self._skips_expandable and block.segment is not None:
            block = next((each for each in free_list.following(block) if each.segment is None), None)
            if block is None:
                return None
        limit = self._max_split_size
        if block.size >= limit and (size < limit or block.size >= size + self._state.config.max_non_split_rounding_size):
            return None
        return block

    def _least_expandable(self, free_list: FreeList, block: Block) -> Block:
        """Of a block that can grow and the larger ones after it, the first that would waste less."""
        for following in free_list.following(block):
            if block.segment is None or _expanded_size(following) >= _expanded_size(block):
                break
            block = following
        return block

    def _obtain(self, pool: BlockPool, size: int, num_bytes: int, stream: int, *, reaped: bool) -> Block:
        """A free block for a request that no cached block fits, from the device or by giving cached memory up for it."""
        state = self._state
        block = None
        if state.config.multi_stream_lazy_reclaim and not reaped and not state.in_capture:
            self._pending.reap()
            block = self._find(pool, size, stream)
        if block is not None:
            return block
        config = state.config
        device_bytes = segment_bytes(
            size, is_small=pool.is_small, large_segment_bytes=config.large_segment_size, page_1g=config.page_size_1g
        )
        if self._tracks_ages:
            self._reclaimer.collect_garbage()
        try:
            block = self._grow(pool, size, device_bytes, stream) or self._borrow(pool, size, stream)
            if block is None and self._reclaimer.release_available(pool, size, stream):
                block = self._grow(pool, size, device_bytes, stream)
            if block is None and not state.in_capture:
                state.driver.synchronize_device()
                if self.workspaces is not None:
                    self.workspaces.empty_cache()
                self._reclaimer.release_cached()
                self.statistics.num_alloc_retries += 1
                block = self._grow(pool, size, device_bytes, stream)
        except _Rejected:
            raise self._out_of_memory_error(rejection_text(num_bytes)) from None
        if block is None:
            raise self._out_of_memory(pool, size, device_bytes, stream)
        return block

    def _grow(self, pool: BlockPool, size: int, device_bytes: int, stream: int) -> Block | None:
        state = self._state
        wanted_bytes = self.statistics.total_reserved_bytes + device_bytes
        if state.allowed_bytes is not None and wanted_bytes > state.allowed_bytes:
            return None
        config = state.config
        if config.throw_on_npumalloc_oom:
            if wanted_bytes > int(config.per_process_memory_fraction * state.hbm.total_bytes):
                self.statistics.num_oom_rejections += 1
                raise _Rejected
        if config.expandable_segments:
            return self._expandable_segments.grow(pool, size, stream)
        return self._segments.make(pool, device_bytes, stream)

    def _borrow(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """A cached block of a private pool that was made with ``use_on_oom``, for a request to a default pool."""
        if pool.owner is not None:
            return None
        for private in self.pools.private.values():
            if private.use_on_oom:
                block = self._find(private.small if pool.is_small else private.large, size, stream)
                if block is not None:
                    return block
        return None

    def _align(self, block: Block, size: int) -> Block:
        """Cut the front off a free block so that it starts on an aligned address, if it stays long enough."""
        front_bytes = -block.address % self._alignment
        if front_bytes + size > block.size:
            return block
        address, rest = block.address + front_bytes, block.size - front_bytes
        aligned = Block(address, rest, FREE, block.free_list, block.segment)
        block.free_list.replace(block, block, block.address, front_bytes)
        block.size = front_bytes
        aligned.insert_after(block)
        block.free_list.add(aligned)
        return aligned

    def _reap_before_search(self) -> bool:
        state = self._state
        if state.in_capture or (
            state.config.multi_stream_lazy_reclaim and self._pending.num_events <= MAX_LAZY_EVENTS
        ):
            return False
        self._pending.reap()
        return True

    def _malloc_nothing(self, num_bytes: int) -> int:
        if num_bytes < 0:
            raise ValueError(f"an allocation cannot be negative: {num_bytes} bytes")
        return 0

    def _free_nothing(self, address: int) -> None:
        if address:
            raise RuntimeError(f"invalid device pointer: {address:#x}")

    def _out_of_memory(self, pool: BlockPool, size: int, device_bytes: int, stream: int) -> Exception:
        state = self._state
        free_bytes, total_bytes = state.hbm.mem_get_info()
        self.statistics.num_ooms += 1
        self._history.record("oom", free_bytes, size, stream, pool.pool_id)
        limit = state.allowed_bytes if state.allowed_bytes is not None else total_bytes
        for observer in tuple(self.out_of_memory_observers):
            observer(state.device_index, device_bytes, limit, free_bytes)
        return self._out_of_memory_error(out_of_memory_text(state, device_bytes))

    # ---- streams

    def record_stream(self, address: int, stream: int) -> None:
        """Note that another stream uses a block, so that it is not given out again before that stream is done.

        Recording the block's own stream counts too, as in torch_npu (and unlike CUDA).

        Raises:
            RuntimeError: No allocated block starts at ``address``.
        """
        self._pending.record_use(self._block_at(address), stream, in_capture=self._state.in_capture)

    def erase_stream(self, address: int, stream: int) -> None:
        """Take a record of :meth:`record_stream` back, if the block's own stream is the current one.

        Raises:
            RuntimeError: No allocated block starts at ``address``.
        """
        block = self._block_at(address)
        if block.free_list.stream == self._state.driver.current_stream():
            self._pending.erase_use(block, stream)

    def _block_at(self, address: int) -> Block:
        block = self._allocated.get(address) or self._pending.blocks.get(address)
        if block is None:
            raise RuntimeError("No allocated block can be found")
        return block

    # ---- giving memory back

    def empty_cache(self, pool_id: PoolId = NO_POOL) -> None:
        """Wait for the device and give all free memory back to it that can be, workspaces included.

        Args:
            pool_id: Only the memory of this private pool, and only if nobody holds the pool any more.
        """
        self._state.driver.synchronize_device()
        if pool_id == NO_POOL and self.workspaces is not None:
            self.workspaces.empty_cache()
        self._reclaimer.release_cached(pool_id)

    def empty_virt_addr_cache(self) -> None:
        """As :meth:`empty_cache`, but the physical memory of expandable segments stays with its pool, to be mapped again.

        Raises:
            RuntimeError: Segments are not expandable.
        """
        if not self._expandable:
            raise RuntimeError("Unsupported config for empty_virt_addr_cache, please enable expandable_segments.")
        self._state.driver.synchronize_device()
        if self.workspaces is not None:
            self.workspaces.empty_cache()
        self._reclaimer.release_cached(keep_physical=True)

    # ---- settings

    @property
    def config(self) -> AllocatorConfig:
        """The settings in force."""
        return self._state.config

    def set_allocator_settings(self, text: str) -> None:
        """Change settings at run time (``torch_npu.npu.memory._set_allocator_settings``).

        Raises:
            ValueError: See :func:`npusim.memory.config.change_allocator_settings`.
        """
        self._state.config = change_allocator_settings(text, self._state.config)
        self._apply_config()

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a part of the device's total; 1.0: no limit.

        Raises:
            TypeError: ``fraction`` is no float.
            ValueError: ``fraction`` is not in 0..1.
        """
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if fraction < 0 or fraction > 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._state.allowed_bytes = None if fraction == 1.0 else int(fraction * self._state.hbm.total_bytes)
        self._apply_config()

    def get_per_process_memory_fraction(self) -> float:
        """The limit of reserved memory as part of the device's total."""
        allowed_bytes = self._state.allowed_bytes
        return 1.0 if allowed_bytes is None else allowed_bytes / self._state.hbm.total_bytes

    def _apply_config(self) -> None:
        config = self._state.config
        self._expandable = config.expandable_segments
        self._skips_expandable = self._skips_expandable or self._expandable
        self._max_split_size = config.max_split_size
        self._alignment = config.base_addr_aligned_size if self._expandable else 0
        self._min_large_rest = MIN_BLOCK_BYTES if self._expandable else SMALL_BYTES + 1
        self._divisions = config.roundup_power2_divisions if max(config.roundup_power2_divisions) > 1 else None
        self._tracks_ages = self._state.tracks_ages

    # ---- private pools

    def begin_allocate_to_pool(self, pool_id: PoolId, matches: StreamPredicate | None = None) -> None:
        """Serve requests from a private pool from now on, which is made if need be; the scope holds the pool.

        Args:
            pool_id: Id of the pool.
            matches: Which streams' requests. Default: all.

        Raises:
            RuntimeError: A scope of that pool is open already.
        """
        self.pools.begin_scope(pool_id, matches if matches is not None else _any_stream)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Close the scope of a pool, which stays held until :meth:`release_pool`."""
        self.pools.end_scope(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Let go of a pool once; when nobody holds it, :meth:`empty_cache` may give its memory back."""
        self.pools.release(pool_id)

    def create_pool(
        self,
        pool_id: PoolId,
        *,
        allocator: SegmentAllocator | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        """Make a private pool and hold it (``MemPool``)."""
        self.pools.hold(pool_id, allocator=allocator, use_on_oom=use_on_oom, no_split=no_split)

    def mark_capture_begin(self) -> None:
        """A graph capture has begun: while the current stream is captured, events are neither recorded nor waited for."""
        self._state.num_captures += 1

    def mark_capture_end(self) -> None:
        """A graph capture has ended."""
        self._state.num_captures -= 1

    # ---- statistics

    def blocks(self) -> Iterator[Block]:
        """All mapped blocks: those in their pools, then those in use or pending."""
        for pool in self.pools.all_pools():
            yield from pool.blocks()
        yield from self._allocated.values()
        yield from self._pending.blocks.values()

    def snapshot(self, pool_id: PoolId = NO_POOL) -> list[SegmentSnapshot]:
        """The segments and their blocks by address, as ``torch.npu.memory.memory_snapshot()`` shows them.

        Args:
            pool_id: Only the segments of this private pool.
        """
        return take_snapshot(self.blocks(), self._state.device_index, pool_id)

    def memory_stats(self) -> dict[str, int]:
        """The figures of ``torch.npu.memory_stats()`` under its keys, sorted."""
        return self.statistics.as_dict()

    @property
    def memory_allocated(self) -> int:
        """Bytes of allocated blocks."""
        return self.statistics.total_allocated_bytes

    @property
    def max_memory_allocated(self) -> int:
        """Peak of :attr:`memory_allocated`."""
        return self.statistics.both.allocated_bytes_peak

    @property
    def memory_reserved(self) -> int:
        """Bytes taken from the device."""
        return self.statistics.total_reserved_bytes

    @property
    def max_memory_reserved(self) -> int:
        """Peak of :attr:`memory_reserved`."""
        return self.statistics.reserved_bytes["all"].peak

    def reset_peak_memory_stats(self) -> None:
        """Let all peaks start anew from the current values."""
        self.statistics.reset_peaks()

    def reset_accumulated_memory_stats(self) -> None:
        """Let all sums and counts of events start anew from zero."""
        self.statistics.reset_accumulated()


def _any_stream(_: int) -> bool:
    return True


def _expanded_size(block: Block) -> int:
    """Size of a block with the unmapped addresses right behind it."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
