"""``torch.npu``: capture of graphs, its rules and its memory."""

from __future__ import annotations

import re

import pytest
import torch

MIB = 1 << 20


def test_pool_handles_count_up(npu_world):
    first, second = torch.npu.graph_pool_handle(), torch.npu.graph_pool_handle()
    assert first[0] == second[0] == 0
    assert second[1] == first[1] + 1
    assert not torch.npu.is_current_stream_capturing()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda graph: graph.capture_begin(),
            "NPU graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on",
        ),
        (lambda graph: graph.replay(), "Called NPUGraph::replay without a preceding successful capture."),
        (lambda graph: graph.pool(), "Called NPUGraph::pool() without a preceding successful capture."),
    ],
)
def test_calls_in_the_wrong_order(npu_world, call, message):
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        call(torch.npu.NPUGraph())


def test_reset_without_a_capture_does_nothing(npu_world):
    torch.npu.NPUGraph().reset()


@pytest.mark.sim_only("reads the world's ledger")
def test_what_is_allocated_in_a_capture_stays_in_its_pool(npu_world):
    npu_world.cards[0].launch("any", npu_world.cards[0].default_stream, 0)  # so that the operator library is there
    graph = torch.npu.NPUGraph()
    free = torch.npu.mem_get_info()[0]
    with torch.npu.graph(graph):
        assert torch.npu.is_current_stream_capturing()
        tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="npu")
        del tensor
    assert not torch.npu.is_current_stream_capturing()
    assert torch.npu.current_stream().stream_id == 0
    pool = graph.pool()
    assert pool[1] == 0
    assert [segment["segment_pool_id"] for segment in torch.npu.memory_snapshot()] == [pool]
    torch.npu.empty_cache()
    graph_bytes = npu_world.profile.acl_graph_bytes.value
    assert free - torch.npu.mem_get_info()[0] == torch.npu.memory_reserved() + graph_bytes == 20 * MIB + graph_bytes
    graph.replay()
    graph.reset()
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free
    graph.reset()


def test_a_graph_that_dies_lets_go_of_its_pool(npu_world):
    graph = torch.npu.NPUGraph()
    free = torch.npu.mem_get_info()[0]
    with torch.npu.graph(graph):
        torch.empty(MIB, dtype=torch.uint8, device="npu")
    del graph
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free


def test_graphs_share_a_pool(npu_world):
    before = torch.npu.memory_reserved()
    pool = torch.npu.graph_pool_handle()
    graphs = [torch.npu.NPUGraph() for _ in range(2)]
    for graph in graphs:
        with torch.npu.graph(graph, pool=pool):
            torch.empty(3 * MIB, dtype=torch.uint8, device="npu")
        assert graph.pool() == pool
    assert torch.npu.memory_reserved() == before + 20 * MIB
    graphs[0].reset()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before + 20 * MIB
    graphs[1].reset()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before


def test_captures_use_one_stream_or_the_given_one(npu_world):
    seen = []
    for stream in (None, None, torch.npu.Stream()):
        with torch.npu.graph(torch.npu.NPUGraph(), stream=stream):
            seen.append(torch.npu.current_stream())
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.sim_only("torch_npu stays on the capture's stream when it refuses")
def test_a_graph_is_captured_once(npu_world):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        pass
    message = "This NPUGraph instance already owns a captured graph. To capture a new graph, create a new instance."
    with pytest.raises(RuntimeError, match=re.escape(message)), torch.npu.graph(graph):
        pass
    assert torch.npu.current_stream().stream_id == 0


@pytest.mark.sim_only("the driver's refusal; its text is assumed")
def test_captures_do_not_nest(npu_world):
    outer, inner = torch.npu.NPUGraph(), torch.npu.NPUGraph()
    with torch.npu.stream(torch.npu.Stream()):
        outer.capture_begin()
        with pytest.raises(RuntimeError, match="Cannot begin an NPU graph capture during another one"):
            inner.capture_begin()
        outer.capture_end()
    outer.replay()


@pytest.mark.sim_only("torch_npu may complain of a device number that it never set")
def test_a_capture_ends_where_it_began(npu_world):
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=re.escape("capture_end() called before capture_begin().")):
        graph.capture_end()
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="Capture must end on the same stream it began on"):
        graph.capture_end()
    with torch.npu.stream(stream):
        graph.capture_end()


def test_an_error_ends_the_capture(npu_world):
    graph = torch.npu.NPUGraph()
    with pytest.raises(ZeroDivisionError), torch.npu.graph(graph):
        assert 1 // 0
    assert not torch.npu.is_current_stream_capturing()
    with torch.npu.graph(torch.npu.NPUGraph()):
        pass


@pytest.mark.sim_only("the driver's refusal; its text is assumed")
@pytest.mark.parametrize("call", [lambda tensor: torch.npu.synchronize(), lambda tensor: tensor.item()])
def test_the_host_does_not_wait_in_a_capture(npu_world, call):
    tensor = torch.ones((), device="npu")
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(RuntimeError, match=r"Cannot call .* graph capture"):
        call(tensor)
    assert tensor.item() == 1


@pytest.mark.sim_only("the environment of a process")
@pytest.mark.npu_settings(environment={"TASK_QUEUE_ENABLE": "2"})
def test_no_capture_with_the_second_task_queue(npu_world):
    message = "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture, please export TASK_QUEUE_ENABLE=1/0."
    with pytest.raises(RuntimeError, match=re.escape(message)), torch.npu.graph(torch.npu.NPUGraph()):
        pass


@pytest.mark.sim_only("what is not modelled")
@pytest.mark.npu_settings(values="real")
def test_replay_computes_nothing(npu_world):
    from npusim.errors import UnmodelledCallError

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        pass
    with pytest.raises(UnmodelledCallError, match=r"NPUGraph\.replay computes no values; run the world in shape mode"):
        graph.replay()
