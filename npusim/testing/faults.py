"""What a test lets go wrong on the simulated devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.device.faults import OtherProcess

if TYPE_CHECKING:
    from npusim.device.card import Card
    from npusim.world import SimWorld


class NpuFaults:
    """Failing allocations, and other processes on the cards.

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

    def other_process(self, num_bytes: int, *, name: str = "other process", device_index: int = 0) -> None:
        """Let another process hold ``num_bytes`` from now on, more or less than before; 0: it has ended.

        Raises:
            LedgerFullError: The card has less free than it wants more.
        """
        card = self._card(device_index)
        if name not in card.other_processes:
            card.other_processes[name] = OtherProcess(card.ledger, name)
        card.other_processes[name].resize(num_bytes)

    def _card(self, device_index: int) -> Card:
        return self._world.cards[device_index]
