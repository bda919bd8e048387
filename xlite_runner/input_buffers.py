"""The device buffers that a runner makes for good before it loads the model."""

from __future__ import annotations

import torch

from xlite_runner.config import RunnerConfig


class InputBuffers:
    """Inputs of a step and the sampler's parameters, sized for the largest step; upstream's set and order.

    Only some of them are used by what the runner does today, but each takes its memory on a card, and none of it is
    in any term of the memory profile. Rows for tokens are ``max_num_batched_tokens + 2 * max_num_seqs``: upstream
    enlarges the limit by that while it makes them (0.22.1rc1, prefill context parallel size 1).

    Args:
        config: The engine's configuration.
        device: Where they live.
    """

    def __init__(self, config: RunnerConfig, device: torch.device) -> None:
        num_reqs = config.scheduler.max_num_seqs
        num_tokens = config.scheduler.max_num_batched_tokens + 2 * num_reqs
        num_blocks = -(-config.scheduler.max_model_len // config.cache.block_size)

        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.input_ids = zeros(num_tokens, dtype=torch.int32)
        self.positions = zeros(num_tokens, dtype=torch.int64)
        self.seq_lens = zeros(num_reqs, dtype=torch.int32)
        self.num_computed_tokens = zeros(num_reqs, dtype=torch.int32)
        self.prev_num_draft_tokens = zeros(num_reqs, dtype=torch.int32)
        self.req_indices = zeros(num_tokens, dtype=torch.int64)
        self.prev_positions = zeros(num_reqs, dtype=torch.int64)
        self.num_scheduled_tokens = zeros(num_reqs, dtype=torch.int32)
        self.encoder_seq_lens = zeros(num_reqs, dtype=torch.int32)
        # Made for text-only models too.
        self.inputs_embeds = zeros(num_tokens, config.model.hidden_size, dtype=getattr(torch, config.model.dtype))
        self.is_token_ids = zeros(num_tokens, dtype=torch.bool)
        self.discard_request_mask = zeros(num_reqs, dtype=torch.bool)
        self.num_decode_draft_tokens = zeros(num_reqs, dtype=torch.int32)
        self.num_accepted_tokens = zeros(num_reqs, dtype=torch.int32)
        self.query_pos = zeros(num_tokens, dtype=torch.int64)
        self.query_start_loc = zeros(num_reqs + 2, dtype=torch.int32)
        self.discard_request_indices = zeros(num_reqs, dtype=torch.int64)
        self.neg_inf = torch.full((), -float("inf"), dtype=torch.float32, device=device)
        self.min_p = zeros(num_reqs, dtype=torch.float32)
        self.block_table = zeros(num_reqs, num_blocks, dtype=torch.int32)
        self.slot_mapping = zeros(num_tokens, dtype=torch.int32)
        self.temperature = zeros(num_reqs, dtype=torch.float32)
        self.top_p = zeros(num_reqs, dtype=torch.float32)
        self.top_k = zeros(num_reqs, dtype=torch.int32)
        self.frequency_penalties = zeros(num_reqs, dtype=torch.float32)
        self.presence_penalties = zeros(num_reqs, dtype=torch.float32)
        self.repetition_penalties = zeros(num_reqs, dtype=torch.float32)
        self.num_draft_tokens = zeros(num_reqs, dtype=torch.int32)
