"""Capturing decode steps as device graphs, and estimating beforehand what that will take."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from xlite_runner.config import CUDAGraphMode

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

    def capture_model(self) -> int:
        """Capture one graph per size; returns the drop of free memory on the device, in bytes."""
        sizes = self._runner.config.compilation.cudagraph_capture_sizes
        if not sizes:
            return 0
        gc.collect()
        free_before, _ = torch.npu.mem_get_info()
        pool = torch.npu.graph_pool_handle()
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = self._capture(size, pool)
        free_after, _ = torch.npu.mem_get_info()
        return int(free_before - free_after)

    def _capture(self, size: int, pool: Any) -> Any:
        graph = torch.npu.NPUGraph()
        self._runner._dummy_run(size, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
        with torch.npu.graph(graph, pool=pool):
            self._runner._dummy_run(size, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY)
        return graph
