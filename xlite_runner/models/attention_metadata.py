"""What attention is told of a batch, and what makes that from the batch's lengths."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

MASK_SIZE = 2048
"""Rows and columns of the causal mask that the fused operator works from, whatever the lengths (exact, upstream)."""


class AscendAttentionState(Enum):
    """What kind of batch the attention sees."""

    PREFILL_NO_CACHE = "PrefillNoCache"
    """All requests are new: keys and values of the batch are all there are."""
    PREFILL_CACHE_HIT = "PrefillCacheHit"
    DECODE_ONLY = "DecodeOnly"
    CHUNKED_PREFILL = "ChunkedPrefill"
    SPEC_DECODING = "SpecDecoding"


@dataclass(frozen=True, kw_only=True)
class AscendMetadata:
    """The batch as attention sees it. Lengths are in tokens, one entry per request, on the host.

    Attributes:
        attn_state: Kind of batch.
        num_actual_tokens: Tokens without padding.
        actual_seq_lengths_q: Where each request's new tokens end in the batch.
        seq_lens_list: Cached plus new tokens.
        query_start_loc: Device tensor, ``actual_seq_lengths_q`` after a 0.
        block_tables: Device tensor, [requests, blocks], KV-cache block numbers.
        slot_mapping: Device tensor, [tokens], where the cache takes each token; negative: nowhere.
        attn_mask: Device tensor, the causal mask.
    """

    attn_state: AscendAttentionState
    num_actual_tokens: int
    actual_seq_lengths_q: list[int]
    seq_lens_list: list[int]
    query_start_loc: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    attn_mask: torch.Tensor


class AscendAttentionMetadataBuilder:
    """Makes metadata, and the causal mask that all of it shares: 4 MiB that the first batch takes for good.

    Args:
        device: Where device tensors go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mask: torch.Tensor | None = None

    @property
    def attn_mask(self) -> torch.Tensor:
        """One where a key is hidden; int8, [2048, 2048]."""
        if self._mask is None:
            hidden = torch.ones(MASK_SIZE, MASK_SIZE, device="cpu").triu(diagonal=1)
            self._mask = hidden.to(torch.int8).to(self._device)
        return self._mask

    def build(
        self,
        *,
        attn_state: AscendAttentionState,
        query_lens: list[int],
        seq_lens: list[int],
        num_actual_tokens: int,
        block_tables: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> AscendMetadata:
        """The metadata of a batch; for the arguments see :class:`AscendMetadata`.

        Args:
            attn_state: Kind of batch.
            query_lens: New tokens of each request.
            seq_lens: Cached plus new tokens of each request.
            num_actual_tokens: Tokens without padding.
            block_tables: One row per request.
            slot_mapping: One element per token, padding included.
        """
        attn_mask = self.attn_mask
        starts = torch.tensor([0, *query_lens], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        return AscendMetadata(
            attn_state=attn_state,
            num_actual_tokens=num_actual_tokens,
            actual_seq_lengths_q=starts[1:].tolist(),
            seq_lens_list=seq_lens,
            query_start_loc=starts.to(self._device),
            block_tables=block_tables,
            slot_mapping=slot_mapping[:num_actual_tokens],
            attn_mask=attn_mask,
        )
