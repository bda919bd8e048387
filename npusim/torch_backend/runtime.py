"""One process' side of one device: its allocator, workspaces, current stream, communicators and random state."""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from npusim.device.streams import StreamEvent
from npusim.hccl.communicator import Communicator, HcclRuntime, HcclSettings
from npusim.memory.caching_allocator import CachingAllocator
from npusim.memory.rounding import pad_bytes
from npusim.memory.uncached import UncachedMemory
from npusim.memory.workspace import WorkspaceAllocator
from npusim.torch_backend.stream_pool import StreamPool
from npusim.torch_backend.task_groups import TaskGroups
from npusim.torch_backend.vendor_errors import vendor_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.device.card import Card
    from npusim.device.clock import Clock
    from npusim.hccl.ranks import Arrival, Ranks
    from npusim.memory.config import AllocatorConfig
    from npusim.torch_backend.sleep_mode import SleepModeMemory
    from npusim.torch_backend.storage import StorageTable
    from npusim.torch_backend.values import Values


class Platform(Protocol):
    """What the backend needs of a world."""

    @property
    def runtimes(self) -> Sequence[DeviceRuntime]:
        """One per device, by index."""

    @property
    def storages(self) -> StorageTable:
        """All live storages."""

    @property
    def sleep_mode(self) -> SleepModeMemory:
        """What vllm-ascend's compiled extension keeps."""

    @property
    def values(self) -> Values:
        """How numbers behind tensors are kept."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of this process."""

    @property
    def clock(self) -> Clock:
        """Virtual time."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that vendor software reads."""

    @property
    def xlite_version(self) -> str:
        """The release of xlite that is imitated."""

    def current_device(self) -> int:
        """Index of the calling rank's current device."""

    def set_device(self, index: int) -> None:
        """Make a device the calling rank's current one."""

    def hccl_communicator(self, name: str) -> Communicator:
        """The calling rank's communicator of this name."""


class RankGroup(Protocol):
    """Ranks whose collectives a graph may have captured."""

    def arrive(self, operation: str, arrival: Arrival) -> None:
        """Wait for the group's other ranks, as :meth:`npusim.hccl.ranks.Ranks.arrive`."""


class RandomState:
    """A device's default generator: counter-based, so a draw depends on seed and offset only.

    Grade of the numbers: assumed (the device's Philox stream is not reproduced; the distribution is).
    """

    def __init__(self, seed: int) -> None:
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Start over from ``seed``, of which 64 bits count."""
        self.seed, self.offset = seed % (1 << 64), 0

    def get_state(self) -> torch.Tensor:
        """Seed and offset as 16 bytes on the host, the layout of torch_npu."""
        return torch.frombuffer(bytearray(struct.pack("<QQ", self.seed, self.offset)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Go on from what :meth:`get_state` gave.

        Raises:
            RuntimeError: It is no such state.
        """
        if state.dtype != torch.uint8 or state.device.type != "cpu" or state.shape != (16,):
            shape = list(state.shape)
            raise RuntimeError(
                f"RNG state must be a torch.ByteTensor of 16 elements on the host, got {state.type()}{shape}"
            )
        self.seed, self.offset = struct.unpack("<QQ", state.numpy().tobytes())

    def advance(self) -> tuple[int, int]:
        """The (seed, offset) of one draw; the next one gets another."""
        self.skip(1)
        return self.seed, self.offset

    def skip(self, num_draws: int) -> None:
        """Leave out so many draws."""
        self.offset += num_draws


