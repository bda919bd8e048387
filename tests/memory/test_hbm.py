"""The device below the allocator: addresses, whole pages, faults, other processes."""

from __future__ import annotations

import pytest

from npusim.device.event_log import EventLog
from npusim.device.faults import HbmFaults, OtherProcess
from npusim.device.hbm import MALLOC_BASE, PAGE_BYTES, RESERVE_BASE, Hbm, HbmAddressError, OutOfHbmError
from npusim.device.ledger import Grade, Ledger, LedgerFullError, Owner

CAPACITY = 16 * PAGE_BYTES


def make_hbm(*failing_allocations: int) -> Hbm:
    return Hbm(Ledger(CAPACITY), EventLog(keep=True), device_index=3, faults=HbmFaults(failing_allocations))


def malloc(hbm: Hbm, num_bytes: int) -> int:
    return hbm.malloc(num_bytes, owner=Owner.RAW, label="test", grade=Grade.EXACT, source="test")


def create_physical(hbm: Hbm, num_bytes: int) -> int:
    return hbm.create_physical(num_bytes, owner=Owner.RAW, label="test", grade=Grade.EXACT, source="test")


def test_addresses_follow_one_another_and_are_not_used_again() -> None:
    hbm = make_hbm()
    first = malloc(hbm, 1)
    assert first == MALLOC_BASE
    hbm.free(first)
    assert malloc(hbm, PAGE_BYTES + 1) == MALLOC_BASE + PAGE_BYTES
    assert malloc(hbm, 1) == MALLOC_BASE + 3 * PAGE_BYTES
    assert hbm.reserve(1) == RESERVE_BASE
    hbm.release(RESERVE_BASE)
    assert hbm.reserve(1) == RESERVE_BASE + PAGE_BYTES


def test_whole_pages_are_charged_to_the_owner() -> None:
    hbm = make_hbm()
    address = malloc(hbm, PAGE_BYTES + 1)
    handle = create_physical(hbm, 1)
    assert hbm.ledger.bytes_by_owner() == {Owner.RAW: 3 * PAGE_BYTES}
    assert hbm.mem_get_info() == (13 * PAGE_BYTES, CAPACITY)
    hbm.free(address)
    hbm.destroy_physical(handle)
    assert hbm.mem_get_info() == (CAPACITY, CAPACITY)


def test_full_device() -> None:
    hbm = make_hbm()
    malloc(hbm, CAPACITY - PAGE_BYTES)
    with pytest.raises(OutOfHbmError) as error:
        malloc(hbm, PAGE_BYTES + 1)
    assert (error.value.num_bytes, error.value.free_bytes) == (2 * PAGE_BYTES, PAGE_BYTES)
    malloc(hbm, PAGE_BYTES)


def test_planned_faults_count_both_kinds_of_allocation() -> None:
    hbm = make_hbm(2)
    malloc(hbm, 1)
    with pytest.raises(OutOfHbmError, match="planned fault"):
        create_physical(hbm, 1)
    hbm.faults.fail_next(num_skipped=1)
    create_physical(hbm, 1)
    with pytest.raises(OutOfHbmError):
        malloc(hbm, 1)
    malloc(hbm, 1)


def test_mapping() -> None:
    hbm = make_hbm()
    address = hbm.reserve(4 * PAGE_BYTES)
    handle = create_physical(hbm, PAGE_BYTES)
    hbm.map(address, handle)
    for wrong in (
        lambda: hbm.map(address + PAGE_BYTES, handle),
        lambda: hbm.destroy_physical(handle),
        lambda: hbm.release(address),
        lambda: hbm.unmap(address + PAGE_BYTES),
    ):
        with pytest.raises(HbmAddressError):
            wrong()
    assert hbm.unmap(address) == handle
    hbm.destroy_physical(handle)
    hbm.release(address)
    assert hbm.event_log.events == [
        ("hbm.reserve", 3, RESERVE_BASE, 4 * PAGE_BYTES),
        ("hbm.phys_malloc", 3, PAGE_BYTES),
        ("hbm.map", 3, RESERVE_BASE, PAGE_BYTES),
        ("hbm.unmap", 3, RESERVE_BASE, PAGE_BYTES),
        ("hbm.phys_free", 3, PAGE_BYTES),
        ("hbm.release", 3, RESERVE_BASE),
    ]


def test_unknown_addresses() -> None:
    hbm = make_hbm()
    for call in (hbm.free, hbm.release, hbm.unmap, hbm.destroy_physical):
        with pytest.raises(HbmAddressError):
            call(12345)


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_sizes_are_positive(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        malloc(make_hbm(), num_bytes)


def test_other_process_takes_and_gives_back() -> None:
    hbm = make_hbm()
    other = OtherProcess(hbm.ledger, "trainer", 4 * PAGE_BYTES)
    other.resize(10 * PAGE_BYTES)
    assert hbm.mem_get_info()[0] == 6 * PAGE_BYTES
    with pytest.raises(LedgerFullError):
        other.resize(CAPACITY + 1)
    assert hbm.mem_get_info()[0] == 6 * PAGE_BYTES
    other.resize(PAGE_BYTES)
    assert hbm.ledger.bytes_by_owner() == {Owner.OTHER_PROCESS: PAGE_BYTES}
