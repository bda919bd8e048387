"""Runs a recording through the model of the allocator and compares, event by event and phase by phase."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

from npusim.device.event_log import EventLog
from npusim.device.faults import OtherProcess
from npusim.device.hbm import Hbm
from npusim.device.ledger import Ledger
from npusim.errors import RecordingError
from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.config import AllocatorConfig
from npusim.memory.driver import ManualStreamDriver
from npusim.memory.history import TraceEntry
from npusim.memory.out_of_memory import OutOfMemoryError
from npusim.memory.pools import NO_POOL
from npusim.memory.rounding import pad_bytes
from npusim.memory.versions import VERSIONS
from npusim.testing.recording import Event, Phase, Recording

REQUESTS: Final = ("alloc", "free_requested", "oom")
FIRST_BUSY_STREAM: Final = 1_000_000
"""Stand for whichever streams kept a freed block in use; the record of events does not name them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the model first did something else.

    Attributes:
        position: Index of the event.
        phase: The phase before it.
        recorded: What the device did, or nothing.
        modelled: What the model did, or nothing.
    """

    position: int
    phase: str
    recorded: str
    modelled: str


@dataclass(slots=True)
class ReplayedPhase:
    """A phase and the model's figures for it, in bytes."""

    recorded: Phase
    allocated_bytes: int
    reserved_bytes: int


@dataclass(slots=True)
class Result:
    """What came of a replay; :attr:`difference` is None if the model did the same throughout."""

    num_events: int
    difference: Difference | None = None
    phases: list[ReplayedPhase] = field(default_factory=list)


def replay(recording: Recording) -> Result:
    """Do on the model what the recording shows; stops at the first difference.

    Raises:
        RecordingError: The recording's release of torch_npu or one of its settings is not modelled.
    """
    return _Replay(recording).run()


@dataclass(slots=True)
class _Segment:
    recorded: int
    modelled: int
    length: int
    held: int


