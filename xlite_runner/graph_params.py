"""The attention operators inside captured graphs, which get each batch's lengths anew before a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_npu

from xlite_runner.models.attention_metadata import AscendMetadata


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor without a hold on its memory, which a graph's pool keeps in place for replays."""
    weak: torch.Tensor = torch_npu._C._weak_ref_tensor(tensor)
    return weak


@dataclass(frozen=True, kw_only=True)
class AttentionTask:
    """One layer's attention operator inside a graph, which gets the batch's lengths anew before each replay.

    Attributes:
        layer_name: Key of the layer's metadata.
        handle: torch_npu's name of the operator in the graph.
        event: What the graph waits for before the operator runs.
        arguments: The operator's arguments, without the batch's.
        out: The tensors it writes to.
    """

    layer_name: str
    handle: Any
    event: Any
    arguments: Mapping[str, Any]
    out: tuple[torch.Tensor, torch.Tensor]

    def update(self, metadata: AscendMetadata, workspace: torch.Tensor, stream: Any) -> None:
        """Give the operator a batch; queued on ``stream``, the current one."""
        torch_npu.npu.graph_task_update_begin(stream, self.handle)
        torch_npu.npu_fused_infer_attention_score.out(
            **self.arguments,
            block_table=metadata.block_tables,
            actual_seq_lengths=metadata.actual_seq_lengths_q,
            actual_seq_lengths_kv=metadata.seq_lens_list,
            workspace=workspace,
            out=list(self.out),
        )
        torch_npu.npu.graph_task_update_end(stream)
        self.event.record(stream)


@dataclass
class GraphParams:
    """What captures have noted of their attention operators, by the number of tokens.

    Attributes:
        workspaces: One workspace for all layers of a graph.
        tasks: The operators, in the order of the layers.
    """

    workspaces: dict[int, torch.Tensor] = field(default_factory=dict)
    tasks: dict[int, list[AttentionTask]] = field(default_factory=dict)

    def update(self, num_tokens: int, metadata_of: Mapping[str, AscendMetadata], stream: Any) -> None:
        """Give the operators of the graph for ``num_tokens`` the batch's metadata, which is by layer name."""
        with torch_npu.npu.stream(stream):
            for task in self.tasks[num_tokens]:
                task.update(metadata_of[task.layer_name], self.workspaces[num_tokens], stream)
