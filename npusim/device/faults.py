"""What can go wrong with a device, planned by a test: failing allocations, and other processes on the card."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from npusim.device.ledger import Grade, Ledger, LedgerFullError, Owner


class HbmFaults:
    """Plans which device allocations fail, whatever is free.

    Args:
        failing_allocations: Ordinals of device allocations (``aclrtMalloc`` and ``aclrtMallocPhysical`` together), the
            first one of the device's life being 1.
    """

    def __init__(self, failing_allocations: Iterable[int] = ()) -> None:
        self.num_allocations = 0
        self._failing = set(failing_allocations)

    def fail_next(self, num_skipped: int = 0) -> None:
        """Let the next allocation fail, or the one after ``num_skipped`` more."""
        self._failing.add(self.num_allocations + 1 + num_skipped)

    def strikes_next_allocation(self) -> bool:
        """Count one allocation and say whether it must fail."""
        self.num_allocations += 1
        return self.num_allocations in self._failing


class OtherProcess:
    """A process on the same card, unknown to the one under test except through ``mem_get_info``.

    Args:
        ledger: Memory of the card.
        label: Name of the process in reports.
        num_bytes: What it holds from the start.
    """

    def __init__(self, ledger: Ledger, label: str, num_bytes: int = 0) -> None:
        self.num_bytes = 0
        self._ledger = ledger
        self._label = label
        self._entry_ids: list[int] = []
        self.resize(num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Hold ``num_bytes`` from now on, taking or giving back the difference.

        Raises:
            LedgerFullError: The card has less free than the process wants more; it then keeps what it had.
        """
        growth = num_bytes - self.num_bytes
        if growth < 0:
            for entry_id in self._entry_ids:
                self._ledger.release(entry_id)
            self._entry_ids.clear()
            growth = num_bytes
        if growth > 0:
            entry_id = self._ledger.charge(Owner.OTHER_PROCESS, self._label, growth, Grade.EXACT, "set by the test")
            self._entry_ids.append(entry_id)
        self.num_bytes = num_bytes

    def try_resize(self, num_bytes: int) -> None:
        """Hold ``num_bytes`` from now on; where the card has less free, the process keeps what it had."""
        with suppress(LedgerFullError):
            self.resize(num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Take ``num_bytes`` more, or give back as many if negative; where the card has less free, take nothing."""
        self.try_resize(max(0, self.num_bytes + num_bytes))
