"""Watches the memory of one simulated device: the ledger's owners, and what the caching allocator does with its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from npusim.device.card import Card
from npusim.device.ledger import Owner
from npusim.memory.caching_allocator import CachingAllocator
from npusim.report.timeline import MAX_SAMPLES, Timeline

ACTIVATIONS: Final = "activations and buffers"
CACHED: Final = "cached by the allocator"


class MemoryWatch:
    """A device's memory over time. Every layer but the caching allocator's is an owner of the ledger.

    What the caching allocator holds is shown as the tensors that the caller names, as other tensors, and as memory that
    it keeps for later. The watch resets the device's peaks, so that each is that of one interval.

    Args:
        card: The device.
        allocator: The process' caching allocator on it.
        tensors: Bytes of tensors that are there from now on, by name, such as the weights.
        max_samples: Of the timeline.
    """

    def __init__(
        self, card: Card, allocator: CachingAllocator, tensors: Mapping[str, int], max_samples: int = MAX_SAMPLES
    ) -> None:
        self.timeline: Final = Timeline(max_samples)
        self._ledger: Final = card.ledger
        self._allocator: Final = allocator
        self._tensors = dict(tensors)
        self._num_changes = -1
        self._outside_torch: dict[str, int] = {}
        self._start_interval()

    def end_interval(self, begin: float, end: float, tensors: Mapping[str, int]) -> None:
        """Add the peak of an interval, and what is held at its end; then start another.

        Args:
            begin: Seconds at which the interval began.
            end: Seconds now.
            tensors: Those of the constructor as they are now; together as large as then.
        """
        self._tensors = dict(tensors)
        allocator = self._allocator
        if self._ledger.num_changes == self._num_changes:
            outside_torch = self._outside_torch
        else:
            holdings = self._ledger.peak_holdings()
            outside_torch = _outside_torch((entry.owner, entry.num_bytes) for entry in holdings)
        peak = self._layers(outside_torch, allocator.max_memory_allocated, allocator.max_memory_reserved)
        self.timeline.add(begin, peak)
        self.timeline.add(end, self.now())
        self._start_interval()

    def now(self) -> dict[str, int]:
        """What each layer holds, in bytes."""
        if self._ledger.num_changes != self._num_changes:
            self._num_changes = self._ledger.num_changes
            self._outside_torch = _outside_torch(self._ledger.bytes_by_owner().items())
        return self._layers(self._outside_torch, self._allocator.memory_allocated, self._allocator.memory_reserved)

    def _start_interval(self) -> None:
        self._ledger.reset_peak()
        self._allocator.reset_peak_memory_stats()

    def _layers(self, outside_torch: Mapping[str, int], allocated: int, reserved: int) -> dict[str, int]:
        layers = {**outside_torch, **self._tensors}
        layers[ACTIVATIONS] = allocated - sum(self._tensors.values())
        layers[CACHED] = reserved - allocated
        return {layer: held for layer, held in layers.items() if held}


def _outside_torch(holdings: Iterable[tuple[Owner, int]]) -> dict[str, int]:
    """Bytes by owner, without the caching allocator's."""
    sums: dict[str, int] = {}
    for owner, num_bytes in holdings:
        if owner is not Owner.TORCH_SEGMENT:
            sums[owner.value] = sums.get(owner.value, 0) + num_bytes
    return sums
