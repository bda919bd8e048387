"""What a device did during a test, as a small file: allocator events, free memory at phases, versions, settings."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import npusim
from npusim.errors import RecordingError

FORMAT: Final = "npusim-recording-1"


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of a device at one moment, in bytes.

    Attributes:
        name: What has just happened.
        num_events: How many of the allocator's events had happened.
        free_bytes: Free on the whole device.
        total_bytes: Memory of the device.
        allocated_bytes: In blocks that tensors hold.
        reserved_bytes: Held by the caching allocator.
    """

    name: str
    num_events: int
    free_bytes: int
    total_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    @property
    def outside_bytes(self) -> int:
        """In use, but not by the caching allocator: contexts, communicators, kernels, other processes."""
        return self.total_bytes - self.free_bytes - self.reserved_bytes


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the allocator's record.

    Attributes:
        action: ``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``,
            ``segment_unmap`` or ``oom``.
        address: Where; for ``oom`` the device's free bytes.
        size: Bytes; of ``alloc`` and ``free_*`` those that were asked for.
        stream: Number of the stream, by first appearance.
        pool_id: Id of the private pool, or (0, 0).
    """

    action: str
    address: int
    size: int
    stream: int
    pool_id: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Recording:
    """One test on one device.

    Attributes:
        test: The test's node id.
        device: The device's name, e.g. ``Ascend910B3``.
        device_index: Its number.
        versions: Of torch, torch_npu, cann and npusim.
        environment: Variables that torch_npu and HCCL read, as far as they were set.
        phases: Oldest first; the first one before the first event.
        events: Oldest first.
    """

    test: str
    device: str
    device_index: int
    versions: dict[str, str]
    environment: dict[str, str]
    phases: tuple[Phase, ...]
    events: tuple[Event, ...]

    def content(self) -> bytes:
        """What the file holds, unpacked: a line of JSON about the test, and one for each event."""
        head = {"format": FORMAT, **asdict(self)}
        del head["events"]
        lines = [json.dumps(head), *(json.dumps(_row(event), separators=(",", ":")) for event in self.events)]
        return "\n".join(lines).encode()

    def write(self, path: Path) -> None:
        """Write the file; the same recording gives the same bytes.

        Raises:
            OSError: That is not possible.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(self.content(), mtime=0))


def read_recording(path: Path) -> Recording:
    """The recording in a file.

    Raises:
        RecordingError: It cannot be read, is none, is damaged, or is of another release's format.
    """
    import pydantic  # not where pytest loads the plugin

    try:
        first, *rows = gzip.decompress(path.read_bytes()).decode().split("\n")
        head = json.loads(first)
        if head["format"] != FORMAT:
            raise RecordingError(
                f"{path} is a recording in format {head['format']!r}; npusim {npusim.__version__} reads {FORMAT!r}. "
                "Use the npusim that wrote it, or record it again"
            )
        recording = pydantic.TypeAdapter(Recording).validate_python({**head, "events": [_fields(row) for row in rows]})
        _check(recording)
        return recording
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None
    except pydantic.ValidationError as error:
        first_error = error.errors()[0]
        place = ".".join(map(str, first_error["loc"]))
        raise RecordingError(f"{path} is no recording, or a damaged one: {place}: {first_error['msg']}") from None
    except (ValueError, KeyError, TypeError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path} is no recording, or a damaged one: {error!r}") from None


def recorded_events(entries: Sequence[Mapping[str, Any]]) -> list[Event]:
    """The allocator's record without what only looking at it leaves there, streams numbered."""
    streams: dict[int, int] = {}
    events = []
    skipped = 0
    for entry in entries:
        action = entry["action"]
        if action == "workspace_snapshot":
            skipped = 2  # the workspace's segment and block follow, as if they had been made now
        elif skipped:
            skipped -= 1
        elif action != "snapshot":
            address = entry["device_free"] if action == "oom" else entry["addr"]
            stream = streams.setdefault(entry["stream"], len(streams))
            events.append(Event(action, address, entry["size"], stream, tuple(entry.get("pool_id", (0, 0)))))
    return events


def _fields(row: str) -> dict[str, object]:
    action, address, size, stream, *pool_id = json.loads(row)
    return {"action": action, "address": address, "size": size, "stream": stream, "pool_id": pool_id or (0, 0)}


def _check(recording: Recording) -> None:
    """Raise ValueError for what no device does."""
    positions = [phase.num_events for phase in recording.phases]
    if not positions or positions[0] != 0 or positions != sorted(positions) or positions[-1] > len(recording.events):
        raise ValueError(f"phases after {positions} of {len(recording.events)} events")
    for event in recording.events:
        if min(event.address, event.size, event.stream) < 0:
            raise ValueError(f"a negative number in {event}")
    for name in ("torch_npu", "cann"):
        if name not in recording.versions:
            raise ValueError(f"no version of {name}")


def _row(event: Event) -> list[str | int]:
    row: list[str | int] = [event.action, event.address, event.size, event.stream]
    return row if event.pool_id == (0, 0) else [*row, *event.pool_id]
