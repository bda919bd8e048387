"""One process' side of one device: its allocator, workspaces, current streams and random state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from npusim.errors import WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.device.card import Card
    from npusim.memory.caching_allocator import CachingAllocator
    from npusim.memory.workspace import WorkspaceAllocator
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
    def values(self) -> Values:
        """How numbers behind tensors are kept."""

    def current_device(self) -> int:
        """Index of the calling rank's current device."""


class RandomState:
    """A device's default generator: counter-based, so a draw depends on seed and offset only.

    Grade of the numbers: assumed (the device's Philox stream is not reproduced; the distribution is).
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.offset = 0

    def manual_seed(self, seed: int) -> None:
        """Start over from ``seed``."""
        self.seed, self.offset = seed, 0

    def advance(self) -> tuple[int, int]:
        """The (seed, offset) of one draw; the next one gets another."""
        self.offset += 1
        return self.seed, self.offset


class DeviceRuntime:
    """torch_npu's state for one device.

    Args:
        card: The device itself.
        allocator: Its caching allocator.
        workspaces: Its per-stream operator workspaces.
        task_queue_level: ``TASK_QUEUE_ENABLE``: from 2 on, operator workspaces come from ``workspaces``.
        seed: Seed of the default generator.
    """

    def __init__(
        self,
        card: Card,
        allocator: CachingAllocator,
        workspaces: WorkspaceAllocator,
        *,
        task_queue_level: int,
        seed: int,
    ) -> None:
        self.card = card
        self.allocator = allocator
        self.workspaces = workspaces
        self.task_queue_level = task_queue_level
        self.random = RandomState(seed)
        self.torch_device = torch.device("npu", card.index)
        self._stream = card.default_stream

    def current_stream(self) -> int:
        """The stream that operators are queued on, as the driver's handle."""
        return self._stream

    def set_stream(self, stream: int) -> None:
        """Queue operators on ``stream`` from now on."""
        self._stream = stream


def device_index(platform: Platform, device: torch.device | int | str | None) -> int:
    """The index a device argument means; no index means the current device.

    Raises:
        WorldError: It names a device that this world does not have.
    """
    if device is None:
        return platform.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    if index is None:
        return platform.current_device()
    if not 0 <= index < len(platform.runtimes):
        raise WorldError(f"device npu:{index} does not exist; this world has {len(platform.runtimes)} device(s)")
    return index
