"""Counters behind ``torch.npu.memory_stats()``.

Statistics exist for the small pool, the large pool, and both together. Those that change with every request are plain
integers of :class:`PoolCounters`, one object per pool class: the current value, its peak, and the sum of all rises.
From these follow the falls (rises minus current) and, except for peaks, the figures of both pools together. The others
are :class:`Stat` objects.
"""

from __future__ import annotations

from typing import Final

SevenFigures = tuple[int, int, int, int, int, int, int]
"""One figure for each of :data:`METRICS`."""

METRICS: Final = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "active",
    "active_bytes",
)
"""The statistics that change with every request."""

_EVENT_COUNTS: Final = ("num_alloc_retries", "num_ooms")
_EXTRA_EVENT_COUNTS: Final = ("num_sync_all_streams", "num_device_alloc", "num_device_free", "num_oom_rejections")


_RISES: Final = (
    "allocations_rises",
    "allocated_bytes_rises",
    "requested_bytes_rises",
    "inactive_splits_rises",
    "inactive_split_bytes_rises",
)


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
        self.reset_peaks((0, 0, 0, 0, 0, 0, 0))

    def peaks(self) -> SevenFigures:
        """The peaks."""
        return (
            self.allocations_peak,
            self.allocated_bytes_peak,
            self.requested_bytes_peak,
            self.inactive_splits_peak,
            self.inactive_split_bytes_peak,
            max(self.allocations_peak, self.pending_active_peak),
            max(self.allocated_bytes_peak, self.pending_active_bytes_peak),
        )

    def figures(self) -> Figures:
        """Rises and peaks, for :class:`Recording`."""
        return (), tuple(getattr(self, name) for name in Peaks.__slots__)

    def raise_by(self, rises: tuple[int, ...], peaks: tuple[int, ...]) -> None:
        """Let rises go on by these, and peaks be no lower than these."""
        del rises
        for name, peak in zip(Peaks.__slots__, peaks, strict=True):
            if peak > getattr(self, name):
                setattr(self, name, peak)

    def reset_peaks(self, currents: SevenFigures) -> None:
        """Let the peaks start anew from the current values."""
        self.allocations_peak = currents[0]
        self.allocated_bytes_peak = currents[1]
        self.requested_bytes_peak = currents[2]
        self.inactive_splits_peak = currents[3]
        self.inactive_split_bytes_peak = currents[4]
        self.pending_active_peak = currents[5]
        self.pending_active_bytes_peak = currents[6]


