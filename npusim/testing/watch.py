"""What is noted about a test on the device while it runs, and what it must keep to."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from npusim.testing.choice import DIGEST_LENGTH, Choice
from npusim.testing.marks import MemoryLimit
from npusim.testing.memory import NpuMemory, call_sites, living_blocks, mib, peak_position, table

if TYPE_CHECKING:
    from npusim.testing.recorder import Recorder
    from npusim.world import SimWorld


class Watch:
    """One test on the device.

    Args:
        choice: The session's choice.
        world: The simulated world; None on a card.

    Attributes:
        recorder: Records the test, if the session records.
        memory: The test's memory, if it asks for that.
        limit: Its marker ``npu_memory_limit``.
        leaks_nothing: Whether it has the marker ``npu_leaks_nothing``.
    """

    def __init__(self, choice: Choice, world: SimWorld | None) -> None:
        self._choice = choice
        self._world = world
        self.memory: NpuMemory | None = None
        self.recorder: Recorder | None = None
        self.limit: MemoryLimit | None = None
        self.leaks_nothing = False
        self._before: list[tuple[int, int]] = []

    def before_call(self) -> None:
        """The test's function is about to be called."""
        if self.recorder is not None:
            self.recorder.memory.phase("set up")
        if self.memory is not None and self.leaks_nothing:
            gc.collect()
            self._before = [(memory.allocated_bytes, len(memory.events())) for memory in self.memory.on_all()]

    def properties(self) -> list[tuple[str, object]]:
        """What JUnit and the terminal show of the test."""
        shown: list[tuple[str, object]] = [("npusim_device", self._choice.device)]
        if self._world is not None:
            shown.append(("npusim_profile", self._world.profile.name))
            shown.append(("npusim_event_log", self._world.event_log.digest))
        if self.memory is not None:
            memories = self.memory.on_all()
            shown += [
                (f"npusim_peak_{of}_bytes", max(memory.growth_bytes(of) for memory in memories))
                for of in ("allocated", "reserved")
            ]
        return shown

    def replay_hint(self, nodeid: str) -> str:
        """How to do the same again; empty on a card."""
        if self._world is None:
            return ""
        log = self._world.event_log
        token = self._choice.token(log.digest)
        return f"pytest '{nodeid}' --npusim-replay={token}  # event log of {log.num_events} events"

    def complaints(self, root: Path) -> Iterator[str]:
        """What the test, which passed, did not keep to; files below ``root`` are named relative to it."""
        if self.memory is not None and self.leaks_nothing:
            yield from self._leaks(self.memory, root)
        if self.memory is not None and self.limit is not None:
            yield from self._excesses(self.memory, self.limit, root)
        expected = self._choice.replayed_digest
        if self._world is not None and expected:
            digest = self._world.event_log.digest
            if not digest.startswith(expected):
                yield (
                    f"--npusim-replay: the event log is {digest[:DIGEST_LENGTH]}; in the run to be replayed it was "
                    f"{expected[:DIGEST_LENGTH]}"
                )

    def _leaks(self, memory: NpuMemory, root: Path) -> Iterator[str]:
        gc.collect()
        for device, (held_bytes, num_events) in zip(memory.on_all(), self._before, strict=True):
            leaked_bytes = device.allocated_bytes - held_bytes
            if leaked_bytes > 0:
                yield (
                    f"npu_leaks_nothing: {mib(leaked_bytes)} more allocated on npu:{device.device_index} after the "
                    "test than before it. Allocated in the test and not freed:\n"
                    + table(call_sites(living_blocks(device.events()[num_events:]), root))
                )

    def _excesses(self, memory: NpuMemory, limit: MemoryLimit, root: Path) -> Iterator[str]:
        for device in memory.on_all():
            growth_bytes = device.growth_bytes(limit.of)
            if growth_bytes > limit.num_bytes:
                events = device.events()
                blocks = living_blocks(events[: peak_position(events, limit.of)])
                yield (
                    f"npu_memory_limit: the test's peak on npu:{device.device_index} is {mib(growth_bytes)} "
                    f"{limit.of}, {mib(limit.num_bytes)} are allowed ({mib(growth_bytes - limit.num_bytes)} too much). "
                    "Largest allocations at that moment:\n" + table(call_sites(blocks, root))
                )
