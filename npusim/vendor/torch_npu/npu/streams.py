"""The double of ``torch_npu.npu.streams``: streams and events in virtual time."""

from __future__ import annotations

from typing import Self

import torch
from torch_npu.npu.devices import Device, runtime_of

from npusim.device.clock import NS_PER_MS
from npusim.device.streams import StreamEvent
from npusim.torch_backend.registration import platform
from npusim.torch_backend.runtime import DeviceRuntime
from npusim.torch_backend.stream_pool import DEFAULT_STREAM_ID
from npusim.torch_backend.vendor_errors import vendor_error

_DEVICE_TYPE: int = torch._C._autograd.DeviceType.PrivateUse1.value


class Stream(torch.Stream):
    """A work queue of a device: a new one, or the one with the given id.

    Args:
        device: Default: the current device.
        priority: Below 0 is high.
        stream_id: Id of an existing stream, with its device's index and type.
        device_index: Its device.
        device_type: torch's number of device type ``npu``; nothing else is possible.
    """

    def __new__(
        cls,
        device: Device = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
    ) -> Self:
        """Take a stream from the device's pool, or name one."""
        del device_type
        runtime = runtime_of(device if device_index is None else device_index)
        number = runtime.streams.take(priority) if stream_id is None else stream_id
        return super().__new__(cls, stream_id=number, device_index=runtime.card.index, device_type=_DEVICE_TYPE)

    @property
    def _runtime(self) -> DeviceRuntime:
        return platform().runtimes[self.device_index]

    @property
    def npu_stream(self) -> int:
        """The driver's handle."""
        return self._runtime.streams.handle_of(self.stream_id)

    @property
    def priority(self) -> int:
        """Not to be had.

        Raises:
            RuntimeError: Always, as in torch_npu.
        """
        raise vendor_error(
            RuntimeError, "NPU dose not support Stream.get_priority() currently.", "ERR00007 PTA feature not supported"
        )

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]  # torch_npu's own kind
        """Record an event behind everything queued now; a new one unless given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:  # type: ignore[override]  # torch_npu's own kind
        """Let later work wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]  # torch_npu's own kind
        """Let later work wait for everything queued on another stream."""
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        """Whether the stream is idle."""
        streams = self._runtime.card.streams
        return streams.query(streams.record_event(self.npu_stream))

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        self._runtime.card.streams.synchronize_stream(self.npu_stream)

    def __enter__(self) -> Self:
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.stream_id, self.device_index) == (
            other.stream_id,
            other.device_index,
        )

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch_npu.npu.Stream device={self.device} npu_stream={self.npu_stream:#x}>"


class Event(torch.Event):
    """A point in a stream's work.

    Args:
        enable_timing: Whether :meth:`elapsed_time` may be asked.
        blocking: Accepted as by torch_npu.
        interprocess: Accepted as by torch_npu.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Self:
        """As torch_npu makes it; nothing is recorded yet."""
        del blocking, interprocess
        event = super().__new__(cls, device="npu", enable_timing=enable_timing)
        event._has_timing = enable_timing
        event._recorded = None
        event._runtime = None
        return event

    _has_timing: bool
    _recorded: StreamEvent | None
    _runtime: DeviceRuntime | None

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]  # None before it is recorded
        """The device on whose stream it was recorded."""
        return None if self._runtime is None else self._runtime.torch_device

    def record(self, stream: Stream | None = None) -> None:  # type: ignore[override]  # torch_npu's own kind
        """Record behind everything queued on a stream, by default the current one.

        Raises:
            RuntimeError: It was recorded on another device before.
        """
        stream = current_stream() if stream is None else stream
        runtime = runtime_of(stream.device_index)
        if self._runtime not in (None, runtime):
            assert self._runtime is not None
            # torch_npu prints the numbers as characters, and the text ends before a zero.
            own, other = chr(self._runtime.card.index), chr(stream.device_index)
            text, *_ = f"Event device {own} does not match recording stream's device {other}.".split("\0")
            raise vendor_error(RuntimeError, text, "ERR00001 PTA invalid parameter")
        self._runtime = runtime
        self._recorded = runtime.card.streams.record_event(stream.npu_stream)

    def wait(self, stream: Stream | None = None) -> None:  # type: ignore[override]  # torch_npu's own kind
        """Let later work of a stream, by default the current one, wait for this event, if it was recorded."""
        stream = current_stream() if stream is None else stream
        if self._recorded is not None:
            runtime_of(stream.device_index).card.streams.wait_event(stream.npu_stream, self._recorded)

    def query(self) -> bool:
        """Whether it has completed; an event never recorded has."""
        return self._runtime is None or self._runtime.query(self._recorded)

    def synchronize(self) -> None:
        """Wait until it has completed."""
        if self._runtime is not None:
            self._runtime.synchronize(self._recorded)

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]  # torch_npu's own kind
        """Milliseconds of virtual time between this event and another one, after waiting for both.

        Raises:
            RuntimeError: One of them was not recorded, or was made without timing (that refusal is the driver's; its
                text is torch's, grade assumed).
        """
        if self._recorded is None or end_event._recorded is None:
            raise vendor_error(
                RuntimeError,
                "Both events must be recorded before calculating elapsed time.",
                "ERR00005 PTA internal error",
            )
        if not (self._has_timing and end_event._has_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        self.synchronize()
        end_event.synchronize()
        return (end_event._recorded.time_ns - self._recorded.time_ns) / NS_PER_MS

    def recorded_time(self) -> int:
        """Virtual time at which it completes, in microseconds.

        Raises:
            RuntimeError: It was not recorded.
        """
        if self._recorded is None:
            raise vendor_error(
                RuntimeError, "Event must be recorded before getting recorded timestamp.", "ERR00005 PTA internal error"
            )
        self.synchronize()
        return int(self._recorded.time_us)

    def __repr__(self) -> str:
        state = "uninitialized" if self._recorded is None else f"stream={self._recorded.stream:#x}"
        return f"<torch_npu.npu.Event {state}>"


def _existing(runtime: DeviceRuntime, stream_id: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=runtime.card.index)


def current_stream(device: Device = None) -> Stream:
    """The stream that operators are queued on."""
    runtime = runtime_of(device)
    return _existing(runtime, runtime.streams.id_of(runtime.current_stream()))


def default_stream(device: Device = None) -> Stream:
    """The stream that exists from the start."""
    return _existing(runtime_of(device), DEFAULT_STREAM_ID)


def set_stream(stream: Stream | None) -> None:
    """Queue operators on a stream from now on, and make its device the current one; None changes nothing."""
    if stream is not None:
        active = platform()
        active.set_device(stream.device_index)
        active.runtimes[stream.device_index].set_stream(stream.npu_stream)


class StreamContext:
    """Operators go to a stream, and its device is the current one, inside a ``with`` block; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._previous: tuple[Stream, Stream] | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._previous = current_stream(self.stream.device_index), current_stream()
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        for stream in self._previous or ():
            set_stream(stream)


def stream(stream: Stream | None) -> StreamContext:
    """Queue operators on a stream inside a ``with`` block."""
    return StreamContext(stream)
