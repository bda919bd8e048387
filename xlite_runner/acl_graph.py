"""A model whose decode steps are captured as device graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch_npu

from xlite_runner.config import CUDAGraphMode
from xlite_runner.forward_context import BatchDescriptor, ForwardContext
from xlite_runner.graph_params import GraphParams, weak_ref_tensor

if TYPE_CHECKING:
    from xlite_runner.models.decoder import CausalLM


@dataclass(frozen=True)
class ACLGraphEntry:
    """A captured graph and, without a hold on its memory, the hidden states that it computes."""

    graph: Any
    output: torch.Tensor


class ACLGraphWrapper:
    """A model whose steps are captured on first sight and replayed afterwards, where the forward context says so.

    Steps of any other graph mode than FULL go to the model itself. Inputs have to lie in the same memory at each call.
    All graphs share one memory pool: since they never run at the same time, a graph can use what a larger one, captured
    before it, has left free.

    Args:
        runnable: The loaded model.

    Attributes:
        entries: The captured graphs.
        graph_params: Their attention operators.
    """

    def __init__(self, runnable: CausalLM) -> None:
        self.runnable = runnable
        self.entries: dict[BatchDescriptor, ACLGraphEntry] = {}
        self.graph_params = GraphParams()
        self._graph_pool = torch_npu.npu.graph_pool_handle()
        self._capturing_enabled = False
        self._update_stream = torch_npu.npu.Stream()

    def unwrap(self) -> CausalLM:
        """The model itself."""
        return self.runnable

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits by the model's output projection; never captured."""
        return self.runnable.compute_logits(hidden_states)

    @contextmanager
    def capturing_enabled(self, graph_pool: Any = None) -> Iterator[None]:
        """Capture what has no graph yet, into the wrapper's memory pool or into another one.

        Graphs that went into another pool are dropped at the end.
        """
        own_pool = self._graph_pool
        self._capturing_enabled = True
        if graph_pool is not None:
            self._graph_pool = graph_pool
        try:
            yield
        finally:
            self._capturing_enabled = False
            if graph_pool is not None:
                self.drop_graphs()
                self._graph_pool = own_pool

    def drop_graphs(self) -> None:
        """Forget all graphs, and with them the memory pool, which cannot be used again."""
        self.entries.clear()
        self.graph_params = GraphParams()
        self._graph_pool = torch_npu.npu.graph_pool_handle()

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext, **model_kwargs: Any
    ) -> torch.Tensor:
        """Hidden states of the batch.

        Raises:
            RuntimeError: The batch has no graph, and now is not the time to capture one; upstream's text.
        """
        if context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
            hidden_states: torch.Tensor = self.runnable(input_ids, positions, context, **model_kwargs)
            return hidden_states
        entry = self.entries.get(context.batch_descriptor)
        if entry is None:
            return self._capture(input_ids, positions, context, **model_kwargs)
        # Else the update could overtake the replay before this one.
        torch_npu.npu.current_stream().synchronize()
        entry.graph.replay()
        num_tokens = context.batch_descriptor.num_tokens
        if num_tokens in self.graph_params.tasks:
            assert isinstance(context.attn_metadata, Mapping)
            self.graph_params.update(num_tokens, context.attn_metadata, self._update_stream)
        return entry.output

    def _capture(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext, **model_kwargs: Any
    ) -> torch.Tensor:
        if not self._capturing_enabled:
            raise RuntimeError(
                "CUDA graph capturing detected at an inappropriate time. This operation is currently disabled."
            )
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph, pool=self._graph_pool):
            output: torch.Tensor = self.runnable(
                input_ids, positions, replace(context, graph_params=self.graph_params), **model_kwargs
            )
        num_tokens = context.batch_descriptor.num_tokens
        if num_tokens in self.graph_params.workspaces:
            self.graph_params.workspaces[num_tokens] = weak_ref_tensor(self.graph_params.workspaces[num_tokens])
        self.entries[context.batch_descriptor] = ACLGraphEntry(graph, weak_ref_tensor(output))
        return output
