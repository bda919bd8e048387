"""The attention operator's module and the metadata it works from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from xlite_runner.forward_context import ForwardContext
from xlite_runner.kv_cache.specs import FullAttentionSpec
from xlite_runner.models.layers import BuildContext


class AscendAttentionState(Enum):
    """What kind of batch the attention sees."""

    PREFILL_NO_CACHE = "PrefillNoCache"
    PREFILL_CACHE_HIT = "PrefillCacheHit"
    DECODE_ONLY = "DecodeOnly"
    CHUNKED_PREFILL = "ChunkedPrefill"
    SPEC_DECODING = "SpecDecoding"


@dataclass(frozen=True, kw_only=True)
class AscendMetadata:
    """The batch as attention sees it. Lengths are in tokens, one entry per request.

    Attributes:
        attn_state: Kind of batch.
        num_actual_tokens: Tokens without padding.
        query_start_loc: Host tensor, cumulative query lengths; starts with 0.
        seq_lens_cpu: Host tensor, cached plus new tokens.
        block_tables: Device tensor, [requests, blocks], KV-cache block numbers.
    """

    attn_state: AscendAttentionState
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens_cpu: torch.Tensor
    block_tables: torch.Tensor


class Attention(nn.Module):
    """Attention of this rank's heads over the KV cache.

    Attributes:
        layer_name: Key of the layer in metadata and in the KV-cache configuration.
    """

    def __init__(self, layer_name: str, build: BuildContext) -> None:
        super().__init__()
        self.layer_name = layer_name
        model, parallel = build.config.model, build.config.parallel
        self.kv_cache_spec = FullAttentionSpec(
            block_size=build.config.cache.block_size,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.head_dim,
            dtype_size=model.dtype_size,
        )
        for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):  # of a quantised KV cache; kept in any case
            self.register_buffer(name, torch.tensor(1.0, dtype=torch.float32, device=build.device))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attention output, [tokens, heads * head dim]; zeros where attention is not computed (profile run).

        Raises:
            NotImplementedError: There is metadata, i.e. this model is to serve by itself rather than xlite.
        """
        del key, value
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if context.attn_metadata is None:
            return output.fill_(0)
        raise NotImplementedError(
            f"{self.layer_name}: attention outside xlite is computed in profile runs only (attn_metadata None)"
        )
