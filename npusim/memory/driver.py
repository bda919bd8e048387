"""What the allocator needs from the device's streams, and a stand-in for tests."""

from __future__ import annotations

from typing import Protocol, cast


class StreamDriver(Protocol):
    """Streams as the allocator sees them: plain integers, compared as such, and events recorded on them.

    An event is any object; the allocator only hands it back.
    """

    def record_event(self, stream: int) -> object:
        """Record an event after everything that is queued on ``stream`` now."""
        ...

    def query(self, event: object) -> bool:
        """Whether the event has completed, without waiting."""
        ...

    def synchronize(self, event: object) -> None:
        """Wait until the event has completed."""
        ...

    def synchronize_device(self) -> None:
        """Wait until every stream of the device is idle."""
        ...

    def current_stream(self) -> int:
        """The calling thread's current stream."""
        ...

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream is being captured; asked only while a capture is marked on the allocator."""
        ...


class ManualStreamDriver:
    """Streams without work on them: an event completes at once, or, while :attr:`held`, when told to.

    Attributes:
        held: While true, events stay incomplete until :meth:`complete` or a wait.
        stream: The current stream.
        capturing: What :meth:`is_current_stream_capturing` answers.
    """

    def __init__(self, *, held: bool = False) -> None:
        self.held = held
        self.stream = 0
        self.capturing = False
        self.num_device_syncs = 0
        self._recorded: dict[int, int] = {}
        self._completed: dict[int, int] = {}

    def record_event(self, stream: int) -> tuple[int, int]:
        """See :meth:`StreamDriver.record_event`."""
        self._recorded[stream] = self._recorded.get(stream, 0) + 1
        return stream, self._recorded[stream]

    def query(self, event: object) -> bool:
        """See :meth:`StreamDriver.query`."""
        stream, ordinal = cast("tuple[int, int]", event)
        return not self.held or ordinal <= self._completed.get(stream, 0)

    def synchronize(self, event: object) -> None:
        """See :meth:`StreamDriver.synchronize`."""
        stream, ordinal = cast("tuple[int, int]", event)
        self._completed[stream] = max(ordinal, self._completed.get(stream, 0))

    def synchronize_device(self) -> None:
        """See :meth:`StreamDriver.synchronize_device`."""
        self.num_device_syncs += 1
        self._completed = dict(self._recorded)

    def complete(self, stream: int) -> None:
        """Complete everything recorded on one stream so far."""
        self._completed[stream] = self._recorded.get(stream, 0)

    def current_stream(self) -> int:
        """See :meth:`StreamDriver.current_stream`."""
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        """See :meth:`StreamDriver.is_current_stream_capturing`."""
        return self.capturing
