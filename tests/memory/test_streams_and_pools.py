"""Blocks that several streams use, and memory set apart in private pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from npusim.errors import WorldError
from npusim.memory.growth import MAX_LAZY_EVENTS
from npusim.memory.out_of_memory import OutOfMemoryError

MIB = 1024**2
MakeBench = Callable[..., Any]


def pending_device(bench: MakeBench, conf: str) -> tuple[Any, int]:
    """A device with one freed block that waits for stream 1, of which one event has completed since."""
    device = bench(conf=conf)
    device.driver.held = True
    address = device.malloc(5_000_000, 0)
    device.allocator.record_stream(address, 1)
    device.free(address)
    device.driver.complete(1)
    return device, address


def test_lazy_reclaim_looks_only_when_the_search_fails(bench: MakeBench) -> None:
    device, address = pending_device(bench, "multi_stream_lazy_reclaim:True")
    assert device.malloc(5_000_000, 0) != address
    assert device.layout() == "L@0[5000192~,5000192*,10971136-]"
    device.malloc(10_900_000, 0)
    assert device.layout() == "L@0[5000192~,5000192*,10971136*]"
    assert device.malloc(4_000_000, 0) == address


def test_lazy_reclaim_looks_before_the_search_when_many_wait(bench: MakeBench) -> None:
    device = bench(conf="multi_stream_lazy_reclaim:True")
    device.driver.held = True
    for _ in range(MAX_LAZY_EVENTS + 1):
        address = device.malloc(1000, 0)
        device.allocator.record_stream(address, 1)
        device.free(address)
    device.driver.complete(1)
    device.malloc(1000, 0)
    assert device.figures("act") == (1536,)


def test_without_lazy_reclaim_every_request_looks(bench: MakeBench) -> None:
    device, address = pending_device(bench, "")
    assert device.malloc(5_000_000, 0) == address


def test_events_of_a_stream_complete_in_order(bench: MakeBench) -> None:
    device = bench()
    device.driver.held = True
    first, second = device.malloc(1000, 0), device.malloc(1000, 0)
    for address, streams in ((first, (1, 2)), (second, (2,))):
        for stream in streams:
            device.allocator.record_stream(address, stream)
        device.free(address)
    device.driver.complete(2)
    device.malloc(0, 0)
    device.malloc(300, 0)
    assert device.layout() == "S@0[1536~,512*,2095104-]"


def test_unknown_addresses(bench: MakeBench) -> None:
    device = bench()
    for call in (device.allocator.record_stream, device.allocator.erase_stream):
        with pytest.raises(RuntimeError, match="No allocated block can be found"):
            call(4096, 1)
    address = device.malloc(1, 0)
    device.free(address)
    with pytest.raises(RuntimeError, match=f"invalid device pointer: {address:#x}"):
        device.free(address)
    with pytest.raises(ValueError, match="negative"):
        device.malloc(-1, 0)


def test_more_than_an_exabyte(bench: MakeBench) -> None:
    device = bench()
    with pytest.raises(OutOfMemoryError) as error:
        device.malloc(2**60, 0)
    assert str(error.value) == "NPU out of memory. Tried to allocate more than 1EB memory."
    assert device.counters() == (0, 0, 0, 0, 0, 0)


def test_free_by_the_garbage_collector_waits_for_the_request_at_work(bench: MakeBench) -> None:
    device = bench(64 * MIB)
    cached, dying = device.malloc(30 * MIB, 0), device.malloc(1000, 0)
    device.free(cached)
    device.driver.synchronize_device = lambda: device.free(dying)
    device.malloc(50 * MIB, 0)
    assert device.layout() == "S@33554432[2097152-] L@35651584[52429312*,2096640-]"
    assert device.figures("alc") == (52429312,)


def test_request_within_a_request_is_refused(bench: MakeBench) -> None:
    device = bench(64 * MIB)
    device.free(device.malloc(30 * MIB, 0))
    device.driver.synchronize_device = lambda: device.malloc(1, 0)
    with pytest.raises(WorldError, match="at work on another request"):
        device.malloc(50 * MIB, 0)


@pytest.mark.parametrize(("version", "pool_id"), [("2.13", (0, 2)), ("2.10", (0, 1))])
def test_one_of_two_open_scopes(bench: MakeBench, version: str, pool_id: tuple[int, int]) -> None:
    device = bench(version=version)
    for opened in ((0, 1), (0, 2)):
        device.allocator.begin_allocate_to_pool(opened)
    device.malloc(1000, 0)
    assert device.allocator.snapshot()[0]["segment_pool_id"] == pool_id


def test_scope_of_some_streams(bench: MakeBench) -> None:
    device = bench()
    device.allocator.begin_allocate_to_pool((0, 1), lambda stream: stream == 5)
    device.malloc(1000, 0)
    device.malloc(1000, 5)
    assert device.layout() == "S@0[1536*,2095616-] Sp@2097152[1536*,2095616-]"
    assert [len(device.allocator.snapshot(pool_id)) for pool_id in ((0, 0), (0, 1), (0, 2))] == [2, 1, 0]


def test_scopes_are_opened_and_closed_once(bench: MakeBench) -> None:
    allocator = bench().allocator
    allocator.begin_allocate_to_pool((0, 1))
    with pytest.raises(RuntimeError, match="beginAllocateToPool: already recording to mempool_id"):
        allocator.begin_allocate_to_pool((0, 1))
    allocator.end_allocate_to_pool((0, 1))
    with pytest.raises(RuntimeError, match="endAllocatePool: not currently recording to mempool_id"):
        allocator.end_allocate_to_pool((0, 1))
    allocator.release_pool((0, 1))
    allocator.release_pool((0, 1))
    with pytest.raises(RuntimeError, match="not in use"):
        allocator.release_pool((0, 1))


def test_pool_that_all_let_go_of_is_not_taken_up_again(bench: MakeBench) -> None:
    device = bench()
    device.allocator.begin_allocate_to_pool((0, 1))
    device.malloc(1000, 0)
    device.allocator.end_allocate_to_pool((0, 1))
    device.allocator.release_pool((0, 1))
    with pytest.raises(RuntimeError, match="use_count > 0 INTERNAL ASSERT FAILED"):
        device.allocator.begin_allocate_to_pool((0, 1))


def test_pool_with_a_live_block_stays_though_it_shrank_as_often_as_it_grew(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True")
    allocator = device.allocator
    allocator.begin_allocate_to_pool((0, 1))
    device.free(device.malloc(60 * MIB, 0))
    address = device.malloc(2 * MIB, 0)
    allocator.end_allocate_to_pool((0, 1))
    allocator.release_pool((0, 1))
    allocator.empty_cache()
    assert device.layout() == "Lxp@0[2097664*,18873856-]"
    device.free(address)
    allocator.empty_cache()
    assert (device.layout(), device.ledger.used_bytes) == ("", 0)


def test_empty_cache_of_one_pool(bench: MakeBench) -> None:
    device = bench()
    allocator = device.allocator
    for pool_id in ((0, 1), (0, 2)):
        allocator.begin_allocate_to_pool(pool_id)
        device.free(device.malloc(1000, 0))
        allocator.end_allocate_to_pool(pool_id)
        allocator.release_pool(pool_id)
    device.free(device.malloc(1000, 0))
    allocator.empty_cache((0, 1))
    assert device.layout() == "Sp@2097152[2097152-] S@4194304[2097152-]"
    assert list(allocator.pools.private) == [(0, 2)]


def test_pool_in_use_outlives_its_holders(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True")
    allocator = device.allocator
    allocator.begin_allocate_to_pool((0, 1))
    address = device.malloc(1000, 0)
    allocator.end_allocate_to_pool((0, 1))
    allocator.release_pool((0, 1))
    allocator.empty_cache()
    assert device.layout() == "Sxp@0[1536*,2095616-]"
    device.free(address)
    allocator.empty_cache()
    assert (device.layout(), allocator.pools.private) == ("", {})


def test_default_pool_borrows_on_out_of_memory(bench: MakeBench) -> None:
    device = bench(64 * MIB)
    allocator = device.allocator
    for pool_id, use_on_oom in (((0, 1), False), ((0, 2), True)):
        allocator.create_pool(pool_id, use_on_oom=use_on_oom)
        allocator.begin_allocate_to_pool(pool_id)
        device.free(device.malloc(24 * MIB, 0))
        allocator.end_allocate_to_pool(pool_id)
    device.malloc(24 * MIB, 0)
    assert device.layout() == "Lp@0[27262976-] Lp@27262976[25166336*,2096640-]"


class CountingAllocator:
    """A user's allocator that takes memory of the device itself."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.calls: list[tuple[str, int]] = []

    def alloc(self, num_bytes: int, device: int, stream: int) -> int:
        from npusim.device.ledger import Grade, Owner

        self.calls.append(("alloc", num_bytes))
        return self.device.hbm.malloc(num_bytes, owner=Owner.RAW, label="user", grade=Grade.EXACT, source="test")

    def free(self, address: int, num_bytes: int, device: int, stream: int) -> None:
        self.calls.append(("free", num_bytes))
        self.device.hbm.free(address)