class PoolCounters(Peaks):
    """What changes with every request to one pool class: current values, peaks, sums of rises since the last reset.

    The caching allocator changes the integers in place, since this is where it spends its time.

    Attributes:
        other: The counters of the other pool class.
        both: The peaks of both classes together.
    """

    __slots__ = (
        "_bases", "allocated_bytes", "allocated_bytes_rises", "allocations", "allocations_rises", "both",
        "inactive_split_bytes", "inactive_split_bytes_rises", "inactive_splits", "inactive_splits_rises", "other",
        "pending", "pending_bytes", "requested_bytes", "requested_bytes_rises",
    )  # fmt: skip

    def __init__(self, both: Peaks) -> None:
        super().__init__()
        self.both: Final = both
        self.other: PoolCounters = self
        self.allocations = self.allocated_bytes = self.requested_bytes = 0
        self.inactive_splits = self.inactive_split_bytes = 0
        self.pending = self.pending_bytes = 0
        self.reset_accumulated()

    def count_allocation(self, size: int, requested_bytes: int) -> None:
        """Count one more allocated block."""
        other, both = self.other, self.both
        self.allocations_rises += 1
        current = self.allocations = self.allocations + 1
        if current > self.allocations_peak:
            self.allocations_peak = current
        current += other.allocations
        if current > both.allocations_peak:
            both.allocations_peak = current
        self.allocated_bytes_rises += size
        current = self.allocated_bytes = self.allocated_bytes + size
        if current > self.allocated_bytes_peak:
            self.allocated_bytes_peak = current
        current += other.allocated_bytes
        if current > both.allocated_bytes_peak:
            both.allocated_bytes_peak = current
        self.requested_bytes_rises += requested_bytes
        current = self.requested_bytes = self.requested_bytes + requested_bytes
        if current > self.requested_bytes_peak:
            self.requested_bytes_peak = current
        current += other.requested_bytes
        if current > both.requested_bytes_peak:
            both.requested_bytes_peak = current

    def add_inactive_splits(self, num_blocks: int) -> None:
        """Count free blocks that are part of a larger segment, or fewer of them if negative."""
        current = self.inactive_splits = self.inactive_splits + num_blocks
        if num_blocks > 0:
            self.inactive_splits_rises += num_blocks
            if current > self.inactive_splits_peak:
                self.inactive_splits_peak = current
            current += self.other.inactive_splits
            if current > self.both.inactive_splits_peak:
                self.both.inactive_splits_peak = current

    def add_inactive_split_bytes(self, num_bytes: int) -> None:
        """Count more bytes of free blocks that are part of a larger segment."""
        self.inactive_split_bytes_rises += num_bytes
        current = self.inactive_split_bytes = self.inactive_split_bytes + num_bytes
        if current > self.inactive_split_bytes_peak:
            self.inactive_split_bytes_peak = current
        current += self.other.inactive_split_bytes
        if current > self.both.inactive_split_bytes_peak:
            self.both.inactive_split_bytes_peak = current

    def note_active_peak(self) -> None:
        """Update the peaks of active blocks; needed after a rise while some block is pending."""
        active = self.allocations + self.pending
        active_bytes = self.allocated_bytes + self.pending_bytes
        self.pending_active_peak = max(self.pending_active_peak, active)
        self.pending_active_bytes_peak = max(self.pending_active_bytes_peak, active_bytes)
        other, both = self.other, self.both
        active += other.allocations + other.pending
        active_bytes += other.allocated_bytes + other.pending_bytes
        both.pending_active_peak = max(both.pending_active_peak, active)
        both.pending_active_bytes_peak = max(both.pending_active_bytes_peak, active_bytes)

    def figures(self) -> Figures:
        """Rises and peaks, for :class:`Recording`."""
        return tuple(getattr(self, name) for name in _RISES), super().figures()[1]

    def raise_by(self, rises: tuple[int, ...], peaks: tuple[int, ...]) -> None:
        """Let rises go on by these, and peaks be no lower than these."""
        super().raise_by((), peaks)
        for name, rise in zip(_RISES, rises, strict=False):
            setattr(self, name, getattr(self, name) + rise)

    def currents(self) -> SevenFigures:
        """The current values."""
        return (
            self.allocations,
            self.allocated_bytes,
            self.requested_bytes,
            self.inactive_splits,
            self.inactive_split_bytes,
            self.allocations + self.pending,
            self.allocated_bytes + self.pending_bytes,
        )

    def rises(self) -> SevenFigures:
        """The sums of rises since the last reset."""
        return (
            self.allocations_rises,
            self.allocated_bytes_rises,
            self.requested_bytes_rises,
            self.inactive_splits_rises,
            self.inactive_split_bytes_rises,
            self.allocations_rises,
            self.allocated_bytes_rises,
        )

    def bases(self) -> SevenFigures:
        """The current values at the last reset of the sums."""
        return self._bases

    def reset_accumulated(self) -> None:
        """Let the sums start anew from zero."""
        self._bases = self.currents()
        self.allocations_rises = self.allocated_bytes_rises = self.requested_bytes_rises = 0
        self.inactive_splits_rises = self.inactive_split_bytes_rises = 0


Figures = tuple[tuple[int, ...], tuple[int, ...]]
"""Rises and peaks of one class of pools, in the order of their slots."""

Effect = tuple[Figures, Figures, Figures]
"""What a recorded interval did to the figures of the small pool, the large pool and both: rises, and its own peaks."""


