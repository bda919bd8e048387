"""Blocks that the user has freed but another stream may still be using."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from npusim.memory.blocks import DEFERRED, PENDING, Block
from npusim.memory.driver import StreamDriver
from npusim.memory.pools import PrivatePool


class PendingFrees:
    """Holds freed blocks until the events recorded on the streams that used them have completed.

    Args:
        driver: The device's streams.
        free_block: Takes a block that no stream uses any more.

    Attributes:
        blocks: The blocks held, by address.
    """

    def __init__(self, driver: StreamDriver, free_block: Callable[[Block], None]) -> None:
        self.blocks: Final[dict[int, Block]] = {}
        self._driver: Final = driver
        self._free_block: Final = free_block
        self._events: dict[int, deque[tuple[object, Block]]] = {}
        self._num_events: dict[Block, int] = {}
        self._deferred: list[Block] = []
        self._captured_uses: dict[Block, list[int]] = {}

    @property
    def num_events(self) -> int:
        """Events that have not been seen complete yet."""
        return sum(self._num_events.values())

    def record_use(self, block: Block, stream: int, *, in_capture: bool) -> None:
        """Note that a stream uses an allocated block, its own stream too."""
        if block.stream_uses is None:
            block.stream_uses = []
        if stream not in block.stream_uses:
            block.stream_uses.append(stream)
        if in_capture:
            self._captured_uses.setdefault(block, []).append(stream)

    def erase_use(self, block: Block, stream: int) -> None:
        """Forget that a stream uses a block; one that was freed already leaves if this was its last use."""
        if block.stream_uses is not None and stream in block.stream_uses:
            block.stream_uses.remove(stream)
            if not block.stream_uses:
                block.stream_uses = None
        queue = self._events.get(stream)
        if queue is not None and any(waiting is block for _, waiting in queue):
            num_erased = sum(waiting is block for _, waiting in queue)
            self._events[stream] = deque(entry for entry in queue if entry[1] is not block)
            self._complete(block, num_erased)

    def hold(self, block: Block, *, in_capture: bool) -> None:
        """Take a freed block with stream uses; during a capture its events are recorded later."""
        counters = block.free_list.pool.counters
        counters.pending += 1
        counters.pending_bytes += block.size
        self.blocks[block.address] = block
        if in_capture:
            block.state = DEFERRED
            self._deferred.append(block)
        else:
            self._record_events(block)

    def reap(self) -> None:
        """Let go the blocks whose events have completed; in each stream's order, up to the first incomplete event."""
        self._record_deferred()
        for stream in sorted(self._events):
            queue = self._events[stream]
            while queue and self._driver.query(queue[0][0]):
                self._complete(queue.popleft()[1])

    def wait(self, pool: PrivatePool | None = None) -> None:
        """Wait for all events, or only those of blocks of one private pool, and let go the blocks."""
        self._record_deferred()
        for stream in sorted(self._events):
            queue = self._events[stream]
            for _ in range(len(queue)):
                event, block = queue.popleft()
                if pool is not None and block.free_list.pool.owner is not pool:
                    queue.append((event, block))
                    continue
                self._driver.synchronize(event)
                self._complete(block)

    def _record_events(self, block: Block) -> None:
        block.state = PENDING
        streams = block.stream_uses or []
        block.stream_uses = None
        self._num_events[block] = len(streams)
        for stream in streams:
            self._events.setdefault(stream, deque()).append((self._driver.record_event(stream), block))

    def _record_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            captured = self._captured_uses.pop(block, [])
            block.stream_uses = [stream for stream in block.stream_uses or [] if stream not in captured]
            self._record_events(block)
            self._complete(block, 0)

    def _complete(self, block: Block, num_events: int = 1) -> None:
        self._num_events[block] -= num_events
        if not self._num_events[block]:
            del self._num_events[block], self.blocks[block.address]
            self._captured_uses.pop(block, None)
            counters = block.free_list.pool.counters
            counters.pending -= 1
            counters.pending_bytes -= block.size
            self._free_block(block)
