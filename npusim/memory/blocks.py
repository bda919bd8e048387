"""Pieces of segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from npusim.memory.expandable import ExpandableSegment
    from npusim.memory.free_list import FreeList

FREE: Final = 0
ALLOCATED: Final = 1
PENDING: Final = 2
DEFERRED: Final = 3
UNMAPPED: Final = 4
"""States of a block: in its pool; with the user; freed, waiting for events of other streams; freed during a graph
capture, its events not recorded yet; an address range of an expandable segment without memory behind it."""


class Block:
    """A piece of a segment; all pieces of one segment are linked by address.

    Attributes:
        requested_bytes: What the user asked for; a free block keeps the figure of its last user, as in torch_npu.
        state: One of the constants of this module.
        free_list: The set that takes the block when it is free; tells its pool and stream.
        segment: The expandable segment that the block is part of, if it is.
        stream_uses: Streams other than its own that were recorded on it while allocated, in the order of recording.
        searches: The pool's search counter when the block was last used; its age, for garbage collection.
    """

    __slots__ = (
        "address", "free_list", "next", "prev", "requested_bytes", "searches", "segment", "size", "state",
        "stream_uses",
    )  # fmt: skip

    address: int
    size: int
    state: int
    free_list: FreeList
    segment: ExpandableSegment | None
    prev: Block | None
    next: Block | None
    requested_bytes: int
    searches: int
    stream_uses: list[int] | None

    # No __init__: calling one from C would double the cost of a block, which every split pays.

    @classmethod
    def whole(
        cls, address: int, size: int, state: int, free_list: FreeList, segment: ExpandableSegment | None = None
    ) -> Block:
        """A block without neighbours."""
        block = cls()
        block.address, block.size, block.state = address, size, state
        block.free_list, block.segment = free_list, segment
        block.prev = block.next = block.stream_uses = None
        block.requested_bytes = block.searches = 0
        return block

    @property
    def is_split(self) -> bool:
        """Whether the segment has other pieces."""
        return self.prev is not None or self.next is not None

    def cut_front(self, size: int) -> Block:
        """A new block of the first ``size`` bytes of this one, which keeps the rest; the states are the same."""
        front = Block()
        front.address = self.address
        front.size = size
        front.state = self.state
        front.free_list = self.free_list
        front.segment = self.segment
        front.requested_bytes = front.searches = 0
        front.stream_uses = None
        before = front.prev = self.prev
        if before is not None:
            before.next = front
        front.next = self
        self.prev = front
        self.address += size
        self.size -= size
        return front

    def cut_back(self, size: int) -> Block:
        """A new block of the last ``size`` bytes of this one, which keeps the rest; the states are the same."""
        self.size -= size
        back = Block.whole(self.address + self.size, size, self.state, self.free_list, self.segment)
        after = back.next = self.next
        if after is not None:
            after.prev = back
        back.prev = self
        self.next = back
        return back

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
