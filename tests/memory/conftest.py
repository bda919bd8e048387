"""A device with nothing on it but the caching allocator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from npusim.device.event_log import EventLog
from npusim.device.faults import HbmFaults
from npusim.device.hbm import MALLOC_BASE, Hbm
from npusim.device.ledger import Ledger
from npusim.memory.blocks import ALLOCATED, DEFERRED, FREE, PENDING, UNMAPPED
from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.config import parse_allocator_config
from npusim.memory.driver import ManualStreamDriver
from npusim.memory.workspace import WorkspaceAllocator

_MARKS = {FREE: "-", ALLOCATED: "*", PENDING: "~", DEFERRED: "d"}


class Bench:
    """One device and its allocator.

    Args:
        capacity: Bytes of device memory.
        conf: ``PYTORCH_NPU_ALLOC_CONF``.
        failing_allocations: Ordinals of device allocations that fail.
        options: Further arguments of :class:`CachingAllocator`.
    """

    def __init__(
        self, capacity: int = 64 * 1024**3, conf: str = "", failing_allocations: Iterable[int] = (), **options: Any
    ) -> None:
        self.log = EventLog(keep=True)
        self.ledger = Ledger(capacity)
        self.faults = HbmFaults(failing_allocations)
        self.hbm = Hbm(self.ledger, self.log, faults=self.faults)
        self.driver = ManualStreamDriver()
        self.workspaces = WorkspaceAllocator(self.hbm, self.driver)
        self.allocator = CachingAllocator(
            self.hbm, self.driver, parse_allocator_config(conf), workspaces=self.workspaces, **options
        )
        self.malloc = self.allocator.malloc
        self.free = self.allocator.free

    def layout(self) -> str:
        """All segments by address, e.g. ``S@0[512*,2096640-]``.

        S or L: small or large pool, x: expandable, p: private. The number is the offset from the first device address,
        or within the expandable segment. Then the blocks: * allocated, - free, ~ pending, d freed during a capture.
        """
        heads = [block for block in self.allocator.blocks() if block.prev is None or block.prev.state == UNMAPPED]
        segments = []
        for head in sorted(heads, key=lambda block: block.address):
            pool = head.free_list.pool
            base = MALLOC_BASE if head.segment is None else head.segment.address
            name = ("S" if pool.is_small else "L") + ("x" if head.segment is not None else "")
            name += "p" if pool.owner is not None else ""
            sizes = []
            block = head
            while block is not None and block.state != UNMAPPED:
                sizes.append(f"{block.size}{_MARKS[block.state]}")
                block = block.next
            segments.append(f"{name}@{head.address - base}[{','.join(sizes)}]")
        return " ".join(segments)

    def offset(self, address: int) -> int:
        """Offset of an address from the first one that the device hands out."""
        return address - MALLOC_BASE

    def figures(self, *names: str) -> tuple[int, ...]:
        """Current values of both pools: alc, res, act, req: bytes; isp, isb: inactive splits and their bytes; seg."""
        keys = {
            "alc": "allocated_bytes",
            "res": "reserved_bytes",
            "act": "active_bytes",
            "req": "requested_bytes",
            "isp": "inactive_split",
            "isb": "inactive_split_bytes",
            "seg": "segment",
        }
        stats = self.allocator.memory_stats()
        return tuple(stats[f"{keys[name]}.all.current"] for name in names)

    def counters(self) -> tuple[int, ...]:
        """Retries, out-of-memory errors, syncs of all streams, device allocations, device frees, rejections."""
        stats = self.allocator.memory_stats()
        return tuple(
            stats[key]
            for key in (
                "num_alloc_retries",
                "num_ooms",
                "num_sync_all_streams",
                "num_device_alloc",
                "num_device_free",
                "num_oom_rejections",
            )
        )


@pytest.fixture
def bench() -> type[Bench]:
    """Makes devices: ``bench(capacity, conf)``."""
    return Bench
