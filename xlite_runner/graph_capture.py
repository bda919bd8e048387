"""Capturing the decode steps that the configuration lists, and estimating beforehand what that will take."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch_npu

from xlite_runner.config import CUDAGraphMode
from xlite_runner.forward_context import BatchDescriptor
from xlite_runner.kv_cache.planning import plan_kv_cache

if TYPE_CHECKING:
    from xlite_runner.runner import NPUModelRunner

logger = logging.getLogger(__name__)

MIN_GRAPH_BYTES = 1 << 20
"""Upstream's floor for what one more graph takes."""
NUM_WARMUPS = 1
"""Eager runs before a capture, so that what runs for the first time is not captured (exact: vLLM 0.22.1, 0.23.0)."""


class GraphRunner:
    """Takes a runner's dummy steps through their captures. Whether a step is captured is up to what it is executed by.

    Upstream's capture and warm-up runs are on a stream of their own, whose memory no other stream uses; so are these.

    Args:
        runner: Whose steps are captured.
    """

    def __init__(self, runner: NPUModelRunner) -> None:
        self._runner = runner

    def capture_model(self) -> int:
        """Capture one graph per size, largest first; returns the drop of free memory on the device, in bytes.

        Where xlite executes decode steps, nothing is captured, and this measures what its first steps take.
        """
        runner = self._runner
        num_piecewise = len(runner.cudagraph_dispatcher.piecewise_sizes)
        if num_piecewise:
            logger.warning(
                "The model is not compiled: %d sizes that torch.compile would cut into piecewise graphs are not "
                "captured, and NPU graph memory is that of %d full decode graphs alone.",
                num_piecewise,
                len(runner.cudagraph_dispatcher.full_sizes),
            )
        gc.collect()
        with runner.acl_graph.capturing_enabled(), _graph_capture(runner.device):
            torch_npu.npu.synchronize()
            torch_npu.npu.empty_cache()
            free_before = _free_memory()
            for descriptor in runner.cudagraph_dispatcher.capture_descs:
                self._warmup_and_capture(descriptor)
                torch_npu.npu.synchronize()
            free_after = _free_memory()
        gc.collect()
        torch_npu.npu.empty_cache()
        return free_before - free_after

    def drop(self) -> None:
        """Forget all captured graphs; their memory is free once the allocator's cache is emptied."""
        if self._runner.config.compilation.cudagraph_mode.has_full_cudagraphs:
            self._runner.acl_graph.drop_graphs()

    def profile_cudagraph_memory(self) -> int:
        """Estimate what :meth:`capture_model` will take, in bytes, from the first two captures on a minimal KV cache.

        The first graph counts as measured, each further one like the second, but at least 1 MiB. The first one's
        sequences are as long as if all of them came in one step.
        """
        runner = self._runner
        config = runner.config
        descriptors = runner.cudagraph_dispatcher.capture_descs
        min_blocks = config.compilation.max_cudagraph_capture_size or 1
        runner.initialize_kv_cache(plan_kv_cache(runner.get_kv_cache_spec(), min_blocks))
        taken = []
        if descriptors:
            logger.info(
                "Profiling CUDA graph memory: FULL=%d (largest=%d)", len(descriptors), descriptors[0].num_tokens
            )
            share = config.scheduler.max_num_batched_tokens // descriptors[0].num_tokens
            lengths = (min(config.scheduler.max_model_len, share), None)
            gc.collect()
            pool = torch_npu.npu.graph_pool_handle()
            with runner.acl_graph.capturing_enabled(pool), _graph_capture(runner.device):
                torch_npu.npu.synchronize()
                torch_npu.npu.empty_cache()
                for descriptor, seq_len in zip(descriptors, lengths, strict=False):
                    free_before = _free_memory()
                    self._warmup_and_capture(descriptor, seq_len)
                    torch_npu.npu.synchronize()
                    taken.append(free_before - _free_memory())
        torch_npu.npu.synchronize()
        runner.drop_kv_cache()
        gc.collect()
        torch_npu.npu.empty_cache()
        if not taken:
            return 0
        per_graph = max(taken[-1] if len(taken) > 1 else 0, MIN_GRAPH_BYTES)
        estimate = taken[0] + per_graph * (len(descriptors) - 1)
        logger.info("Estimated CUDA graph memory: %.2f GiB total", estimate / (1 << 30))
        return estimate

    def _warmup_and_capture(self, descriptor: BatchDescriptor, seq_len: int | None = None) -> None:
        run = self._runner._dummy_run
        for _ in range(NUM_WARMUPS):
            run(
                descriptor.num_tokens,
                cudagraph_runtime_mode=CUDAGraphMode.NONE,
                force_attention=True,
                uniform_decode=descriptor.uniform,
                profile_seq_lens=seq_len,
            )
        run(
            descriptor.num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            uniform_decode=descriptor.uniform,
            profile_seq_lens=seq_len,
        )


def _free_memory() -> int:
    free: int = torch_npu.npu.mem_get_info()[0]
    return free


@contextmanager
def _graph_capture(device: torch.device) -> Iterator[None]:
    """Run on a new stream, behind everything queued on the current one."""
    stream = torch_npu.npu.Stream(device=device)
    stream.wait_stream(torch_npu.npu.current_stream())
    with torch_npu.npu.stream(stream):
        yield
