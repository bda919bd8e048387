"""Sets of bytes of one storage, as sorted ranges that do not touch."""

from __future__ import annotations

Ranges = tuple[tuple[int, int], ...]
"""First byte and the one behind the last, of each range."""


def with_range(ranges: Ranges, start: int, end: int) -> Ranges:
    """``ranges`` and the bytes from ``start`` up to ``end``."""
    before = tuple(known for known in ranges if known[1] < start)
    after = tuple(known for known in ranges if known[0] > end)
    touched = ranges[len(before) : len(ranges) - len(after)]
    if touched:
        start, end = min(start, touched[0][0]), max(end, touched[-1][1])
    return (*before, (start, end), *after)


def without_range(ranges: Ranges, start: int, end: int) -> Ranges:
    """``ranges`` but for the bytes from ``start`` up to ``end``."""
    pieces = [piece for first, last in ranges for piece in ((first, min(last, start)), (max(first, end), last))]
    return tuple((first, last) for first, last in pieces if first < last)


def covers(ranges: Ranges, start: int, end: int) -> bool:
    """Whether all bytes from ``start`` up to ``end`` are among them."""
    return any(first <= start and end <= last for first, last in ranges)
