"""Streams and events of one device, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from npusim.errors import WorldError


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A point in a stream's work: complete once virtual time has reached it."""

    stream: int
    time_us: float


class Streams:
    """Work queues of a device: each is known by a handle, its work completes in order.

    Args:
        clock: Virtual time in microseconds, shared by all devices of a world.
        first_handle: Handle of the default stream; further ones follow it.
    """

    def __init__(self, clock: simpy.Environment, *, first_handle: int = 1) -> None:
        self._clock = clock
        self.default_stream = first_handle
        self._busy_until_us: dict[int, float] = {first_handle: 0.0}

    def create(self) -> int:
        """A new stream's handle."""
        handle = self.default_stream + len(self._busy_until_us)
        self._busy_until_us[handle] = 0.0
        return handle

    def enqueue(self, stream: int, duration_us: float) -> None:
        """Queue work that takes ``duration_us`` once everything queued before it is done."""
        self._busy_until_us[stream] = max(self._clock.now, self._busy(stream)) + duration_us

    def wait_event(self, stream: int, event: StreamEvent) -> None:
        """Let later work of ``stream`` start no earlier than the event completes."""
        self._busy_until_us[stream] = max(self._busy(stream), event.time_us)

    def record_event(self, stream: int) -> StreamEvent:
        """An event behind everything queued on ``stream`` now."""
        return StreamEvent(stream, max(self._clock.now, self._busy(stream)))

    def query(self, event: StreamEvent) -> bool:
        """Whether the event has completed."""
        return event.time_us <= self._clock.now

    def synchronize(self, event: StreamEvent) -> None:
        """Let virtual time pass until the event has completed."""
        if event.time_us > self._clock.now:
            self._clock.run(until=event.time_us)

    def synchronize_stream(self, stream: int) -> None:
        """Let virtual time pass until a stream is idle."""
        self.synchronize(self.record_event(stream))

    def synchronize_device(self) -> None:
        """Let virtual time pass until every stream is idle."""
        for stream in self._busy_until_us:
            self.synchronize_stream(stream)

    def _busy(self, stream: int) -> float:
        try:
            return self._busy_until_us[stream]
        except KeyError:
            raise WorldError(f"the device has no stream {stream:#x}") from None
