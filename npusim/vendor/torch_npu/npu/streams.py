"""The double of ``torch_npu.npu.streams``: streams and events in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from npusim.device.streams import StreamEvent
from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import DeviceRuntime, device_index

Device = torch.device | int | str | None


def _runtime(device: Device) -> DeviceRuntime:
    active = platform()
    return active.runtimes[device_index(active, device)]


class Stream:
    """A work queue of a device.

    Args:
        device: Default: the current device.
        priority: Accepted as by torch_npu; the simulated device has one priority.
        handle: An existing stream; default: a new one.
    """

    def __init__(self, device: Device = None, priority: int = 0, *, handle: int | None = None) -> None:
        self._runtime = _runtime(device)
        self.priority = priority
        self.npu_stream = self._runtime.card.streams.create() if handle is None else handle

    @property
    def stream_id(self) -> int:
        """The stream's number."""
        return self.npu_stream

    @property
    def device(self) -> torch.device:
        """The stream's device."""
        return self._runtime.torch_device

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event behind everything queued now; a new one unless given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let later work wait for an event."""
        if event.recorded is not None:
            self._runtime.card.streams.wait_event(self.npu_stream, event.recorded)

    def wait_stream(self, other: Stream) -> None:
        """Let later work wait for everything queued on another stream."""
        self.wait_event(other.record_event())

    def query(self) -> bool:
        """Whether the stream is idle."""
        streams = self._runtime.card.streams
        return streams.query(streams.record_event(self.npu_stream))

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        self._runtime.card.streams.synchronize_stream(self.npu_stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.npu_stream, self.device) == (other.npu_stream, other.device)

    def __hash__(self) -> int:
        return hash((self.npu_stream, self.device.index))

    def __repr__(self) -> str:
        return f"<torch_npu.npu.Stream device={self.device} npu_stream={self.npu_stream:#x}>"


class Event:
    """A point in a stream's work.

    Args:
        enable_timing: Whether :meth:`elapsed_time` may be asked.
        blocking: Accepted as by torch_npu.
        interprocess: Accepted as by torch_npu.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        del blocking, interprocess
        self.enable_timing = enable_timing
        self.recorded: StreamEvent | None = None
        self._runtime: DeviceRuntime | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record behind everything queued on a stream, by default the current one."""
        stream = current_stream() if stream is None else stream
        self._runtime = _runtime(stream.device)
        self.recorded = self._runtime.card.streams.record_event(stream.npu_stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of a stream, by default the current one, wait for this event."""
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Whether it has completed; an event never recorded has."""
        return self._runtime is None or self._runtime.query(self.recorded)

    def synchronize(self) -> None:
        """Wait until it has completed."""
        if self._runtime is not None:
            self._runtime.synchronize(self.recorded)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of virtual time between this event and a later one.

        Raises:
            RuntimeError: One of them was not recorded, or was made without timing.
        """
        if self.recorded is None or end.recorded is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        self.synchronize()
        end.synchronize()
        return (end.recorded.time_us - self.recorded.time_us) / 1000


def current_stream(device: Device = None) -> Stream:
    """The stream that operators are queued on."""
    return Stream(device, handle=_runtime(device).current_stream())


def default_stream(device: Device = None) -> Stream:
    """The stream that exists from the start."""
    return Stream(device, handle=_runtime(device).card.default_stream)


def set_stream(stream: Stream | None) -> None:
    """Queue operators on a stream from now on; None changes nothing."""
    if stream is not None:
        _runtime(stream.device).set_stream(stream.npu_stream)


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Queue operators on a stream inside the context."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
