"""What a test holds on the device, by the vendor's own figures: the same on the simulated device and on a card."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _pytest
import pluggy
import torch
import torch_npu
from torch_npu import npu

from npusim.testing.recording import Phase, recorded_events

GROWING = {"allocated": ("alloc",), "reserved": ("segment_alloc", "segment_map")}
SHRINKING = {"allocated": ("free_requested",), "reserved": ("segment_free", "segment_unmap")}
NUM_FRAMES = 3
_MIB = 1 << 20
_TORCH_FOLDERS = (torch.__path__[0], torch_npu.__path__[0])
_PYTEST_FOLDERS = (*_pytest.__path__, *pluggy.__path__)

Event = Mapping[str, Any]
"""One event of the allocator's record, as ``torch.npu.memory._snapshot()`` shows it."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """A line of code with its callers, and what it allocated: ``num_bytes`` in ``num_blocks`` blocks."""

    where: str
    num_bytes: int
    num_blocks: int


class NpuMemory:
    """Memory of one device since the test began. All figures in bytes.

    Args:
        start: Per device, what was allocated and reserved when the test began.
        phases: Per device, the phases so far.
        device_index: The device.
    """

    def __init__(
        self, start: Sequence[Mapping[str, int]], phases: Sequence[list[Phase]], device_index: int = 0
    ) -> None:
        self.device_index = device_index
        self._start = start
        self._phases = phases

    def on(self, device_index: int) -> NpuMemory:
        """The same of another device."""
        return NpuMemory(self._start, self._phases, device_index)

    def on_all(self) -> list[NpuMemory]:
        """The same of each device."""
        return [self.on(index) for index in range(len(self._start))]

    @property
    def allocated_bytes(self) -> int:
        """In blocks that tensors hold now (``torch.npu.memory_allocated``)."""
        return int(npu.memory_allocated(self.device_index))

    @property
    def peak_allocated_bytes(self) -> int:
        """Most since the test began, or since :meth:`reset_peak` (``torch.npu.max_memory_allocated``)."""
        return int(npu.max_memory_allocated(self.device_index))

    @property
    def reserved_bytes(self) -> int:
        """Held by the caching allocator now (``torch.npu.memory_reserved``)."""
        return int(npu.memory_reserved(self.device_index))

    @property
    def peak_reserved_bytes(self) -> int:
        """Most since the test began, or since :meth:`reset_peak` (``torch.npu.max_memory_reserved``)."""
        return int(npu.max_memory_reserved(self.device_index))

    @property
    def free_bytes(self) -> int:
        """Free on the whole device, for everyone (``torch.npu.mem_get_info``)."""
        return int(npu.mem_get_info(self.device_index)[0])

    @property
    def total_bytes(self) -> int:
        """Memory of the device (``torch.npu.mem_get_info``)."""
        return int(npu.mem_get_info(self.device_index)[1])

    def reset_peak(self) -> None:
        """Let peaks start anew from what is held now (``torch.npu.reset_peak_memory_stats``)."""
        npu.reset_peak_memory_stats(self.device_index)

    def growth_bytes(self, of: str = "allocated") -> int:
        """How far the peak lies above what was there when the test began; ``of``: ``allocated`` or ``reserved``."""
        peak = self.peak_allocated_bytes if of == "allocated" else self.peak_reserved_bytes
        return peak - self._start[self.device_index][of]

    def phase(self, name: str) -> None:
        """Note the figures of all devices in :attr:`phases`, under the name of what has just happened."""
        for device, phases in zip(self.on_all(), self._phases, strict=True):
            num_events = len(recorded_events(device.events()))
            figures = (device.free_bytes, device.total_bytes, device.allocated_bytes, device.reserved_bytes)
            phases.append(Phase(name, num_events, *figures))

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of this device so far, oldest first."""
        return self._phases[self.device_index]

    def events(self) -> Sequence[Event]:
        """The allocator's record since the test began, oldest first."""
        traces = npu.memory._snapshot()["device_traces"]
        return traces[self.device_index] if self.device_index < len(traces) else ()


