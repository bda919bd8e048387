"""Counters behind ``torch.npu.memory_stats()``.

Statistics exist for the small pool, the large pool, and both together. Those that change with every request are plain
integers of :class:`PoolCounters`, one object per pool class: the current value, its peak, and the sum of all rises.
From these follow the falls (rises minus current) and, except for peaks, the figures of both pools together. The others
are :class:`Stat` objects.
"""

from __future__ import annotations

from typing import Final

HOT_METRICS: Final = {
    "allocation": "allocations",
    "allocated_bytes": "allocated_bytes",
    "requested_bytes": "requested_bytes",
    "inactive_split": "inactive_splits",
    "inactive_split_bytes": "inactive_split_bytes",
}
"""Key of ``memory_stats`` and attribute of :class:`PoolCounters`."""


class Stat:
    """One statistic that changes rarely: its current value, its peak, and the sums of its rises and falls."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, amount: int) -> None:
        """Change the current value by ``amount``; one change counts as one rise or one fall."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount

    def reset_peak(self) -> None:
        """Let the peak start anew from the current value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Let the sums start anew from zero."""
        self.allocated = self.freed = 0

    def figures(self) -> tuple[int, int, int, int]:
        """Current, peak, allocated, freed."""
        return self.current, self.peak, self.allocated, self.freed


class Peaks:
    """Highest values so far of the statistics that change with every request.

    Active blocks are the allocated ones and the pending ones (freed, but a stream may still use them). Their peak can
    exceed that of the allocated ones only while some are pending, so ``pending_*`` are the peaks seen in such moments.
    """

    __slots__ = (
        "allocated_bytes_peak", "allocations_peak", "inactive_split_bytes_peak", "inactive_splits_peak",
        "pending_active_bytes_peak", "pending_active_peak", "requested_bytes_peak",
    )  # fmt: skip

    def __init__(self) -> None:
        self.allocations_peak = self.allocated_bytes_peak = self.requested_bytes_peak = 0
        self.inactive_splits_peak = self.inactive_split_bytes_peak = 0
        self.pending_active_peak = self.pending_active_bytes_peak = 0


