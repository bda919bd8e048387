"""``NPUPluggableAllocator``, and sleep mode, which is made of it."""

from __future__ import annotations

import ctypes.util

import pytest
import torch

from npusim.device.hbm import OutOfHbmError
from npusim.device.ledger import Owner
from npusim.errors import UnmodelledCallError, WorldError

MIB = 1 << 20

pytestmark = pytest.mark.sim_only("host memory is none of a card's, and vllm-ascend's extension needs a card")


@pytest.fixture
def c_library():
    path = ctypes.util.find_library("c")
    if path is None:
        pytest.skip("no C library was found by name")
    return path


def new_tensor(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="npu")


def segment_bytes(world) -> int:
    return world.cards[0].ledger.bytes_by_owner().get(Owner.TORCH_SEGMENT, 0)


def test_functions_of_a_library_make_the_segments_of_a_pool(npu_world, c_library):
    # Exact: the same figures come from torch_npu 2.13.0 on the stub CANN.
    allocator = torch.npu.NPUPluggableAllocator(c_library, "malloc", "free")
    free_bytes = torch.npu.mem_get_info()[0]
    pool = torch.npu.MemPool(allocator._allocator)
    with torch.npu.use_mem_pool(pool):
        small, large = new_tensor(1000), new_tensor(3 * MIB)
    sizes = {segment["total_size"]: segment["segment_pool_id"] for segment in pool.snapshot()}
    assert sizes == {2 * MIB: pool.id, 20 * MIB: pool.id}
    stats = torch.npu.memory_stats()
    assert (stats["num_device_alloc"], stats["reserved_bytes.all.current"]) == (2, 22 * MIB)
    assert torch.npu.mem_get_info()[0] == free_bytes
    del small, large
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == 22 * MIB
    del pool
    stats = torch.npu.memory_stats()
    assert (stats["num_device_free"], stats["reserved_bytes.all.current"]) == (2, 0)


def test_an_allocator_without_memory_is_out_of_memory(npu_world, c_library):
    pool = torch.npu.MemPool(torch.npu.NPUPluggableAllocator(c_library, "malloc", "free")._allocator)
    with (
        torch.npu.use_mem_pool(pool),
        pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4194304\.00 GiB"),
    ):
        new_tensor(1 << 52)  # more than the address space has
    assert torch.npu.memory_stats()["num_alloc_retries"] == 1


def test_expandable_segments_pass_an_allocator_by(npu_world, c_library):
    torch.npu.memory._set_allocator_settings("expandable_segments:True")
    pool = torch.npu.MemPool(torch.npu.NPUPluggableAllocator(c_library, "malloc", "free")._allocator)
    with torch.npu.use_mem_pool(pool):
        tensor = new_tensor(1000)
    assert pool.snapshot()[0]["is_expandable"]
    assert segment_bytes(npu_world) == 2 * MIB
    del tensor


def test_what_is_no_allocator_is_refused(npu_world, c_library):
    with pytest.raises(OSError, match="no_such_library"):
        torch.npu.NPUPluggableAllocator("/no_such_library.so", "malloc", "free")
    with pytest.raises(AttributeError, match="no_such_function"):
        torch.npu.NPUPluggableAllocator(c_library, "no_such_function", "free")
    with pytest.raises(AttributeError, match="no_such_function"):
        torch.npu.NPUPluggableAllocator(None, "no_such_function", "free")
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        torch.npu.MemPool(torch.npu.NPUPluggableAllocator(c_library, "malloc", "free"))


def test_the_allocator_of_the_process_cannot_be_replaced(npu_world, c_library):
    allocator = torch.npu.NPUPluggableAllocator(c_library, "malloc", "free")
    with pytest.raises(UnmodelledCallError, match="change_current_allocator"):
        torch.npu.change_current_allocator(allocator)
    new_tensor(1)
    with pytest.raises(RuntimeError, match="Can't swap an already initialized allocator"):
        torch.npu.change_current_allocator(allocator)


