"""Storages: their birth is a malloc, their end its free, whoever held them last."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re

import pytest
import torch
from torch import nn

MIB = 1 << 20


@pytest.fixture(autouse=True)
def usable(npu_world):
    pass


def allocated() -> int:
    return torch.npu.memory_allocated()


def block(num_bytes: int) -> int:
    """What a request takes: 32 bytes more, rounded up to 512."""
    return (num_bytes + 32 + 511) // 512 * 512


def test_birth_and_end():
    before = allocated()
    tensor = torch.empty(1000, device="npu")
    assert allocated() - before == block(4000)
    assert tensor.untyped_storage().nbytes() == 4000
    assert tensor.untyped_storage().data_ptr() == tensor.data_ptr() != 0
    del tensor
    assert allocated() == before


def test_views_share_a_storage_and_keep_it():
    before = allocated()
    tensor = torch.empty(10, 100, device="npu")
    views = [tensor[3], tensor.t(), tensor.view(-1)[5:], tensor.unsqueeze(0), tensor.narrow(1, 5, 5), tensor.detach()]
    views += [tensor.data, tensor.view(torch.int32), tensor.expand(2, 10, 100), tensor.as_strided((3,), (7,), 2)]
    assert allocated() - before == block(4000)
    for view in views:
        assert view.untyped_storage().data_ptr() == tensor.data_ptr()
        assert view.device == tensor.device
    assert views[0].data_ptr() == tensor.data_ptr() + 300 * 4
    del tensor, view
    while views:
        assert allocated() - before == block(4000)
        views.pop()
    assert allocated() == before


def test_empty_tensors_take_nothing():
    before = allocated()
    tensor = torch.empty(0, 5, device="npu")
    assert (allocated(), tensor.data_ptr(), tensor.shape) == (before, 0, (0, 5))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.int64, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [(), (3,), (2, 3), (1, 0, 4), (2, 1, 3, 1, 2)])
def test_geometry(size, dtype):
    made, expected = torch.empty(size, dtype=dtype, device="npu"), torch.empty(size, dtype=dtype)
    assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), dtype)
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
    strided = torch.empty_strided((3, 2), (2, 7), dtype=dtype, device="npu")
    assert strided.stride() == (2, 7)
    assert strided.untyped_storage().nbytes() == 12 * dtype.itemsize


def test_channels_last_is_refused():
    message = "Only c10::MemoryFormat::Contiguous is supported for creating a npu tensor\n[ERROR] "
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}.*ERR01007 OPS feature not supported"):
        torch.empty(2, 3, 4, 5, device="npu", memory_format=torch.channels_last)


def test_parameters_own_their_memory():
    before = allocated()
    parameter = nn.Parameter(torch.empty(1000, device="npu"))
    assert allocated() - before == block(4000)
    parameter.data = torch.empty(2000, device="npu")
    assert allocated() - before == block(8000)
    module = nn.Linear(4, 8, device="npu", dtype=torch.bfloat16)
    assert [each.device.type for each in module.parameters()] == ["npu", "npu"]
    del parameter, module
    assert allocated() == before


def test_modules_move_and_come_back():
    before = allocated()
    module = nn.Linear(1000, 10)
    expected = module.weight.detach().clone()
    assert module.npu() is module
    assert allocated() - before == block(40000) + block(40)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.is_npu
    module.cpu()
    assert allocated() == before
    assert torch.equal(module.weight.detach(), expected)


def test_exceptions_do_not_leak():
    before = allocated()

    def fail():
        tensor = torch.empty(1000, device="npu")
        raise ZeroDivisionError(tensor.shape)

    with pytest.raises(ZeroDivisionError):
        fail()
    gc.collect()
    assert allocated() == before


def test_cycles_are_freed_by_the_collector():
    before = allocated()
    cycle = [torch.empty(1000, device="npu")]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert allocated() == before


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch_npu's own copy uses it
def test_deepcopy_of_tensors_and_modules():
    before = allocated()
    tensor = torch.arange(4, device="npu")
    twin = copy.deepcopy(tensor)
    assert twin.device == tensor.device
    assert twin.data_ptr() != tensor.data_ptr()
    view, same = copy.deepcopy([tensor[1:], tensor])
    assert view.untyped_storage().data_ptr() == same.untyped_storage().data_ptr()
    module = nn.Linear(2, 2, device="npu")
    other = copy.deepcopy(module)
    assert other.weight.data_ptr() != module.weight.data_ptr()
    assert other.weight.is_npu
    del tensor, twin, view, same, module, other
    assert allocated() == before


@pytest.mark.needs("values")
def test_deepcopy_copies_numbers():
    tensor = torch.arange(4, device="npu")
    twin = copy.deepcopy(tensor)
    tensor += 1
    assert twin.tolist() == [0, 1, 2, 3]
    assert tensor.untyped_storage().clone()[0] == 1


def test_pickle_and_torch_save():
    tensor = torch.tensor([0, 1, 2, 3]).npu()
    assert pickle.loads(pickle.dumps(tensor)).tolist() == [0, 1, 2, 3]
    file = io.BytesIO()
    torch.save({"x": tensor}, file)
    for where, device in ((None, "npu:0"), ("cpu", "cpu"), ("npu:0", "npu:0")):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["x"]
        assert str(loaded.device) == device
        assert loaded.tolist() == [0, 1, 2, 3]


@pytest.mark.sim_only("values that nobody computed")
def test_what_nobody_computed_cannot_be_saved():
    from npusim.errors import UncomputedValueError

    with pytest.raises(UncomputedValueError):
        torch.save(torch.empty(4, device="npu"), io.BytesIO())


# ---- storages themselves


def test_storages_made_in_python():
    before = allocated()
    storage = torch.UntypedStorage(1000, device="npu")
    assert (storage.nbytes(), len(storage), storage.device) == (1000, 1000, torch.device("npu", 0))
    assert allocated() - before == block(1000)
    tensor = torch.empty(0, dtype=torch.uint8, device="npu").set_(storage)
    assert tensor.shape == (1000,)
    assert tensor.untyped_storage().data_ptr() == storage.data_ptr()
    del storage
    assert allocated() - before == block(1000)
    del tensor
    assert allocated() == before


def test_storages_are_copied():
    storage = torch.tensor([1, 2], dtype=torch.uint8).npu().untyped_storage()
    twin = storage.clone()
    assert twin.data_ptr() != storage.data_ptr()
    assert twin.device == storage.device
    assert storage.cpu().tolist() == [1, 2]
    assert torch.UntypedStorage([3, 4], device="cpu").tolist() == [3, 4]


def test_storages_are_resized_by_a_new_allocation():
    before = allocated()
    tensor = torch.empty(1000, device="npu")
    storage = tensor.untyped_storage()
    torch.npu.reset_peak_memory_stats()
    assert storage.resize_(100) is storage
    assert storage.nbytes() == 100
    assert allocated() - before == block(100)
    assert torch.npu.max_memory_allocated() - before == block(4000) + block(100)
    storage.resize_(0)
    assert (storage.nbytes(), allocated()) == (0, before)
    assert tensor.shape == (1000,)
    storage.resize_(4000)
    assert allocated() - before == block(4000)
    del tensor, storage
    assert allocated() == before


@pytest.mark.sim_only("torch's C++ side keeps the first address")
def test_storages_do_not_outgrow_their_first_size():
    from npusim.errors import UnmodelledCallError

    storage = torch.empty(10, device="npu").untyped_storage()
    message = "resize_ of an npu storage to 41 bytes is not modelled; at most its first size, 40 bytes"
    with pytest.raises(UnmodelledCallError, match=re.escape(message)):
        storage.resize_(41)


def test_tensors_are_resized():
    before = allocated()
    tensor = torch.tensor([1, 2, 3, 4]).npu()
    tensor.resize_(2)
    assert allocated() - before == block(32)
    assert tensor.tolist() == [1, 2]
    torch.npu.reset_peak_memory_stats()
    tensor.resize_(1000)
    assert allocated() - before == block(8000)
    assert torch.npu.max_memory_allocated() - before == block(8000) + block(32)
    assert tensor[:4].tolist() == [1, 2, 3, 4]


def test_set():
    before = allocated()
    tensor, other = torch.tensor([1, 2, 3]).npu(), torch.tensor([[4, 5], [6, 7]]).npu()
    tensor.set_(other.untyped_storage(), 1, (3,), (1,))
    assert allocated() - before == block(32)
    assert tensor.tolist() == [5, 6, 7]
    tensor.set_(other)
    assert tensor.tolist() == [[4, 5], [6, 7]]
    assert torch.empty(2, dtype=torch.int64, device="npu").set_(other.untyped_storage()).shape == (4,)
    tensor.set_()
    assert tensor.shape == (0,)
    del other
    assert allocated() == before


# ---- modes


def test_inference_mode():
    before = allocated()
    with torch.inference_mode():
        tensor = torch.ones(10, device="npu")
        views = [tensor, tensor[2:], tensor.view(2, 5), tensor.to(torch.float16), torch.empty_like(tensor)]
        assert all(view.is_inference() for view in views)
        tensor.add_(1)
        tensor[2:].zero_()
    assert not torch.empty(1, device="npu").is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        tensor.add_(1)
    del tensor, views
    assert allocated() == before


def test_no_grad():
    with torch.no_grad():
        parameter = nn.Parameter(torch.ones(3, device="npu"))
        result = parameter * 2
    assert parameter.requires_grad
    assert not result.requires_grad
    assert (parameter * 2).requires_grad


# ---- pinned memory


def test_pinned_memory():
    assert torch.empty(4, pin_memory=True).is_pinned()
    pinned = torch.tensor([1, 2], pin_memory=True)
    assert pinned[1:].is_pinned()
    assert pinned.pin_memory() is pinned
    copied = torch.arange(4).view(2, 2).t().pin_memory()
    assert copied.is_pinned()
    assert copied.tolist() == [[0, 2], [1, 3]]
    assert pinned.npu(non_blocking=True).tolist() == [1, 2]
    before = allocated()
    torch.zeros(1000, pin_memory=True)
    assert allocated() == before


@pytest.mark.sim_only("CANN's stand-in calls all memory of the host pinned")
def test_other_memory_is_not_pinned():
    assert not torch.empty(4).is_pinned()
    assert not torch.empty(4, pin_memory=True).clone().is_pinned()
    assert not torch.empty(4, pin_memory=False).is_pinned()


def test_device_memory_cannot_be_pinned():
    assert not torch.empty(4, device="npu").is_pinned()
    with pytest.raises(RuntimeError, match=r"cannot pin 'npuFloatType|cannot pin 'torch\.npu\.FloatTensor"):
        torch.empty(4, device="npu").pin_memory()
    for make in (torch.empty, torch.rand, torch.empty(4, device="npu").new_zeros):
        with pytest.raises(RuntimeError, match=r"^Only dense CPU tensors can be pinned"):
            make(4, device="npu", pin_memory=True)


def test_some_factories_do_not_look_whether_to_pin_device_memory():
    """Recorded on torch_npu 2.13.0; upstream's drafter asks for such zeros."""
    for make in (torch.zeros, torch.ones, torch.arange, torch.eye):
        assert not make(4, device="npu", pin_memory=True).is_pinned()


# ---- several devices, several worlds


@pytest.mark.npu_settings(num_devices=2)
def test_each_device_has_its_memory():
    tensor = torch.empty(1000, device="npu:1")
    assert [torch.npu.memory_allocated(index) for index in (0, 1)] == [0, 4096]
    del tensor
    assert torch.npu.memory_allocated(1) == 0


@pytest.mark.sim_only("the table of a world")
def test_no_record_is_left(npu_world):
    tensors = [torch.empty(10, device="npu") for _ in range(100)]
    assert len(npu_world.storages) == 100
    tensors[::2] = [None] * 50
    assert len(npu_world.storages) == 50
    tensors.clear()
    assert len(npu_world.storages) == 0


@pytest.mark.sim_only("a limit of the device")
def test_out_of_memory_leaves_nothing_behind(npu_world):
    before = allocated()
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(1 << 40, dtype=torch.uint8, device="npu")
    assert (allocated(), len(npu_world.storages)) == (before, 0)
