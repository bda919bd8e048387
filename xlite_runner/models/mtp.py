"""The modules that draft: one more decoder layer, which sees a token's embedding and the hidden state before it.

Qwen2 models have :class:`MiMoMTP`, which is published: MiMo-7B is a Qwen2 with one such layer. For the other
architectures there is none; :class:`MultiTokenPredictor` has the layers of DeepSeek's module, which most follow.
"""

from __future__ import annotations

import torch
from torch import nn

from xlite_runner.forward_context import ForwardContext
from xlite_runner.models.decoder import CausalLM
from xlite_runner.models.layers import BuildContext, LogitsProcessor, ParallelLMHead, ReplicatedLinear, RMSNorm


class MiMoMTP(nn.Module):
    """MiMo's module; the embedding is the target's, the output projection its own.

    Args:
        build: What the weights are made with.
        target: The loaded target model.
    """

    def __init__(self, build: BuildContext, target: CausalLM) -> None:
        super().__init__()
        model = build.config.model
        self.token_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)
        self.hidden_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)
        self.input_proj = nn.Linear(2 * model.hidden_size, model.hidden_size, False, build.device, build.dtype)
        self.mtp_block = target.make_layer(model.num_hidden_layers, f"model.layers.{model.num_hidden_layers}")
        self.final_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)
        self.lm_head = ParallelLMHead(build)
        self.logits_processor = LogitsProcessor(build)
        self._target = (target,)  # in a tuple, so that its weights do not count as this module's

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states of every token, after the final norm; for the arguments see :class:`MultiTokenPredictor`."""
        # As in upstream's frames, embeddings and normed hidden states live until the layer is done.
        embeds = self._target[0].model.embed_tokens(input_ids)
        embeds[positions == 0] = 0
        normed_embeds = self.token_layernorm(embeds)
        normed_states = self.hidden_layernorm(hidden_states)
        hidden_states = self.input_proj(torch.cat((normed_states, normed_embeds), dim=-1))
        hidden_states, residual = self.mtp_block(positions, hidden_states, None, context)
        hidden_states = residual + hidden_states
        output: torch.Tensor = self.final_layernorm(hidden_states)
        return output

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits over the whole vocabulary, the same on every rank."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits


class MultiTokenPredictor(nn.Module):
    """Drafts from the target's hidden states; embedding and output projection are the target's.

    Args:
        build: What the weights are made with.
        target: The loaded target model.
    """

    def __init__(self, build: BuildContext, target: CausalLM) -> None:
        super().__init__()
        model = build.config.model
        self.enorm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)
        self.hnorm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)
        self.eh_proj = ReplicatedLinear(2 * model.hidden_size, model.hidden_size, build)
        self.mtp_block = target.make_layer(model.num_hidden_layers, f"model.layers.{model.num_hidden_layers}")
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)
        self._target = (target,)  # in a tuple, so that its weights do not count as this module's

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Hidden states of every token.

        Args:
            input_ids: The token after each position.
            positions: Of the target's tokens.
            hidden_states: The target's, at these positions.
            context: Of the target's step.
        """
        inputs_embeds = self._target[0].model.embed_tokens(input_ids)
        # The first position has no token before it whose state could count.
        inputs_embeds = torch.where(positions.unsqueeze(-1) == 0, 0, inputs_embeds)
        inputs_embeds = self.enorm(inputs_embeds)
        hidden_states = self.hnorm(hidden_states)
        hidden_states = self.eh_proj(torch.cat((inputs_embeds, hidden_states), dim=-1))
        hidden_states, residual = self.mtp_block(positions, hidden_states, None, context)
        output: torch.Tensor = residual + hidden_states
        return output

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits over the whole vocabulary, the same on every rank."""
        return self._target[0].compute_logits(self.norm(hidden_states))
