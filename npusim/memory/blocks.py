"""Pieces of segments, and the ordered sets in which free ones wait for a request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from npusim.memory.expandable import ExpandableSegment
    from npusim.memory.pools import BlockPool

FREE: Final = 0
ALLOCATED: Final = 1
PENDING: Final = 2
DEFERRED: Final = 3
UNMAPPED: Final = 4
"""States of a block: in its pool; with the user; freed, waiting for events of other streams; freed during a graph
capture, its events not recorded yet; an address range of an expandable segment without memory behind it."""

_ADDRESS_BITS: Final = 48
_MAX_CHUNK: Final = 1024


class Block:
    """A piece of a segment; all pieces of one segment are linked by address.

    Attributes:
        key: Orders the block among the free ones: by size, then address. Kept by :class:`FreeList`.
        requested_bytes: What the user asked for; a free block keeps the figure of its last user, as in torch_npu.
        state: One of the constants of this module.
        free_list: The set that takes the block when it is free; tells its pool and stream.
        segment: The expandable segment that the block is part of, if it is.
        stream_uses: Streams other than its own that were recorded on it while allocated, in the order of recording.
        searches: The pool's search counter when the block was last used; its age, for garbage collection.
    """

    __slots__ = (
        "address", "free_list", "key", "next", "prev", "requested_bytes", "searches", "segment", "size", "state",
        "stream_uses",
    )  # fmt: skip

    def __init__(
        self, address: int, size: int, state: int, free_list: FreeList, segment: ExpandableSegment | None
    ) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.free_list = free_list
        self.segment = segment
        self.prev: Block | None = None
        self.next: Block | None = None
        self.key = 0
        self.requested_bytes = 0
        self.searches = 0
        self.stream_uses: list[int] | None = None

    @property
    def is_split(self) -> bool:
        """Whether the segment has other pieces."""
        return self.prev is not None or self.next is not None

    def insert_before(self, block: Block) -> None:
        """Link this new block into a segment, right before ``block``."""
        self.prev, self.next = block.prev, block
        if block.prev is not None:
            block.prev.next = self
        block.prev = self

    def insert_after(self, block: Block) -> None:
        """Link this new block into a segment, right after ``block``."""
        self.prev, self.next = block, block.next
        if block.next is not None:
            block.next.prev = self
        block.next = self

    def absorb_before(self, neighbour: Block) -> None:
        """Take over the range of the block right before this one, which leaves the segment."""
        self.address = neighbour.address
        self.size += neighbour.size
        before = self.prev = neighbour.prev
        if before is not None:
            before.next = self

    def absorb_after(self, neighbour: Block) -> None:
        """Take over the range of the block right after this one, which leaves the segment."""
        self.size += neighbour.size
        after = self.next = neighbour.next
        if after is not None:
            after.prev = self


class FreeList:
    """The free blocks of one pool and stream, ordered by size, then address.

    A sorted list of integers (size and address in one) with the blocks beside it, cut into chunks so that an insertion
    moves little memory. Every operation takes logarithmic time, without a Python call per comparison.

    Attributes:
        pool: The pool.
        stream: The stream.
    """

    __slots__ = ("_blocks", "_chunks", "_lasts", "pool", "stream")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self._chunks: list[list[int]] = []
        self._blocks: list[list[Block]] = []
        self._lasts: list[int] = []

    def __iter__(self) -> Iterator[Block]:
        for blocks in self._blocks:
            yield from blocks

    def smallest_from(self, size: int) -> Block | None:
        """The smallest block of at least ``size`` bytes, at the lowest address if there are several."""
        key = size << _ADDRESS_BITS
        lasts = self._lasts
        position = bisect_left(lasts, key)
        if position == len(lasts):
            return None
        return self._blocks[position][bisect_left(self._chunks[position], key)]

    def next_after(self, block: Block) -> Block | None:
        """The block that follows ``block`` in order."""
        position = bisect_left(self._lasts, block.key)
        blocks = self._blocks[position]
        index = bisect_left(self._chunks[position], block.key) + 1
        if index < len(blocks):
            return blocks[index]
        return self._blocks[position + 1][0] if position + 1 < len(self._blocks) else None

    def largest(self) -> Block | None:
        """The last block in order, if there is any."""
        return self._blocks[-1][-1] if self._blocks else None

    def add(self, block: Block) -> None:
        """Take in a block."""
        key = block.key = block.size << _ADDRESS_BITS | block.address
        lasts = self._lasts
        position = bisect_left(lasts, key)
        if position == len(lasts):
            if not position:
                lasts.append(key)
                self._chunks.append([key])
                self._blocks.append([block])
                return
            position -= 1
            lasts[position] = key
        chunk = self._chunks[position]
        index = bisect_left(chunk, key)
        chunk.insert(index, key)
        self._blocks[position].insert(index, block)
        if len(chunk) > _MAX_CHUNK:
            self._halve(position)

    def remove(self, block: Block) -> None:
        """Let a block go."""
        key = block.key
        position = bisect_left(self._lasts, key)
        self._delete(position, bisect_left(self._chunks[position], key))

    def replace(self, old_key: int, block: Block) -> None:
        """Let a block stand in place of the entry with ``old_key``; cheap where the order stays the same.

        The block, with its present range, may be the one of that entry.
        """
        key = block.size << _ADDRESS_BITS | block.address
        lasts = self._lasts
        position = bisect_left(lasts, old_key)
        chunk = self._chunks[position]
        index = bisect_left(chunk, old_key)
        is_last = old_key == lasts[position]
        if key < old_key:
            stays = chunk[index - 1] < key if index else position == 0
        else:
            stays = position + 1 == len(lasts) if is_last else key < chunk[index + 1]
        if stays:
            block.key = chunk[index] = key
            self._blocks[position][index] = block
            if is_last:
                lasts[position] = key
        else:
            self._delete(position, index)
            self.add(block)

    def _delete(self, position: int, index: int) -> None:
        chunk = self._chunks[position]
        del chunk[index]
        if not chunk:
            del self._chunks[position], self._blocks[position], self._lasts[position]
            return
        del self._blocks[position][index]
        if index == len(chunk):
            self._lasts[position] = chunk[-1]

    def _halve(self, position: int) -> None:
        half = _MAX_CHUNK // 2
        chunk, blocks = self._chunks[position], self._blocks[position]
        self._chunks[position : position + 1] = chunk[:half], chunk[half:]
        self._blocks[position : position + 1] = blocks[:half], blocks[half:]
        self._lasts.insert(position, chunk[half - 1])