class Recording:
    """An interval in which the allocator's requests are recorded; made by :meth:`Statistics.record`."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._before = self._figures()
        self._others = self._rare()

    def effect(self) -> Effect | None:
        """End the interval; None if it cannot be repeated, since it changed what is current, or something rare."""
        statistics, after = self._statistics, self._figures()
        counters = (statistics.small, statistics.large, statistics.both)
        for each, (_, peaks) in zip(counters, self._before, strict=True):
            each.raise_by((), peaks)
        if self._others != self._rare():
            return None
        small, large, both = (
            (tuple(new - old for new, old in zip(rises, rises_before, strict=True)), peaks)
            for (rises, peaks), (rises_before, _) in zip(after, self._before, strict=True)
        )
        return small, large, both

    def _figures(self) -> Effect:
        statistics = self._statistics
        small, large, both = (each.figures() for each in (statistics.small, statistics.large, statistics.both))
        return small, large, both

    def _rare(self) -> tuple[object, ...]:
        statistics = self._statistics
        stats = [(s.current, s.allocated, s.freed) for s in statistics._stats.values()]
        events = [getattr(statistics, name) for name in _EVENT_COUNTS + _EXTRA_EVENT_COUNTS]
        return statistics.small.currents(), statistics.large.currents(), stats, events


class Statistics:
    """All statistics of one device's allocator.

    Args:
        max_split_size: The option's value when the allocator was made (``memory_stats`` shows it, unlimited as -1).
        extra_counters: Show the four counters that torch_npu has from 2.13 on.
    """

    def __init__(self, max_split_size: int, *, extra_counters: bool = True) -> None:
        self.both: Final = Peaks()
        self.small: Final = PoolCounters(self.both)
        self.large: Final = PoolCounters(self.both)
        self.small.other, self.large.other = self.large, self.small
        self.segments: Final = {pool: Stat() for pool in ("all", "small_pool", "large_pool")}
        self.reserved_bytes: Final = {pool: Stat() for pool in ("all", "small_pool", "large_pool")}
        self.oversize_allocations: Final = Stat()
        self.oversize_segments: Final = Stat()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0
        self._max_split_size: Final = max_split_size - 2**64 if max_split_size >= 2**63 else max_split_size
        self._event_counts: Final = _EVENT_COUNTS + (_EXTRA_EVENT_COUNTS if extra_counters else ())
        self._stats: Final = {
            "oversize_allocations": self.oversize_allocations,
            "oversize_segments": self.oversize_segments,
            **{f"segment.{pool}": stat for pool, stat in self.segments.items()},
            **{f"reserved_bytes.{pool}": stat for pool, stat in self.reserved_bytes.items()},
        }
        self._keys: Final = sorted(self._values())

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

    def reset_peaks(self) -> None:
        """Let all peaks start anew from the current values."""
        small, large = self.small.currents(), self.large.currents()
        self.small.reset_peaks(small)
        self.large.reset_peaks(large)
        self.both.reset_peaks(_sums(small, large))
        for stat in self._stats.values():
            stat.reset_peak()

    def reset_accumulated(self) -> None:
        """Let all sums and counts of events start anew from zero."""
        self.small.reset_accumulated()
        self.large.reset_accumulated()
        for stat in self._stats.values():
            stat.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = self.num_oom_rejections = 0

    def record(self) -> Recording:
        """Begin to record what happens from now on to the figures that change with every request.

        Peaks start anew; :meth:`Recording.effect` restores those of before.
        """
        recording = Recording(self)
        self.reset_peaks()
        return recording

    def repeat(self, effect: Effect) -> None:
        """Change the figures as a recorded effect did, which left what is current as it was."""
        for counters, (rises, peaks) in zip((self.small, self.large, self.both), effect, strict=True):
            counters.raise_by(rises, peaks)

    def as_dict(self) -> dict[str, int]:
        """The values under the keys of ``torch.npu.memory_stats()``, sorted by key."""
        values = self._values()
        return {key: values[key] for key in self._keys}

    def _values(self) -> dict[str, int]:
        values = {name: getattr(self, name) for name in self._event_counts}
        values["max_split_size"] = self._max_split_size
        for name, stat in self._stats.items():
            values[f"{name}.current"] = stat.current
            values[f"{name}.peak"] = stat.peak
            values[f"{name}.allocated"] = stat.allocated
            values[f"{name}.freed"] = stat.freed
        small, large = self.small, self.large
        _enter(values, "small_pool", small.currents(), small.peaks(), small.rises(), small.bases())
        _enter(values, "large_pool", large.currents(), large.peaks(), large.rises(), large.bases())
        _enter(
            values,
            "all",
            _sums(small.currents(), large.currents()),
            self.both.peaks(),
            _sums(small.rises(), large.rises()),
            _sums(small.bases(), large.bases()),
        )
        return values


def _sums(small: SevenFigures, large: SevenFigures) -> SevenFigures:
    a, b, c, d, e, f, g = map(int.__add__, small, large)
    return a, b, c, d, e, f, g


def _enter(
    values: dict[str, int],
    pool: str,
    currents: SevenFigures,
    peaks: SevenFigures,
    rises: SevenFigures,
    bases: SevenFigures,
) -> None:
    for name, current, peak, risen, base in zip(METRICS, currents, peaks, rises, bases, strict=True):
        values[f"{name}.{pool}.current"] = current
        values[f"{name}.{pool}.peak"] = peak
        values[f"{name}.{pool}.allocated"] = risen
        values[f"{name}.{pool}.freed"] = risen - (current - base)
