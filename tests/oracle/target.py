"""What a program can do to an allocator, and how what it did is written down: the same for model and original."""

from __future__ import annotations

import json
import re
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

ERRORS = (RuntimeError, ValueError, TypeError)
PLACE_IN_SOURCE = re.compile(r' at "[^"]*":\d+|\w+:\.\./torch_npu/\S+:\d+ ')
SKIPPED = "skipped"
"""Result of an operation whose object is not there, as when shrinking left out what makes it."""


@dataclass(frozen=True)
class Program:
    """A device, settings, and what to do with them.

    Attributes:
        operations: Method names of :class:`Target` with arguments.
        conf: ``PYTORCH_NPU_ALLOC_CONF``.
        soc: Name of the chip.
        total_bytes: Memory of the device.
        full: Write down whole snapshots instead of their checksums.
        caching: Tensors come from the caching allocator, not straight from the driver.
    """

    operations: list[list[Any]]
    conf: str = ""
    soc: str = "Ascend910B3"
    total_bytes: int = 1 << 30
    full: bool = False
    caching: bool = True

    def to_json(self) -> str:
        """One line."""
        return json.dumps(vars(self))


@dataclass
class Record:
    """What one operation did.

    Attributes:
        result: An address, an error's class and text, or whatever the call returns.
        stats: ``memory_stats()`` after it.
        calls: The device calls that it made.
        segments: The snapshot after it, or its checksum.
    """

    result: Any
    stats: dict[str, int]
    calls: list[list[Any]]
    segments: Any


@dataclass
class Recording:
    """What a program did.

    Attributes:
        error: Why the settings were refused, or what broke the allocator.
        steps: One record for each operation.
        history: The allocator's own record of events.
        summary: ``memory_summary()`` at the end.
    """

    error: str = ""
    steps: list[Record] = field(default_factory=list)
    history: list[list[Any]] = field(default_factory=list)
    summary: str = ""

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """The reverse of :meth:`to_json`."""
        values = json.loads(text)
        return cls(**values | {"steps": [Record(**step) for step in values["steps"]]})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(vars(self) | {"steps": [vars(step) for step in self.steps]})


class Target(ABC):
    """An allocator that programs run on. Streams are numbers in order of creation, 0 the default stream."""

    # Operations

    @abstractmethod
    def allocate(self, key: int, num_bytes: int) -> Any:
        """Allocate on the current stream."""

    @abstractmethod
    def allocate_on(self, key: int, num_bytes: int, stream: int) -> Any:
        """Allocate on a stream, without a tensor."""

    @abstractmethod
    def free(self, key: int) -> Any: ...

    @abstractmethod
    def record_stream(self, key: int, stream: int) -> Any: ...

    @abstractmethod
    def erase_stream(self, key: int, stream: int) -> Any: ...

    @abstractmethod
    def set_stream(self, stream: int) -> Any: ...

    @abstractmethod
    def hold_events(self, held: bool) -> Any:
        """From now on events complete only when told to, or waited for."""

    @abstractmethod
    def complete(self, stream: int) -> Any:
        """Complete the events of a stream."""

    @abstractmethod
    def empty_cache(self) -> Any: ...

    @abstractmethod
    def empty_virt_addr_cache(self) -> Any: ...

    @abstractmethod
    def reset_peaks(self) -> Any: ...

    @abstractmethod
    def reset_accumulated(self) -> Any: ...

    @abstractmethod
    def set_fraction(self, fraction: float) -> Any: ...

    @abstractmethod
    def get_fraction(self) -> Any: ...

    @abstractmethod
    def mem_get_info(self) -> Any: ...

    @abstractmethod
    def change_settings(self, text: str) -> Any: ...

    @abstractmethod
    def fail_next(self, num_skipped: int) -> Any:
        """Let the device refuse an allocation to come."""

    @abstractmethod
    def resize_others(self, num_bytes: int) -> Any:
        """Let other processes hold so much, if there is room for it."""

    @abstractmethod
    def create_pool(self, name: str, use_on_oom: bool, no_split: bool) -> Any: ...

    @abstractmethod
    def begin_pool(self, name: str) -> Any:
        """Allocate from a pool from now on."""

    @abstractmethod
    def end_pool(self, name: str) -> Any: ...

    @abstractmethod
    def destroy_pool(self, name: str) -> Any: ...

    @abstractmethod
    def begin_capture(self, name: str, pool: str) -> Any:
        """Capture the current stream into a graph, in its own pool or in that of another graph."""

    @abstractmethod
    def end_capture(self, name: str) -> Any: ...

    @abstractmethod
    def reset_graph(self, name: str) -> Any: ...

    # Pictures

    @abstractmethod
    def stats(self) -> dict[str, int]: ...

    @abstractmethod
    def take_calls(self) -> list[list[Any]]:
        """The device calls since the last time."""

    @abstractmethod
    def segments(self) -> list[dict[str, Any]]:
        """The snapshot, with this class's numbers for streams."""

    @abstractmethod
    def history(self) -> list[list[Any]]: ...

    @abstractmethod
    def summary(self) -> str: ...

    def run(self, program: Program) -> Recording:
        """Carry out a program."""
        recording = Recording()
        for name, *arguments in program.operations:
            try:
                result = getattr(self, name)(*arguments)
            except ERRORS as error:
                result = described(error)
            except Exception as error:  # noqa: BLE001 - what else goes wrong in the model is a finding
                recording.error = described(error)
                return recording
            segments = self.segments()
            recording.steps.append(
                Record(result, self.stats(), self.take_calls(), segments if program.full else checksum(segments))
            )
        recording.history = self.history()
        recording.summary = self.summary()
        return recording


def described(error: Exception) -> str:
    """Class and text, without the vendor's error code, which has the time in it, and without line numbers."""
    text = str(error).split("\n[ERROR]")[0]
    return f"{type(error).__name__}: {PLACE_IN_SOURCE.sub('', text)}"


def checksum(segments: list[dict[str, Any]]) -> int:
    """Two snapshots with one checksum are the same."""
    return zlib.crc32(json.dumps(segments, sort_keys=True).encode())