@pytest.mark.parametrize(
    ("version", "conf", "calls"),
    [
        ("2.13", "", [("alloc", 20 * MIB), ("free", 20 * MIB)]),
        ("2.10", "", [("alloc", 20 * MIB)]),
        ("2.13", "expandable_segments:True", []),
    ],
)
def test_pool_with_a_users_allocator(bench: MakeBench, version: str, conf: str, calls: list[tuple[str, int]]) -> None:
    device = bench(conf=conf, version=version)
    allocator = device.allocator
    user = CountingAllocator(device)
    allocator.create_pool((0, 1), allocator=user)
    allocator.begin_allocate_to_pool((0, 1))
    device.free(device.malloc(5_000_000, 0))
    allocator.end_allocate_to_pool((0, 1))
    allocator.release_pool((0, 1))
    allocator.release_pool((0, 1))
    allocator.empty_cache()
    assert user.calls == calls
    assert not device.ledger.used_bytes


class FailingAllocator(CountingAllocator):
    """A user's allocator that has nothing left."""

    def alloc(self, num_bytes: int, device: int, stream: int) -> int:
        return 0


def test_users_allocator_may_fail(bench: MakeBench) -> None:
    device = bench()
    device.allocator.create_pool((0, 1), allocator=FailingAllocator(device))
    device.allocator.begin_allocate_to_pool((0, 1))
    with pytest.raises(OutOfMemoryError):
        device.malloc(1000, 0)


