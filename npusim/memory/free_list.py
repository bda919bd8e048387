"""Free blocks waiting for a request, ordered by size, then address."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from npusim.memory.blocks import Block
    from npusim.memory.pools import BlockPool

_ADDRESS_BITS: Final = 48
_MAX_CHUNK: Final = 1024


class FreeList:
    """The free blocks of one pool and stream.

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
        return self._first_from(size << _ADDRESS_BITS)

    def next_after(self, block: Block) -> Block | None:
        """The block that follows ``block`` in order."""
        return self._first_from((block.size << _ADDRESS_BITS | block.address) + 1)

    def largest(self) -> Block | None:
        """The last block in order, if there is any."""
        return self._blocks[-1][-1] if self._blocks else None

    def add(self, block: Block) -> None:
        """Take in a block."""
        key = block.size << _ADDRESS_BITS | block.address
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
        """Let a block go, whose size and address are still those that it came with."""
        key = block.size << _ADDRESS_BITS | block.address
        position = bisect_left(self._lasts, key)
        self._delete(position, bisect_left(self._chunks[position], key))

    def replace(self, size: int, address: int, block: Block) -> None:
        """Let a block stand in place of the one that came with this size and address; cheap if the order stays."""
        old_key = size << _ADDRESS_BITS | address
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
            chunk[index] = key
            self._blocks[position][index] = block
            if is_last:
                lasts[position] = key
        else:
            self._delete(position, index)
            self.add(block)

    def _delete(self, position: int, index: int) -> None:
        chunk = self._chunks[position]
        del chunk[index], self._blocks[position][index]
        if index == len(chunk):
            if chunk:
                self._lasts[position] = chunk[-1]
            else:
                del self._chunks[position], self._blocks[position], self._lasts[position]

    def _first_from(self, key: int) -> Block | None:
        position = bisect_left(self._lasts, key)
        if position == len(self._lasts):
            return None
        return self._blocks[position][bisect_left(self._chunks[position], key)]

    def _halve(self, position: int) -> None:
        half = _MAX_CHUNK // 2
        chunk, blocks = self._chunks[position], self._blocks[position]
        self._chunks[position : position + 1] = chunk[:half], chunk[half:]
        self._blocks[position : position + 1] = blocks[:half], blocks[half:]
        self._lasts.insert(position, chunk[half - 1])
