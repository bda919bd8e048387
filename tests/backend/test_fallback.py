"""Torch's operators without kernels of their own: sizes by torch's meta kernels, numbers by its CPU ones."""

from __future__ import annotations

import pytest
import torch

from npusim.errors import UncomputedValueError, UnmodelledCallError
from npusim.torch_backend.registration import has_kernel

pytestmark = pytest.mark.sim_only("operators that only the simulated device takes from torch")
X = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
Y = torch.tensor([[2.0, 2.0, 0.5], [1.0, -1.0, 3.0]])


def unknown(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="npu")


@pytest.mark.parametrize(
    "name",
    [
        "atan2",
        "aminmax",
        "fmod.Tensor",
        "hypot",
        "kron",
        "median",
        "tril_indices",
        "unfold",
        "xlogy.Tensor",
    ],
)
def test_the_operators_of_these_tests_have_no_kernels(npu_world, name):
    assert not has_kernel("aten", name)


def test_results(npu_world):
    x, y = X.npu(), Y.npu()
    assert torch.equal(torch.atan2(x, y).cpu(), torch.atan2(X, Y))
    assert torch.equal(torch.kron(x, y).cpu(), torch.kron(X, Y))
    low, high = torch.aminmax(x, dim=1)
    assert (low.tolist(), high.tolist()) == ([-2.0, -6.0], [3.0, 5.0])
    assert torch.median(x).item() == 1.0


def test_results_are_allocated(npu_world):
    x, y = X.npu(), Y.npu()
    before = torch.npu.memory_allocated()
    result = torch.kron(x, y)
    assert torch.npu.memory_allocated() - before == 512
    del result
    assert torch.npu.memory_allocated() == before


def test_sizes_without_numbers(npu_world):
    result = torch.kron(unknown(100, 200), unknown(30, 2))
    assert (result.shape, result.dtype, result.device) == ((3000, 400), torch.float32, torch.device("npu:0"))
    with pytest.raises(UncomputedValueError):
        result[0, 0].item()


@pytest.mark.npu_settings(num_devices=2)
def test_results_lie_where_the_inputs_do(npu_world):
    x = X.to("npu:1")
    before = torch.npu.memory_allocated(1)
    result = torch.hypot(x, x)
    assert result.device == torch.device("npu:1")
    assert torch.npu.memory_allocated(1) == before + 512


@pytest.mark.npu_settings(num_devices=2)
def test_factories(npu_world):
    assert torch.tril_indices(3, 2, device="npu:1").device == torch.device("npu:1")
    assert torch.equal(torch.tril_indices(3, 2, device="npu").cpu(), torch.tril_indices(3, 2))


def test_views(npu_world):
    x = torch.arange(8.0, device="npu")
    before = torch.npu.memory_allocated()
    windows = x[2:].unfold(0, 2, 2)
    assert windows.tolist() == [[2, 3], [4, 5], [6, 7]]
    windows[1].zero_()
    assert x.tolist() == [0, 1, 2, 3, 0, 0, 6, 7]
    assert torch.npu.memory_allocated() == before


def test_views_of_another_type(npu_world):
    x = torch.arange(8.0, device="npu")
    complexes = torch.view_as_complex(x.view(4, 2)[1:])
    assert complexes.dtype == torch.complex64
    assert complexes.tolist() == [2 + 3j, 4 + 5j, 6 + 7j]
    assert torch.view_as_real(complexes)[1:].tolist() == [[4, 5], [6, 7]]
    assert complexes[1:].real.tolist() == [4, 6]


def test_updates_in_place(npu_world):
    x, y = X.npu(), Y.npu()
    assert x.xlogy_(y) is x
    assert torch.equal(x.nan_to_num().cpu(), torch.xlogy(X, Y).nan_to_num())
    stacked = torch.zeros(2, 2, 3, device="npu")
    stacked[1].copy_(y)
    stacked[1].hypot_(Y.npu())
    assert torch.equal(stacked.cpu(), torch.stack([torch.zeros(2, 3), torch.hypot(Y, Y)]))


