"""How a step is executed, and its shape with padding, as data-parallel ranks agree on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from xlite_runner.config import CUDAGraphMode, RunnerConfig
from xlite_runner.cudagraph_dispatcher import CudagraphDispatcher
from xlite_runner.forward_context import BatchDescriptor
from xlite_runner.parallel_state import ParallelState

_MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
"""From what every rank can run to what not every rank can."""


@dataclass(frozen=True)
class BatchExecution:
    """One step's execution.

    Attributes:
        mode: NONE, PIECEWISE or FULL.
        descriptor: Shape with padding.
        max_tokens_across_dp: Tokens of the data-parallel rank that has most, with padding.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    max_tokens_across_dp: int


class BatchExecutionPlanner:
    """Decides with the other data-parallel ranks, on the host, how each step is executed.

    Of a mixture of experts every rank takes part in every step, so that all of them replay graphs, padded to the
    largest step, or none does. Replicas of a dense model decide alone (exact: vllm-ascend 0.23.0,
    ``_sync_metadata_across_dp``).

    Args:
        config: The engine's configuration.
        parallel: This rank's process groups.
        dispatcher: Knows the graphs.
    """

    def __init__(self, config: RunnerConfig, parallel: ParallelState, dispatcher: CudagraphDispatcher) -> None:
        self._group = parallel.dp_cpu_group
        self._dp_size = config.parallel.data_parallel_size
        self._dispatcher = dispatcher

    def plan(self, num_tokens: int, *, uniform_decode: bool, force_eager: bool = False) -> BatchExecution:
        """The execution of a step of this rank; every rank calls this for each step.

        Args:
            num_tokens: Tokens of this rank.
            uniform_decode: Whether every request brings the tokens of one decode step.
            force_eager: No graph is replayed.
        """
        mode, descriptor = self._dispatch(num_tokens, uniform_decode=uniform_decode, force_eager=force_eager)
        if self._group is None:
            return BatchExecution(mode, descriptor, descriptor.num_tokens)
        own = torch.tensor([descriptor.num_tokens, _MODES.index(mode)], dtype=torch.int32, device="cpu")
        gathered = [torch.empty_like(own) for _ in range(self._dp_size)]
        dist.all_gather(gathered, own, group=self._group)
        of_ranks = torch.stack(gathered)
        max_tokens, common = int(of_ranks[:, 0].max()), _MODES[int(of_ranks[:, 1].min())]
        if common is not CUDAGraphMode.NONE:
            mode, descriptor = self._dispatcher.dispatch(
                max_tokens, uniform_decode=uniform_decode, piecewise_only=common is CUDAGraphMode.PIECEWISE
            )
        elif mode is not CUDAGraphMode.NONE:
            mode, descriptor = CUDAGraphMode.NONE, BatchDescriptor(descriptor.num_tokens)
        return BatchExecution(mode, descriptor, max_tokens)

    def _dispatch(
        self, num_tokens: int, *, uniform_decode: bool, force_eager: bool
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        if force_eager:
            return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
        return self._dispatcher.dispatch(num_tokens, uniform_decode=uniform_decode)
