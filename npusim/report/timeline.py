"""Something in layers over virtual time, such as a device's memory by owner, in few samples that keep every peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_SAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Sample:
    """How much is in each layer from a moment until the next sample.

    Attributes:
        time: Seconds.
        values: By layer; a layer that is missing is empty.
    """

    time: float
    values: Mapping[str, int]

    @property
    def total(self) -> int:
        """All layers together."""
        return sum(self.values.values())


class Timeline:
    """Samples in the order of time.

    When there are too many, neighbours are merged in pairs and the one with more in it stays, at the time of the first:
    so every peak is there, with the layers that it had, at most one merged interval early.

    Args:
        max_samples: How many are kept at most, an even number.

    Attributes:
        peaks: The most that each layer had in any sample ever added.
        peak_sample: The sample with most in all layers together, the first of equals.
    """

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        if max_samples < 2 or max_samples % 2:
            raise ValueError(f"max_samples must be an even number from 2, got {max_samples}")
        self.peaks: dict[str, int] = {}
        self.peak_sample: Sample | None = None
        self._max_samples = max_samples
        self._samples: list[Sample] = []
        self._merged = 1
        self._in_last = 0

    def add(self, time: float, values: Mapping[str, int]) -> None:
        """Add what is so from ``time`` on.

        Raises:
            ValueError: ``time`` is before the last sample's.
        """
        last = self._samples[-1] if self._samples else None
        if last is not None and time < last.time:
            raise ValueError(f"a sample at {time} s came after one at {last.time} s")
        if last is not None and last.values == values:
            return
        sample = Sample(time, dict(values))
        for layer, value in values.items():
            if value > self.peaks.get(layer, 0):
                self.peaks[layer] = value
        if self.peak_sample is None or sample.total > self.peak_sample.total:
            self.peak_sample = sample
        self._append(sample)

    def samples(self) -> tuple[Sample, ...]:
        """What is kept, first to last."""
        return tuple(self._samples)

    def _append(self, sample: Sample) -> None:
        if self._in_last and self._in_last < self._merged:
            self._samples[-1] = _larger(self._samples[-1], sample)
            self._in_last += 1
            return
        if len(self._samples) == self._max_samples:
            pairs = zip(self._samples[::2], self._samples[1::2], strict=True)
            self._samples = [_larger(first, second) for first, second in pairs]
            self._merged *= 2
        self._samples.append(sample)
        self._in_last = 1


def _larger(first: Sample, second: Sample) -> Sample:
    """The sample with more in it, from the first one's time on."""
    return first if first.total >= second.total else Sample(first.time, second.values)
