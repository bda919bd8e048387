"""Proposes one draft token for each request after a step, by a multi-token-prediction module.

As upstream with the padded drafter batch: the module runs on all tokens of the step, those of rejected drafts included,
and a draft comes from each request's last token that counts. The module is never captured here; upstream captures it
where decode steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from xlite_runner.config import RunnerConfig
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

    def dummy_run(
        self, target_hidden_states: torch.Tensor, positions: torch.Tensor, context: ForwardContext, num_reqs: int
    ) -> None:
        """One step without meaning, logits included.

        Args:
            target_hidden_states: Of the dummy step.
            positions: Of its tokens, and more.
            context: Its context.
            num_reqs: Rows of logits.
        """
        hidden_states = self._run(target_hidden_states, positions, context)
        self.model.compute_logits(hidden_states[self.token_indices_to_sample[:num_reqs]])  # type: ignore[operator]

    def propose(
        self,
        inputs: StepInputs,
        sampled_token_ids: Sequence[Sequence[int]],
        next_prompt_tokens: Callable[[int], int],
        target: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        context: ForwardContext,
    ) -> torch.Tensor:
        """Draft tokens on the device, [rows] int64.

        Args:
            inputs: The step.
            sampled_token_ids: What the step gave each row; nothing for rows in the middle of their prompt.
            next_prompt_tokens: The token of a row's prompt that follows the step's.
            target: The step's token ids, positions and hidden states, and more behind them.
            context: The step's context.
        """
        input_ids, positions, hidden_states = target
        num_tokens = inputs.num_tokens
        next_tokens = [
            token_ids[-1] if token_ids else next_prompt_tokens(row) for row, token_ids in enumerate(sampled_token_ids)
        ]
        last = to_device(self._last_tokens(inputs, sampled_token_ids), self.input_ids.device)
        self.input_ids[: num_tokens - 1] = input_ids[1:num_tokens]
        self.input_ids[last] = to_device(np.array(next_tokens, dtype=np.int32), last.device)
        self.token_indices_to_sample[: len(last)] = last
        hidden_states = self._run(hidden_states, positions, context)
        logits: torch.Tensor = self.model.compute_logits(hidden_states[last])  # type: ignore[operator]
        return logits.argmax(dim=-1)

    def _last_tokens(self, inputs: StepInputs, sampled_token_ids: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Each row's last token that is not a rejected draft, as its place in the step."""
        last = np.cumsum(inputs.query_lens) - 1
        if inputs.spec_decode is not None:
            num_sampled = np.array([len(token_ids) for token_ids in sampled_token_ids])
            last -= np.where(num_sampled > 0, inputs.spec_decode.num_draft_tokens + 1 - num_sampled, 0)
        return last.astype(np.int32)

    def _run(
        self, target_hidden_states: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """On as many tokens as the step has with padding, for which there may be no hidden states."""
        num_tokens = context.batch_descriptor.num_tokens
        target_hidden_states = target_hidden_states[:num_tokens]
        self.positions[:num_tokens] = positions[:num_tokens]
        self.hidden_states[: len(target_hidden_states)] = target_hidden_states
        hidden_states: torch.Tensor = self.model(
            self.input_ids[:num_tokens], self.positions[:num_tokens], self.hidden_states[:num_tokens], context
        )
        return hidden_states