def settle() -> None:
    """On a card, where tests follow each other in one process: give back what earlier ones left."""
    gc.collect()
    for index in range(npu.device_count()):
        if npu.memory_reserved(index):
            npu.synchronize(index)  # operators that wait in the task queue hold their tensors
    npu.empty_cache()


def begin() -> NpuMemory:
    """Start to watch all devices: peaks anew, and the allocators' record on, with Python's call stacks."""
    start = []
    npu.init()
    for index in range(npu.device_count()):
        npu.reset_peak_memory_stats(index)
        start.append({"allocated": npu.memory_allocated(index), "reserved": npu.memory_reserved(index)})
    npu.memory._record_memory_history(enabled="all", context="all", stacks="python")
    return NpuMemory(start, [[] for _ in start])


def end() -> None:
    """Stop the record."""
    npu.memory._record_memory_history(enabled=None)


def peak_position(events: Sequence[Event], of: str = "allocated") -> int:
    """How many of the events happened up to the moment when most was allocated (or reserved)."""
    held = most = position = 0
    for number, event in enumerate(events, 1):
        if event["action"] in GROWING[of]:
            held += event["size"]
            if held > most:
                most, position = held, number
        elif event["action"] in SHRINKING[of]:
            held -= event["size"]
    if events[position : position + 1] and events[position]["action"] == "alloc":
        position += 1  # the request that the last segment was made for
    return position


def living_blocks(events: Sequence[Event]) -> list[Event]:
    """The allocations among the events that were not freed, oldest first."""
    living: dict[int, Event] = {}
    for event in events:
        if event["action"] == "alloc":
            living[event["addr"]] = event
        elif event["action"] == "free_requested":
            living.pop(event["addr"], None)
    return list(living.values())


def call_sites(blocks: Sequence[Event], root: Path) -> list[CallSite]:
    """Who made these allocations, the largest first; files below ``root`` are shown relative to it."""
    sums: dict[str, list[int]] = {}
    for block in blocks:
        site = sums.setdefault(_site(block.get("frames", ()), root), [0, 0])
        site[0] += block["size"]
        site[1] += 1
    sites = [CallSite(where, num_bytes, num_blocks) for where, (num_bytes, num_blocks) in sums.items()]
    return sorted(sites, key=lambda site: (-site.num_bytes, site.where))


def _site(frames: Sequence[Mapping[str, Any]], root: Path) -> str:
    shown: list[str] = []
    file_before = ""
    for frame in frames:
        file = frame["filename"]
        if file.startswith(_TORCH_FOLDERS):
            continue
        if len(shown) == NUM_FRAMES or file.startswith(_PYTEST_FOLDERS):
            break
        path = Path(file)
        name = "" if file == file_before else str(path.relative_to(root) if path.is_relative_to(root) else path)
        shown.append(f"{name}:{frame['line']} {frame['name']}")
        file_before = file
    return " < ".join(shown) or "unknown place"


def table(sites: Sequence[CallSite], num_rows: int = 5) -> str:
    """The largest call sites, one a line."""
    lines = [f"{mib(site.num_bytes):>14}  {site.num_blocks:>5}x  {site.where}" for site in sites[:num_rows]]
    rest = sites[num_rows:]
    if rest:
        num_bytes, num_blocks = sum(site.num_bytes for site in rest), sum(site.num_blocks for site in rest)
        lines.append(f"{mib(num_bytes):>14}  {num_blocks:>5}x  in {len(rest)} other places")
    return "\n".join(lines) if lines else "  (the record of allocations is empty; did the test switch it off?)"


def mib(num_bytes: int) -> str:
    """Bytes as MiB with two decimals; fewer than 0.01 MiB as bytes."""
    return f"{num_bytes / _MIB:,.2f} MiB" if num_bytes == 0 or num_bytes * 100 >= _MIB else f"{num_bytes} bytes"
