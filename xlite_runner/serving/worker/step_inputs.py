"""One step's inputs on the device: token ids, positions, lengths, slots, and the rows that get logits.

Order and memory of vllm-ascend 0.23.0 (``_prepare_inputs``), where slots are computed by a Triton kernel, which takes
no memory; here they are computed on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlite_runner.config import RunnerConfig
from xlite_runner.input_buffers import InputBuffers
from xlite_runner.models.attention_metadata import AscendAttentionState
from xlite_runner.serving.worker.host_twin import HostTwin, to_device
from xlite_runner.serving.worker.input_batch import InputBatch

PAD_SLOT_ID = -1
"""A token without a place in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecDecodeMetadata:
    """Which logits verify drafts. Tensors are on the device, int32.

    Attributes:
        num_draft_tokens: By row, on the host.
        draft_token_ids: [drafts], row after row.
        draft_rows: Row of each draft, on the host.
        target_logits_indices: Logits that say whether each draft is right, [drafts].
        bonus_logits_indices: Logits of the token after all of a row's drafts, [rows].
        cu_num_draft_tokens: Drafts of a row and all before it, [rows]; upstream's kernels read both sums.
        cu_num_sampled_tokens: The same with one more for each row.
    """

    num_draft_tokens: NDArray[Any]
    draft_token_ids: torch.Tensor
    draft_rows: NDArray[Any]
    target_logits_indices: torch.Tensor
    bonus_logits_indices: torch.Tensor
    cu_num_draft_tokens: torch.Tensor
    cu_num_sampled_tokens: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """A step.

    Attributes:
        num_tokens: Without padding.
        query_lens: New tokens by row.
        seq_lens: Cached and new tokens by row.
        attn_state: Kind of batch.
        is_uniform_decode: Every row brings the tokens of one decode step.
        logits_indices: Tokens that get logits, on the device.
        discarded_rows: Rows whose sample means nothing, since more of their prompt follows.
        spec_decode: None if there are no drafts.
    """

    num_tokens: int
    query_lens: list[int]
    seq_lens: list[int]
    attn_state: AscendAttentionState
    is_uniform_decode: bool
    logits_indices: torch.Tensor
    discarded_rows: list[int]
    spec_decode: SpecDecodeMetadata | None


