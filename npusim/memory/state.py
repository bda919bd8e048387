"""What the parts of one device's allocator share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from npusim.device.hbm import Hbm
from npusim.device.ledger import Grade
from npusim.memory.config import AllocatorConfig
from npusim.memory.driver import StreamDriver
from npusim.memory.history import History
from npusim.memory.pools import BlockPool, PoolRegistry
from npusim.memory.statistics import Statistics
from npusim.memory.versions import AllocatorVersion

LEDGER_GRADE: Final = Grade.EXACT
LEDGER_SOURCE: Final = "torch_npu 2.13.0 caching allocator, traces recorded from the wheel"


@dataclass(slots=True)
class AllocatorState:
    """State of one device's allocator that more than one part of it reads or changes.

    Attributes:
        hbm: The device's memory.
        driver: The device's streams.
        config: The settings in force.
        version: Where the release differs from others.
        statistics: The counters.
        pools: The block pools.
        history: The recorded events.
        device_index: The device's number, for texts and snapshots.
        allowed_bytes: Upper limit of reserved bytes, or None.
        num_captures: Graph captures marked as begun and not ended.
    """

    hbm: Hbm
    driver: StreamDriver
    config: AllocatorConfig
    version: AllocatorVersion
    statistics: Statistics
    pools: PoolRegistry
    history: History
    device_index: int
    allowed_bytes: int | None = None
    num_captures: int = 0

    @property
    def in_capture(self) -> bool:
        """Whether events may not be queried or waited for, because the current stream is being captured."""
        if self.version.capture_by_scope:
            return bool(self.pools.scopes)
        return self.num_captures > 0 and self.driver.is_current_stream_capturing()

    @property
    def tracks_ages(self) -> bool:
        """Whether garbage collection is on: it needs both a threshold and a limit."""
        return self.allowed_bytes is not None and self.config.garbage_collection_threshold > 0

    def ledger_label(self, pool: BlockPool) -> str:
        """Name under which a pool's memory stands in the ledger."""
        size_class = "small" if pool.is_small else "large"
        if pool.owner is None:
            return f"{size_class} pool"
        return f"{size_class} part of private pool {pool.owner.pool_id}"
