"""``PYTORCH_NO_NPU_MEMORY_CACHING``: each tensor is a call of the driver. ``tests/oracle`` compares with torch_npu."""

from __future__ import annotations

import pytest
import torch

from npusim.memory.uncached import caching_is_off

MIB = 1 << 20

pytestmark = [
    pytest.mark.sim_only("torch_npu reads the variable once per process"),
    pytest.mark.npu_settings(environment={"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}, keep_events=True),
]


def free_bytes() -> int:
    return torch.npu.mem_get_info()[0]


def new_tensor(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="npu")


@pytest.mark.parametrize(("text", "off"), [("1", True), ("2", True), (" 1", True), ("0", False), ("yes", False)])
def test_a_number_other_than_0_switches_caching_off(text, off):
    assert caching_is_off(text) is off
    assert not caching_is_off("")


def test_a_tensor_is_a_call_of_the_driver_and_in_no_statistics(npu_world):
    before = free_bytes()
    tensor = new_tensor(1000)
    assert before - free_bytes() == 2 * MIB
    assert npu_world.event_log.events[-1] == ("hbm.malloc", 0, tensor.data_ptr(), 1032)
    assert torch.npu.memory_allocated() == torch.npu.memory_reserved() == 0
    assert torch.npu.memory_snapshot() == []
    tensor.record_stream(torch.npu.Stream())
    del tensor
    assert free_bytes() == before


def test_a_full_device_is_an_error_of_the_driver(npu_world):
    with pytest.raises(RuntimeError, match=r"AclrtMallocAlign32.*error code is 207001") as caught:
        new_tensor(1 << 40)
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError, match="more than 1EB"):
        new_tensor(1 << 60)
    assert new_tensor(0).data_ptr() == 0


def test_raw_blocks_and_captured_tensors_come_from_the_caching_allocator(npu_world):
    address = torch.npu.caching_allocator_alloc(1000)
    assert torch.npu.memory_allocated() == 1536
    torch.npu.caching_allocator_delete(address)
    graph = torch.npu.NPUGraph()
    with torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()
        captured = new_tensor(1000)
        graph.capture_end()
    assert torch.npu.memory_allocated() == 1536
    del captured
    graph.reset()
    assert torch.npu.memory_reserved() == 0


def test_pools_are_passed_by(npu_world):
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        tensor = new_tensor(1000)
    assert pool.snapshot() == []
    assert tensor.data_ptr()
