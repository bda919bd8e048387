"""Free blocks waiting for a request, found by size, then address."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from npusim.memory.blocks import Block
    from npusim.memory.pools import BlockPool

    SizeClass = tuple[dict[int, Block], list[int], int, int]
    """Free blocks of one size by address; the heap of their addresses and stale ones; word and bit of the size."""

_CLASS_SHIFT: Final = 9
_WORD_SHIFT: Final = 6
_BIT_MASK: Final = 63
"""Sizes are multiples of 512 bytes; each has a bit, in words of 64."""

_MIN_STALE: Final = 64
_MIN_CLASSES: Final = 4096


class FreeList:
    """The free blocks of one pool and stream.

    Blocks of one size are a dict by address, and a heap of the addresses that finds the lowest; a block that leaves is
    deleted from the dict alone, and its entry of the heap is passed over later. Which sizes there are tells a bit for
    each, in words of 64, and a sorted list of the words that may have bits. So little is compared, and the cost hardly
    depends on how many blocks there are.

    Attributes:
        pool: The pool.
        stream: The stream.
    """

    __slots__ = ("_classes", "_max_classes", "_present", "_words", "pool", "stream")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        self._classes: dict[int, SizeClass] = {}
        self._max_classes = _MIN_CLASSES
        self._words: dict[int, int] = {}
        self._present: list[int] = []

    def __iter__(self) -> Iterator[Block]:
        for size_class in sorted(self._classes):
            blocks = self._classes[size_class][0]
            for address in sorted(blocks):
                yield blocks[address]

    def smallest_from(self, size: int) -> Block | None:
        """The smallest block of at least ``size`` bytes, at the lowest address if there are several."""
        size_class = size >> _CLASS_SHIFT
        word = size_class >> _WORD_SHIFT
        words = self._words
        bits = words.get(word, 0) >> (size_class & _BIT_MASK)
        if bits:
            size_class += (bits & -bits).bit_length() - 1
        else:
            present = self._present
            position = bisect_right(present, word)
            while not bits:
                if position == len(present):
                    return None
                word = present[position]
                bits = words[word]
                if not bits:
                    del present[position], words[word]
            size_class = (word << _WORD_SHIFT) + (bits & -bits).bit_length() - 1
        blocks, heap, _, _ = self._classes[size_class]
        while heap[0] not in blocks:
            heappop(heap)
        return blocks[heap[0]]

    def next_after(self, block: Block) -> Block | None:
        """The block that follows ``block`` in order."""
        blocks = self._classes[block.size >> _CLASS_SHIFT][0]
        later = [address for address in blocks if address > block.address]
        return blocks[min(later)] if later else self.smallest_from(block.size + 512)

    def largest(self) -> Block | None:
        """The last block in order, if there is any."""
        for word in reversed(self._present):
            bits = self._words[word]
            if bits:
                blocks = self._classes[(word << _WORD_SHIFT) + bits.bit_length() - 1][0]
                return blocks[max(blocks)]
        return None

    def add(self, block: Block) -> None:
        """Take in a block."""
        size_class = block.size >> _CLASS_SHIFT
        found = self._classes.get(size_class)
        blocks, heap, word, bit = self._new_class(size_class) if found is None else found
        if not blocks:
            bits = self._words.get(word)
            if bits is None:
                insort(self._present, word)
                bits = 0
            self._words[word] = bits | bit
        address = block.address
        blocks[address] = block
        heappush(heap, address)
        if len(heap) > _MIN_STALE and len(heap) > 2 * len(blocks):
            heap[:] = blocks
            heapify(heap)

    def remove(self, block: Block) -> None:
        """Let a block go, whose size and address are still those that it came with."""
        blocks, heap, word, bit = self._classes[block.size >> _CLASS_SHIFT]
        del blocks[block.address]
        if not blocks:
            heap.clear()
            self._words[word] ^= bit

    def _new_class(self, size_class: int) -> SizeClass:
        if len(self._classes) >= self._max_classes:
            self._classes = {known: found for known, found in self._classes.items() if found[0]}
            self._max_classes = 2 * len(self._classes) + _MIN_CLASSES
        made: SizeClass = {}, [], size_class >> _WORD_SHIFT, 1 << (size_class & _BIT_MASK)
        self._classes[size_class] = made
        return made
