"""What a test lets go wrong on the simulated devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.device.clock import NS_PER_S
from npusim.device.faults import OtherProcess

if TYPE_CHECKING:
    from npusim.device.card import Card
    from npusim.world import SimWorld


class NpuFaults:
    """Failing allocations, other processes on the cards, and devices that are slow or hang. Times are virtual.

    Args:
        world: The world under test.
    """

    def __init__(self, world: SimWorld) -> None:
        self._world = world

    def fail_allocations(self, count: int = 1, *, after: int = 0, device_index: int = 0) -> None:
        """Let device allocations (``aclrtMalloc``) fail, whatever is free.

        The caching allocator asks again after it gave cached memory back, so one failure alone may show only in
        ``num_alloc_retries``.

        Args:
            count: How many in a row.
            after: How many succeed before.
            device_index: On which device.
        """
        for number in range(after, after + count):
            self._card(device_index).faults.fail_next(number)

    def other_process(
        self, num_bytes: int, *, name: str = "other process", device_index: int = 0, at: float | None = None
    ) -> None:
        """Let another process hold ``num_bytes`` from now on, more or less than before; 0: it has ended.

        Args:
            num_bytes: What it holds then.
            name: The process, in reports.
            device_index: On which device.
            at: Not from now on, but from this time on, in seconds; if the card has too little free then, the process
                keeps what it had.

        Raises:
            LedgerFullError: The card has less free now than it wants more.
            WorldError: ``at`` is past.
        """
        card = self._card(device_index)
        if name not in card.other_processes:
            card.other_processes[name] = OtherProcess(card.ledger, name)
        process = card.other_processes[name]
        if at is None:
            process.resize(num_bytes)
        else:
            card.agenda.at(round(at * NS_PER_S), lambda: process.try_resize(num_bytes))

    def slow_down(self, factor: float, *, device_index: int = 0) -> None:
        """Let every kernel of a device take ``factor`` times as long from now on.

        Raises:
            WorldError: The factor is not positive.
        """
        self._card(device_index).slow_down(factor)

    def hang(self, seconds: float, *, at: float = 0.0, device_index: int = 0) -> None:
        """Let a device stand still for so long, at a time in seconds or at the first operator after it.

        Ranks that meet it in a collective wait; longer than ``HCCL_EXEC_TIMEOUT``, and the collective fails.

        Raises:
            WorldError: ``at`` is past.
        """
        card = self._card(device_index)
        card.agenda.at(round(at * NS_PER_S), lambda: card.stall(round(seconds * NS_PER_S)))

    def _card(self, device_index: int) -> Card:
        return self._world.cards[device_index]
