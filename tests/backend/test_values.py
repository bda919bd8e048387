"""Numbers in shape mode: what is known, when it is computed, and how it stays true under in-place writes."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from npusim.errors import UncomputedValueError
from npusim.torch_backend.byte_ranges import covers, with_range, without_range
from npusim.torch_backend.values import Bytes, ShapeValues

pytestmark = pytest.mark.sim_only("how a simulated world keeps numbers")
UNKNOWN = pytest.raises(UncomputedValueError)


def known(tensor: torch.Tensor) -> bool:
    from npusim.torch_backend.registration import platform

    return platform().values.known([tensor])


def depth(world, tensor: torch.Tensor) -> int:
    value = world.storages.of(tensor).value
    return value.depth


# ---- what is known


def test_data_from_the_host_is_known(npu_world):
    assert torch.tensor([1, 2]).npu().tolist() == [1, 2]
    assert torch.ones(2, device="npu").tolist() == [1, 1]
    assert torch.arange(3, device="npu").sum().item() == 3
    assert bool(torch.tensor(True).npu())
    assert [int(each) for each in torch.arange(3, device="npu")] == [0, 1, 2]
    assert f"{torch.tensor(3).npu():d}" == "3"


def test_memory_that_nobody_wrote_is_not(npu_world):
    tensor = torch.empty(2, 3, device="npu")
    assert not known(tensor)
    for read in (
        lambda: tensor.tolist(),
        lambda: tensor.cpu(),
        lambda: tensor.sum().item(),
        lambda: bool(tensor[0, 0]),
        lambda: (tensor + 1)[0].tolist(),
        lambda: torch.ones(2, 3).copy_(tensor),
    ):
        with UNKNOWN:
            read()


def test_the_error_says_what_was_read_and_what_to_do(npu_world):
    text = (
        "a value of a torch.float32 tensor of shape (2, 3) on npu:0 was read, but nobody computed it: it comes from "
        "dummy weights, uninitialised memory or an operator modelled by its shapes only; run the world in real mode, "
        "or read something that follows from host data"
    )
    with pytest.raises(UncomputedValueError, match=f"^{re.escape(text)}$") as caught:
        torch.empty(2, 3, device="npu").tolist()
    assert isinstance(caught.value, RuntimeError)


def test_empty_tensors_are_known(npu_world):
    empty = torch.empty(0, 3, device="npu")
    assert known(empty)
    assert empty.tolist() == []
    assert (torch.cat([empty, torch.ones(1, 3, device="npu")])).tolist() == [[1, 1, 1]]


def test_printing_reads_nothing(npu_world):
    unknown = torch.empty(2, 3, device="npu")
    assert repr(unknown) == "tensor(<values not computed>, size=(2, 3), device='npu:0')"
    assert "values not computed" in str(torch.nn.Parameter(unknown))
    assert repr(unknown.half()[0]).endswith("size=(3,), device='npu:0', dtype=torch.float16)")
    assert repr(torch.arange(2, device="npu")) == "tensor([0, 1], device='npu:0')"
    assert repr(unknown.untyped_storage()).startswith(
        "<values not computed>\n[torch.storage.UntypedStorage(device=npu:0)"
    )
    assert repr(torch.nn.Linear(2, 2, device="npu")) == "Linear(in_features=2, out_features=2, bias=True)"


def test_an_operator_with_an_unknown_input_gives_unknown_results(npu_world):
    mixed = torch.empty(2, device="npu") + torch.ones(2, device="npu")
    assert not known(mixed)
    target = torch.ones(2, device="npu")
    target += torch.empty(2, device="npu")
    assert not known(target)


def test_products_are_not_followed(npu_world):
    assert not known(torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu"))


# ---- when it is computed


def test_results_above_the_limit_are_computed_when_read(npu_world):
    large = torch.ones(1 << 20, device="npu")
    doubled = large * 2
    assert depth(npu_world, doubled) == 2
    assert doubled[5].item() == 2
    assert depth(npu_world, doubled) == 0
    assert depth(npu_world, torch.ones(16, device="npu") * 2) == 0


def test_results_do_not_follow_later_writes_to_their_inputs(npu_world):
    large = torch.ones(1 << 20, device="npu")
    doubled = large * 2
    large.zero_()
    view = large[10:20]
    view.fill_(7)
    assert doubled[0].item() == 2
    assert large[9:11].tolist() == [0, 7]


def test_what_is_never_read_costs_nothing(npu_world):
    huge = torch.zeros(1 << 33, dtype=torch.uint8, device="npu")
    for _ in range(10):
        huge = huge + 1
    assert known(huge)
    assert depth(npu_world, huge) == 11


def test_unread_results_keep_no_device_memory(npu_world):
    before = torch.npu.memory_allocated()
    large = torch.ones(1 << 20, device="npu")
    doubled = large * 2
    del large
    assert torch.npu.memory_allocated() - before == (4 << 20) + 512
    assert doubled[0].item() == 2


# ---- writes in place


def test_views_read_what_was_written_through_another(npu_world):
    base = torch.zeros(4, 4, dtype=torch.int64, device="npu")
    base.t()[1] = 5
    base[2, 3] = 9
    base.view(-1)[::5] += 1
    assert base.tolist() == [[1, 5, 0, 0], [0, 6, 0, 0], [0, 5, 1, 9], [0, 5, 0, 1]]
    assert base.view(torch.int32).view(4, 8)[2, 6].item() == 9


@pytest.mark.parametrize("size", [8, 1 << 15])
def test_part_of_a_storage_can_be_known(npu_world, size):
    tensor = torch.empty(size, device="npu")
    tensor[2:4] = torch.tensor([1.0, 2.0])
    assert tensor[2:4].tolist() == [1, 2]
    assert tensor[3].item() == 2
    assert not known(tensor)
    with UNKNOWN:
        tensor[1:3].tolist()
    tensor[4:] = 5
    tensor[:2] = 0
    assert known(tensor)
    assert tensor[:6].tolist() == [0, 0, 1, 2, 5, 5]


def test_unknown_writes_make_unknown_only_what_they_cover(npu_world):
    tensor = torch.zeros(8, device="npu")
    tensor[2:4] = torch.empty(2, device="npu")
    assert tensor[:2].tolist() == [0, 0]
    assert tensor[4:].tolist() == [0] * 4
    with UNKNOWN:
        tensor[2].item()
    tensor.copy_(torch.empty(8, device="npu"))
    assert not known(tensor[:1])


def test_strided_writes_between_unknown_bytes_stay_unknown(npu_world):
    tensor = torch.empty(8, device="npu")
    tensor[::2] = 1
    assert not known(tensor[::2])
    tensor[:4] = 0
    tensor[1::2] = 3
    assert tensor[:4].tolist() == [0, 3, 0, 3]
    assert not known(tensor[4:])


def test_resized_storages_keep_what_is_known(npu_world):
    tensor = torch.arange(8, device="npu")
    storage = tensor.untyped_storage()
    storage.resize_(32)
    assert tensor[:4].tolist() == [0, 1, 2, 3]
    storage.resize_(64)
    assert tensor.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    partly = torch.empty(8, dtype=torch.int64, device="npu")
    partly[:4] = 1
    partly.untyped_storage().resize_(24)
    assert partly[:3].tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [4, 1 << 14])
def test_counters_do_not_grow_chains(npu_world, size):
    counter = torch.zeros(size, dtype=torch.int64, device="npu")
    for _ in range(100):
        counter += 1
    assert depth(npu_world, counter) <= 32
    for _ in range(40):
        counter[1] += 1
    assert depth(npu_world, counter) <= 32
    assert counter[:2].tolist() == [100, 140]
    for _ in range(40):
        counter = counter + 1
    assert counter[0].item() == 140


def test_long_chains_do_not_recurse(npu_world):
    tensor = torch.zeros(1 << 14, dtype=torch.int64, device="npu")
    limit = sys.getrecursionlimit()
    for _ in range(200):
        tensor = tensor + 1
    sys.setrecursionlimit(450)
    try:
        assert tensor[0].item() == 200
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.slow
def test_a_hundred_thousand_updates(npu_world):
    counter = torch.zeros(4, dtype=torch.int64, device="npu")
    for _ in range(100_000):
        counter += 1
    assert counter.tolist() == [100_000] * 4
    assert len(npu_world.storages) == 1


def test_chains_over_huge_storages_end_unknown(npu_world):
    huge = torch.zeros(1 << 30, dtype=torch.uint8, device="npu")
    for _ in range(40):
        huge[0] += 1
    assert not known(huge)
    assert len(npu_world.storages) == 1


def test_forgetting_a_part_again_and_again_adds_nothing(npu_world):
    tensor = torch.zeros(1 << 20, device="npu")
    for _ in range(100):
        npu_world.values.forget([tensor[:16]])
    assert depth(npu_world, tensor) <= 2
    assert tensor[16].item() == 0


def test_overlapping_copies_take_the_old_values(npu_world):
    tensor = torch.arange(6, device="npu")
    tensor[1:].copy_(tensor[:-1])
    assert tensor.tolist() == [0, 0, 1, 2, 3, 4]


@pytest.mark.npu_settings(values="real")
def test_real_values(npu_world):
    tensor = torch.arange(6, device="npu")
    tensor[1:].copy_(tensor[:-1])
    assert tensor.tolist() == [0, 0, 1, 2, 3, 4]
    assert torch.empty(2, device="npu").tolist() == [0, 0]
    assert (torch.ones(2, 2, device="npu") @ torch.ones(2, 2, device="npu")).tolist() == [[2, 2], [2, 2]]
    tensor.resize_(8)
    assert tensor.tolist() == [0, 0, 1, 2, 3, 4, 0, 0]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="out of bounds"):
        tensor.tolist()


# ---- the parts


@pytest.mark.parametrize(
    ("ranges", "added", "expected"),
    [
        ((), (2, 4), ((2, 4),)),
        (((2, 4),), (4, 6), ((2, 6),)),
        (((2, 4),), (0, 2), ((0, 4),)),
        (((2, 4),), (6, 8), ((2, 4), (6, 8))),
        (((2, 4), (6, 8)), (3, 7), ((2, 8),)),
        (((2, 4), (6, 8), (10, 12)), (4, 6), ((2, 8), (10, 12))),
        (((2, 8),), (3, 5), ((2, 8),)),
        (((4, 6),), (0, 1), ((0, 1), (4, 6))),
    ],
)
def test_adding_a_range(ranges, added, expected):
    assert with_range(ranges, *added) == expected


@pytest.mark.parametrize(
    ("ranges", "removed", "expected"),
    [
        ((), (2, 4), ()),
        (((0, 8),), (2, 4), ((0, 2), (4, 8))),
        (((0, 8),), (0, 8), ()),
        (((0, 4), (6, 8)), (3, 7), ((0, 3), (7, 8))),
        (((0, 4),), (4, 8), ((0, 4),)),
        (((4, 8),), (0, 4), ((4, 8),)),
    ],
)
def test_removing_a_range(ranges, removed, expected):
    assert without_range(ranges, *removed) == expected


def test_covering():
    assert covers(((0, 4), (6, 8)), 1, 4)
    assert not covers(((0, 4), (6, 8)), 1, 5)
    assert not covers(((0, 4), (6, 8)), 3, 7)
    assert not covers((), 0, 1)


def test_bytes_are_computed_once():
    calls = []
    value = Bytes(None, lambda: calls.append(1) or torch.zeros(1, dtype=torch.uint8), depth=3)
    assert value.depth == 3
    assert value.host() is value.host()
    assert (calls, value.depth) == ([1], 0)


def test_limits_are_settings(npu_world):
    values = ShapeValues(npu_world.storages, eager_limit_bytes=0, max_depth=2)
    tensor = torch.empty(4, device="npu")
    for step in range(5):
        values.update([tensor], [], lambda step=step: torch.full((4,), float(step)))
    assert values.read(tensor).tolist() == [4.0] * 4