def test_updates_with_unknown_numbers(npu_world):
    x = X.npu()
    x[0].hypot_(unknown(3))
    assert x[1].tolist() == [4, 5, -6]
    with pytest.raises(UncomputedValueError):
        x[0].tolist()


def test_out(npu_world):
    x, y, out = X.npu(), Y.npu(), unknown(2, 3)
    assert torch.atan2(x, y, out=out) is out
    assert torch.equal(out.cpu(), torch.atan2(X, Y))


def test_out_is_resized(npu_world):
    out = unknown(0)
    torch.atan2(X.npu(), Y.npu(), out=out)
    assert torch.equal(out.cpu(), torch.atan2(X, Y))


def test_out_may_be_an_input_as_well(npu_world):
    x, y = X.npu(), Y.npu()
    torch.atan2(x, y, out=x)
    assert torch.equal(x.cpu(), torch.atan2(X, Y))
    x = X.npu()
    torch.atan2(y, x, out=x)
    assert torch.equal(x.cpu(), torch.atan2(Y, X))
    x = X.npu()
    torch.scatter(x, 0, torch.tensor([[1]]).npu(), 7.0, out=x)  # this one has a kernel of its own
    assert x.tolist() == [[1, -2, 3], [7, 5, -6]]


@pytest.mark.parametrize("number", [2, 1.5, True])
def test_numbers_for_tensors(npu_world, number):
    for host in (X, X.to(torch.int32), X[0, 0].bfloat16()):
        x = host.npu()
        want = torch.fmod(host, number)
        got = torch.fmod(x, number, out=torch.empty_like(want, device="npu"))
        assert got.dtype == want.dtype
        assert torch.equal(got.cpu(), want)


def test_written_and_new_results(npu_world):
    mean, variance = torch.zeros(3, device="npu"), torch.ones(3, device="npu")
    result = torch.nn.functional.batch_norm(X.npu(), mean, variance, training=True)
    running_mean, running_variance = torch.zeros(3), torch.ones(3)
    want = torch.nn.functional.batch_norm(X, running_mean, running_variance, training=True)
    assert torch.equal(result.cpu(), want)
    assert torch.equal(mean.cpu(), running_mean)
    assert torch.equal(variance.cpu(), running_variance)


def test_where_torch_contradicts_itself(npu_world):
    mean, variance = torch.zeros(3, device="npu"), torch.ones(3, device="npu")
    text = (
        r"^aten::native_batch_norm is not modelled on the simulated device for these arguments: torch's kernels give "
        r"results of sizes \[3\] by shapes and \[0\] by values$"
    )
    with pytest.raises(UnmodelledCallError, match=text):
        torch.nn.functional.batch_norm(X.npu(), mean, variance, training=False)


def test_sizes_that_follow_from_numbers(npu_world):
    assert torch.unique_consecutive(torch.tensor([3, 3, 5, 5, 3]).npu()).tolist() == [3, 5, 3]
    with pytest.raises(UncomputedValueError):
        torch.unique_consecutive(unknown(5))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("_cummax_helper", lambda: torch.cummax(X.npu(), 0)),
        ("geqrf", lambda: torch.geqrf(X.npu())),
        ("_conj", lambda: torch.tensor([1j]).npu().conj()),
        ("convolution_overrideable", lambda: torch.conv1d(X.npu(), torch.ones(1, 2, 2).npu())),
    ],
)
def test_unmodelled_operators(npu_world, name, call):
    with pytest.raises(UnmodelledCallError, match=f"^operator aten::{name} is not modelled on the simulated device$"):
        call()


def test_host_tensors_are_torch_s_own(npu_world):
    assert torch.equal(torch.atan2(X, Y, out=torch.empty(2, 3)), torch.atan2(X, Y))
    assert torch.tensor([1j]).conj().tolist() == [-1j]
    before = torch.npu.memory_allocated()
    assert torch.kron(X, Y).device.type == "cpu"
    assert torch.npu.memory_allocated() == before
