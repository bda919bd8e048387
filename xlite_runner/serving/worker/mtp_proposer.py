"""Proposes one draft token for each request after a step, by a multi-token-prediction module.

As upstream with the padded drafter batch: the module runs on all tokens of the step, those of rejected drafts included,
and a draft comes from each request's last token that counts. The module is never captured, as upstream's with
``enforce_eager`` in its ``speculative_config``; without that upstream captures it where decode steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from xlite_runner.config import CUDAGraphMode, RunnerConfig
from xlite_runner.errors import ScenarioError
from xlite_runner.forward_context import ForwardContext
from xlite_runner.models.decoder import CausalLM
from xlite_runner.models.loader import build_mtp
from xlite_runner.serving.worker.host_twin import to_device
from xlite_runner.serving.worker.step_inputs import StepInputs


class MtpProposer:
    """The drafter of one rank.

    Its buffers are made for good before the model is loaded, and no term of the memory profile counts them: 64.3 MiB
    with 8192 batched tokens and hidden size 2048. Set and sizes are upstream's (vllm-ascend 0.23.0).

    Args:
        config: The engine's configuration.
        device: This rank's device.

    Raises:
        ScenarioError: More than one draft token.
    """

    def __init__(self, config: RunnerConfig, device: torch.device) -> None:
        assert config.speculative is not None
        if config.speculative.num_speculative_tokens != 1:
            raise ScenarioError(
                f"num_speculative_tokens = {config.speculative.num_speculative_tokens} is not supported; allowed: 1"
            )
        scheduler = config.scheduler
        self._max_num_seqs = scheduler.max_num_seqs
        num_tokens, hidden_size = scheduler.max_num_batched_tokens, config.model.hidden_size
        num_metadata_rows = num_tokens + 2 * scheduler.max_num_seqs
        dtype: torch.dtype = getattr(torch, config.model.dtype)

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.input_ids = zeros(num_tokens)
        self.hidden_states = zeros(num_tokens, hidden_size, dtype=dtype)
        self.inputs_embeds = zeros(num_tokens, hidden_size, dtype=dtype)
        self.arange = torch.arange(num_tokens, dtype=torch.int32, device=device)
        self.slot_mapping_buffer = zeros(num_tokens, dtype=torch.int64)
        self.token_indices_to_sample = zeros(num_tokens)
        self.slot_mapping = zeros(num_metadata_rows)
        self.seq_lens = zeros(num_metadata_rows)
        self.query_start_loc = zeros(num_metadata_rows)
        self.positions = zeros(num_tokens)
        self.model: nn.Module

    def load_model(self, target: CausalLM) -> None:
        """Build the module with dummy weights."""
        self.model = build_mtp(target)

    def modules(self) -> Iterator[nn.Module]:
        """All modules of the drafter, not those that it shares with the target."""
        return self.model.modules()

    def dummy_run(self, context: ForwardContext) -> None:
        """One step without meaning and without attention, logits included.

        Args:
            context: The target's.
        """
        num_tokens = context.batch_descriptor.num_tokens
        num_reqs = max(num_tokens // 2, 1)
        if context.in_profile_run:
            num_reqs = min(num_reqs, self._max_num_seqs)
        self._run(
            num_tokens,
            self.token_indices_to_sample[:num_reqs],
            replace(context, attn_metadata=None, cudagraph_runtime_mode=CUDAGraphMode.NONE),
        )

    def propose(
        self,
        inputs: StepInputs,
        sampled_token_ids: Sequence[Sequence[int]],
        next_prompt_tokens: Callable[[int], int],
        target: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        make_context: Callable[[], ForwardContext],
    ) -> torch.Tensor:
        """Draft tokens on the device, [rows] int64.

        Args:
            inputs: The step.
            sampled_token_ids: What the step gave each row; nothing for rows in the middle of their prompt.
            next_prompt_tokens: The token of a row's prompt that follows the step's.
            target: The step's token ids, positions and hidden states, and more behind them.
            make_context: Makes the drafter's own context, without padding.
        """
        device, num_tokens = self.input_ids.device, inputs.num_tokens
        next_tokens = [
            token_ids[-1] if token_ids else next_prompt_tokens(row) for row, token_ids in enumerate(sampled_token_ids)
        ]
        num_sampled = np.array([len(token_ids) for token_ids in sampled_token_ids], dtype=np.int64)
        # What upstream computes on the device from the sampled tokens, and keeps until the module has run.
        next_token_ids = to_device(np.array(next_tokens, dtype=np.int32), device)
        kept = [to_device(num_sampled, device)]
        num_rejected = np.zeros(len(num_sampled), dtype=np.int32)
        if inputs.spec_decode is not None:
            num_drafts = inputs.spec_decode.num_draft_tokens
            num_rejected += np.where((num_sampled > 0) & (num_drafts > 0), num_drafts + 1 - num_sampled, 0)
            kept.append(to_device(num_rejected, device))
        last = to_device((np.cumsum(inputs.query_lens) - 1 - num_rejected).astype(np.int32), device)
        if inputs.spec_decode is not None:
            # All tokens, rejected ones too; yet into new tensors (exact: vllm-ascend 0.23.0).
            indices = self.arange[:num_tokens]
            input_ids, positions, hidden_states = (tensor[indices] for tensor in target)
        else:
            input_ids, positions, hidden_states = (tensor[:num_tokens] for tensor in target)
        self.input_ids[: num_tokens - 1] = input_ids[1:]
        self.input_ids[last] = next_token_ids
        self.positions[:num_tokens] = positions
        self.hidden_states[:num_tokens] = hidden_states
        context = make_context()
        kept.append(self.positions[last])
        self.token_indices_to_sample[: len(last)] = last
        return self._run(num_tokens, self.token_indices_to_sample[: len(last)], context)

    def _run(self, num_tokens: int, token_indices_to_sample: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden_states = self.model(
            self.input_ids[:num_tokens], self.positions[:num_tokens], self.hidden_states[:num_tokens], context
        )
        sample_hidden_states = hidden_states[token_indices_to_sample]
        logits: torch.Tensor = self.model.compute_logits(sample_hidden_states)  # type: ignore[operator]
        return logits.argmax(dim=-1)
