"""Captured decode steps: which steps, in which order, and what the wrapper around the model does with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("xlite._C")

from xlite_runner.acl_graph import ACLGraphWrapper
from xlite_runner.budget import graph_estimate_message, graph_memory_message
from xlite_runner.config import CUDAGraphMode, EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.cudagraph_dispatcher import CudagraphDispatcher
from xlite_runner.forward_context import BatchDescriptor, ForwardContext
from xlite_runner.graph_capture import MIN_GRAPH_BYTES, GraphRunner
from xlite_runner.scenario import load_scenario
from xlite_runner.wrapper import XliteWrapper

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny.toml"
NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
OFF, DECODE_ONLY = {"enabled": False}, {"enabled": True}
MIB = 1 << 20


def config(xlite=OFF, **settings):
    args = EngineArgs(**{"max_num_seqs": 8, "max_num_batched_tokens": 256, "xlite_graph_config": xlite} | settings)
    return check_and_update_config(args, ModelConfig.from_hf(load_scenario(TINY).model))


# ---- which steps


@pytest.mark.parametrize("xlite", [OFF, DECODE_ONLY])
@pytest.mark.parametrize("max_num_seqs", [8, 64, 96])
def test_all_configured_sizes_are_captured_largest_first(xlite, max_num_seqs):
    made = config(xlite, max_num_seqs=max_num_seqs)
    captured = [descriptor.num_tokens for descriptor in CudagraphDispatcher(made).capture_descs]
    assert captured == list(reversed(made.compilation.cudagraph_capture_sizes))
    assert captured[0] == max_num_seqs


@pytest.mark.parametrize(
    ("num_tokens", "uniform_decode", "mode", "descriptor"),
    [
        (1, True, FULL, BatchDescriptor(1, 1, uniform=True)),
        (3, True, FULL, BatchDescriptor(4, 4, uniform=True)),
        (8, True, FULL, BatchDescriptor(8, 8, uniform=True)),
        (9, True, NONE, BatchDescriptor(9)),
        (4, False, NONE, BatchDescriptor(4)),
    ],
)
def test_decode_steps_are_padded_to_the_next_graph(num_tokens, uniform_decode, mode, descriptor):
    dispatcher = CudagraphDispatcher(config(DECODE_ONLY))
    assert dispatcher.dispatch(num_tokens, uniform_decode=uniform_decode) == (mode, descriptor)


@pytest.mark.parametrize(
    ("num_tokens", "uniform_decode", "mode", "descriptor"),
    [
        (3, True, FULL, BatchDescriptor(4, 4, uniform=True)),
        (3, False, PIECEWISE, BatchDescriptor(4)),
        (8, False, PIECEWISE, BatchDescriptor(8)),
        (9, False, NONE, BatchDescriptor(9)),
    ],
)
def test_other_steps_are_padded_to_the_size_of_a_piecewise_graph(num_tokens, uniform_decode, mode, descriptor):
    dispatcher = CudagraphDispatcher(config(OFF))
    assert dispatcher.dispatch(num_tokens, uniform_decode=uniform_decode) == (mode, descriptor)
    piecewise = dispatcher.dispatch(num_tokens, uniform_decode=uniform_decode, piecewise_only=True)
    assert piecewise == (mode if mode is NONE else PIECEWISE, BatchDescriptor(descriptor.num_tokens))


@pytest.mark.parametrize("xlite", [{"enabled": True, "full_mode": True}, DECODE_ONLY, OFF])
def test_eager_engines_capture_nothing(xlite):
    dispatcher = CudagraphDispatcher(config(xlite, enforce_eager=True))
    assert not dispatcher.capture_descs
    assert dispatcher.dispatch(1, uniform_decode=True) == (NONE, BatchDescriptor(1))


def test_with_speculation_graphs_are_of_whole_requests():
    dispatcher = CudagraphDispatcher(config(num_speculative_tokens=1))
    assert dispatcher.full_sizes == (2, 4, 8, 16)
    assert dispatcher.capture_descs[0] == BatchDescriptor(16, 8, uniform=True)


# ---- the wrapper around the model


def step(num_tokens, mode):
    return ForwardContext(
        batch_descriptor=BatchDescriptor(num_tokens, num_tokens, uniform=True),
        max_tokens_across_dp=num_tokens,
        padded_num_tokens=num_tokens,
        cudagraph_runtime_mode=mode,
    )


class Model:
    """Stands for a model: a large intermediate tensor, and its result."""

    def __init__(self):
        self.contexts = []

    def __call__(self, input_ids, positions, context):
        self.contexts.append(context)
        num_tokens = context.batch_descriptor.num_tokens
        intermediate = torch.empty(num_tokens, MIB, dtype=torch.uint8, device="npu")
        return intermediate[:, :16].clone()


def call(wrapper, num_tokens, mode=FULL):
    return wrapper(None, None, step(num_tokens, mode))


def test_eager_steps_go_through(npu_world):
    model = Model()
    wrapper = ACLGraphWrapper(model)
    with wrapper.capturing_enabled():
        for _ in range(2):
            assert call(wrapper, 4, NONE).shape == (4, 16)
    assert [context.graph_params for context in model.contexts] == [None, None]
    assert not wrapper.entries


def test_a_step_is_captured_once_and_replayed_afterwards(npu_world):
    model = Model()
    wrapper = ACLGraphWrapper(model)
    with wrapper.capturing_enabled():
        captured = call(wrapper, 4)
        address = captured.data_ptr()
    assert model.contexts[0].graph_params is wrapper.graph_params
    del captured
    assert [call(wrapper, 4).data_ptr() for _ in range(2)] == [address, address]
    assert len(model.contexts) == 1


def test_serving_does_not_capture(npu_world):
    wrapper = ACLGraphWrapper(Model())
    with pytest.raises(RuntimeError, match=r"^CUDA graph capturing detected at an inappropriate time\."):
        call(wrapper, 4)


def test_smaller_graphs_live_in_the_memory_of_larger_ones(npu_world):
    wrapper = ACLGraphWrapper(Model())
    with wrapper.capturing_enabled():
        call(wrapper, 64)
        reserved = torch.npu.memory_reserved()
        for num_tokens in (32, 4, 1):
            call(wrapper, num_tokens)
    assert torch.npu.memory_reserved() == reserved
    assert torch.npu.memory_allocated() == 0  # results are held weakly


def test_graphs_in_a_pool_for_profiling_are_dropped(npu_world):
    wrapper = ACLGraphWrapper(Model())
    torch.zeros(4, device="npu")  # so that the operator library is there
    torch.npu.empty_cache()
    free = torch.npu.mem_get_info()[0]
    with wrapper.capturing_enabled(torch.npu.graph_pool_handle()):
        call(wrapper, 4)
    assert not wrapper.entries
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free


def test_both_wrappers_are_taken_off(npu_world):
    model = Model()
    xlite = object.__new__(XliteWrapper)
    xlite.runnable = ACLGraphWrapper(model)
    assert xlite.unwrap() is model
    assert xlite.runnable.unwrap() is model


# ---- order


def test_each_capture_follows_one_eager_run_with_attention(frozen_imports, npu_world):
    """Largest first; the first of a profile with long sequences."""
    calls = []
    made = config()

    def dummy_run(num_tokens, *, cudagraph_runtime_mode, force_attention=False, uniform_decode, profile_seq_lens):
        calls.append((num_tokens, cudagraph_runtime_mode, force_attention, uniform_decode, profile_seq_lens))

    runner = SimpleNamespace(
        config=made,
        device=torch.device("npu", 0),
        cudagraph_dispatcher=CudagraphDispatcher(made),
        acl_graph=ACLGraphWrapper(Model()),
        get_kv_cache_spec=lambda: {"layer": KV_CACHE_SPEC},
        initialize_kv_cache=lambda plan: calls.append(("blocks", plan.num_blocks)),
        drop_kv_cache=lambda: calls.append("dropped"),
        _dummy_run=dummy_run,
    )
    GraphRunner(runner).capture_model()
    assert calls == [
        each for size in (8, 4, 2, 1) for each in ((size, NONE, True, True, None), (size, FULL, False, True, None))
    ]
    calls.clear()
    assert GraphRunner(runner).profile_cudagraph_memory() == 3 * MIN_GRAPH_BYTES
    assert calls == [
        ("blocks", 8),
        (8, NONE, True, True, 32),
        (8, FULL, False, True, 32),
        (4, NONE, True, True, None),
        (4, FULL, False, True, None),
        "dropped",
    ]


KV_CACHE_SPEC = SimpleNamespace(page_size_bytes=1)


# ---- log


def test_log_lines_about_the_estimate():
    """As vllm-ascend 0.22.1rc1 logged them for these figures on the double, where its own start-up was run."""
    estimate, graph, total = 33637888, 2097152, 65787658240
    assert graph_estimate_message(0.95, estimate, total) == (
        "ACL graph memory profiling is enabled (default since v0.22.1). The current --gpu-memory-utilization=0.9500 is "
        "equivalent to --gpu-memory-utilization=0.9495 without ACL graph memory profiling. To maintain the same "
        "effective KV cache size as before, increase --gpu-memory-utilization to 0.9505. To disable, set "
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0."
    )
    assert graph_memory_message(graph, estimate) == (
        "ACL graph pool memory: 0.0 GiB (actual), 0.03 GiB (estimated), difference: 0.03 GiB (1504.0%)."
    )
