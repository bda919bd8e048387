"""High-bandwidth memory of one device: physical pages, address ranges, and the driver calls that hand them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from npusim.device.clock import Agenda, Clock
from npusim.device.event_log import EventLog
from npusim.device.faults import HbmFaults
from npusim.device.ledger import Grade, Ledger, LedgerFullError, Owner
from npusim.errors import NpusimError

_V = TypeVar("_V")

PAGE_BYTES: Final = 2 * 1024**2
"""Physical page; every device allocation takes whole pages. Exact for huge pages (CANN documentation of
aclrtMallocPhysical); assumed for small requests, which a card may serve from 4 KiB pages."""

MALLOC_BASE: Final = 0x1200_0000_0000
RESERVE_BASE: Final = 0x3000_0000_0000
"""First addresses handed out. Assumed: real ones cannot be predicted; only their order and alignment ever matter."""


class OutOfHbmError(NpusimError):
    """A device allocation was refused, because the device is full or because a fault was planned for it.

    Attributes:
        num_bytes: What was asked for.
        free_bytes: What was free at that moment.
    """

    def __init__(self, num_bytes: int, free_bytes: int, reason: str) -> None:
        super().__init__(f"device allocation of {num_bytes} bytes failed: {reason}, {free_bytes} bytes are free")
        self.num_bytes = num_bytes
        self.free_bytes = free_bytes


class HbmAddressError(NpusimError):
    """An address or handle given to the driver is none that it handed out, or not in the state that the call needs."""


@dataclass(frozen=True, slots=True)
class _Holding:
    num_bytes: int
    entry_id: int


class Hbm:
    """The memory side of one device's driver; every call is recorded in the event log and every byte in the ledger.

    Addresses follow two counters, so that a test can rely on them: allocations lie one after another from
    :data:`MALLOC_BASE`, reservations from :data:`RESERVE_BASE`, each rounded up to whole pages. None is used twice.

    Args:
        ledger: Takes the bytes; its capacity is the device's total memory.
        event_log: Gets one event for each call, named ``hbm.<call>``.
        device_index: The device's number, written to the events.
        faults: Which allocations must fail. Default: none.
        agenda: What happens to the memory at planned times. Default: nothing.
    """

    def __init__(
        self,
        ledger: Ledger,
        event_log: EventLog,
        *,
        device_index: int = 0,
        faults: HbmFaults | None = None,
        agenda: Agenda | None = None,
    ) -> None:
        self.ledger: Final = ledger
        self.event_log: Final = event_log
        self.device_index: Final = device_index
        self.faults: Final = faults if faults is not None else HbmFaults()
        self._agenda: Final = agenda if agenda is not None else Agenda(Clock())
        self._next_malloc = MALLOC_BASE
        self._next_reserve = RESERVE_BASE
        self._next_handle = 1
        self._allocations: dict[int, _Holding] = {}
        self._reservations: dict[int, int] = {}
        self._physical: dict[int, _Holding] = {}
        self._mapped: dict[int, int] = {}
        self._mapped_handles: set[int] = set()

    @property
    def total_bytes(self) -> int:
        """Memory of the device as software sees it, in bytes."""
        return self.ledger.capacity_bytes

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the whole device (``aclrtGetMemInfo(ACL_HBM_MEM)``)."""
        self._agenda.catch_up()
        return self.ledger.free_bytes, self.ledger.capacity_bytes

    def malloc(self, num_bytes: int, *, owner: Owner, label: str, grade: Grade, source: str) -> int:
        """Allocate device memory (``aclrtMalloc``) and return its address; charges whole pages to ``owner``.

        Raises:
            OutOfHbmError: The device is full, or a fault was planned for this allocation.
            ValueError: ``num_bytes`` is not positive.
        """
        charged_bytes = _whole_pages(num_bytes)
        try:
            entry_id = self._charge(charged_bytes, owner, label, grade, source)
        except OutOfHbmError:
            self._record("malloc", None, num_bytes)
            raise
        address = self._next_malloc
        self._next_malloc += charged_bytes
        self._allocations[address] = _Holding(num_bytes, entry_id)
        self._record("malloc", address, num_bytes)
        return address

    def free(self, address: int) -> None:
        """Give an allocation back (``aclrtFree``).

        Raises:
            HbmAddressError: No allocation starts at ``address``.
        """
        self.ledger.release(_take(self._allocations, address, "allocation").entry_id)
        self._record("free", address)

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range of whole pages without memory behind it (``aclrtReserveMemAddress``)."""
        address = self._next_reserve
        reserved_bytes = self._reservations[address] = _whole_pages(num_bytes)
        self._next_reserve += reserved_bytes
        self._record("reserve", address, reserved_bytes)
        return address

    def release(self, address: int) -> None:
        """Give an address range back (``aclrtReleaseMemAddress``); nothing may be mapped in it.

        Raises:
            HbmAddressError: No reservation starts at ``address``, or something is mapped in it.
        """
        end = address + self._reservations.get(address, 0)
        if any(address <= mapped < end for mapped in self._mapped):
            raise HbmAddressError(f"the reservation {address:#x} still has memory mapped in it; unmap it first")
        _take(self._reservations, address, "reservation")
        self._record("release", address)

    def create_physical(self, num_bytes: int, *, owner: Owner, label: str, grade: Grade, source: str) -> int:
        """Take physical memory without an address (``aclrtMallocPhysical``) and return its handle.

        Raises:
            OutOfHbmError: The device is full, or a fault was planned for this allocation.
            ValueError: ``num_bytes`` is not positive.
        """
        try:
            entry_id = self._charge(_whole_pages(num_bytes), owner, label, grade, source)
        except OutOfHbmError:
            self._record("phys_malloc_oom", num_bytes)
            raise
        handle = self._next_handle
        self._next_handle += 1
        self._physical[handle] = _Holding(num_bytes, entry_id)
        self._record("phys_malloc", num_bytes)
        return handle

    def destroy_physical(self, handle: int) -> None:
        """Give physical memory back (``aclrtFreePhysical``).

        Raises:
            HbmAddressError: There is no such handle, or it is still mapped.
        """
        if handle in self._mapped_handles:
            raise HbmAddressError(f"physical handle {handle} is still mapped; unmap it first")
        holding = _take(self._physical, handle, "physical handle")
        self.ledger.release(holding.entry_id)
        self._record("phys_free", holding.num_bytes)

    def map(self, address: int, handle: int) -> None:
        """Put physical memory behind ``address`` (``aclrtMapMem``).

        Raises:
            HbmAddressError: The handle is unknown or mapped already, or something is mapped at ``address``.
        """
        if handle not in self._physical or handle in self._mapped_handles or address in self._mapped:
            raise HbmAddressError(f"cannot map physical handle {handle} at {address:#x}: one is unknown or in use")
        self._mapped[address] = handle
        self._mapped_handles.add(handle)
        self._record("map", address, self._physical[handle].num_bytes)

    def unmap(self, address: int) -> int:
        """Take the physical memory behind ``address`` away (``aclrtUnmapMem``) and return its handle.

        Raises:
            HbmAddressError: Nothing is mapped at ``address``.
        """
        handle = _take(self._mapped, address, "mapping")
        self._mapped_handles.remove(handle)
        self._record("unmap", address, self._physical[handle].num_bytes)
        return handle

    def _charge(self, num_bytes: int, owner: Owner, label: str, grade: Grade, source: str) -> int:
        self._agenda.catch_up()
        if self.faults.strikes_next_allocation():
            raise OutOfHbmError(num_bytes, self.ledger.free_bytes, "planned fault")
        try:
            return self.ledger.charge(owner, label, num_bytes, grade, source)
        except LedgerFullError as full:
            raise OutOfHbmError(num_bytes, self.ledger.free_bytes, "the device is full") from full

    def _record(self, call: str, *numbers: object) -> None:
        self.event_log.record(f"hbm.{call}", self.device_index, *numbers)


def _take(holdings: dict[int, _V], key: int, kind: str) -> _V:
    try:
        return holdings.pop(key)
    except KeyError:
        raise HbmAddressError(f"the device has no {kind} {key:#x}") from None


def _whole_pages(num_bytes: int) -> int:
    if num_bytes <= 0:
        raise ValueError(f"a device allocation needs a positive size, got {num_bytes} bytes")
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
