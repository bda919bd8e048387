"""Virtual time of a world: whole nanoseconds, a host clock for each process, and what is planned for a point in time.

Ranks are processes of their own, so each has its own host time; they take turns in one Python process and one may be
ahead of another. They agree where they wait for each other: in collectives, and where an engine starts and collects
them (:meth:`Clock.start_together`).

Times of streams follow from sums and maxima alone (:mod:`npusim.device.streams`), and are then those that SimPy
processes would reach; a test compares the two. What is planned waits in SimPy's queue, whose order of equal times is
(time, priority, sequence).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

import simpy

from npusim.device.moments import latest
from npusim.errors import WorldError

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


class Clock:
    """Host time of every process of a world.

    Args:
        process: Number of the process that runs.

    Attributes:
        process: The process that runs; whoever lets another one run says so here.
    """

    __slots__ = ("_now_ns", "process")

    def __init__(self, process: int = 0) -> None:
        self.process = process
        self._now_ns: defaultdict[int, int] = defaultdict(int)

    def of(self, process: int) -> Clock:
        """The clock as one process sees it, whichever runs."""
        clock = Clock(process)
        clock._now_ns = self._now_ns
        return clock

    @property
    def now_ns(self) -> int:
        """The process' host time in nanoseconds; 0 when the world was made."""
        return self._now_ns[self.process]

    @property
    def now(self) -> float:
        """The same in microseconds."""
        return self.now_ns / NS_PER_US

    def spend(self, duration_ns: int) -> int:
        """The process' host works for so long; returns its time then."""
        now_ns = self._now_ns[self.process] = self._now_ns[self.process] + duration_ns
        return now_ns

    def wait_until(self, time_ns: int) -> None:
        """The process' host waits until then; not at all if that is past."""
        self._now_ns[self.process] = latest(self._now_ns[self.process], time_ns)

    def replace(self, times_ns: Mapping[int, int]) -> None:
        """Give processes other objects for their times of now (:mod:`npusim.device.moments`)."""
        assert all(self._now_ns[process] == time_ns for process, time_ns in times_ns.items())
        self._now_ns.update(times_ns)

    def start_together(self, num_processes: int) -> None:
        """Processes 0 to ``num_processes`` - 1 are told to do something: they begin no earlier than the caller is."""
        now_ns = self.now_ns
        for process in range(num_processes):
            self._now_ns[process] = latest(now_ns, self._now_ns[process])

    def end_together(self, num_processes: int) -> None:
        """The caller waits for what they answer."""
        for process in range(num_processes):
            self.wait_until(self._now_ns[process])


class HostClock:
    """One process' time in seconds, for engines that must know it (``xlite_runner.serving.clock.Clock``).

    Args:
        clock: The process' clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        """Seconds since the world was made."""
        return self._clock.now_ns / NS_PER_S

    def sleep_until(self, t: float) -> None:
        """Let time pass until :meth:`now` is ``t`` or later.

        Raises:
            WorldError: ``t`` is no point in time.
        """
        if not math.isfinite(t):
            raise WorldError(f"a process cannot sleep until {t} s")
        time_ns = int(t * NS_PER_S)
        while time_ns / NS_PER_S < t:
            time_ns += 1
        self._clock.wait_until(time_ns)

    def charge(self, host_seconds: float) -> None:
        """The host worked this long on something that is no operator.

        Raises:
            ValueError: Less than nothing.
        """
        if not (host_seconds >= 0 and math.isfinite(host_seconds)):
            raise ValueError(f"host_seconds must not be negative, got {host_seconds}")
        self._clock.spend(round(host_seconds * NS_PER_S))


class Agenda:
    """What is planned to happen to a device at points in time; it happens when somebody looks at the device after them.

    Args:
        clock: Whoever looks, looks at its time.

    Attributes:
        next_ns: When the next action is due; infinity if none is planned.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._environment = simpy.Environment(initial_time=0)
        self.next_ns: float = math.inf

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Plan an action; what is planned for the same time happens in the order of planning.

        Raises:
            WorldError: ``time_ns`` is past for the calling process.
        """
        if time_ns < self._clock.now_ns:
            raise WorldError(f"cannot plan for {time_ns} ns: it is {self._clock.now_ns} ns already")
        delay_ns = max(0, time_ns - int(self._environment.now))
        event = self._environment.timeout(delay_ns)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: action())
        self.next_ns = self._environment.peek()

    def catch_up(self) -> None:
        """Let everything happen that was planned for up to now, in order."""
        while self.next_ns <= self._clock.now_ns:
            self._environment.step()
            self.next_ns = self._environment.peek()
