"""``torch.npu``: the caching allocator's figures, pools, raw blocks, pictures."""

from __future__ import annotations

import collections
import pickle
import re

import pytest
import torch

from npusim.errors import UnmodelledCallError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean(npu_world):
    torch.npu.synchronize()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()


def test_a_tensor_takes_its_bytes_and_padding_rounded_to_512():
    before = torch.npu.memory_allocated()
    tensor = torch.empty(1000, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before == 1536
    del tensor
    assert torch.npu.memory_allocated() == before


def test_peaks_and_their_reset():
    before = torch.npu.memory_allocated()
    tensor = torch.empty(4 * MIB, dtype=torch.uint8, device="npu")
    assert torch.npu.max_memory_allocated() - before == 4 * MIB + 512
    del tensor
    assert torch.npu.max_memory_allocated() - before == 4 * MIB + 512
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == before


def test_reserved_memory_stays_until_the_cache_is_emptied():
    before = torch.npu.memory_reserved()
    tensor = torch.empty(40 * MIB, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_reserved() - before == 42 * MIB
    del tensor
    assert torch.npu.memory_reserved() - before == 42 * MIB
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before
    assert torch.npu.max_memory_reserved() - before == 42 * MIB


def test_free_memory_follows_reserved_memory():
    free, total = torch.npu.mem_get_info()
    reserved = torch.npu.memory_reserved()
    tensor = torch.empty(100 * MIB, dtype=torch.uint8, device="npu")
    assert free - torch.npu.mem_get_info()[0] == torch.npu.memory_reserved() - reserved
    assert torch.npu.mem_get_info()[1] == total
    del tensor


def test_stats_are_sorted_and_nest():
    stats = torch.npu.memory_stats()
    assert isinstance(stats, collections.OrderedDict)
    assert list(stats) == sorted(stats)
    assert stats["allocated_bytes.all.current"] == torch.npu.memory_allocated()
    nested = torch.npu.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == stats["allocated_bytes.all.current"]
    assert nested["num_ooms"] == stats["num_ooms"]


def test_accumulated_stats_can_be_reset():
    torch.empty(1, device="npu")
    assert torch.npu.memory_stats()["allocation.all.allocated"] > 0
    torch.npu.reset_accumulated_memory_stats()
    assert torch.npu.memory_stats()["allocation.all.allocated"] == 0


def test_old_names_warn():
    for name in ("memory_cached", "max_memory_cached", "reset_max_memory_allocated", "reset_max_memory_cached"):
        with pytest.warns(DeprecationWarning, match=f"torch_npu.npu.{name}"):
            getattr(torch.npu, name)()


def test_summary_is_a_table():
    lines = torch.npu.memory_summary().splitlines()
    assert lines[1] == "|                  PyTorch NPU memory summary, device ID 0                  |"
    assert {len(line) for line in lines} == {77}
    assert len(torch.npu.memory_summary(abbreviated=True).splitlines()) < len(lines)


def test_raw_blocks():
    before = torch.npu.memory_allocated()
    address = torch.npu.caching_allocator_alloc(1000)
    assert address % 512 == 0
    assert torch.npu.memory_allocated() - before == 1536
    torch.npu.caching_allocator_delete(address)
    assert torch.npu.memory_allocated() == before
    with pytest.raises(RuntimeError, match=r"^invalid device pointer: 0x3039"):
        torch.npu.caching_allocator_delete(12345)
    with pytest.raises(TypeError, match=r"^Invalid type for stream argument, must be `torch_npu.npu.Stream` or `int`"):
        torch.npu.caching_allocator_alloc(1, stream="x")


def test_snapshot_shows_segments_and_blocks():
    tensor = torch.empty(1000, dtype=torch.uint8, device="npu")
    (segment,) = [
        each
        for each in torch.npu.memory_snapshot()
        if each["address"] <= tensor.data_ptr() < each["address"] + each["total_size"]
    ]
    assert segment["segment_type"] == "small"
    assert segment["total_size"] == sum(block["size"] for block in segment["blocks"]) == 2 * MIB
    (block,) = [block for block in segment["blocks"] if block["address"] == tensor.data_ptr()]
    assert (block["size"], block["requested_size"], block["state"]) == (1536, 1000, "active_allocated")


def test_history_goes_into_a_dumped_snapshot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # torch_npu leaves a table of modules there, too
    torch.npu.memory._record_memory_history(max_entries=100, stacks="python")
    try:
        del_me = torch.empty(1000, dtype=torch.uint8, device="npu")
        del del_me
        torch.npu.memory._dump_snapshot(str(tmp_path / "picture.pickle"))
    finally:
        torch.npu.memory._record_memory_history(None)
    picture = pickle.loads((tmp_path / "picture.pickle").read_bytes())
    actions = [entry["action"] for entry in picture["device_traces"][0]]
    assert [name for name in actions if "segment" not in name][:2] == ["alloc", "free_requested"]


def test_memory_fraction():
    assert torch.npu.get_per_process_memory_fraction() == 1.0
    for wrong, error, text in (
        (2.0, ValueError, "Invalid fraction value: 2.0. Allowed range: 0~1"),
        ("a", TypeError, "Invalid type for fraction argument, must be `float`"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            torch.npu.set_per_process_memory_fraction(wrong)
    torch.npu.set_per_process_memory_fraction(0.001)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
            torch.empty(1 << 30, dtype=torch.uint8, device="npu")
    finally:
        torch.npu.set_per_process_memory_fraction(1.0)


def test_virtual_address_cache_needs_expandable_segments():
    with pytest.raises(RuntimeError, match="Unsupported config for empty_virt_addr_cache, please"):
        torch.npu.empty_virt_addr_cache()


def test_memory_pool():
    pool = torch.npu.MemPool()
    assert pool.id[0] == 0
    assert pool.use_count() == 1
    with torch.npu.use_mem_pool(pool):
        tensor = torch.empty(1000, dtype=torch.uint8, device="npu")
        assert pool.use_count() == 2
    assert pool.use_count() == 1
    (segment,) = pool.snapshot()
    assert segment["segment_pool_id"] == pool.id
    assert segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
    del tensor
    reserved = torch.npu.memory_reserved()
    del pool
    assert torch.npu.memory_reserved() == reserved - 2 * MIB


NAMES = re.findall(
    r"\w+",
    """
    MemPool NPUPluggableAllocator caching_allocator_alloc caching_allocator_delete change_current_allocator empty_cache
    empty_virt_addr_cache get_allocator_backend get_per_process_memory_fraction host_empty_cache host_memory_stats
    host_memory_stats_as_nested_dict max_memory_allocated max_memory_cached max_memory_reserved memory_allocated
    memory_cached memory_reserved memory_snapshot memory_stats memory_stats_as_nested_dict memory_summary
    reset_accumulated_host_memory_stats reset_accumulated_memory_stats reset_max_memory_allocated
    reset_max_memory_cached reset_peak_host_memory_stats reset_peak_memory_stats set_per_process_memory_fraction
    use_mem_pool
    """,
)
"""``torch_npu.npu.memory.__all__`` of torch_npu 2.13.0."""


@pytest.mark.sim_only("says which of torch_npu's names the double lacks")
def test_names_of_the_module(npu_world):
    lacking = {name for name in NAMES if not hasattr(torch.npu.memory, name)}
    assert lacking == {name for name in NAMES if "host" in name}  # statistics of pinned host memory
    for name in lacking:
        with pytest.raises(UnmodelledCallError, match=name):
            getattr(torch.npu.memory, name)


def test_allocator_backend():
    assert torch.npu.get_allocator_backend() == "native"


@pytest.mark.npu_settings(num_devices=2)
def test_cache_of_all_devices_of_the_process_is_emptied(npu_world):
    for index in (0, 1):
        torch.empty(1, device=f"npu:{index}")
        assert torch.npu.memory_reserved(index) == 2 * MIB
    assert len(torch.npu.memory_snapshot()) == 2
    torch.npu.empty_cache()
    assert [torch.npu.memory_reserved(index) for index in (0, 1)] == [0, 0]


@pytest.mark.npu_settings(num_devices=2)
@pytest.mark.sim_only("ranks of a world")
def test_a_rank_empties_only_its_own_cache(npu_world):
    def rank(number: int) -> tuple[int, int]:
        torch.npu.set_device(number)
        torch.empty(1, device="npu")
        if number == 1:
            torch.npu.empty_cache()
        return torch.npu.memory_reserved(), len(torch.npu.memory_snapshot())

    assert npu_world.run_ranks([lambda: rank(0), lambda: rank(1)]) == [(2 * MIB, 1), (0, 0)]
    assert torch.npu.memory_reserved(0) == 2 * MIB