class _Addresses:
    """Which of the model's segments stands for which of the device's."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: dict[int, _Segment] = {}

    def add(self, recorded: int, modelled: int, size: int) -> bool:
        """A segment was made, or one grew at its end; False if that was not so for both."""
        segment = self._segment_of(recorded)
        if segment is not None and recorded <= segment.recorded + segment.length:
            grows = modelled - recorded == segment.modelled - segment.recorded
            if grows:
                segment.length = max(segment.length, recorded + size - segment.recorded)
                segment.held += size
            if grows or recorded < segment.recorded + segment.length:
                return grows
        self._starts.insert(bisect_right(self._starts, recorded), recorded)
        self._segments[recorded] = _Segment(recorded, modelled, size, size)
        return True

    def remove(self, recorded: int, size: int) -> None:
        """A segment, or a part of it, went back to the device."""
        segment = self._segment_of(recorded)
        if segment is not None:
            segment.held -= size
            if segment.held <= 0:
                self._starts.remove(segment.recorded)
                del self._segments[segment.recorded]

    def agree(self, recorded: int, modelled: int) -> bool:
        """Whether two addresses are the same place in corresponding segments."""
        segment = self._segment_of(recorded)
        return segment is not None and modelled - recorded == segment.modelled - segment.recorded

    def _segment_of(self, recorded: int) -> _Segment | None:
        index = bisect_right(self._starts, recorded)
        return self._segments[self._starts[index - 1]] if index else None


class _Replay:
    def __init__(self, recording: Recording) -> None:
        if not recording.phases:
            raise RecordingError(f"the recording of {recording.test} has no phases")
        release = ".".join(recording.versions["torch_npu"].split(".")[:2])
        if release not in VERSIONS:
            raise RecordingError(f"torch_npu {release} is not modelled; there are {', '.join(VERSIONS)}")
        self.recording = recording
        self.first = recording.phases[0]
        ledger = Ledger(self.first.total_bytes)
        self.hbm = Hbm(ledger, EventLog())
        self.outside = OtherProcess(ledger, "outside the allocator", self.first.outside_bytes)
        self.driver = ManualStreamDriver(held=True)
        self.pad_bytes = pad_bytes(recording.device, recording.versions["cann"])
        self.allocator = CachingAllocator(
            self.hbm,
            self.driver,
            _settings(recording, release),
            version=release,
            pad_bytes=self.pad_bytes,
        )
        self.allocator.record_memory_history("all", None)
        self.addresses = _Addresses()
        self.blocks: dict[int, int] = {}
        self.busy_streams: dict[int, int] = {}
        self.num_busy = 0
        self.pools: set[tuple[int, int]] = set()

    def run(self) -> Result:
        events = self.recording.events
        result = Result(len(events))
        phases = list(self.recording.phases)
        position = 0
        while True:
            while phases and phases[0].num_events <= position and result.difference is None:
                result.phases.append(self._meet(phases.pop(0)))
                result.difference = _phase_difference(result.phases[-1], position)
            if position == len(events) or result.difference is not None:
                return result
            end = _end_of_step(events, position, phases[0].num_events if phases else len(events))
            self._do(events[position:end])
            result.difference = self._compare(events[position:end], position, result.phases)
            if result.difference is not None:
                return result
            position = end

    def _meet(self, phase: Phase) -> ReplayedPhase:
        """The model's figures; then what others hold becomes what it was on the device."""
        met = ReplayedPhase(phase, self.allocator.memory_allocated, self.allocator.memory_reserved)
        self.outside.resize(max(0, min(phase.outside_bytes, self.outside.num_bytes + self.hbm.mem_get_info()[0])))
        return met

    def _do(self, step: Sequence[Event]) -> None:
        request = next((event for event in step if event.action in REQUESTS), None)
        for event in step:
            if event.action == "free_completed" and event.address in self.busy_streams:
                self.driver.complete(self.busy_streams.pop(event.address))
        if self._cache_was_emptied(step):
            for event in step:
                if event.action == "segment_free" and event.pool_id in self.pools:
                    self.pools.remove(event.pool_id)
                    self.allocator.release_pool(event.pool_id)
            self.allocator.empty_cache()
        if request is not None and request.action == "free_requested":
            self._free(request, completed=step[-1].action == "free_completed")
        elif request is not None:
            self._malloc(request)

    def _cache_was_emptied(self, step: Sequence[Event]) -> bool:
        """Segments went back because the program said so, and not because a request found the device full."""
        if not any(event.action in ("segment_free", "segment_unmap") for event in step):
            return False
        wanted_bytes = sum(event.size for event in step if event.action in ("segment_alloc", "segment_map"))
        failed = any(event.action == "oom" for event in step)
        return not failed and wanted_bytes <= self.hbm.mem_get_info()[0]

    def _malloc(self, request: Event) -> None:
        pool_id, allocator = request.pool_id, self.allocator
        num_bytes = request.size - self.pad_bytes if request.action == "oom" else request.size
        if pool_id != NO_POOL:
            if pool_id not in self.pools:
                self.pools.add(pool_id)
                allocator.create_pool(pool_id)
            allocator.begin_allocate_to_pool(pool_id)
        try:
            self.blocks[request.address] = allocator.malloc(num_bytes, request.stream)
        except OutOfMemoryError:
            pass  # the record of events shows it
        finally:
            if pool_id != NO_POOL:
                allocator.end_allocate_to_pool(pool_id)
                allocator.release_pool(pool_id)

    def _free(self, request: Event, *, completed: bool) -> None:
        if request.address not in self.blocks:
            raise RecordingError(
                f"{self.recording.test}: a block at {request.address:#x} is freed, but was not allocated"
            )
        address = self.blocks.pop(request.address)
        if not completed:
            self.busy_streams[request.address] = FIRST_BUSY_STREAM + self.num_busy
            self.num_busy += 1
            self.allocator.record_stream(address, self.busy_streams[request.address])
        self.allocator.free(address)

    def _compare(self, step: Sequence[Event], position: int, phases: Sequence[ReplayedPhase]) -> Difference | None:
        modelled = [entry for entry in self.allocator.history.entries if entry.action != "snapshot"]
        self.allocator.history.entries.clear()
        for number, (event, entry) in enumerate(zip_longest(step, modelled)):
            if event is None or entry is None or not self._same(event, entry):
                shown = "" if event is None else _shown(event)
                found = "" if entry is None else _shown(Event(entry.action, entry.address, entry.size, entry.stream))
                return Difference(position + number, phases[-1].recorded.name, shown, found)
        return None

    def _same(self, event: Event, entry: TraceEntry) -> bool:
        if (event.action, event.size, event.stream) != (entry.action, entry.size, entry.stream):
            return False
        if event.action == "oom":
            return True  # its address is the device's free memory, which is compared at phases
        if event.action in ("segment_alloc", "segment_map"):
            return self.addresses.add(event.address, entry.address, event.size)
        agreed = self.addresses.agree(event.address, entry.address)
        if event.action in ("segment_free", "segment_unmap"):
            self.addresses.remove(event.address, event.size)
        return agreed