class DeviceRuntime:
    """torch_npu's state for one device; to its allocator it is the driver's streams.

    Args:
        card: The device itself.
        settings: Of the caching allocator.
        torch_npu_version: Release imitated, ``2.13`` or ``2.10``.
        task_queue_level: ``TASK_QUEUE_ENABLE``: from 2 on, operator workspaces come from :attr:`workspaces`.
        seed: Seed of the default generator.
        hccl: HCCL's settings from the environment.
        caches_tensors: Tensors come from the caching allocator; see :mod:`npusim.memory.uncached`.

    Attributes:
        tensor_memory: Where tensors get their memory: the caching allocator, unless the user switched it off.
    """

    def __init__(
        self,
        card: Card,
        settings: AllocatorConfig,
        *,
        torch_npu_version: str,
        task_queue_level: int,
        seed: int,
        hccl: HcclSettings,
        caches_tensors: bool = True,
    ) -> None:
        self.card = card
        self.task_queue_level = task_queue_level
        self.random = RandomState(seed)
        self.hccl = HcclRuntime(card, hccl)
        self.communicators: dict[str, Communicator] = {}
        self.streams = StreamPool(card.streams)
        self._stream = card.default_stream
        self._capturing: int | None = None
        self.captured_groups: list[RankGroup] = []
        self.task_groups = TaskGroups()
        self._num_pools = {"user": 0, "capture": 0}
        self.workspaces = WorkspaceAllocator(
            card.hbm, self, device_index=card.index, out_of_memory_error=torch.OutOfMemoryError
        )
        pad = pad_bytes(card.profile.soc_name.value, card.profile.cann_version.value)
        self.allocator = CachingAllocator(
            card.hbm,
            self,
            settings,
            device_index=card.index,
            version=torch_npu_version,
            pad_bytes=pad,
            out_of_memory_error=torch.OutOfMemoryError,
            workspaces=self.workspaces,
        )
        self.tensor_memory: CachingAllocator | UncachedMemory = self.allocator
        if not caches_tensors:
            self.tensor_memory = UncachedMemory(
                card.hbm, self, self.allocator, pad_bytes=pad, out_of_memory_error=torch.OutOfMemoryError
            )

    @cached_property
    def torch_device(self) -> torch.device:
        """The device as torch names it, once ``npu`` is registered."""
        return torch.device("npu", self.card.index)

    def current_stream(self) -> int:
        """The stream that operators are queued on, as the driver's handle."""
        return self._stream

    def set_stream(self, stream: int) -> None:
        """Queue operators on ``stream`` from now on."""
        self._stream = stream

    def record_event(self, stream: int) -> object:
        """An event behind everything queued on ``stream`` now."""
        return self.card.streams.record_event(stream)

    def query(self, event: object) -> bool:
        """Whether an event has completed."""
        assert isinstance(event, StreamEvent)
        return self.card.streams.query(event)

    def synchronize(self, event: object) -> None:
        """Wait, in virtual time, until an event has completed."""
        assert isinstance(event, StreamEvent)
        self.card.streams.synchronize(event)

    def synchronize_device(self) -> None:
        """Wait, in virtual time, until every stream is idle."""
        self.card.streams.synchronize_device()

    def refuse_in_capture(self, call: str) -> None:
        """Called where the host waits for the device, which a capture does not allow.

        Raises:
            RuntimeError: The current stream is being captured. Grade of the text: assumed.
        """
        if self._capturing is not None and self.is_current_stream_capturing():
            raise RuntimeError(f"Cannot call {call} during NPU graph capture.")

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return self._capturing is not None and self._capturing == self._stream

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured into a graph."""
        return self._capturing == stream

    def begin_capture(self, stream: int) -> None:
        """Operators on ``stream`` are captured from now on.

        Raises:
            RuntimeError: Another capture is going on. Grade of the text: assumed.
        """
        if self._capturing is not None:
            raise RuntimeError("Cannot begin an NPU graph capture during another one.")
        self._capturing = stream
        self.captured_groups.clear()
        self.card.streams.begin_capture(stream)
        self.allocator.mark_capture_begin()

    def capture_group(self, group: RankGroup) -> None:
        """A collective is queued; if it is captured, replays will meet the group's ranks."""
        if self._capturing is not None and group not in self.captured_groups:
            self.captured_groups.append(group)

    def end_capture(self) -> int:
        """Nothing is captured any more; returns how long a replay takes, in nanoseconds."""
        self._capturing = None
        self.allocator.mark_capture_end()
        return self.card.streams.end_capture()

    @cached_property
    def capture_stream_id(self) -> int:
        """The stream that graphs are captured on if the caller names none; one for all captures, as in torch_npu."""
        return self.streams.take()

    def new_pool_id(self, *, user: bool) -> tuple[int, int]:
        """An id for a private memory pool: ``(0, n)`` for a user's pool, ``(n, 0)`` for a capture without one."""
        kind = "user" if user else "capture"
        self._num_pools[kind] += 1
        number = self._num_pools[kind]
        return (0, number) if user else (number, 0)


def device_index(platform: Platform, device: torch.device | int | str | None) -> int:
    """The index a device argument means; no index means the current device.

    Raises:
        RuntimeError: It names a device that this world does not have; in torch_npu's words.
    """
    if device is None:
        return platform.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        return platform.current_device()
    if not 0 <= index < len(platform.runtimes):
        error = vendor_error(
            RuntimeError,
            "NPU function error: c10_npu::SetDevice(device), error code is 107001",
            "ERR00100 PTA call acl api failed\n[Error]: Invalid device ID.\n"
            "        Check whether the device ID is valid.",
        )
        error.add_note(f"device npu:{index} does not exist; this world has {len(platform.runtimes)} device(s)")
        raise error
    return index
