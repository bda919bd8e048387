"""The module of the attention operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch_npu
from torch import nn

from xlite_runner.errors import KVCacheError, UnsupportedDeviceError
from xlite_runner.forward_context import AscendDeviceType, ForwardContext
from xlite_runner.graph_params import AttentionTask, GraphParams, weak_ref_tensor
from xlite_runner.kv_cache.specs import FullAttentionSpec
from xlite_runner.models.attention_metadata import AscendAttentionState, AscendMetadata
from xlite_runner.models.layers import BuildContext

CAUSAL_SPARSE_MODE = 3
ALL_TOKENS = 2147483647
KERNEL_BLOCK_SIZE = 128
"""Tokens in a block of the attention kernels, which larger blocks are split into."""


class Attention(nn.Module):
    """Attention of this rank's heads over the KV cache, by the vendor's fused operator as on A2 and A3.

    Attributes:
        layer_name: Key of the layer in metadata and in the KV-cache configuration.
        kv_cache: The layer's keys and values, each [blocks, block size, KV heads, head size]; None until there are any.
    """

    def __init__(self, layer_name: str, build: BuildContext) -> None:
        super().__init__()
        self.layer_name = layer_name
        model, parallel = build.config.model, build.config.parallel
        self.num_heads = model.get_num_attention_heads(parallel)
        self.num_kv_heads = model.get_num_kv_heads(parallel)
        self.head_size = model.head_dim
        self.scale = model.head_dim**-0.5
        self.device_type = build.device_type
        self.kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None
        self.kv_cache_spec = FullAttentionSpec(
            block_size=build.config.cache.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype_size=model.dtype_size,
        )
        # Of a quantised KV cache; made in any case. The ranges are on the device until the weights are loaded.
        for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            self.register_buffer(name, torch.tensor(1.0, dtype=torch.float32, device=build.device))
        self.ranges = [torch.tensor(0.0, dtype=torch.float32, device=build.device) for _ in range(3)]

    def process_weights_after_loading(self) -> None:
        """Let go of what only the loading of a quantised cache's scales would need."""
        self.ranges.clear()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attention output, [tokens, heads * head size]; zeros where attention is not computed (profile run).

        Raises:
            KVCacheError: There is no cache to write to.
            UnsupportedDeviceError: Neither an A2 nor an A3.
        """
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if context.attn_metadata is None:
            return output.fill_(0)
        assert isinstance(context.attn_metadata, Mapping)
        metadata: AscendMetadata = context.attn_metadata[self.layer_name]
        query = query.view(-1, self.num_heads, self.head_size)
        key = key.view(-1, self.num_kv_heads, self.head_size)
        value = value.view(-1, self.num_kv_heads, self.head_size)
        heads = output.view(-1, self.num_heads, self.head_size)
        self._reshape_and_cache(key, value, metadata)
        if context.graph_params is not None:
            self._capture(query, heads, metadata, context.graph_params)
        else:
            self._compute(query, key, value, heads, metadata)
        return output

    def _reshape_and_cache(self, key: torch.Tensor, value: torch.Tensor, metadata: AscendMetadata) -> None:
        if self.device_type not in (AscendDeviceType.A2, AscendDeviceType.A3):
            raise UnsupportedDeviceError(
                f"{self.layer_name}: attention outside of profile runs and xlite is there for A2 and A3, not for "
                f"{self.device_type.value}"
            )
        if self.kv_cache is None:
            raise KVCacheError(f"{self.layer_name}: no KV cache was initialised, and the batch has attention metadata")
        key_cache, value_cache = self.kv_cache
        num_tokens = metadata.num_actual_tokens
        torch_npu._npu_reshape_and_cache(
            key=key[:num_tokens],
            value=value[:num_tokens],
            key_cache=key_cache,
            value_cache=value_cache,
            slot_indices=metadata.slot_mapping,
        )

    def _cached(self) -> dict[str, Any]:
        """The operator's arguments for keys and values in the cache, whose heads it wants side by side."""
        assert self.kv_cache is not None
        num_blocks, block_size, _, _ = self.kv_cache[0].shape
        key, value = (cache.view(num_blocks, block_size, -1) for cache in self.kv_cache)
        return {"key": key, "value": value, "block_size": block_size}

    def _arguments(self, metadata: AscendMetadata) -> dict[str, Any]:
        """The operator's arguments that neither depend on the step nor on where keys and values are."""
        return {
            "atten_mask": metadata.attn_mask,
            "input_layout": "TND",
            "num_key_value_heads": self.num_kv_heads,
            "num_heads": self.num_heads,
            "scale": self.scale,
            "sparse_mode": CAUSAL_SPARSE_MODE,
        }

    def _compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        metadata: AscendMetadata,
    ) -> None:
        num_tokens = metadata.actual_seq_lengths_q[-1]
        if metadata.attn_state is AscendAttentionState.PREFILL_NO_CACHE:
            # Values are a view of the projections' output: copied, as by vllm-ascend 0.23.0; 0.22.1rc1 passes the view.
            batch = {
                "key": key[:num_tokens].contiguous(),
                "value": value[:num_tokens].contiguous(),
                "block_size": KERNEL_BLOCK_SIZE,
                "block_table": None,
                "actual_seq_lengths_kv": metadata.actual_seq_lengths_q,
            }
        else:
            batch = {
                **self._cached(),
                "block_table": metadata.block_tables[: len(metadata.seq_lens_list)],
                "actual_seq_lengths_kv": metadata.seq_lens_list,
            }
        attn_output, _ = torch_npu.npu_fused_infer_attention_score(
            query=query[:num_tokens],
            actual_seq_lengths=metadata.actual_seq_lengths_q,
            **batch,
            **self._arguments(metadata),
        )
        output[:num_tokens] = attn_output.view(num_tokens, self.num_heads, self.head_size)

    def _capture(
        self, query: torch.Tensor, output: torch.Tensor, metadata: AscendMetadata, graph_params: GraphParams
    ) -> None:
        """Put the operator into the graph such that each replay can have other lengths and blocks."""
        num_tokens = metadata.actual_seq_lengths_q[-1]
        softmax_lse = torch.empty(1, dtype=query.dtype, device=query.device)
        arguments = {
            "query": query,
            **self._cached(),
            **self._arguments(metadata),
            "pre_tokens": ALL_TOKENS,
            "next_tokens": ALL_TOKENS,
        }
        batch = {
            "block_table": metadata.block_tables,
            "actual_seq_lengths": metadata.actual_seq_lengths_q,
            "actual_seq_lengths_kv": metadata.seq_lens_list,
        }
        if num_tokens not in graph_params.workspaces:
            graph_params.workspaces[num_tokens] = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
                **arguments, **batch
            )
        stream = torch_npu.npu.current_stream()
        event = torch_npu.npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        torch_npu.npu.graph_task_group_begin(stream)
        torch_npu.npu_fused_infer_attention_score.out(
            **arguments, **batch, workspace=graph_params.workspaces[num_tokens], out=[output, softmax_lse]
        )
        handle = torch_npu.npu.graph_task_group_end(stream)
        weak = {
            name: weak_ref_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        graph_params.tasks.setdefault(num_tokens, []).append(
            AttentionTask(
                layer_name=self.layer_name,
                handle=handle,
                event=event,
                arguments=weak,
                out=(weak_ref_tensor(output), weak_ref_tensor(softmax_lse)),
            )
        )