class PoolCounters(Peaks):
    """What changes with every request to one pool class: current values, peaks, sums of rises since the last reset.

    The caching allocator changes the integers in place, since this is where it spends its time.

    Attributes:
        other: The counters of the other pool class.
        bases: The current values when the sums were last reset.
    """

    __slots__ = (
        "allocated_bytes", "allocated_bytes_rises", "allocations", "allocations_rises", "bases", "inactive_split_bytes",
        "inactive_split_bytes_rises", "inactive_splits", "inactive_splits_rises", "other", "pending", "pending_bytes",
        "requested_bytes", "requested_bytes_rises",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.allocations = self.allocations_rises = 0
        self.allocated_bytes = self.allocated_bytes_rises = 0
        self.requested_bytes = self.requested_bytes_rises = 0
        self.inactive_splits = self.inactive_splits_rises = 0
        self.inactive_split_bytes = self.inactive_split_bytes_rises = 0
        self.pending = self.pending_bytes = 0
        self.other: PoolCounters = self
        self.bases: dict[str, int] = {}

    def reset_accumulated(self) -> None:
        """Let the sums start anew from zero."""
        self.bases = {"pending": self.pending, "pending_bytes": self.pending_bytes}
        for name in HOT_METRICS.values():
            self.bases[name] = getattr(self, name)
            setattr(self, f"{name}_rises", 0)


class Statistics:
    """All statistics of one device's allocator.

    Args:
        max_split_size: The option's value when the allocator was made (``memory_stats`` shows it, unlimited as -1).
        extra_counters: Show the four counters that torch_npu has from 2.13 on.
    """

    def __init__(self, max_split_size: int, *, extra_counters: bool = True) -> None:
        self.small: Final = PoolCounters()
        self.large: Final = PoolCounters()
        self.small.other, self.large.other = self.large, self.small
        self.both: Final = Peaks()
        self.segments: Final = _pool_stats()
        self.reserved_bytes: Final = _pool_stats()
        self.oversize_allocations: Final = Stat()
        self.oversize_segments: Final = Stat()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0
        self._max_split_size = max_split_size - 2**64 if max_split_size >= 2**63 else max_split_size
        self._extra_counters = extra_counters

    @property
    def total_reserved_bytes(self) -> int:
        """Bytes that the allocator holds on the device, ``reserved_bytes.all.current``."""
        return self.reserved_bytes["all"].current

    @property
    def total_allocated_bytes(self) -> int:
        """Bytes of allocated blocks, ``allocated_bytes.all.current``."""
        return self.small.allocated_bytes + self.large.allocated_bytes

    @property
    def total_active_bytes(self) -> int:
        """Bytes of allocated and pending blocks, ``active_bytes.all.current``."""
        return self.total_allocated_bytes + self.small.pending_bytes + self.large.pending_bytes

    def reserve(self, num_bytes: int, *, is_small: bool) -> None:
        """Count bytes taken from the device, or given back if negative."""
        self.reserved_bytes["all"].add(num_bytes)
        self.reserved_bytes["small_pool" if is_small else "large_pool"].add(num_bytes)

    def count_segments(self, amount: int, *, is_small: bool) -> None:
        """Count segments made, or given back if negative."""
        self.segments["all"].add(amount)
        self.segments["small_pool" if is_small else "large_pool"].add(amount)

    def note_active_peak(self, counters: PoolCounters) -> None:
        """Update the peaks of the active statistics, after a rise while some block is pending."""
        other = counters.other
        active = counters.allocations + counters.pending
        active_bytes = counters.allocated_bytes + counters.pending_bytes
        counters.pending_active_peak = max(counters.pending_active_peak, active)
        counters.pending_active_bytes_peak = max(counters.pending_active_bytes_peak, active_bytes)
        both = self.both
        both.pending_active_peak = max(both.pending_active_peak, active + other.allocations + other.pending)
        active_bytes += other.allocated_bytes + other.pending_bytes
        both.pending_active_bytes_peak = max(both.pending_active_bytes_peak, active_bytes)

    def change_inactive_split(self, counters: PoolCounters, num_blocks: int, num_bytes: int) -> None:
        """Count free blocks that are part of a larger segment; each figure changes in one step."""
        other, both = counters.other, self.both
        counters.inactive_splits += num_blocks
        if num_blocks > 0:
            counters.inactive_splits_rises += num_blocks
            current = counters.inactive_splits
            counters.inactive_splits_peak = max(counters.inactive_splits_peak, current)
            both.inactive_splits_peak = max(both.inactive_splits_peak, current + other.inactive_splits)
        counters.inactive_split_bytes += num_bytes
        if num_bytes > 0:
            counters.inactive_split_bytes_rises += num_bytes
            current = counters.inactive_split_bytes
            counters.inactive_split_bytes_peak = max(counters.inactive_split_bytes_peak, current)
            both.inactive_split_bytes_peak = max(both.inactive_split_bytes_peak, current + other.inactive_split_bytes)

    def reset_peaks(self) -> None:
        """Let all peaks start anew from the current values."""
        for name in HOT_METRICS.values():
            for counters in (self.small, self.large):
                setattr(counters, f"{name}_peak", getattr(counters, name))
            setattr(self.both, f"{name}_peak", getattr(self.small, name) + getattr(self.large, name))
        for peaks in (self.small, self.large, self.both):
            peaks.pending_active_peak = peaks.pending_active_bytes_peak = 0
        self.note_active_peak(self.small)
        self.note_active_peak(self.large)
        for stat in self._stats().values():
            stat.reset_peak()

    def reset_accumulated(self) -> None:
        """Let all sums and counts of events start anew from zero."""
        self.small.reset_accumulated()
        self.large.reset_accumulated()
        for stat in self._stats().values():
            stat.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0

    def as_dict(self) -> dict[str, int]:
        """The values under the keys of ``torch.npu.memory_stats()``, sorted by key."""
        values = {
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            "max_split_size": self._max_split_size,
        }
        if self._extra_counters:
            values |= {
                "num_sync_all_streams": self.num_sync_all_streams,
                "num_device_alloc": self.num_device_alloc,
                "num_device_free": self.num_device_free,
                "num_oom_rejections": self.num_oom_rejections,
            }
        figures = {name: stat.figures() for name, stat in self._stats().items()} | self._hot_figures()
        for name, (current, peak, allocated, freed) in figures.items():
            values[f"{name}.current"] = current
            values[f"{name}.peak"] = peak
            values[f"{name}.allocated"] = allocated
            values[f"{name}.freed"] = freed
        return dict(sorted(values.items()))

    def _stats(self) -> dict[str, Stat]:
        stats = {"oversize_allocations": self.oversize_allocations, "oversize_segments": self.oversize_segments}
        for pool in ("all", "small_pool", "large_pool"):
            stats[f"segment.{pool}"] = self.segments[pool]
            stats[f"reserved_bytes.{pool}"] = self.reserved_bytes[pool]
        return stats

    def _hot_figures(self) -> dict[str, tuple[int, int, int, int]]:
        figures = {}
        pools = {"small_pool": (self.small,), "large_pool": (self.large,), "all": (self.small, self.large)}
        for pool, counters in pools.items():
            peaks = self.both if len(counters) == 2 else counters[0]
            for key, name in HOT_METRICS.items():
                rises = sum(getattr(each, f"{name}_rises") for each in counters)
                growth = sum(getattr(each, name) - each.bases.get(name, 0) for each in counters)
                current = sum(getattr(each, name) for each in counters)
                figures[f"{key}.{pool}"] = current, getattr(peaks, f"{name}_peak"), rises, rises - growth
            for key, name, pending in (
                ("active", "allocations", "pending"),
                ("active_bytes", "allocated_bytes", "pending_bytes"),
            ):
                current, peak, rises, freed = figures[f"{'allocation' if key == 'active' else name}.{pool}"]
                waiting = sum(getattr(each, pending) for each in counters)
                newly_waiting = waiting - sum(each.bases.get(pending, 0) for each in counters)
                peak = max(peak, getattr(peaks, f"pending_{key}_peak"))
                figures[f"{key}.{pool}"] = current + waiting, peak, rises, freed - newly_waiting
        return figures


def _pool_stats() -> dict[str, Stat]:
    return {pool: Stat() for pool in ("all", "small_pool", "large_pool")}