def test_open_scope_is_a_capture_in_2_10(bench: MakeBench) -> None:
    device = bench(64 * MIB, version="2.10")
    allocator = device.allocator
    device.free(device.malloc(48 * MIB, 0))
    allocator.begin_allocate_to_pool((0, 1))
    with pytest.raises(OutOfMemoryError):
        device.malloc(48 * MIB, 0)
    assert allocator.memory_stats()["num_alloc_retries"] == 0
    with pytest.raises(RuntimeError, match=r"captures_underway\.empty\(\) INTERNAL ASSERT FAILED"):
        allocator.empty_cache()
    allocator.end_allocate_to_pool((0, 1))
    allocator.empty_cache()
    assert len(allocator.memory_stats()) == 119


def test_stream_uses_during_a_capture_need_no_event(bench: MakeBench) -> None:
    device = bench()
    device.driver.held = device.driver.capturing = True
    device.allocator.mark_capture_begin()
    address = device.malloc(1000, 0)
    device.allocator.record_stream(address, 1)
    device.free(address)
    device.driver.capturing = False
    device.allocator.mark_capture_end()
    assert device.malloc(1000, 0) == address


def test_no_retry_during_a_capture(bench: MakeBench) -> None:
    device = bench(64 * MIB)
    device.free(device.malloc(48 * MIB, 0))
    device.allocator.mark_capture_begin()
    device.driver.capturing = True
    with pytest.raises(OutOfMemoryError):
        device.malloc(56 * MIB, 0)
    assert device.counters() == (0, 1, 0, 1, 0, 0)
