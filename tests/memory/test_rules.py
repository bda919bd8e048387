"""Each rule of the allocator by a sequence small enough to follow by hand.

The expected figures were worked out from the sources of torch_npu (9e73e708) and confirmed on a compiled copy of them
over a fake device. ``bench.layout()`` writes segments as ``S@0[512*,2096640-]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from npusim.memory.out_of_memory import OutOfMemoryError

MIB = 1024**2
GIB = 1024**3
ADVICE = "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."

MakeBench = Callable[..., Any]


def test_rounding(bench: MakeBench) -> None:
    device = bench()
    for num_bytes in (1, 480, 481, 992):
        device.malloc(num_bytes, 0)
    assert device.layout() == "S@0[512*,512*,1024*,1024*,2094080-]"
    assert device.figures("alc", "req", "res", "isp", "isb", "seg") == (3072, 1954, 2097152, 1, 2094080, 1)


def test_zero_bytes(bench: MakeBench) -> None:
    device = bench()
    assert device.malloc(0, 0) == 0
    device.free(0)
    assert not any(device.figures("alc", "res", "act", "req", "isp", "seg"))


def test_pool_boundary(bench: MakeBench) -> None:
    device = bench()
    device.malloc(1048544, 0)
    device.malloc(1048545, 0)
    assert device.layout() == "S@0[1048576*,1048576-] L@2097152[1049088*,19922432-]"
    assert device.figures("alc", "res", "isp", "isb") == (2097664, 23068672, 2, 20971008)


def test_requests_below_10_mib_share_a_segment(bench: MakeBench) -> None:
    device = bench()
    device.malloc(10485216, 0)
    device.malloc(10485217, 1)
    assert device.layout() == "L@0[10485248*,10486272-] L@20971520[10485760*]"
    assert device.figures("res", "alc", "isp", "isb", "seg") == (31457280, 20971008, 1, 10486272, 2)


def test_tensor_of_2_mib(bench: MakeBench) -> None:
    device = bench()
    device.malloc(2 * MIB, 0)
    assert device.layout() == "L@0[2097664*,18873856-]"


def test_tensor_of_100_mib(bench: MakeBench) -> None:
    device = bench()
    device.malloc(100 * MIB, 0)
    assert device.layout() == "L@0[104858112*,2096640-]"
    assert device.figures("res", "isp", "isb") == (106954752, 1, 2096640)


def test_rest_of_a_large_block_is_given_along(bench: MakeBench) -> None:
    device = bench()
    device.malloc(60_000_000, 0)
    assert device.layout() == "L@0[60817408*]"
    assert device.figures("alc", "res", "act", "req", "isp", "isb") == (60817408, 60817408, 60817408, 60000000, 0, 0)


def test_merge(bench: MakeBench) -> None:
    device = bench()
    x, y, z = (device.malloc(num_bytes, 0) for num_bytes in (1000, 2000, 3000))
    device.free(y)
    assert device.layout() == "S@0[1536*,2048-,3072*,2090496-]"
    assert device.figures("isp", "isb") == (2, 2092544)
    device.free(x)
    assert device.layout() == "S@0[3584-,3072*,2090496-]"
    assert device.figures("isp", "isb") == (2, 2094080)
    device.free(z)
    assert device.layout() == "S@0[2097152-]"
    assert device.figures("isp", "isb", "alc", "act", "req", "res", "seg") == (0, 0, 0, 0, 0, 2097152, 1)


@pytest.mark.parametrize(
    ("num_bytes", "layout", "allocated", "splits"),
    [
        (16776672, "L@0[3146240*,17825280*]", 20971520, (0, 0)),
        (16776160, "L@0[3146240*,16776192*,1049088-]", 19922432, (1, 1049088)),
    ],
)
def test_large_block_splits_only_above_1_mib(
    bench: MakeBench, num_bytes: int, layout: str, allocated: int, splits: tuple[int, int]
) -> None:
    device = bench()
    device.malloc(3 * MIB, 0)
    device.malloc(num_bytes, 0)
    assert device.layout() == layout
    assert device.figures("alc") == (allocated,)
    assert device.figures("isp", "isb") == splits


def test_best_fit_takes_the_lower_address(bench: MakeBench) -> None:
    device = bench()
    blocks = [device.malloc(num_bytes, 0) for num_bytes in (1500, 600, 3000, 600, 1500, 600)]
    for address in blocks[::2]:
        device.free(address)
    assert device.malloc(1400, 0) == blocks[0]
    assert device.malloc(900, 0) == blocks[4]
    assert device.layout() == "S@0[1536*,1024*,3072-,1024*,1024*,512-,1024*,2087936-]"
    assert device.figures("alc", "isp", "isb") == (5632, 3, 2091520)


def test_streams_do_not_share_blocks(bench: MakeBench) -> None:
    device = bench()
    x = device.malloc(5_000_000, 0)
    device.free(x)
    device.malloc(5_000_000, 1)
    assert device.figures("res") == (41943040,)
    assert device.malloc(5_000_000, 0) == x
    assert device.figures("alc", "isp", "isb", "seg") == (10000384, 2, 31942656, 2)


def test_record_stream_on_own_stream_counts(bench: MakeBench) -> None:
    device = bench()
    device.driver.held = True
    x = device.malloc(5_000_000, 0)
    device.allocator.record_stream(x, 0)
    device.free(x)
    assert device.layout() == "L@0[5000192~,15971328-]"
    assert device.figures("alc", "act", "req") == (0, 5000192, 5000000)
    assert device.offset(device.malloc(5_000_000, 0)) == 5000192
    device.driver.complete(0)
    assert device.malloc(5_000_000, 0) == x
    assert device.layout() == "L@0[5000192*,5000192*,10971136-]"


def test_erase_stream(bench: MakeBench) -> None:
    device = bench()
    device.driver.held = True
    x = device.malloc(5_000_000, 0)
    device.allocator.record_stream(x, 1)
    device.allocator.erase_stream(x, 1)
    device.free(x)
    assert device.layout() == "L@0[20971520-]"


def test_erase_stream_counts_only_on_the_blocks_own_stream(bench: MakeBench) -> None:
    device = bench()
    device.driver.held = True
    x = device.malloc(5_000_000, 0)
    device.allocator.record_stream(x, 1)
    device.driver.stream = 1
    device.allocator.erase_stream(x, 1)
    device.free(x)
    assert device.layout() == "L@0[5000192~,15971328-]"
    device.driver.stream = 0
    device.allocator.erase_stream(x, 1)
    assert device.layout() == "L@0[20971520-]"


def test_empty_cache(bench: MakeBench) -> None:
    device = bench()
    x, _, z = (device.malloc(num_bytes, 0) for num_bytes in (5_000_000, 1000, 30_000_000))
    device.free(x)
    device.free(z)
    device.allocator.empty_cache()
    assert device.layout() == "S@20971520[1536*,2095616-]"
    assert device.figures("res", "isp", "isb", "seg") == (2097152, 1, 2095616, 1)
    assert device.counters() == (0, 0, 1, 3, 2, 0)


def test_full_device_makes_the_allocator_give_up_cached_segments(bench: MakeBench) -> None:
    device = bench(256 * MIB)
    device.free(device.malloc(100 * MIB, 0))
    device.malloc(200 * MIB, 0)
    assert device.counters() == (1, 0, 1, 2, 1, 0)
    assert device.figures("res", "seg") == (211812352, 1)


def test_out_of_memory(bench: MakeBench) -> None:
    device = bench(128 * MIB)
    x = device.malloc(100 * MIB, 0)
    with pytest.raises(OutOfMemoryError) as error:
        device.malloc(100 * MIB, 0)
    assert str(error.value) == (
        "NPU out of memory. Tried to allocate 102.00 MiB (NPU 0; 128.00 MiB total capacity; "
        "100.00 MiB already allocated; "
        f"100.00 MiB current active; 26.00 MiB free; 102.00 MiB reserved in total by PyTorch).{ADVICE}"
    )
    assert device.counters() == (1, 1, 1, 1, 0, 0)
    device.free(x)
    device.malloc(100 * MIB, 0)


def test_memory_fraction(bench: MakeBench) -> None:
    device = bench(256 * MIB)
    device.allocator.set_per_process_memory_fraction(0.5)
    device.malloc(60_000_000, 0)
    device.malloc(60_000_000, 0)
    assert device.figures("res") == (121634816,)
    with pytest.raises(OutOfMemoryError) as error:
        device.malloc(40_000_000, 0)
    assert str(error.value) == (
        "NPU out of memory. Tried to allocate 40.00 MiB (NPU 0; 256.00 MiB total capacity; "
        "116.00 MiB already allocated; 116.00 MiB current active; 140.00 MiB free; 128.00 MiB allowed; "
        f"116.00 MiB reserved in total by PyTorch).{ADVICE}"
    )


def test_max_split_size(bench: MakeBench) -> None:
    device = bench(conf="max_split_size_mb:40")
    x = device.malloc(60 * MIB, 0)
    device.free(x)
    device.malloc(30 * MIB, 0)
    assert device.malloc(56 * MIB, 0) == x
    assert device.layout() == "L@0[65011712*] L@65011712[31457792*,2096640-]"
    assert device.figures("alc", "res", "isp", "isb") == (96469504, 98566144, 1, 2096640)
    stats = device.allocator.memory_stats()
    assert stats["oversize_allocations.current"] == stats["oversize_segments.current"] == 1


@pytest.mark.parametrize(
    ("capacity", "first", "counters"),
    [(200 * MIB, 120 * MIB, (0, 0, 0, 2, 1, 0)), (128 * MIB, 60 * MIB, (1, 0, 1, 2, 1, 0))],
)
def test_oversize_blocks_are_given_up_first(
    bench: MakeBench, capacity: int, first: int, counters: tuple[int, ...]
) -> None:
    device = bench(capacity, "max_split_size_mb:40")
    device.free(device.malloc(first, 0))
    device.malloc(90 * MIB, 0)
    assert device.counters() == counters
    assert device.figures("res") == (96468992,)


def test_roundup_power2_divisions(bench: MakeBench) -> None:
    device = bench(conf="roundup_power2_divisions:4")
    for num_bytes in (1150000, 33554400, 33554432, 5000):
        device.malloc(num_bytes, 0)
    sizes = [segment["blocks"][0]["size"] for segment in device.allocator.snapshot()]
    assert sizes == [1310720, 33554432, 41943040, 5120]
    assert device.figures("alc", "res", "seg") == (76813312, 98566144, 4)


def test_expandable_segment_with_aligned_blocks(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True")
    for num_bytes in (1000, 3_000_000, 30_000_000):
        device.malloc(num_bytes, 0)
    assert device.layout() == "Sx@0[1536*,2095616-] Lx@0[3000320*,14336-,30000128*,8928256-]"
    assert device.figures("alc", "res", "seg", "isp", "isb") == (33001984, 44040192, 0, 0, 0)
    assert device.counters()[3] == 3


def test_expandable_segment_without_alignment(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True,base_addr_aligned_kb:0")
    device.malloc(3_000_000, 0)
    device.malloc(30_000_000, 0)
    assert device.layout() == "Lx@0[3000320*,30000128*,8942592-]"


def test_alignment_leaves_a_sliver(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True")
    device.malloc(1048600, 0)
    device.malloc(2097152, 0)
    assert device.layout() == "Lx@0[1049088*,15872-,2097664*,17808896-]"


def test_block_that_can_grow_counts_as_large(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True")
    x = device.malloc(5_000_000, 0)
    device.malloc(11_456_480, 0)
    device.free(x)
    device.malloc(4_000_000, 0)
    assert device.layout() == "Lx@0[4000256*,1013248-,11456512*,4501504-]"
    assert device.figures("res") == (20971520,)


def test_unmap_and_refill(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True")
    x = device.malloc(30_000_000, 0)
    device.malloc(30_000_000, 0)
    assert device.layout() == "Lx@0[30000128*,15360-,30000128*,2898944-]"
    assert device.figures("res") == (62914560,)
    device.free(x)
    device.allocator.empty_cache()
    assert device.layout() == "Lx@20971520[9043968-,30000128*,2898944-]"
    assert device.figures("res") == (41943040,)
    assert device.counters() == (0, 0, 1, 2, 1, 0)
    device.malloc(20971488, 0)
    assert device.layout() == "Lx@0[20971520*,9043968-,30000128*,2898944-]"
    assert device.figures("res") == (62914560,)
    assert device.counters()[3] == 3


def test_empty_virt_addr_cache_keeps_physical_memory(bench: MakeBench) -> None:
    device = bench(conf="expandable_segments:True")
    device.free(device.malloc(30_000_000, 0))
    device.allocator.empty_virt_addr_cache()
    assert (device.layout(), device.figures("res"), device.ledger.used_bytes) == ("", (0,), 41943040)
    device.malloc(1_500_000, 0)
    assert (device.figures("res"), device.ledger.used_bytes) == ((20971520,), 41943040)
    device.allocator.empty_cache()
    assert device.ledger.used_bytes == 20971520


def test_empty_virt_addr_cache_needs_expandable_segments(bench: MakeBench) -> None:
    with pytest.raises(RuntimeError, match="please enable expandable_segments"):
        bench().allocator.empty_virt_addr_cache()


def test_expandable_segment_maps_all_or_nothing(bench: MakeBench) -> None:
    device = bench(100 * MIB, "expandable_segments:True")
    device.malloc(30_000_000, 0)
    before = device.layout()
    with pytest.raises(OutOfMemoryError, match=r"allocate 86\.00 MiB .* 60\.00 MiB free; 40\.00 MiB reserved"):
        device.malloc(90_000_000, 0)
    assert device.counters() == (1, 1, 1, 1, 0, 0)
    assert device.layout() == before


def test_pages_of_1_gib(bench: MakeBench) -> None:
    device = bench(8 * GIB, "page_size:1g")
    for num_bytes in (1_500_000, 1_500_000_000, 1000):
        device.malloc(num_bytes, 0)
    assert device.layout() == (
        "L@0[1500160*,1072241664-] L@1073741824[1500000256*,647483392-] S@3221225472[1536*,2095616-]"
    )
    assert device.figures("res") == (3223322624,)


def test_private_pool(bench: MakeBench) -> None:
    device = bench()
    allocator = device.allocator
    allocator.begin_allocate_to_pool((0, 1))
    x = device.malloc(5_000_000, 0)
    allocator.end_allocate_to_pool((0, 1))
    device.malloc(5_000_000, 0)
    device.free(x)
    device.malloc(5_000_000, 0)
    assert device.layout() == "Lp@0[20971520-] L@20971520[5000192*,5000192*,10971136-]"
    allocator.release_pool((0, 1))
    allocator.empty_cache()
    assert device.layout() == "L@20971520[5000192*,5000192*,10971136-]"
    assert device.counters() == (0, 0, 1, 2, 1, 0)
    assert not allocator.pools.private


def test_free_during_a_capture_waits(bench: MakeBench) -> None:
    device = bench()
    device.driver.held = True
    allocator = device.allocator
    x = device.malloc(5_000_000, 0)
    allocator.record_stream(x, 1)
    allocator.begin_allocate_to_pool((0, 1))
    allocator.mark_capture_begin()
    device.driver.capturing = True
    device.free(x)
    assert device.figures("act") == (5000192,)
    assert allocator.snapshot()[0]["blocks"][0]["state"] == "inactive"
    device.malloc(5_000_000, 0)
    assert device.layout() == "L@0[5000192d,15971328-] Lp@20971520[5000192*,15971328-]"
    device.driver.capturing = False
    allocator.mark_capture_end()
    allocator.end_allocate_to_pool((0, 1))
    device.malloc(100, 0)
    assert device.layout().startswith("L@0[5000192~,15971328-]")
    device.driver.complete(1)
    device.malloc(100, 0)
    assert device.layout().startswith("L@0[20971520-]")
    assert device.figures("alc", "isp", "isb") == (5001216, 2, 18067456)


def test_garbage_collection_frees_the_longest_unused(bench: MakeBench) -> None:
    device = bench(512 * MIB, "garbage_collection_threshold:0.5")
    device.allocator.set_per_process_memory_fraction(0.5)
    a, b = device.malloc(60 * MIB, 0), device.malloc(60 * MIB, 0)
    device.free(a)
    device.malloc(3_000_000, 1)
    device.free(b)
    device.malloc(70 * MIB, 0)
    assert device.figures("res") == (161480704,)
    assert device.counters() == (0, 0, 0, 4, 1, 0)
    assert device.malloc(60 * MIB, 0) == b


def test_rejection(bench: MakeBench) -> None:
    device = bench(512 * MIB, "throw_on_npumalloc_oom:True")
    device.malloc(200 * MIB, 0)
    with pytest.raises(OutOfMemoryError, match=r"preemptively rejected .* Requested size: 400\.00 MiB"):
        device.malloc(400 * MIB, 0)
    assert device.counters() == (0, 0, 0, 1, 0, 1)


def test_pool_without_splits(bench: MakeBench) -> None:
    device = bench()
    device.allocator.create_pool((0, 1), no_split=True)
    device.allocator.begin_allocate_to_pool((0, 1))
    device.malloc(5_000_000, 0)
    device.malloc(1000, 0)
    assert device.layout() == "Lp@0[20971520*] Sp@20971520[2097152*]"
    assert device.figures("alc", "req") == (23068672, 5001000)


def test_no_padding(bench: MakeBench) -> None:
    device = bench(pad_bytes=0)
    for num_bytes in (512, 1048576, 1048577):
        device.malloc(num_bytes, 0)
    assert device.layout() == "S@0[512*,1048576*,1048064-] L@2097152[1049088*,19922432-]"


def test_large_segment_size(bench: MakeBench) -> None:
    device = bench(conf="large_segment_size_mb:64")
    device.malloc(3_000_000, 0)
    device.malloc(20_000_000, 0)
    assert device.layout() == "L@0[3000320*,20000256*,44108288-]"
    device = bench(conf="expandable_segments:True,segment_size_mb:64")
    device.malloc(3_000_000, 0)
    assert device.figures("res") == (67108864,)
