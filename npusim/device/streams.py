"""Streams and events of one device, in virtual time.

Work of a stream starts when the host has queued it and what was queued before it is done, and takes its duration; an
event completes with the work in front of it. So every time is a sum or a maximum of others, computed when work is
queued. Streams run side by side, each at full speed: that they share memory and cores is not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

from npusim.device.clock import NS_PER_US, Clock
from npusim.device.moments import Moment, latest
from npusim.errors import WorldError


class StreamEvent(NamedTuple):
    """A point in a stream's work: complete once virtual time has reached it.

    Attributes:
        stream: Handle of the stream.
        time_ns: When the work in front of it is done; since the capture's beginning for one recorded in a capture.
        capture: Number of the capture that it was recorded in; 0 if in none.
    """

    stream: int
    time_ns: int
    capture: int = 0

    @property
    def time_us(self) -> float:
        """The time in microseconds."""
        return self.time_ns / NS_PER_US


class Streams:
    """Work queues of a device: each is known by a handle, its work completes in order.

    Args:
        clock: Host time of whoever queues work and waits.
        first_handle: Handle of the default stream; further ones follow it.
    """

    def __init__(self, clock: Clock, *, first_handle: int = 1) -> None:
        self._clock = clock
        self.default_stream = first_handle
        self._busy_until_ns: dict[int, int] = {first_handle: 0}
        self._captured_ns: dict[int, int] = {}
        self._capture = 0
        self._num_captures = 0

    def create(self) -> int:
        """A new stream's handle."""
        handle = self.default_stream + len(self._busy_until_ns)
        self._busy_until_ns[handle] = 0
        return handle

    def is_captured(self, stream: int) -> bool:
        """Whether work on a stream is recorded and does not run."""
        return stream in self._captured_ns

    def ready_ns(self, stream: int) -> int:
        """When work that is queued now would start; since the capture's beginning on a stream that is captured."""
        if stream in self._captured_ns:
            return self._captured_ns[stream]
        return latest(self._clock.now_ns, self._busy(stream))

    def enqueue(self, stream: int, duration_ns: int, *, not_before_ns: int = 0) -> None:
        """Queue work that takes ``duration_ns`` once everything queued before it is done.

        Args:
            stream: Its handle.
            duration_ns: How long the work takes.
            not_before_ns: The earliest start, in the stream's time (:meth:`ready_ns`).
        """
        if self._captured_ns and stream in self._captured_ns:
            self._captured_ns[stream] = max(not_before_ns, self._captured_ns[stream]) + duration_ns
        else:
            start_ns = latest(self._clock.now_ns, self._busy(stream))
            if not_before_ns:
                start_ns = latest(not_before_ns, start_ns)
            self._busy_until_ns[stream] = start_ns + duration_ns

    def correct(self, stream: int, change_ns: int) -> None:
        """Work queued last turned out to take longer by ``change_ns``, or shorter if it is negative."""
        self._busy_until_ns[stream] = self._busy(stream) + change_ns

    def wait_event(self, stream: int, event: StreamEvent) -> None:
        """Let later work of ``stream`` start no earlier than the event completes.

        An event of a capture takes the stream into it, as far as the capture goes on.
        """
        if event.capture:
            if event.capture == self._capture:
                self._captured_ns[stream] = max(self._captured_ns.get(stream, 0), event.time_ns)
        elif stream not in self._captured_ns:  # what was recorded before a capture is done before its replay
            self._busy_until_ns[stream] = latest(self._busy(stream), event.time_ns)

    def record_event(self, stream: int) -> StreamEvent:
        """An event behind everything queued on ``stream`` now."""
        capture = self._capture if stream in self._captured_ns else 0
        return StreamEvent(stream, self.ready_ns(stream), capture)

    def query(self, event: StreamEvent) -> bool:
        """Whether the event has completed; one of a capture has, since nothing of it runs."""
        return bool(event.capture) or event.time_ns <= self._clock.now_ns

    def synchronize(self, event: StreamEvent) -> None:
        """The host waits until the event has completed."""
        if not event.capture:
            self._clock.wait_until(event.time_ns)

    def synchronize_stream(self, stream: int) -> None:
        """The host waits until a stream is idle."""
        self.synchronize(self.record_event(stream))

    def synchronize_device(self) -> None:
        """The host waits until every stream is idle."""
        for time_ns in self._busy_until_ns.values():
            self._clock.wait_until(time_ns)

    def delay(self, duration_ns: int) -> None:
        """All streams stand still for so long from now on, or from when their work would have been done."""
        for stream in self._busy_until_ns:
            self._busy_until_ns[stream] = max(self._clock.now_ns, self._busy(stream)) + duration_ns

    @property
    def idle_from_ns(self) -> int:
        """When everything queued so far is done."""
        return max(self._busy_until_ns.values())

    def occupy_until(self, stream: int, time_ns: int) -> None:
        """A stream is busy until then, at least."""
        self._busy_until_ns[stream] = max(self._busy(stream), time_ns)

    def take_moments(self) -> list[tuple[int, Moment]]:
        """Streams whose times are moments, which become numbers."""
        moments = [(stream, time) for stream, time in self._busy_until_ns.items() if isinstance(time, Moment)]
        for stream, moment in moments:
            self._busy_until_ns[stream] = int(moment)
        return moments

    def begin_capture(self, stream: int) -> None:
        """Work on ``stream`` is recorded from now on and does not run, as is that of streams that wait for it."""
        self._num_captures += 1
        self._capture = self._num_captures
        self._captured_ns = {stream: 0}

    def end_capture(self) -> int:
        """Nothing is recorded any more; returns how long the recorded work takes, in nanoseconds."""
        duration_ns = max(self._captured_ns.values(), default=0)
        self._captured_ns = {}
        self._capture = 0
        return duration_ns

    def _busy(self, stream: int) -> int:
        try:
            return self._busy_until_ns[stream]
        except KeyError:
            raise WorldError(f"the device has no stream {stream:#x}") from None
