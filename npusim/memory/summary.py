"""The table that ``torch.npu.memory_summary()`` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

_WIDTH: Final = 75
_PARTS: Final = (("large_pool", "      from large pool"), ("small_pool", "      from small pool"))
_OVERSIZE_METRICS: Final = (
    ("oversize_allocations", "Oversize allocations"),
    ("oversize_segments", "Oversize NPU segments"),
)
_COLUMNS: Final = ("current", "peak", "allocated", "freed")


def memory_summary(stats: Mapping[str, int], device_index: int, *, abbreviated: bool = False) -> str:
    """The vendor's table of ``memory_stats``.

    Args:
        stats: What ``memory_stats()`` gave.
        device_index: The device's number, for the title.
        abbreviated: Leave out the two pools.
    """
    ruler, double_ruler = "-" * _WIDTH, "=" * _WIDTH
    lines = [
        double_ruler,
        f"{'':18}PyTorch NPU memory summary, device ID {device_index:<18d} ",
        ruler,
        f"{'':12}NPU OOMs: {stats['num_ooms']:<13d} |{'':8}npuMalloc retries: {stats['num_alloc_retries']:<9d}  ",
        double_ruler,
        "        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ",
    ]
    for key, title, in_unit in _METRICS:
        lines.append(ruler)
        units = tuple(stats[f"{key}.all.{column}"] for column in _COLUMNS)
        for pool, name in (("all", title), *(() if abbreviated else _PARTS)):
            lines.append(_row(name, stats, f"{key}.{pool}", units, in_unit))
    for key, title in _OVERSIZE_METRICS:
        lines.append(ruler)
        lines.append(_row(title, stats, key, tuple(stats[f"{key}.{column}"] for column in _COLUMNS), _count))
    lines.append(double_ruler)
    return "".join(f"|{line}|\n" for line in lines)


def _row(
    name: str, stats: Mapping[str, int], key: str, units: tuple[int, ...], in_unit: Callable[[int, int], str]
) -> str:
    cells = (in_unit(stats[f"{key}.{column}"], unit) for column, unit in zip(_COLUMNS, units, strict=True))
    return f" {name:<21} | " + " | ".join(cells) + " "


def _bytes(value: int, unit_of: int) -> str:
    """The value in the unit that suits ``unit_of``, cut off, not rounded."""
    return _in_unit(value, unit_of, 1024, 768 * 1024, ("B ", "KB", "MB", "GB", "TB", "PB"))


def _count(value: int, unit_of: int) -> str:
    return _in_unit(value, unit_of, 1000, 750 * 1000, (" ", "K", "M")) + " "


def _in_unit(value: int, unit_of: float, base: int, limit: int, units: tuple[str, ...]) -> str:
    index = 0
    while unit_of >= limit and index + 1 < len(units):
        value //= base
        unit_of /= base
        index += 1
    return f"{value:7d} {units[index]}"


_METRICS: Final = (
    ("allocated_bytes", "Allocated memory", _bytes),
    ("active_bytes", "Active memory", _bytes),
    ("reserved_bytes", "NPU reserved memory", _bytes),
    ("inactive_split_bytes", "Non-releasable memory", _bytes),
    ("allocation", "Allocations", _count),
    ("active", "Active allocs", _count),
    ("segment", "NPU reserved segments", _count),
    ("inactive_split", "Non-releasable allocs", _count),
)
