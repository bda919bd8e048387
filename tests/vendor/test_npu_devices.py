"""``torch.npu``: devices, and what is said of those that do not exist."""

from __future__ import annotations

import re

import pytest
import torch

INVALID_DEVICE = r"NPU function error: c10_npu::SetDevice\(.*\), error code is 107001"
MANY = pytest.mark.npu_settings(num_devices=2)


def code(text: str) -> str:
    """A line with an error code, with or without the time and process that torch_npu adds."""
    return r"\[ERROR\] (.*\) )?" + re.escape(text)


def test_device_0_is_there(npu_world):
    assert torch.npu.is_available()
    assert torch.npu.device_count() >= 1
    assert torch.npu.is_initialized() or torch.npu.init() is None
    assert torch.npu.current_device() == 0
    assert torch.empty(1, device="npu").device == torch.device("npu", 0)
    assert torch.empty(1, device="npu").is_npu
    assert not torch.empty(1).is_npu


def test_torch_npu_is_importable_and_torch_npu_npu_is_torch_npu(npu_world):
    import torch_npu

    assert torch_npu.npu is torch.npu
    assert torch_npu.__version__.startswith("2.")


@pytest.mark.parametrize("nothing", [lambda: None, lambda: -1, lambda: "npu", lambda: torch.device("npu")])
def test_set_device_to_no_device_in_particular_changes_nothing(npu_world, nothing):
    torch.npu.set_device(nothing())
    assert torch.npu.current_device() == 0


def test_set_device_that_does_not_exist(npu_world):
    with pytest.raises(RuntimeError, match=INVALID_DEVICE):
        torch.npu.set_device(15)
    assert torch.npu.current_device() == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(1, device="npu:15"),
        lambda: torch.npu.synchronize(15),
        lambda: torch.npu.Stream(15),
        lambda: torch.npu.device(15).__enter__(),
        lambda: torch.ones(1).to("npu:15"),
    ],
)
def test_use_of_a_device_that_does_not_exist(npu_world, call):
    with pytest.raises(RuntimeError, match=INVALID_DEVICE):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda device: torch.npu.set_device(device),
        lambda device: torch.npu.device(device),
        lambda device: torch.npu.synchronize(device),
        lambda device: torch.npu.memory_allocated(device),
        lambda device: torch.npu.mem_get_info(device),
        lambda device: torch.npu.Stream(device),
    ],
)
def test_devices_of_another_kind(npu_world, call):
    with pytest.raises(ValueError, match="Expected a npu device, but got: cpu\n" + code("ERR00003 PTA invalid value")):
        call("cpu")


@pytest.mark.parametrize("index", [15, -1])
@pytest.mark.parametrize("name", ["get_device_name", "get_device_properties", "mem_get_info"])
def test_questions_about_a_device_that_does_not_exist(npu_world, name, index):
    with pytest.raises(AssertionError, match="Invalid device id\n" + code("ERR00003 PTA invalid value")):
        getattr(torch.npu, name)(index)


@pytest.mark.parametrize("index", [15, -1])
@pytest.mark.parametrize("name", ["memory_allocated", "memory_stats", "memory_reserved", "reset_peak_memory_stats"])
def test_memory_of_a_device_that_does_not_exist(npu_world, name, index):
    text = re.escape(f"Invalid device argument {index}: did you call init?\n") + code("ERR00001 PTA invalid parameter")
    with pytest.raises(RuntimeError, match=text):
        getattr(torch.npu, name)(index)


def test_device_context(npu_world):
    with torch.npu.device(0):
        assert torch.npu.current_device() == 0
    with torch.npu.device(-1), torch.npu.device(None):
        assert torch.npu.current_device() == 0
    assert torch.npu.device("npu:1").idx == 1
    assert torch.npu.device_of(torch.empty(1)).idx == -1
    assert torch.npu.device_of(torch.empty(1, device="npu")).idx == 0


