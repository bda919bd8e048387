"""The way of a request: from cached blocks if one fits, else from the device; and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from npusim.device.hbm import Hbm
from npusim.errors import WorldError
from npusim.memory.blocks import ALLOCATED, FREE, Block
from npusim.memory.config import AllocatorConfig
from npusim.memory.driver import StreamDriver
from npusim.memory.expandable import ExpandableSegments
from npusim.memory.fit import BestFit
from npusim.memory.growth import ExhaustedError, Growth, RejectedError
from npusim.memory.history import History
from npusim.memory.out_of_memory import MORE_THAN_1EB, explanation, out_of_memory_text, rejection_text
from npusim.memory.pending import PendingFrees
from npusim.memory.pools import PoolRegistry
from npusim.memory.reclaim import Reclaimer
from npusim.memory.rounding import (
    MAX_REQUEST_BYTES,
    MIN_BLOCK_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    round_to_power_of_two_division,
)
from npusim.memory.segments import Segments
from npusim.memory.state import AllocatorState
from npusim.memory.statistics import Statistics
from npusim.memory.versions import AllocatorVersion
from npusim.memory.workspace import WorkspaceAllocator

_BLOCK_MASK: Final = -MIN_BLOCK_BYTES

OutOfMemoryObserver = Callable[[int, int, int, int], None]
"""Called with device, bytes asked of the device, the limit or else the device's total, and the device's free bytes."""


class RequestPath:
    """Serves and takes back blocks of one device.

    This is where the time goes, so :meth:`malloc` and :meth:`free` avoid calls and look-ups that other code may spend.

    A tensor's finalizer may free memory at any moment, also while the allocator is at work in the same thread (Python's
    garbage collector runs when it likes); such a free takes effect when the work is done. Threads must take turns.

    Attributes:
        version: Where the release differs from others.
        device_index: The device's number.
        statistics: The counters.
        pools: The block pools.
        workspaces: The operator workspaces.
        history: The recorded events.
        out_of_memory_observers: Called before an out-of-memory error is raised.
    """

    def __init__(
        self,
        hbm: Hbm,
        driver: StreamDriver,
        config: AllocatorConfig,
        *,
        device_index: int,
        version: AllocatorVersion,
        pad_bytes: int,
        out_of_memory_error: type[Exception],
        workspaces: WorkspaceAllocator | None,
    ) -> None:
        self.version: Final = version
        self.device_index: Final = device_index
        self.statistics: Final = Statistics(config.max_split_size, extra_counters=version.extra_counters)
        self.pools: Final = PoolRegistry(self.statistics, innermost_scope_first=version.innermost_scope_first)
        self.workspaces: Final = workspaces
        self.history: Final = History()
        self.out_of_memory_observers: Final[list[OutOfMemoryObserver]] = []
        state = AllocatorState(hbm, driver, config, version, self.statistics, self.pools, self.history, device_index)
        self._state: Final = state
        self._out_of_memory_error: Final = out_of_memory_error
        self._pad_bytes: Final = pad_bytes
        self._round_up_bytes: Final = pad_bytes + MIN_BLOCK_BYTES - 1
        segments = Segments(state)
        self._expandable: Final = ExpandableSegments(state)
        self._pending: Final = PendingFrees(driver, self._cache)
        self._fit: Final = BestFit(state)
        self._reclaimer: Final = Reclaimer(state, segments, self._expandable, self._pending)
        self._growth: Final = Growth(
            state, self._fit, segments, self._expandable, self._pending, self._reclaimer, workspaces
        )
        self._allocated: Final[dict[int, Block]] = {}
        self._pending_blocks: Final = self._pending.blocks
        self._small_pool: Final = self.pools.small
        self._large_pool: Final = self.pools.large
        self._scopes: Final = self.pools.scopes
        self._is_busy = False
        self._late_frees: Final[list[int]] = []
        self._configure()
        self._probe_expandable_segments()

    def malloc(self, num_bytes: int, stream: int) -> int:
        """Allocate device memory for use on ``stream`` and return its address; 0 for 0 bytes.

        Raises:
            Exception: Of the out-of-memory class, when memory runs out; the allocator stays usable.
            ValueError: ``num_bytes`` is negative.
        """
        if num_bytes <= 0:
            return _malloc_nothing(num_bytes)
        if self._is_busy:
            raise WorldError("the allocator was asked for memory while at work on another request")
        self._is_busy = True
        try:
            history = self.history
            if history.enabled:
                history.enter_request()
            reaped = self._growth.reap_before_search() if self._pending_blocks else False
            if self._divisions is None:
                size = (num_bytes + self._round_up_bytes) & _BLOCK_MASK
            else:
                size = round_to_power_of_two_division(num_bytes + self._pad_bytes, self._divisions)
            fit = self._fit
            if size <= SMALL_BYTES:
                pool = self._small_pool
                min_rest = MIN_BLOCK_BYTES
            else:
                pool = self._large_pool
                min_rest = fit.min_large_rest
            if self._scopes:
                pool = self.pools.route(pool, stream)
            free_list = pool.free_lists.get(stream) or pool.free_list(stream)
            block = fit.find(free_list, size)
            if block is None:
                block = self._growth.obtain(pool, size, stream, reaped=reaped)
                free_list = block.free_list
                pool = free_list.pool
            address = block.address
            if size >= ROUND_LARGE_BYTES and fit.alignment and address % fit.alignment:
                block = fit.align(block, size)
                address = block.address
            counters = pool.counters
            if block.size - size >= min_rest and size < fit.split_limit and not pool.no_split:
                rest = block
                is_whole = rest.prev is None and rest.next is None
                free_bytes = rest.size
                block = rest.cut_front(size)
                rest.searches = pool.searches
                free_list.replace(free_bytes, address, rest)
                if rest.segment is None:
                    if is_whole:
                        counters.add_inactive_splits(1)
                        counters.add_inactive_split_bytes(rest.size)
                    else:
                        counters.inactive_split_bytes -= size
            else:
                size = block.size
                free_list.remove(block)
                if block.segment is None and (block.prev is not None or block.next is not None):
                    counters.inactive_splits -= 1
                    counters.inactive_split_bytes -= size
            block.state = ALLOCATED
            block.requested_bytes = num_bytes
            self._allocated[address] = block
            counters.count_allocation(size, num_bytes)
            if self._pending_blocks:
                counters.note_active_peak()
            if fit.is_split_limited and size >= fit.max_split_size:
                self.statistics.oversize_allocations.add(1)
            if history.enabled:
                history.record_block("alloc", block)
            return address
        except RejectedError:
            failure = None
        except ExhaustedError as exhausted:
            failure = exhausted
        finally:
            self._is_busy = False
            if self._late_frees:
                self._free_late()
        raise self._out_of_memory(num_bytes, failure)

    def free(self, address: int) -> None:
        """Give a block back. It is cached at once, or, if other streams used it, when they are done; 0 does nothing.

        Raises:
            RuntimeError: No allocated block starts at ``address``.
        """
        if self._is_busy:
            self._late_frees.append(address)
            return
        block = self._allocated.pop(address, None)
        if block is None:
            _free_nothing(address)
            return
        self._is_busy = True
        try:
            history = self.history
            if history.enabled:
                history.enter_release()
                history.record_block("free_requested", block)
            size = block.size
            counters = block.free_list.pool.counters
            counters.allocations -= 1
            counters.allocated_bytes -= size
            if self._fit.is_split_limited and size >= self._fit.max_split_size:
                self.statistics.oversize_allocations.add(-1)
            if block.stream_uses is None:
                self._cache(block)
            else:
                self._pending.hold(block, in_capture=self._state.in_capture)
        finally:
            self._is_busy = False
            if self._late_frees:
                self._free_late()

    def blocks(self) -> Iterator[Block]:
        """All mapped blocks: those in their pools, then those in use, then those pending."""
        for pool in self.pools.all_pools():
            yield from pool.blocks()
        yield from self._allocated.values()
        yield from self._pending_blocks.values()

    def _cache(self, block: Block) -> None:
        """Merge a block that nobody uses any more with its free neighbours and put it into its pool."""
        if self.history.enabled:
            self.history.record_block("free_completed", block)
        free_list = block.free_list
        pool = free_list.pool
        counters = pool.counters
        counters.requested_bytes -= block.requested_bytes
        size = block.size
        block.state = FREE
        block.searches = pool.searches
        before, after = block.prev, block.next
        num_merged = 0
        if after is not None and after.state == FREE:
            num_merged = 1
            if before is not None and before.state == FREE:
                num_merged = 2
                free_list.remove(before)
                block.absorb_before(before)
            block.absorb_after(after)
            free_list.replace(after.size, after.address, block)
        elif before is not None and before.state == FREE:
            num_merged = 1
            block.absorb_before(before)
            free_list.replace(before.size, before.address, block)
        else:
            free_list.add(block)
        if block.segment is None:
            if block.prev is not None or block.next is not None:
                if num_merged != 1:
                    counters.add_inactive_splits(1 - num_merged)
                counters.add_inactive_split_bytes(size)
            else:
                counters.inactive_splits -= num_merged
                counters.inactive_split_bytes -= block.size - size

    def _out_of_memory(self, num_bytes: int, exhausted: ExhaustedError | None) -> Exception:
        if exhausted is None:
            return self._out_of_memory_error(rejection_text(num_bytes))
        if exhausted.size >= MAX_REQUEST_BYTES:
            return self._out_of_memory_error(MORE_THAN_1EB)
        state = self._state
        free_bytes, total_bytes = state.hbm.mem_get_info()
        limit = total_bytes if state.allowed_bytes is None else state.allowed_bytes
        for observer in tuple(self.out_of_memory_observers):
            observer(self.device_index, exhausted.device_bytes, limit, free_bytes)
        error = self._out_of_memory_error(out_of_memory_text(state, exhausted.device_bytes))
        error.add_note(explanation(state, exhausted.size, exhausted.device_bytes, list(self.blocks())))
        return error

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Frees wait while this is open."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
            self._free_late()

    def _free_late(self) -> None:
        while self._late_frees:
            self.free(self._late_frees.pop(0))

    def _configure(self) -> None:
        """Read the settings; to be called after each change."""
        divisions = self._state.config.roundup_power2_divisions
        self._divisions = divisions if max(divisions) > 1 else None
        self._fit.configure()

    def _probe_expandable_segments(self) -> None:
        if self._state.config.expandable_segments:
            self._expandable.probe()


def _malloc_nothing(num_bytes: int) -> int:
    if num_bytes < 0:
        raise ValueError(f"an allocation cannot be negative: {num_bytes} bytes")
    return 0


def _free_nothing(address: int) -> None:
    if address:
        raise RuntimeError(f"invalid device pointer: {address:#x}")
