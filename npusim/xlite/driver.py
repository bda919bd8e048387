"""What xlite's native side asks of the machine below it, and the simulated device's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from npusim.device.ledger import Grade, Owner
from npusim.device.moments import OpenDuration
from npusim.device.profile import Fact
from npusim.hccl.ranks import Arrival
from npusim.torch_backend.registration import platform
from npusim.torch_backend.values import RealValues
from npusim.xlite.config import DeviceFacts
from npusim.xlite.outside_pool import OutsideAllocation
from npusim.xlite.rank_model import RankModel
from npusim.xlite.work import ForwardTime, Lengths

POOL_SOURCE = "xlite csrc/runtime.cpp: one aclrtMalloc of size << 20"


class Communicator(Protocol):
    """One of xlite's HCCL communicators."""

    def operate(self) -> None:
        """A collective runs on it."""


class Driver(Protocol):
    """Devices below xlite. Memory is kept for an ``owner``, an object of xlite's; sizes are bytes."""

    @property
    def version(self) -> str:
        """The release of xlite that is imitated."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that xlite reads."""

    def current_device(self) -> int:
        """Index of the calling thread's device."""

    def facts(self, device: int) -> DeviceFacts:
        """What xlite asks a device for."""

    def take_pool(self, owner: object, device: int, num_bytes: int) -> None:
        """Take the tensor pool.

        Raises:
            OutOfHbmError: The device has no room for it; then nothing was taken.
        """

    def take_outside(self, owner: object, device: int, allocation: OutsideAllocation) -> None:
        """Take device memory outside the pool."""

    def communicator(self, device: int, name: str, num_ranks: int) -> Communicator:
        """Open a communicator."""

    @property
    def computes_values(self) -> bool:
        """Whether the forward's numbers are computed, by the active world's values."""

    def launch(self, device: int, model: RankModel, lengths: Lengths) -> None:
        """A forward of so many tokens was launched on the current stream."""

    def forget(self, target: torch.Tensor) -> None:
        """A forward overwrote this tensor with numbers that nobody computes."""


class SimulatedDriver:
    """The active world's devices."""

    @property
    def version(self) -> str:
        """The release of xlite that the world imitates."""
        return platform().xlite_version

    @property
    def environment(self) -> Mapping[str, str]:
        """The world's variables."""
        return platform().environment

    def current_device(self) -> int:
        """Index of the calling rank's device."""
        return platform().current_device()

    def facts(self, device: int) -> DeviceFacts:
        """By the device's profile."""
        profile = platform().runtimes[device].card.profile
        return DeviceFacts(num_ai_cores=profile.num_aicore.value, devices_per_node=profile.devices_per_node.value)

    def take_pool(self, owner: object, device: int, num_bytes: int) -> None:
        """In whole pages of 2 MiB; the world keeps it to its end.

        Raises:
            OutOfHbmError: The device has no room for it.
        """
        del owner
        platform().runtimes[device].card.hbm.malloc(
            num_bytes, owner=Owner.XLITE_POOL, label="tensor pool", grade=Grade.EXACT, source=POOL_SOURCE
        )

    def take_outside(self, owner: object, device: int, allocation: OutsideAllocation) -> None:
        """Charge the ledger with the bytes asked for."""
        del owner
        fact = Fact(allocation.num_bytes, allocation.grade, allocation.source)
        platform().runtimes[device].card.charge(Owner.XLITE_TABLES, allocation.label, fact)

    def communicator(self, device: int, name: str, num_ranks: int) -> Communicator:
        """One of the simulated HCCL."""
        return platform().runtimes[device].hccl.communicator(name, num_ranks)

    @property
    def computes_values(self) -> bool:
        """Whether the world's values are real."""
        return isinstance(platform().values, RealValues)

    def launch(self, device: int, model: RankModel, lengths: Lengths) -> None:
        """Occupy the current stream for a pass; ranks of the same TP and DP groups start and end it together.

        Where no ranks run (:meth:`npusim.world.SimWorld.run_ranks`), the others are taken to do the same at this time.
        """
        runtime, ranks = platform().runtimes[device], platform().ranks
        card, stream = runtime.card, runtime.current_stream()
        arrival = Arrival(card.streams.ready_ns(stream), card.slowdown)
        if ranks.are_several and not ranks.is_lone:
            replica, tp_rank = divmod(model.rank, model.tp.size)
            ranks.arrive(("xlite TP", device - tp_rank), tp_rank, model.tp.size, "xlite forward", arrival)
            ranks.arrive(("xlite DP", tp_rank), replica, model.dp.size, "xlite forward", arrival)
        forward_time = ForwardTime(model, card.costs)
        duration_ns = OpenDuration(forward_time(lengths), lambda lens, cached: forward_time(Lengths(lens, cached)))
        card.launch("xlite", stream, duration_ns, not_before_ns=arrival.time_ns, slowdown=arrival.slowdown)

    def forget(self, target: torch.Tensor) -> None:
        """Nobody knows the numbers any more."""
        platform().values.forget([target])
