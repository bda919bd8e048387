"""Capturing decode steps as device graphs, and estimating beforehand what that will take."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from xlite_runner.config import CUDAGraphMode
from xlite_runner.kv_cache.planning import plan_kv_cache

if TYPE_CHECKING:
    from xlite_runner.runner import NPUModelRunner

MIN_GRAPH_BYTES = 1 << 20
"""Upstream's floor for what one more graph takes."""


class GraphRunner:
    """Captures the steps that the configuration lists, largest first.

    Args:
        runner: Whose steps are captured.
    """

    def __init__(self, runner: NPUModelRunner) -> None:
        self._runner = runner
        self._graphs: dict[int, Any] = {}

    @property
    def _sizes(self) -> list[int]:
        return sorted(self._runner.config.compilation.cudagraph_capture_sizes, reverse=True)

    def capture_model(self) -> int:
        """Capture one graph per size; returns the drop of free memory on the device, in bytes."""
        if not self._sizes:
            return 0
        gc.collect()
        pool = torch.npu.graph_pool_handle()
        free_before, _ = torch.npu.mem_get_info()
        for size in self._sizes:
            self._graphs[size] = self._capture(size, pool)
        free_after, _ = torch.npu.mem_get_info()
        return int(free_before - free_after)

    def profile_cudagraph_memory(self) -> int:
        """Estimate what :meth:`capture_model` will take, in bytes, from the first two captures on a minimal KV cache.

        The first graph counts as measured, each further one like the second, but at least 1 MiB.
        """
        if not self._sizes:
            return 0
        runner = self._runner
        runner.initialize_kv_cache(plan_kv_cache(runner.get_kv_cache_spec(), self._sizes[0]))
        pool = torch.npu.graph_pool_handle()
        taken, graphs = [], []
        for size in self._sizes[:2]:
            free_before, _ = torch.npu.mem_get_info()
            graphs.append(self._capture(size, pool))
            free_after, _ = torch.npu.mem_get_info()
            taken.append(int(free_before - free_after))
        for graph in graphs:
            graph.reset()
        runner.drop_kv_cache()
        gc.collect()
        torch.npu.empty_cache()
        return taken[0] + sum(max(each, MIN_GRAPH_BYTES) * (len(self._sizes) - 1) for each in taken[1:])

    def _capture(self, size: int, pool: Any) -> Any:
        run = self._runner._dummy_run
        run(size, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)  # what runs for the first time must not be captured
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, pool=pool):
            run(size, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
        return graph
