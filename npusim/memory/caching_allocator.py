"""``NPUCachingAllocator``: device memory of one NPU as torch_npu manages it."""

from __future__ import annotations

import sys
from array import array
from operator import attrgetter

from npusim.device.hbm import Hbm
from npusim.memory.blocks import FREE, UNMAPPED
from npusim.memory.config import AllocatorConfig, change_allocator_settings
from npusim.memory.driver import StreamDriver
from npusim.memory.out_of_memory import OutOfMemoryError
from npusim.memory.pools import NO_POOL, PoolId, SegmentAllocator, StreamPredicate
from npusim.memory.request_path import RequestPath
from npusim.memory.rounding import PAD_BYTES
from npusim.memory.segment_snapshot import SegmentSnapshot, segments_of
from npusim.memory.summary import memory_summary
from npusim.memory.versions import VERSIONS
from npusim.memory.workspace import WorkspaceAllocator


class CachingAllocator(RequestPath):
    """The caching allocator of one device.

    Addresses, statistics, device calls and texts are those of torch_npu on the same device. A freed block stays cached
    and serves later requests on its stream; free neighbours merge.

    Args:
        hbm: The device's memory.
        driver: The device's streams and events.
        config: Settings, by default those of an empty ``PYTORCH_NPU_ALLOC_CONF``.
        device_index: The device's number in texts and snapshots.
        version: Release of torch_npu: ``2.13`` or ``2.10``.
        pad_bytes: Bytes added to each request, see :func:`npusim.memory.rounding.pad_bytes`.
        out_of_memory_error: Class of the out-of-memory error.
        workspaces: The operator workspaces, which are given up before memory runs out.

    Attributes:
        empties_with_pools: When a private pool is let go of for the last time, all cached memory goes back.
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
        super().__init__(
            hbm,
            driver,
            config,
            device_index=device_index,
            version=VERSIONS[version],
            pad_bytes=pad_bytes,
            out_of_memory_error=out_of_memory_error,
            workspaces=workspaces,
        )
        self.empties_with_pools = False
        self.set_per_process_memory_fraction(config.per_process_memory_fraction)

    # Streams

    def record_stream(self, address: int, stream: int) -> None:
        """Note that a stream uses a block, so that it is not given out again before that stream is done.

        Recording the block's own stream counts too, as in torch_npu and unlike CUDA.

        Raises:
            RuntimeError: No allocated block starts at ``address``.
        """
        block = self._allocated.get(address)
        if block is None:
            raise RuntimeError("No allocated block can be found")
        self._pending.record_use(block, stream, in_capture=self._state.in_capture)

    def erase_stream(self, address: int, stream: int) -> None:
        """Take a :meth:`record_stream` back, if the block's own stream is the current one; also of a pending block.

        Raises:
            RuntimeError: No allocated or pending block starts at ``address``.
        """
        block = self._allocated.get(address) or self._pending_blocks.get(address)
        if block is None:
            raise RuntimeError("No allocated block can be found")
        if block.free_list.stream == self._state.driver.current_stream():
            with self._at_work():
                self._pending.erase_use(block, stream)

    # Giving memory back

    def empty_cache(self, pool_id: PoolId = NO_POOL) -> None:
        """Wait for the device and give all free memory back to it that can be, workspaces included.

        Args:
            pool_id: Only the memory of this private pool, and only if nobody holds the pool any more.
        """
        self._empty_cache(pool_id, keep_physical=False)

    def empty_virt_addr_cache(self) -> None:
        """As :meth:`empty_cache`, but physical memory of expandable segments stays with its pool, to be mapped again.

        Raises:
            RuntimeError: Segments are not expandable.
        """
        if not self._state.config.expandable_segments:
            raise RuntimeError("Unsupported config for empty_virt_addr_cache, please enable expandable_segments.")
        self._empty_cache(NO_POOL, keep_physical=True)

    def _empty_cache(self, pool_id: PoolId, *, keep_physical: bool) -> None:
        with self._at_work():
            self.history.enter_release()
            self._state.driver.synchronize_device()
            if pool_id == NO_POOL and self.workspaces is not None:
                self.workspaces.empty_cache()
            self._reclaimer.release_cached(pool_id, keep_physical=keep_physical)

    # Settings

    @property
    def config(self) -> AllocatorConfig:
        """The settings in force."""
        return self._state.config

    def set_allocator_settings(self, text: str) -> None:
        """Change settings at run time (``torch_npu.npu.memory._set_allocator_settings``).

        Raises:
            ValueError, RuntimeError: See :func:`npusim.memory.config.change_allocator_settings`.
        """
        self._state.config, refusal = change_allocator_settings(text, self._state.config, version=self.version.name)
        self._configure()
        if refusal is not None:
            raise refusal
        self._probe_expandable_segments()

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a part of the device's total; 1.0: no limit.

        Raises:
            TypeError: ``fraction`` is no float.
            ValueError: ``fraction`` is not in 0..1.
        """
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self._state.allowed_bytes = None if fraction == 1.0 else int(fraction * self._state.hbm.total_bytes)
        self._fit.configure()

    def get_per_process_memory_fraction(self) -> float:
        """The limit of reserved memory as a part of the device's total."""
        allowed_bytes = self._state.allowed_bytes
        return 1.0 if allowed_bytes is None else allowed_bytes / self._state.hbm.total_bytes

    # Private pools

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
        """Close the scope of a pool, which stays held until :meth:`release_pool`.

        Raises:
            RuntimeError: No scope of that pool is open.
        """
        self.pools.end_scope(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Let go of a pool once; when nobody holds it, :meth:`empty_cache` may give its memory back.

        Raises:
            RuntimeError: Nobody holds the pool.
        """
        self.pools.release(pool_id)
        if self.empties_with_pools and pool_id in self.pools.freeable:
            with self._at_work():
                self._reclaimer.release_cached()

    def create_pool(
        self,
        pool_id: PoolId,
        *,
        allocator: SegmentAllocator | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        """Make a private pool, or hold it once more; see :class:`npusim.memory.pools.PrivatePool`."""
        self.pools.hold(pool_id, allocator=allocator, use_on_oom=use_on_oom, no_split=no_split)

    def destroy_pool(self, pool_id: PoolId) -> None:
        """Let go of a pool for good (the end of a ``MemPool``); if nobody else holds it, its free memory goes back.

        Raises:
            RuntimeError: Nobody holds the pool.
        """
        self.pools.private[pool_id].use_on_oom = False
        self.release_pool(pool_id)
        self.empty_cache(pool_id)

    def mark_capture_begin(self) -> None:
        """A graph capture has begun: while the current stream is captured, no event is recorded or waited for."""
        self._state.num_captures += 1

    def mark_capture_end(self) -> None:
        """A graph capture has ended."""
        self._state.num_captures -= 1

    # Statistics and pictures

    def memory_stats(self) -> dict[str, int]:
        """The figures of ``torch.npu.memory_stats()`` under its keys, sorted."""
        return self.statistics.as_dict()

    def memory_summary(self, *, abbreviated: bool = False) -> str:
        """The table of ``torch.npu.memory_summary()``."""
        return memory_summary(self.memory_stats(), self.device_index, abbreviated=abbreviated)

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

    def snapshot(self, pool_id: PoolId = NO_POOL) -> list[SegmentSnapshot]:
        """The segments and their blocks by address; :func:`npusim.memory.snapshot.take_snapshot` has workspaces too.

        Args:
            pool_id: Only the segments of this private pool.
        """
        with self._at_work():
            segments = segments_of(list(self.blocks()), self.history, self.device_index, pool_id)
        total_active_bytes = sum(segment["active_size"] for segment in segments)
        self.history.record_snapshot(total_active_bytes, pool_id)
        return segments

    def layout(self) -> array[int]:
        """Every mapped block, by address, with what decides where later requests are placed, in 64-bit numbers."""
        numbers = array("q")
        for block in sorted(self.blocks(), key=attrgetter("address")):
            is_head = block.prev is None or block.prev.state == UNMAPPED
            requested_bytes = block.requested_bytes if block.state != FREE else 0
            free_list = block.free_list
            numbers.extend((block.address, block.size, block.state, is_head, requested_bytes, free_list.stream))
            numbers.extend(free_list.pool.pool_id)
        return numbers

    def record_memory_history(
        self, enabled: str | None = "all", context: str | None = "all", max_entries: int = sys.maxsize
    ) -> None:
        """Start or stop the record of events; see :meth:`npusim.memory.history.History.switch`."""
        self.history.switch(enabled, context, max_entries)


def _any_stream(_: int) -> bool:
    return True
