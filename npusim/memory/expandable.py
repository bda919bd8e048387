"""Expandable segments: large reserved address ranges that grow and shrink by pages of physical memory."""

from __future__ import annotations

from typing import Final

from npusim.device.hbm import OutOfHbmError
from npusim.device.ledger import Owner
from npusim.memory.blocks import FREE, UNMAPPED, Block
from npusim.memory.pools import BlockPool
from npusim.memory.rounding import EXTRA_LARGE_PAGE_BYTES, SMALL_SEGMENT_BYTES, round_up
from npusim.memory.state import LEDGER_GRADE, LEDGER_SOURCE, AllocatorState

_PROBE_BYTES: Final = 512


class ExpandableSegment:
    """One reserved address range and the physical memory mapped into it.

    Attributes:
        address: First address.
        page_bytes: Bytes mapped at a time.
        size: Bytes reserved.
    """

    def __init__(self, address: int, page_bytes: int, size: int) -> None:
        self.address: Final = address
        self.page_bytes: Final = page_bytes
        self.size: Final = size


class ExpandableSegments:
    """Grows and shrinks the expandable segments of one device.

    Their blocks tile the whole reserved range: mapped ones, and unmapped ones that stand for addresses without memory.
    """

    def __init__(self, state: AllocatorState) -> None:
        self._state: Final = state

    def probe(self) -> None:
        """Reserve and release a little, as torch_npu does whenever it has read settings with expandable segments on."""
        self._state.hbm.release(self._state.hbm.reserve(_PROBE_BYTES))

    def grow(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Map memory until some free block has at least ``size`` bytes, and return it, in its pool.

        The lowest run of free and unmapped blocks that is long enough grows; without one a new segment is reserved.
        None if the device has no room; what was mapped until then stays.
        """
        block = self._lowest_run(pool, size, stream) or self._reserve(pool, stream)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            hole = block.next
            if hole is None or not self._map(hole, min(size - block.size, hole.size)):
                return None
            block = hole
        return block

    def shrink(self, block: Block, *, keep_physical: bool = False) -> None:
        """Unmap the whole pages inside a free block; a segment without mapped pages is given up.

        Args:
            block: A mapped free block.
            keep_physical: Keep the physical memory in the pool, to map it again, instead of giving it back.
        """
        segment = block.segment
        assert segment is not None
        page_bytes = segment.page_bytes
        begin = segment.address + round_up(block.address - segment.address, page_bytes)
        end = block.address + block.size
        end -= (end - segment.address) % page_bytes
        if begin >= end:
            return
        self._unmap_pages(block.free_list.pool, begin, end, page_bytes, keep_physical=keep_physical)
        block.free_list.remove(block)
        if begin > block.address:
            block.free_list.add(block.cut_front(begin - block.address))
        if block.address + block.size > end:
            block.free_list.add(block.cut_back(block.address + block.size - end))
        block.state = UNMAPPED
        pool, stream = block.free_list.pool, block.free_list.stream
        holes = pool.holes_of(stream)
        before, after = block.prev, block.next
        if before is not None and before.state == UNMAPPED:
            del holes[before.address]
            block.absorb_before(before)
        if after is not None and after.state == UNMAPPED:
            del holes[after.address]
            block.absorb_after(after)
        holes[block.address] = block
        statistics = self._state.statistics
        statistics.reserve(begin - end, is_small=pool.is_small)
        statistics.num_device_free += 1
        if pool.owner is not None:
            pool.owner.num_segments -= 1
            pool.owner.reserved_bytes -= end - begin
        self._state.history.record_segment("segment_unmap", block, begin, end - begin)
        if not block.is_split:
            del holes[block.address]
            self._state.hbm.release(segment.address)

    def _lowest_run(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        for hole in pool.holes_of(stream).values():
            start: Block = hole
            if hole.prev is not None and hole.prev.state == FREE:
                start = hole.prev
            run_bytes = 0
            block: Block | None = start
            while block is not None and block.state in (FREE, UNMAPPED):
                run_bytes += block.size
                if run_bytes >= size:
                    return start
                block = block.next
        return None

    def _reserve(self, pool: BlockPool, stream: int) -> Block:
        page_bytes = self._page_bytes(pool)
        total_bytes = self._state.hbm.total_bytes
        size = round_up(total_bytes + total_bytes // 8, page_bytes)
        address = self._state.hbm.reserve(size)
        segment = ExpandableSegment(address, page_bytes, size)
        block = Block.whole(address, size, UNMAPPED, pool.free_list(stream), segment)
        pool.holes_of(stream)[address] = block
        return block

    def _page_bytes(self, pool: BlockPool) -> int:
        if pool.is_small:
            return SMALL_SEGMENT_BYTES
        config = self._state.config
        return EXTRA_LARGE_PAGE_BYTES if config.page_size_1g else config.expandable_large_page

    def _map(self, hole: Block, num_bytes: int) -> bool:
        """Map ``num_bytes`` or more at the start of an unmapped block, which becomes free; False if there is none."""
        segment = hole.segment
        assert segment is not None
        num_bytes = round_up(num_bytes, segment.page_bytes)
        pool, stream = hole.free_list.pool, hole.free_list.stream
        if not self._map_pages(pool, hole.address, num_bytes, segment.page_bytes):
            return False
        holes = pool.holes_of(stream)
        del holes[hole.address]
        if hole.size > num_bytes:
            rest = hole.cut_back(hole.size - num_bytes)
            holes[rest.address] = rest
        mapped_address = hole.address
        hole.state = FREE
        before, after = hole.prev, hole.next
        if before is not None and before.state == FREE:
            before.free_list.remove(before)
            hole.absorb_before(before)
        if after is not None and after.state == FREE:
            after.free_list.remove(after)
            hole.absorb_after(after)
        hole.free_list.add(hole)
        statistics = self._state.statistics
        statistics.reserve(num_bytes, is_small=pool.is_small)
        statistics.num_device_alloc += 1
        if pool.owner is not None:
            pool.owner.reserved_bytes += num_bytes
        self._state.history.record_segment("segment_map", hole, mapped_address, num_bytes)
        return True

    def _map_pages(self, pool: BlockPool, address: int, num_bytes: int, page_bytes: int) -> bool:
        hbm = self._state.hbm
        handles: list[int] = []
        for _ in range(num_bytes // page_bytes):
            handle = pool.free_physical.pop() if pool.free_physical else self._new_page(pool, page_bytes)
            if not handle:
                for obtained in handles:
                    hbm.destroy_physical(obtained)
                return False
            handles.append(handle)
        for index, handle in enumerate(handles):
            hbm.map(address + index * page_bytes, handle)
        return True

    def _new_page(self, pool: BlockPool, page_bytes: int) -> int:
        """Handle of a new page, or 0; one of 1 GiB that fails is asked for once more as ordinary pages."""
        for _ in range(2 if page_bytes == EXTRA_LARGE_PAGE_BYTES else 1):
            try:
                return self._state.hbm.create_physical(
                    page_bytes,
                    owner=Owner.TORCH_SEGMENT,
                    label=self._state.ledger_label(pool),
                    grade=LEDGER_GRADE,
                    source=LEDGER_SOURCE,
                )
            except OutOfHbmError:
                continue
        return 0

    def _unmap_pages(self, pool: BlockPool, begin: int, end: int, page_bytes: int, *, keep_physical: bool) -> None:
        self._state.driver.synchronize_device()
        for address in range(begin, end, page_bytes):
            handle = self._state.hbm.unmap(address)
            if keep_physical:
                pool.free_physical.append(handle)
            else:
                self._state.hbm.destroy_physical(handle)
