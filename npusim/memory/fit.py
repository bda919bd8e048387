"""Which cached block serves a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from npusim.memory.blocks import UNMAPPED, Block
from npusim.memory.config_parser import SIZE_MAX
from npusim.memory.free_list import FreeList
from npusim.memory.rounding import MIN_BLOCK_BYTES, SMALL_BYTES
from npusim.memory.state import AllocatorState


class BestFit:
    """Searches the free blocks of a pool under the settings in force.

    Attributes:
        is_split_limited: ``max_split_size_mb`` is in force.
        max_split_size: From this size on blocks are oversize: smaller requests do not get them.
        split_limit: Requests of this size or more take a block whole. Expandable segments have no such limit; they and
            ``max_split_size_mb`` exclude each other, but both are in force after torch_npu has refused to add one.
        min_large_rest: The least rest for which a block of the large pool is split; of the small pool it is 512.
        alignment: Requests from 2 MiB start on a multiple of it where possible; 0: anywhere.
        find: Given a free list and a size, the free block that a request of that size gets, which stays in its list;
            None if none fits. It is the smallest that is large enough. Where segments are expandable, one that can
            grow counts as large as it can become; where they are not any more, blocks of expandable segments are passed
            over.
    """

    find: Callable[[FreeList, int], Block | None]

    def __init__(self, state: AllocatorState) -> None:
        self._state: Final = state
        self._met_expandable = False
        self.configure()

    def configure(self) -> None:
        """Read the settings; call it after each change."""
        config = self._state.config
        self._expandable = config.expandable_segments
        self._met_expandable = self._met_expandable or self._expandable
        self._tracks_ages = self._state.tracks_ages
        self.is_split_limited = config.max_split_size != SIZE_MAX
        self.max_split_size = config.max_split_size
        self.split_limit = SIZE_MAX if self._expandable else config.max_split_size
        self.min_large_rest = MIN_BLOCK_BYTES if self._expandable else SMALL_BYTES + 1
        self.alignment = config.base_addr_aligned_size if self._expandable else 0
        if self._tracks_ages or self.is_split_limited or self._met_expandable != self._expandable:
            self.find = self._find_carefully
        else:
            self.find = _find_growing if self._expandable else FreeList.smallest_from

    def _find_carefully(self, free_list: FreeList, size: int) -> Block | None:
        """As :attr:`find` does it under any settings."""
        if self._tracks_ages:
            free_list.pool.searches += 1
        if self._expandable:
            block = _find_growing(free_list, size)
        else:
            block = free_list.smallest_from(size)
            while block is not None and block.segment is not None:
                block = free_list.next_after(block)
        return None if block is None or self._is_oversize_for(block, size) else block

    def _is_oversize_for(self, block: Block, size: int) -> bool:
        limit = self.max_split_size
        return block.size >= limit and (
            size < limit or block.size >= size + self._state.config.max_non_split_rounding_size
        )

    def align(self, block: Block, size: int) -> Block:
        """Cut the front off a free block so that it starts on an aligned address, if it stays long enough."""
        front_bytes = -block.address % self.alignment
        if front_bytes + size > block.size:
            return block
        free_list = block.free_list
        free_bytes = block.size
        aligned = block.cut_back(free_bytes - front_bytes)
        free_list.replace(free_bytes, block.address, aligned)
        free_list.add(block)
        return aligned


def _find_growing(free_list: FreeList, size: int) -> Block | None:
    block = free_list.smallest_from(size)
    if block is not None:
        after = block.next
        if after is not None and after.state == UNMAPPED:
            return _less_growing(free_list, block)
    return block


def _less_growing(free_list: FreeList, block: Block) -> Block:
    """Go on from a block that can grow to larger ones, as long as the next can become less large."""
    larger = free_list.next_after(block)
    while block.segment is not None and larger is not None and _full_size(larger) < _full_size(block):
        block, larger = larger, free_list.next_after(larger)
    return block


def _full_size(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