def test_properties(npu_world):
    properties = torch.npu.get_device_properties()
    assert properties.name == torch.npu.get_device_name()
    assert properties.name.startswith("Ascend")
    assert properties.cube_core_num > 0
    assert properties.multi_processor_count == properties.vector_core_num >= properties.cube_core_num
    assert properties.L2_cache_size >= 1 << 20


@pytest.mark.sim_only("figures of the profile")
def test_properties_are_those_of_the_profile(npu_world):
    profile = npu_world.profile
    properties = torch.npu.get_device_properties("npu:0")
    assert properties.total_memory == torch.npu.mem_get_info()[1] == profile.total_bytes.value
    assert properties.cube_core_num == profile.num_aicore.value
    assert torch.npu.get_soc_version() == profile.soc_version.value


@MANY
def test_several_devices(npu_world):
    assert torch.npu.device_count() == 2
    torch.npu.set_device("npu:1")
    assert torch.npu.current_device() == 1
    with torch.npu.device(0):
        assert torch.npu.current_device() == 0
    with pytest.raises(ZeroDivisionError), torch.npu.device(0):
        assert 1 // 0
    assert torch.npu.current_device() == 1
    with torch.npu.device_of(torch.empty(1, device="npu:0")):
        assert torch.npu.current_device() == 0


@MANY
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, device="npu"),
        lambda: torch.full((2,), 1, device="npu"),
        lambda: torch.arange(2, device="npu"),
        lambda: torch.zeros_like(torch.ones(2), device="npu"),
        lambda: torch.tensor([1], device="npu"),
        lambda: torch.as_tensor([1], device="npu"),
        lambda: torch.asarray([1], device="npu"),
        lambda: torch.ones(2).to("npu"),
        lambda: torch.ones(2).to(device="npu", dtype=torch.float16),
        lambda: torch.ones(2).to(torch.device("npu"), torch.float16, non_blocking=True),
        lambda: torch.ones(2).npu(),
        lambda: torch.ones(2).new_tensor([1], device="npu"),
        lambda: torch.ones(2).new_zeros(2, device="npu"),
        lambda: torch.empty(2, device="npu:0").to("npu"),
        lambda: torch.nn.Linear(2, 2).to("npu").weight,
        lambda: torch.nn.Linear(2, 2, device="npu").weight,
        lambda: torch.randn(2, device="npu"),
    ],
)
def test_device_npu_is_the_current_one(npu_world, make):
    torch.npu.set_device(1)
    assert make().device == torch.device("npu", 1)


@MANY
def test_the_default_device_is_the_current_one(npu_world):
    torch.npu.set_device(1)
    torch.set_default_device("npu")
    try:
        assert torch.ones(1).device == torch.tensor([1]).device == torch.device("npu", 1)
        assert torch.tensor([1], device="cpu").device == torch.device("cpu")
    finally:
        torch.set_default_device(None)
    with torch.device("npu"):
        assert torch.ones(1).device == torch.as_tensor([1]).device == torch.device("npu", 1)
    assert torch.tensor([1]).device == torch.device("cpu")


@MANY
@pytest.mark.needs("values")
def test_copies_between_devices(npu_world):
    first = torch.arange(4, device="npu:0")
    second = first.to("npu:1")
    second += 1
    assert second.device == torch.device("npu", 1)
    assert second.to("npu:0").tolist() == [1, 2, 3, 4]
    assert first.tolist() == [0, 1, 2, 3]
    assert torch.npu.memory_allocated(1) > 0


@MANY
def test_torch_accelerator_is_torch_npu(npu_world):
    torch.accelerator.set_device_index(1)
    assert torch.npu.current_device() == torch.accelerator.current_device_index() == 1
    held = torch.empty(1000, device="npu")
    assert torch.accelerator.memory_allocated() == torch.npu.memory_allocated(1) > 0
    assert torch.accelerator.get_memory_info() == torch.npu.mem_get_info()
    torch.accelerator.synchronize()
    assert torch.accelerator.current_stream().stream_id == torch.npu.current_stream().stream_id
    del held
    torch.accelerator.empty_cache()
    assert torch.npu.memory_reserved() == 0
