"""Pools of blocks: the default ones, private ones (of graphs and of ``MemPool``), and which requests go to which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

from sortedcontainers import SortedDict

from npusim.memory.blocks import Block
from npusim.memory.free_list import FreeList
from npusim.memory.statistics import PoolCounters, Statistics

PoolId = tuple[int, int]
StreamPredicate = Callable[[int], bool]

NO_POOL: Final[PoolId] = (0, 0)
"""Id that stands for the default pools."""


class SegmentAllocator(Protocol):
    """A user's own allocator behind a ``MemPool``; it is asked for whole segments."""

    def alloc(self, num_bytes: int, device: int, stream: int) -> int:
        """Return the address of ``num_bytes`` of device memory."""
        ...

    def free(self, address: int, num_bytes: int, device: int, stream: int) -> None:
        """Take a segment back."""
        ...


class BlockPool:
    """Free blocks of one size class.

    Attributes:
        is_small: Holds blocks up to 1 MiB in segments of 2 MiB.
        owner: The private pool that this is half of, if it is.
        counters: The statistics of its size class.
        free_lists: The mapped free blocks by stream.
        holes: The unmapped blocks by stream, then address.
        free_physical: Handles of physical memory unmapped by ``empty_virt_addr_cache``, to be mapped again.
        no_split: Blocks are given out whole.
        searches: How often the pool was searched while garbage collection was on; the clock of block ages.
    """

    __slots__ = ("counters", "free_lists", "free_physical", "holes", "is_small", "no_split", "owner", "searches")

    def __init__(self, *, is_small: bool, counters: PoolCounters, owner: PrivatePool | None = None) -> None:
        self.is_small: Final = is_small
        self.owner: Final = owner
        self.counters: Final = counters
        self.free_lists: dict[int, FreeList] = {}
        self.holes: dict[int, SortedDict[int, Block]] = {}
        self.free_physical: list[int] = []
        self.no_split: Final = owner is not None and owner.no_split
        self.searches = 0

    @property
    def pool_id(self) -> PoolId:
        """Id of the private pool, or that of the default pools."""
        return self.owner.pool_id if self.owner is not None else NO_POOL

    def free_list(self, stream: int) -> FreeList:
        """The free blocks of one stream."""
        found = self.free_lists.get(stream)
        if found is None:
            found = self.free_lists[stream] = FreeList(self, stream)
        return found

    def holes_of(self, stream: int) -> SortedDict[int, Block]:
        """The unmapped blocks of one stream by address."""
        return self.holes.setdefault(stream, SortedDict())

    def blocks(self) -> Iterator[Block]:
        """All mapped free blocks, by stream, size and address."""
        for stream in sorted(self.free_lists):
            yield from self.free_lists[stream]


class PrivatePool:
    """A pair of pools apart from the default ones.

    Attributes:
        use_count: Scopes and owners that hold it; at 0 its free memory may be given back.
        num_segments: Segments not given back; of expandable ones times grown minus times shrunk, as torch_npu counts.
        reserved_bytes: Memory that it holds.
        allocator: Makes its segments instead of the device, unless segments are expandable.
        use_on_oom: Default-pool requests may take its free blocks when the device is full.
        no_split: Its blocks are never split.
    """

    def __init__(
        self,
        pool_id: PoolId,
        statistics: Statistics,
        *,
        allocator: SegmentAllocator | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        self.pool_id: Final = pool_id
        self.allocator: Final = allocator
        self.use_on_oom = use_on_oom
        self.no_split: Final = no_split
        self.use_count = 0
        self.num_segments = self.reserved_bytes = 0
        self.small: Final = BlockPool(is_small=True, counters=statistics.small, owner=self)
        self.large: Final = BlockPool(is_small=False, counters=statistics.large, owner=self)


class PoolRegistry:
    """The pools of one device, and the scopes that send requests to private ones.

    Attributes:
        small: Default pool of small blocks.
        large: Default pool of large blocks.
        private: Private pools by id, in order of creation.
        freeable: Those of them that nobody holds any more. torch_npu has no order of its own among them.
        scopes: Open scopes, outermost first.
    """

    def __init__(self, statistics: Statistics, *, innermost_scope_first: bool) -> None:
        self.small: Final = BlockPool(is_small=True, counters=statistics.small)
        self.large: Final = BlockPool(is_small=False, counters=statistics.large)
        self.private: dict[PoolId, PrivatePool] = {}
        self.freeable: dict[PoolId, PrivatePool] = {}
        self.scopes: list[tuple[PoolId, StreamPredicate]] = []
        self._statistics = statistics
        self._innermost_first = innermost_scope_first

    def route(self, pool: BlockPool, stream: int) -> BlockPool:
        """Where a request for a default pool on ``stream`` goes: there, or to its like of a scope's private pool."""
        for pool_id, matches in reversed(self.scopes) if self._innermost_first else self.scopes:
            if matches(stream):
                private = self.private[pool_id]
                return private.small if pool.is_small else private.large
        return pool

    def hold(
        self,
        pool_id: PoolId,
        *,
        allocator: SegmentAllocator | None = None,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        """Count one more holder of a private pool, and make the pool if there is none of that id.

        The options count only when the pool is made.

        Raises:
            RuntimeError: The pool was let go of by all before, but still holds memory.
        """
        pool = self.private.get(pool_id)
        if pool is None:
            pool = self.private[pool_id] = PrivatePool(
                pool_id, self._statistics, allocator=allocator, use_on_oom=use_on_oom, no_split=no_split
            )
        if pool_id in self.freeable:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED, please report a bug to PyTorch. ")
        pool.use_count += 1

    def begin_scope(self, pool_id: PoolId, matches: StreamPredicate) -> None:
        """Send requests of matching streams to a private pool from now on; holds the pool.

        Raises:
            RuntimeError: A scope of that pool is open already.
        """
        self.hold(pool_id)
        if any(open_id == pool_id for open_id, _ in self.scopes):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.scopes.append((pool_id, matches))

    def end_scope(self, pool_id: PoolId) -> None:
        """Close the scope of a pool; the pool stays held.

        Raises:
            RuntimeError: No such scope is open.
        """
        for index, (open_id, _) in enumerate(self.scopes):
            if open_id == pool_id:
                del self.scopes[index]
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release(self, pool_id: PoolId) -> None:
        """Count one holder less; without holders the pool's free memory may be given back.

        Raises:
            RuntimeError: There is no such pool, or nobody holds it.
        """
        pool = self.private.get(pool_id)
        if pool is None or pool.use_count == 0:
            raise RuntimeError("releasePool: the pool is not in use")
        pool.use_count -= 1
        if pool.use_count == 0:
            self.freeable[pool_id] = pool

    def drop(self, pool_id: PoolId) -> None:
        """Forget a private pool that holds no memory any more."""
        del self.private[pool_id], self.freeable[pool_id]

    def all_pools(self) -> Iterator[BlockPool]:
        """Small and large pools, the default ones first."""
        yield self.small
        yield self.large
        for pool in self.private.values():
            yield pool.small
            yield pool.large
