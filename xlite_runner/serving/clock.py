"""Time as an engine sees it: the wall clock on a card, the world's virtual time on a simulated device.

The composition root hands one clock to whatever must know the time; nothing else in xlite_runner asks for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Seconds of the process that asks.

    On a card work takes time by itself. In a simulated world the host's work takes none unless it is charged.
    """

    def now(self) -> float:
        """Seconds since an origin that never moves."""
        ...

    def sleep_until(self, t: float) -> None:
        """Return when :meth:`now` is ``t`` or later; at once if it is."""
        ...

    def charge(self, host_seconds: float) -> None:
        """The host worked this long on something that is no operator: a scheduler's step, a runner's Python code.

        Raises:
            ValueError: Less than nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Host work of an engine's step that is no operator, to be charged; nothing on a card, where it takes real time.

    Attributes:
        step_seconds: Of each step: scheduling, inputs, outputs.
        request_seconds: What each request of the step adds.
    """

    step_seconds: float = 0.0
    request_seconds: float = 0.0

    def of_step(self, num_requests: int) -> float:
        """Seconds of a step with so many requests."""
        return self.step_seconds + num_requests * self.request_seconds


class WallClock:
    """The clock for a card: real time, in which work takes what it takes."""

    def now(self) -> float:
        """See :class:`Clock`."""
        return time.perf_counter()

    def sleep_until(self, t: float) -> None:
        """See :class:`Clock`."""
        while (left := t - time.perf_counter()) > 0:
            time.sleep(left)

    def charge(self, host_seconds: float) -> None:
        """See :class:`Clock`; the work has taken its time already."""
        if not host_seconds >= 0:
            raise ValueError(f"host_seconds must not be negative, got {host_seconds}")