class StepInputBuilder:
    """Fills the runner's buffers for a step.

    Args:
        config: The engine's configuration.
        buffers: The device's side.
        batch: The rows.
    """

    def __init__(self, config: RunnerConfig, buffers: InputBuffers, batch: InputBatch) -> None:
        self._config = config
        self._batch = batch
        self._block_size = config.cache.block_size
        self._buffers = buffers
        self._input_ids = HostTwin(buffers.input_ids)
        self._req_indices = HostTwin(buffers.req_indices)
        self._query_pos = HostTwin(buffers.query_pos)
        self._query_start_loc = HostTwin(buffers.query_start_loc)
        self._num_scheduled_tokens = HostTwin(buffers.num_scheduled_tokens)
        self._slot_mapping = HostTwin(buffers.batch.slot_mapping)
        self._discard_request_indices = HostTwin(buffers.discard_request_indices)
        self._discard_request_mask = HostTwin(buffers.discard_request_mask)
        self._num_decode_draft_tokens = HostTwin(buffers.num_decode_draft_tokens)
        self._logits_indices: torch.Tensor | None = None

    def build(self, num_scheduled_tokens: Mapping[str, int]) -> StepInputs:
        """Prepare a step of at least one token."""
        self._logits_indices = None  # before the new ones are made, so that steps leave memory as they found it
        batch, num_reqs = self._batch, self._batch.num_reqs
        batch.block_table.upload(num_reqs)
        query_lens = np.array([num_scheduled_tokens[request.req_id] for request in batch.requests], dtype=np.int32)
        num_drafts = np.array([len(token_ids) for token_ids in batch.spec_token_ids], dtype=np.int32)
        num_computed = batch.num_computed_tokens[:num_reqs]
        ends = query_lens.cumsum(dtype=np.int32)
        num_tokens = int(ends[-1])
        rows = np.repeat(np.arange(num_reqs), query_lens)
        query_pos = np.arange(num_tokens) - np.repeat(ends - query_lens, query_lens)
        positions = num_computed[rows] + query_pos
        seq_lens = num_computed + query_lens

        self._query_start_loc.np[0] = 0
        self._query_start_loc.np[1 : num_reqs + 1] = ends
        self._query_start_loc.np[num_reqs + 1 :] = PAD_SLOT_ID
        query_start_loc = self._query_start_loc.upload(len(self._query_start_loc.np))
        self._input_ids.fill(batch.token_ids[rows, positions])
        discarded = np.flatnonzero(seq_lens < batch.num_tokens[:num_reqs])
        self._discard_request_indices.fill(discarded)
        self._discard_request_mask.fill(seq_lens < batch.num_tokens[:num_reqs])
        self._buffers.num_accepted_tokens.fill_(1)
        self._upload_positions(num_reqs, rows, query_pos, query_lens)
        blocks = batch.block_table.np[rows, positions // self._block_size]
        self._slot_mapping.fill(blocks * self._block_size + positions % self._block_size)

        has_drafts = bool(num_drafts.any())
        spec_decode = None
        if has_drafts:
            self._num_decode_draft_tokens.fill(
                np.where(num_computed >= batch.num_prompt_tokens[:num_reqs], num_drafts, PAD_SLOT_ID)
            )
            logits_indices, spec_decode = self._spec_decode_metadata(num_drafts, ends)
        else:
            logits_indices = query_start_loc[1 : num_reqs + 1] - 1
        # Upstream's runner keeps them until the next step (exact: vllm-ascend 0.23.0 model_runner_v1.py).
        self._logits_indices = logits_indices
        return StepInputs(
            num_tokens=num_tokens,
            query_lens=query_lens.tolist(),
            seq_lens=seq_lens.tolist(),
            attn_state=attention_state(
                num_computed,
                query_lens,
                query_lens - num_drafts,
                speculates=self._config.speculative is not None,
                enable_chunked_prefill=self._config.scheduler.enable_chunked_prefill,
            ),
            is_uniform_decode=self._is_uniform_decode(query_lens, num_computed),
            logits_indices=logits_indices,
            discarded_rows=discarded.tolist(),
            spec_decode=spec_decode,
        )

    def pad(self, num_tokens: int, num_padded_tokens: int, num_reqs: int, num_padded_reqs: int) -> None:
        """Make the rest of a captured graph's inputs harmless: no slots, and block 0 in the tables."""
        if num_padded_tokens > num_tokens:
            self._buffers.batch.slot_mapping[num_tokens:num_padded_tokens].fill_(PAD_SLOT_ID)
        if num_padded_reqs > num_reqs:
            self._buffers.batch.block_table[num_reqs:num_padded_reqs].fill_(0)

    def _upload_positions(
        self, num_reqs: int, rows: NDArray[Any], query_pos: NDArray[Any], query_lens: NDArray[Any]
    ) -> None:
        """Positions and lengths, added up on the device, which with asynchronous scheduling alone knows them."""
        num_computed = self._batch.num_computed_tokens_twin.upload(num_reqs)
        row_indices = self._req_indices.fill(rows)
        positions = num_computed[row_indices].to(torch.int64) + self._query_pos.fill(query_pos)
        self._buffers.positions[: len(rows)] = positions
        scheduled = self._num_scheduled_tokens.fill(query_lens)
        self._buffers.seq_lens[:num_reqs] = num_computed + scheduled
        self._buffers.seq_lens[num_reqs:].fill_(0)

    def _is_uniform_decode(self, query_lens: NDArray[Any], num_computed: NDArray[Any]) -> bool:
        if self._config.speculative is not None and not (num_computed > 0).all():
            return False
        return bool((query_lens == self._config.uniform_decode_query_len).all())

    def _spec_decode_metadata(
        self, num_drafts: NDArray[Any], ends: NDArray[Any]
    ) -> tuple[torch.Tensor, SpecDecodeMetadata]:
        """The last tokens of each row, one more than it has drafts, and what each of their logits is for."""
        device = self._buffers.input_ids.device
        num_sampled = num_drafts + 1
        sampled_ends = num_sampled.cumsum(dtype=np.int32)
        offsets = np.arange(sampled_ends[-1], dtype=np.int32) - np.repeat(sampled_ends - num_sampled, num_sampled)
        tokens = np.repeat(ends - num_sampled, num_sampled) + offsets
        is_bonus = offsets == np.repeat(num_drafts, num_sampled)
        logits_indices = to_device(tokens.astype(np.int32), device)
        targets = to_device(np.flatnonzero(~is_bonus).astype(np.int32), device)
        return logits_indices, SpecDecodeMetadata(
            num_draft_tokens=num_drafts,
            draft_token_ids=self._buffers.input_ids[logits_indices][targets + 1],
            draft_rows=np.repeat(np.arange(len(num_drafts)), num_drafts),
            target_logits_indices=targets,
            bonus_logits_indices=to_device(np.flatnonzero(is_bonus).astype(np.int32), device),
            cu_num_draft_tokens=to_device(num_drafts.cumsum(dtype=np.int32), device),
            cu_num_sampled_tokens=to_device(sampled_ends, device),
        )


def attention_state(
    num_computed: NDArray[Any] | Sequence[int],
    query_lens: NDArray[Any] | Sequence[int],
    num_valid: NDArray[Any] | Sequence[int],
    *,
    speculates: bool,
    enable_chunked_prefill: bool,
) -> AscendAttentionState:
    """The kind of a batch; the first rule that holds for all requests counts (exact: vllm-ascend 0.23.0).

    A remainder of one prompt token counts as a decode step.

    Args:
        num_computed: Cached tokens by request.
        query_lens: New tokens by request.
        num_valid: New tokens that are no drafts, by request.
        speculates: Whether speculation (by MTP) is configured.
        enable_chunked_prefill: As configured.
    """
    if not np.any(num_computed):
        return AscendAttentionState.PREFILL_NO_CACHE
    decode = AscendAttentionState.SPEC_DECODING if speculates else AscendAttentionState.DECODE_ONLY
    if np.all(np.equal(query_lens, 1)):
        return decode
    if np.all(np.equal(num_valid, 1)):
        return AscendAttentionState.SPEC_DECODING if speculates else AscendAttentionState.CHUNKED_PREFILL
    return AscendAttentionState.CHUNKED_PREFILL if enable_chunked_prefill else AscendAttentionState.PREFILL_CACHE_HIT
