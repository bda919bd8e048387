"""Dense models: Llama, Qwen2, Qwen3."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import nn

from xlite_runner.forward_context import ForwardContext
from xlite_runner.models.decoder import CausalLM, DecoderLayer, LlamaAttention, Qwen3Attention
from xlite_runner.models.layers import BuildContext, MergedColumnParallelLinear, RowParallelLinear, silu_and_mul
from xlite_runner.models.rotary import make_rotary_embedding


class Qwen2MLP(nn.Module):
    """Gated MLP of the Qwen models."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        hidden_size, intermediate_size = build.config.model.hidden_size, build.config.model.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, (intermediate_size, intermediate_size), build)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, build)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The MLP's output, the same on every rank."""
        del context
        gate_up = self.gate_up_proj(x)
        x = silu_and_mul(gate_up)
        output: torch.Tensor = self.down_proj(x)  # upstream's frame keeps gate_up until here
        return output


class LlamaMLP(Qwen2MLP):
    """Gated MLP of the Llama models: the same, with a shorter life of the intermediate tensor."""

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The MLP's output, the same on every rank."""
        del context
        x = self.gate_up_proj(x)
        x = silu_and_mul(x)
        x = self.down_proj(x)
        return x  # noqa: RET504


class LlamaForCausalLM(CausalLM):
    """Llama 2, Llama 3 and 3.1."""

    def __init__(self, build: BuildContext) -> None:
        get_rope = cache(partial(make_rotary_embedding, build))
        super().__init__(
            build,
            lambda _, prefix: DecoderLayer(LlamaAttention(prefix, get_rope, build), LlamaMLP(build), build),
        )


class Qwen2ForCausalLM(CausalLM):
    """Qwen2 and Qwen2.5."""

    def __init__(self, build: BuildContext) -> None:
        get_rope = cache(partial(make_rotary_embedding, build))
        super().__init__(
            build,
            lambda _, prefix: DecoderLayer(LlamaAttention(prefix, get_rope, build), Qwen2MLP(build), build),
        )


class Qwen3ForCausalLM(CausalLM):
    """Qwen3, dense."""

    def __init__(self, build: BuildContext) -> None:
        get_rope = cache(partial(make_rotary_embedding, build))
        super().__init__(
            build,
            lambda _, prefix: DecoderLayer(Qwen3Attention(prefix, get_rope, build), Qwen2MLP(build), build),
        )
