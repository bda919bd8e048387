"""The device buffers that a runner makes for good before it loads the model."""

from __future__ import annotations

import torch

from xlite_runner.config import RunnerConfig
from xlite_runner.models.rotary import CosSinBuffers


class InputBatchBuffers:
    """The requests of a batch: their blocks and sampling parameters; upstream's set and order.

    Args:
        config: The engine's configuration.
        num_tokens: Rows for tokens.
        device: Where they live.
        slot_dtype: Of the slots in the KV cache, one per token.
    """

    def __init__(
        self, config: RunnerConfig, num_tokens: int, device: torch.device, slot_dtype: torch.dtype = torch.int32
    ) -> None:
        num_reqs = config.scheduler.max_num_seqs
        num_blocks = -(-config.scheduler.max_model_len // config.cache.block_size)

        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.neg_inf = torch.full((), -float("inf"), dtype=torch.float32, device=device)
        self.min_p = zeros(num_reqs, dtype=torch.float32)
        self.block_table = zeros(num_reqs, num_blocks, dtype=torch.int32)
        self.slot_mapping = zeros(num_tokens, dtype=slot_dtype)
        self.temperature = zeros(num_reqs, dtype=torch.float32)
        self.top_p = zeros(num_reqs, dtype=torch.float32)
        self.top_k = zeros(num_reqs, dtype=torch.int32)
        self.frequency_penalties = zeros(num_reqs, dtype=torch.float32)
        self.presence_penalties = zeros(num_reqs, dtype=torch.float32)
        self.repetition_penalties = zeros(num_reqs, dtype=torch.float32)


class InputBuffers:
    """Inputs of a step and the sampler's parameters, sized for the largest step; upstream's set and order.

    The batch's part is made twice, at the start and at the end, as upstream's runner and the one that it is derived
    from both do; what the first took is free memory in a segment from then on.

    Only some of them are used by what the runner does today, but each takes its memory on a card, and none of it is
    in any term of the memory profile. Rows for tokens are ``max_num_batched_tokens + 2 * max_num_seqs``: upstream
    enlarges the limit by that while it makes them (0.22.1rc1, prefill context parallel size 1).

    Args:
        config: The engine's configuration.
        device: Where they live.

    Attributes:
        batch: Blocks and sampling parameters of the batch.
        cos_sin: The batch's rotary cosines and sines.
        mc2_mask: Which rows are tokens, for MC2 operators; None without experts.
    """

    def __init__(self, config: RunnerConfig, device: torch.device) -> None:
        max_num_tokens, num_reqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        num_tokens = max_num_tokens + 2 * num_reqs
        dtype = getattr(torch, config.model.dtype)
        first_batch = InputBatchBuffers(config, num_tokens, device, torch.int64)

        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.input_ids = zeros(num_tokens, dtype=torch.int32)
        self.positions = zeros(num_tokens, dtype=torch.int64)
        self.query_start_loc = zeros(num_reqs + 1, dtype=torch.int32)
        self.seq_lens = zeros(num_reqs, dtype=torch.int32)
        self.num_computed_tokens = zeros(num_reqs, dtype=torch.int32)
        self.prev_num_draft_tokens = zeros(num_reqs, dtype=torch.int32)
        self.req_indices = zeros(num_tokens, dtype=torch.int64)
        self.prev_positions = zeros(num_reqs, dtype=torch.int64)
        self.num_scheduled_tokens = zeros(num_reqs, dtype=torch.int32)
        self.encoder_seq_lens = zeros(num_reqs, dtype=torch.int32)
        # Made for text-only models too.
        self.inputs_embeds = zeros(num_tokens, config.model.hidden_size, dtype=dtype)
        self.is_token_ids = zeros(num_tokens, dtype=torch.bool)
        self.discard_request_mask = zeros(num_reqs, dtype=torch.bool)
        self.num_decode_draft_tokens = zeros(num_reqs, dtype=torch.int32)
        self.num_accepted_tokens = zeros(num_reqs, dtype=torch.int32)
        self.query_pos = zeros(num_tokens, dtype=torch.int64)
        self.query_start_loc = zeros(num_reqs + 2, dtype=torch.int32)  # in place of the first
        self.discard_request_indices = zeros(num_reqs, dtype=torch.int64)
        self.cos_sin = CosSinBuffers(max_num_tokens, config.model.head_dim, dtype, device)
        self.mc2_mask = zeros(max_num_tokens, dtype=torch.bool) if config.model.moe is not None else None
        self.batch = InputBatchBuffers(config, num_tokens, device)
        del first_batch
        self.num_draft_tokens = zeros(num_reqs, dtype=torch.int32)
