"""What a picture of memory over time shows, whatever it is drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from npusim.device.ledger import Owner
from npusim.report.memory import ACTIVATIONS, CACHED
from npusim.report.timeline import Sample

GIB: Final = 1 << 30
WEIGHTS: Final = "weights"
KV_CACHE_IN_USE: Final = "KV cache, in use"
KV_CACHE_FREE: Final = "KV cache, free"

COLORS: Final = {
    Owner.CONTEXT.value: "#777777",
    Owner.KERNELS.value: "#aaaaaa",
    Owner.HCCL.value: "#cc79a7",
    Owner.XLITE_TABLES.value: "#882255",
    Owner.XLITE_POOL.value: "#d55e00",
    Owner.RAW.value: "#999933",
    WEIGHTS: "#0072b2",
    KV_CACHE_IN_USE: "#56b4e9",
    KV_CACHE_FREE: "#cceeff",
    ACTIVATIONS: "#e69f00",
    Owner.WORKSPACE.value: "#f0e442",
    Owner.ACL_GRAPH.value: "#117733",
    CACHED: "#dddddd",
    Owner.OTHER_PROCESS.value: "#333333",
}
"""Layers from the bottom up, in colours that people with colour-blindness can tell apart (Okabe and Ito; Tol)."""

UNKNOWN_COLOR: Final = "#ffffff"
LOAD_COLORS: Final = {"running": "#0072b2", "waiting": "#e69f00"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One device under one load.

    Attributes:
        title: Above it.
        memory: Bytes by layer over time.
        load: Requests by state over time.
        end: Seconds at which it ends.
        capacity_bytes: The device's memory.
        budget_bytes: What the process may use of it.
    """

    title: str
    memory: Sequence[Sample]
    load: Sequence[Sample]
    end: float
    capacity_bytes: int
    budget_bytes: int


def layers_of(panels: Sequence[Panel]) -> list[str]:
    """All layers of the panels from the bottom up; unknown ones last."""
    found = {layer: None for panel in panels for sample in panel.memory for layer in sample.values}
    return [layer for layer in COLORS if layer in found] + [layer for layer in found if layer not in COLORS]


def steps(samples: Sequence[Sample], layers: Sequence[str], end: float) -> tuple[list[float], list[list[int]]]:
    """Times, and by layer its values at those times, for a picture in steps; the last value lasts until ``end``."""
    times = [sample.time for sample in samples]
    values = [[sample.values.get(layer, 0) for sample in samples] for layer in layers]
    if not times:
        return [0.0, end], [[0, 0] for _ in layers]
    return [*times, max(end, times[-1])], [[*row, row[-1]] for row in values]
