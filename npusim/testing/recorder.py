"""Makes recordings of a test, on the simulated device or on a card."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_npu import npu

import npusim
from npusim.testing.choice import version_of
from npusim.testing.memory import NpuMemory
from npusim.testing.recording import Event, Recording, recorded_events

if TYPE_CHECKING:
    from npusim.world import SimWorld

SETTINGS = re.compile("HCCL_|PYTORCH_(NPU_)?ALLOC|TASK_QUEUE_|ASCEND_LAUNCH_|ASCEND_RT_VISIBLE_|MULTI_STREAM_")


class Recorder:
    """Records one test, on all devices.

    Args:
        memory: Has been watching since the test began.
        world: The simulated world; None on a card.
        environment: The variables that vendor software reads.
    """

    def __init__(self, memory: NpuMemory, world: SimWorld | None, environment: Mapping[str, str]) -> None:
        self.memory = memory
        self._world = world
        self._environment = {name: value for name, value in sorted(environment.items()) if SETTINGS.match(name)}
        self._num_allocations = [_num_allocations(index) for index in range(len(memory.on_all()))]
        memory.phase("start")

    def write(self, folder: Path, test: str) -> str:
        """Write a file for each device that did anything; returns why that was not possible, or nothing.

        A record of events that began with memory in use, or was switched by the test itself, cannot be replayed.
        """
        self.memory.phase("end")
        for device, before in zip(self.memory.on_all(), self._num_allocations, strict=True):
            first = device.phases[0]
            if first.reserved_bytes:
                return f"{first.reserved_bytes} bytes were reserved on npu:{device.device_index} before the test"
            events = recorded_events(device.events())
            num_allocations = sum(event.action == "alloc" for event in events)
            if num_allocations != _num_allocations(device.device_index) - before:
                return "the test switched the allocator's record or its statistics"
            if events or device.device_index == 0:
                try:
                    self._recording(device, events, test).write(folder / _file_name(test, device.device_index))
                except OSError as error:
                    return f"cannot write to {folder}: {error.strerror}"
        return ""

    def _recording(self, device: NpuMemory, events: Sequence[Event], test: str) -> Recording:
        return Recording(
            test=test,
            device=npu.get_device_name(device.device_index),
            device_index=device.device_index,
            versions={
                "npusim": npusim.__version__,
                "torch": version_of("torch"),
                "torch_npu": version_of("torch_npu"),
                "cann": _cann_version(self._world),
            },
            environment=self._environment,
            phases=tuple(device.phases),
            events=tuple(events),
        )


def _num_allocations(device_index: int) -> int:
    return int(npu.memory_stats(device_index).get("allocation.all.allocated", 0))


def _cann_version(world: SimWorld | None) -> str:
    if world is not None:
        return world.profile.cann_version.value
    from torch_npu.npu.utils import get_cann_version

    return str(get_cann_version())


def _file_name(test: str, device_index: int) -> str:
    stem = re.sub(r"[^\w.-]+", "-", test).strip("-")[:100]
    tag = hashlib.sha256(test.encode()).hexdigest()[:6]  # names that are alike or long stay apart
    return f"{stem}-{tag}.npu{device_index}.json.gz"
