"""Segments of fixed size: memory that the device hands out and takes back as a whole."""

from __future__ import annotations

from typing import Final

from npusim.device.hbm import HbmAddressError, OutOfHbmError
from npusim.device.ledger import Owner
from npusim.memory.blocks import FREE, Block
from npusim.memory.pools import BlockPool
from npusim.memory.state import LEDGER_GRADE, LEDGER_SOURCE, AllocatorState


class Segments:
    """Makes and gives back segments of fixed size."""

    def __init__(self, state: AllocatorState) -> None:
        self._state: Final = state

    def make(self, pool: BlockPool, num_bytes: int, stream: int) -> Block | None:
        """A new free block that is a whole segment, in its pool; None if the device has no room."""
        state = self._state
        owner = pool.owner
        if owner is not None and owner.allocator is not None:
            address = owner.allocator.alloc(num_bytes, state.device_index, stream)
        else:
            address = self._ask_device(pool, num_bytes)
        if not address:
            return None
        if owner is not None:
            owner.num_segments += 1
            owner.reserved_bytes += num_bytes
        statistics = state.statistics
        statistics.count_segments(1, is_small=pool.is_small)
        statistics.reserve(num_bytes, is_small=pool.is_small)
        if num_bytes >= state.config.max_split_size:
            statistics.oversize_segments.add(1)
        statistics.num_device_alloc += 1
        free_list = pool.free_list(stream)
        block = Block.whole(address, num_bytes, FREE, free_list)
        state.history.record_segment("segment_alloc", block, address, num_bytes)
        free_list.add(block)
        return block

    def give_back(self, block: Block) -> None:
        """Take a free block that is a whole segment out of its pool and return it to the device.

        Raises:
            RuntimeError: It belongs to an expandable segment. Only ``max_split_size_mb`` leads here, which torch_npu
                refuses beside expandable segments and keeps all the same.
            HbmAddressError: It is a part of a segment. Only ``max_split_size_mb`` leads here, with ``page_size:1g``, or
                set after blocks of that size were split. torch_npu gets an error from the device then, too; or, if the
                part is the first, it gives the whole segment back and goes on using the rest.
        """
        if block.segment is not None:
            raise RuntimeError("!block->expandable_segment_ INTERNAL ASSERT FAILED, please report a bug to PyTorch. ")
        if block.is_split:
            raise HbmAddressError(
                f"the block at {block.address:#x} is a part of a segment, which cannot be given back in parts; "
                "with max_split_size_mb, do not use page_size:1g, and do not set it once larger blocks have been split"
            )
        state = self._state
        free_list = block.free_list
        pool, owner = free_list.pool, free_list.pool.owner
        state.statistics.num_device_free += 1
        state.history.record_segment("segment_free", block, block.address, block.size)
        if owner is not None and owner.allocator is not None and state.version.pool_allocator_frees:
            owner.allocator.free(block.address, block.size, state.device_index, free_list.stream)
        else:
            state.hbm.free(block.address)
        if owner is not None:
            owner.num_segments -= 1
            owner.reserved_bytes -= block.size
        state.statistics.count_segments(-1, is_small=pool.is_small)
        state.statistics.reserve(-block.size, is_small=pool.is_small)
        if block.size >= state.config.max_split_size:
            state.statistics.oversize_segments.add(-1)
        free_list.remove(block)

    def _ask_device(self, pool: BlockPool, num_bytes: int) -> int:
        """Address of a device allocation, or 0; pages of 1 GiB that fail are asked for once more as ordinary ones."""
        num_attempts = 2 if self._state.config.page_size_1g and not pool.is_small else 1
        for _ in range(num_attempts):
            try:
                return self._state.hbm.malloc(
                    num_bytes,
                    owner=Owner.TORCH_SEGMENT,
                    label=self._state.ledger_label(pool),
                    grade=LEDGER_GRADE,
                    source=LEDGER_SOURCE,
                )
            except OutOfHbmError:
                continue
        return 0