class SleepMode:
    """What a user of the extension keeps, as ``vllm_ascend/device_allocator/camem.py`` does."""

    def __init__(self, extension) -> None:
        self.extension = extension
        self.handles: dict[int, tuple[int, int, int, int]] = {}
        self.backups: dict[int, torch.Tensor] = {}
        extension.init_module(self.on_malloc, self.handles.pop)
        self.pool = torch.npu.MemPool(torch.npu.NPUPluggableAllocator(None, "my_malloc", "my_free")._allocator)

    def on_malloc(self, handle: tuple[int, int, int, int]) -> None:
        self.handles[handle[2]] = handle

    def sleep(self, *, keep: bool) -> None:
        from acl.rt import memcpy

        for address, handle in self.handles.items():
            if keep:
                backup = self.backups[address] = torch.empty(handle[1], dtype=torch.uint8, pin_memory=True)
                assert memcpy(backup.data_ptr(), backup.data_ptr() + 2 * handle[1], address, handle[1], 2) == 0
            self.extension.python_unmap_and_release(*handle)

    def wake_up(self) -> None:
        from acl.rt import memcpy

        for address, handle in self.handles.items():
            self.extension.python_create_and_map(*handle)
            backup = self.backups.pop(address, None)
            if backup is not None:
                assert memcpy(address, address + 2 * handle[1], backup.data_ptr(), handle[1], 1) == 0


@pytest.fixture
def extension(npu_world):
    from npusim.vendor import vllm_ascend_C

    return vllm_ascend_C


@pytest.mark.parametrize("keep", [True, False])
def test_sleep_gives_memory_up_and_wake_up_takes_it_again(npu_world, extension, keep):
    sleeper = SleepMode(extension)
    with torch.npu.use_mem_pool(sleeper.pool):
        weight = torch.tensor([1, 2, 3]).to("npu")
        cache = new_tensor(30 * MIB)
    free_awake, address = torch.npu.mem_get_info()[0], cache.data_ptr()
    assert segment_bytes(npu_world) == sum(handle[1] for handle in sleeper.handles.values()) == 34 * MIB
    sleeper.sleep(keep=keep)
    assert torch.npu.mem_get_info()[0] - free_awake == 34 * MIB
    assert segment_bytes(npu_world) == 0
    assert torch.npu.memory_reserved() == 34 * MIB  # the caching allocator does not know
    sleeper.wake_up()
    assert torch.npu.mem_get_info()[0] == free_awake
    assert cache.data_ptr() == address
    if keep:
        assert weight.tolist() == [1, 2, 3]
    else:
        with pytest.raises(RuntimeError, match="value"):
            weight.tolist()
    del weight, cache
    del sleeper.pool
    assert sleeper.handles == {}
    assert segment_bytes(npu_world) == 0


def test_a_segment_that_sleeps_can_be_given_up(npu_world, extension):
    sleeper = SleepMode(extension)
    with torch.npu.use_mem_pool(sleeper.pool):
        tensor = new_tensor(1000)
    sleeper.sleep(keep=False)
    del tensor
    del sleeper.pool
    assert sleeper.handles == {}
    assert torch.npu.memory_reserved() == 0


def test_waking_up_on_a_full_device_is_an_error(npu_world, extension):
    sleeper = SleepMode(extension)
    with torch.npu.use_mem_pool(sleeper.pool):
        tensor = new_tensor(1000)
    sleeper.sleep(keep=False)
    hog = new_tensor(torch.npu.mem_get_info()[0] - MIB)
    with pytest.raises(OutOfHbmError, match="the device is full"):
        sleeper.wake_up()
    del tensor, hog


def test_sleep_mode_needs_callbacks_and_known_copies(npu_world, extension):
    from acl.rt import memcpy

    with pytest.raises(TypeError, match="Both arguments must be callables"):
        extension.init_module(print, None)
    pool = torch.npu.MemPool(torch.npu.NPUPluggableAllocator(None, "my_malloc", "my_free")._allocator)
    with torch.npu.use_mem_pool(pool), pytest.raises(WorldError, match="init_module was not called"):
        new_tensor(1)
    with pytest.raises(UnmodelledCallError, match="after a copy from a device"):
        memcpy(1, 2, 3, 4, 1)
    with pytest.raises(UnmodelledCallError, match="kind must be 1 or 2"):
        memcpy(1, 2, 3, 4, 3)


@pytest.mark.npu_settings(num_devices=2)
def test_sleep_mode_of_two_devices_in_one_process_is_refused(npu_world, extension):
    sleeper = SleepMode(extension)
    with torch.npu.use_mem_pool(sleeper.pool):
        kept = new_tensor(1000)
    torch.npu.set_device(1)
    pool = torch.npu.MemPool(torch.npu.NPUPluggableAllocator(None, "my_malloc", "my_free")._allocator)
    with torch.npu.use_mem_pool(pool), pytest.raises(UnmodelledCallError, match="devices 0 and 1 of one process"):
        new_tensor(1000)
    del kept