def _settings(recording: Recording, release: str) -> AllocatorConfig:
    try:
        return AllocatorConfig.from_environment(recording.environment, release)
    except ValueError as error:  # the vendor's own
        raise RecordingError(f"{recording.test}: its allocator settings are refused: {error}") from None


def _phase_difference(phase: ReplayedPhase, position: int) -> Difference | None:
    recorded = f"{phase.recorded.allocated_bytes} bytes allocated, {phase.recorded.reserved_bytes} reserved"
    modelled = f"{phase.allocated_bytes} bytes allocated, {phase.reserved_bytes} reserved"
    return None if recorded == modelled else Difference(position, phase.recorded.name, recorded, modelled)


def _end_of_step(events: Sequence[Event], position: int, limit: int) -> int:
    """A step is one call of the program: what comes before a request, the request, and the end of a free."""
    for index in range(position, limit):
        event = events[index]
        if event.action in REQUESTS:
            after = events[index + 1] if index + 1 < len(events) else event
            completes = event.action == "free_requested" and after.action == "free_completed"
            return index + 2 if completes and after.address == event.address else index + 1
    return limit


def _shown(event: Event) -> str:
    pool = "" if event.pool_id == NO_POOL else f", pool {event.pool_id}"
    return f"{event.action} of {event.size} bytes at {event.address:#x} on stream {event.stream}{pool}"


def report(recording: Recording, result: Result) -> str:
    """The replay in words: a table of the phases, and the first difference with what led to it."""
    title = f"{recording.test} on {recording.device}, torch_npu {recording.versions['torch_npu']}"
    width = max(len(phase.recorded.name) for phase in result.phases)
    lines = [
        title,
        f"{'phase':<{width}} {'events':>8} {'free':>14} {'outside':>14} {'reserved':>14} {'allocated':>14}  model",
    ]
    for phase in result.phases:
        seen = phase.recorded
        same = (phase.reserved_bytes, phase.allocated_bytes) == (seen.reserved_bytes, seen.allocated_bytes)
        verdict = "same" if same else f"{phase.reserved_bytes} reserved, {phase.allocated_bytes} allocated"
        lines.append(
            f"{seen.name:<{width}} {seen.num_events:>8} {seen.free_bytes:>14} {seen.outside_bytes:>14} "
            f"{seen.reserved_bytes:>14} {seen.allocated_bytes:>14}  {verdict}"
        )
    difference = result.difference
    if difference is None:
        return "\n".join([*lines, f"No difference in {result.num_events} events and {len(result.phases)} phases."])
    lines.append(f"First difference at event {difference.position} of {result.num_events}, after {difference.phase!r}:")
    before = recording.events[max(0, difference.position - 3) : difference.position]
    lines += [f"  before    {_shown(event)}" for event in before]
    lines += [f"  recorded  {difference.recorded or 'nothing'}", f"  model     {difference.modelled or 'nothing'}"]
    return "\n".join(lines)
