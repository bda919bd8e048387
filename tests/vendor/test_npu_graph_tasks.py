"""``torch.npu``: operators of a captured graph that get other arguments, and tensors without a hold on their memory."""

from __future__ import annotations

import re

import pytest
import torch
import torch_npu

from npusim.errors import UnmodelledCallError


def test_a_group_is_closed_into_a_handle_by_which_it_is_updated(npu_world):
    event, graph, update_stream = torch.npu.ExternalEvent(), torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.empty(4, device="npu").fill_(1)
        handle = torch.npu.graph_task_group_end(stream)
    assert isinstance(handle, torch_npu._C._NPUTaskGroupHandle)
    for _ in range(2):
        graph.replay()
        torch.npu.graph_task_update_begin(update_stream, handle)
        torch.npu.graph_task_update_end(update_stream)
        event.record(update_stream)


def on_a_stream(call):
    return lambda: call(torch.npu.Stream())


def begin_twice():
    with torch.npu.graph(torch.npu.NPUGraph()):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        torch.npu.graph_task_group_begin(torch.npu.current_stream())


@pytest.mark.sim_only("the driver refuses these; the texts are assumed")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            on_a_stream(lambda stream: torch.npu.graph_task_group_begin(stream)),
            RuntimeError,
            "graph_task_group_begin() called on a stream that is not being captured.",
        ),
        (begin_twice, RuntimeError, "graph_task_group_begin() called twice without graph_task_group_end()."),
        (
            on_a_stream(lambda stream: torch.npu.graph_task_group_end(stream)),
            RuntimeError,
            "graph_task_group_end() called before graph_task_group_begin().",
        ),
        (
            on_a_stream(lambda stream: torch.npu.graph_task_update_end(stream)),
            RuntimeError,
            "graph_task_update_end() called before graph_task_update_begin().",
        ),
        (
            on_a_stream(lambda stream: torch.npu.graph_task_update_begin(stream, None)),
            TypeError,
            "graph_task_update_begin(): incompatible function arguments: None",
        ),
        (
            on_a_stream(lambda stream: torch.npu.ExternalEvent().wait(stream)),
            UnmodelledCallError,
            "ExternalEvent.wait before record outside of a capture would block for ever",
        ),
    ],
)
def test_calls_in_the_wrong_order(npu_world, call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.sim_only("what is not modelled")
def test_a_stream_waits_for_an_external_event(npu_world):
    event, stream = torch.npu.ExternalEvent(), torch.npu.Stream()
    event.record(torch.npu.current_stream())
    event.wait(stream)
    event.reset(stream)
    with pytest.raises(UnmodelledCallError):
        event.wait(stream)


@pytest.mark.sim_only("looks into the world")
@pytest.mark.npu_settings(values="real")
def test_a_weak_reference_sees_the_same_memory_and_does_not_keep_it(npu_world):
    tensor = torch.arange(12, device="npu").view(3, 4)[1:]
    allocated = torch.npu.memory_allocated()
    weak = torch_npu._C._weak_ref_tensor(tensor)
    assert (weak.shape, weak.stride(), weak.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert weak.data_ptr() == tensor.data_ptr()
    assert torch.npu.memory_allocated() == allocated
    tensor.fill_(7)
    assert weak.cpu().tolist() == [[7] * 4] * 2
    weak.add_(1)
    assert tensor.cpu().tolist() == [[8] * 4] * 2
    del tensor
    assert torch.npu.memory_allocated() == 0
    num_storages = len(npu_world.storages)
    del weak
    assert len(npu_world.storages) == num_storages - 1


@pytest.mark.sim_only("looks into the world")
def test_a_weak_reference_may_die_first(npu_world):
    tensor = torch.zeros(4, device="npu")
    torch_npu._C._weak_ref_tensor(tensor)
    assert tensor.sum().item() == 0
    assert len(npu_world.storages) == 1
