"""Qwen3 with routed experts."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache, partial

import torch
from torch import nn

from xlite_runner.config import MoeConfig
from xlite_runner.forward_context import ForwardContext, MoECommType
from xlite_runner.models.decoder import CausalLM, DecoderLayer, Qwen3Attention
from xlite_runner.models.dense import Qwen2MLP
from xlite_runner.models.layers import BuildContext, ReplicatedLinear
from xlite_runner.models.rotary import make_rotary_embedding
from xlite_runner.moe.comm_method import MoECommMethod
from xlite_runner.moe.fused_moe import FusedMoE


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Router and experts."""

    def __init__(
        self, build: BuildContext, moe: MoeConfig, comm_methods: MutableMapping[MoECommType, MoECommMethod]
    ) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(build.config.model.hidden_size, moe.num_experts, build)
        self.experts = FusedMoE(build, moe, comm_methods)

    def forward(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The block's output, the same on every tensor-parallel rank."""
        router_logits = self.gate(hidden_states)
        output: torch.Tensor = self.experts(hidden_states, router_logits, context)
        return output


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and their kind."""

    def __init__(self, build: BuildContext) -> None:
        moe = build.config.model.moe
        assert moe is not None
        get_rope = cache(partial(make_rotary_embedding, build))
        comm_methods: dict[MoECommType, MoECommMethod] = {}

        def make_layer(index: int, prefix: str) -> DecoderLayer:
            attention = Qwen3Attention(prefix, get_rope, build)
            sparse = build.config.model.is_moe_layer(index)
            mlp = Qwen3MoeSparseMoeBlock(build, moe, comm_methods) if sparse else Qwen2MLP(build)
            return DecoderLayer(attention, mlp, build)

        super().__init__(build, make_layer)
