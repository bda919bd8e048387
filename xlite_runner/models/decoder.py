"""The decoder that all supported architectures share; they differ in attention's details and in the MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from xlite_runner.forward_context import ForwardContext
from xlite_runner.kv_cache.specs import FullAttentionSpec
from xlite_runner.models.attention import Attention
from xlite_runner.models.layers import (
    BuildContext,
    LogitsProcessor,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from xlite_runner.models.rotary import RotaryEmbedding

GetRope = Callable[[], RotaryEmbedding]
"""The rotary embedding that all layers share, made when the first asks for it."""


class LlamaAttention(nn.Module):
    """Projections, rotary embedding and attention of one layer."""

    def __init__(self, layer_prefix: str, get_rope: GetRope, build: BuildContext) -> None:
        super().__init__()
        model, parallel = build.config.model, build.config.parallel
        self.head_dim = model.head_dim
        self.q_size = model.get_num_attention_heads(parallel) * model.head_dim
        self.kv_size = model.get_num_kv_heads(parallel) * model.head_dim
        self.qkv_proj = QKVParallelLinear(build)
        self.o_proj = RowParallelLinear(
            model.num_attention_heads * model.head_dim, model.hidden_size, build, bias=model.attention_output_bias
        )
        self.rotary_emb = get_rope()
        self.attn = Attention(f"{layer_prefix}.self_attn.attn", build)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The layer's attention output, the same on every rank."""
        # The whole of qkv stays until the end, also where q and k became tensors of their own: v is a view of it.
        qkv = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.norm_heads(q, k)
        q, k = self.rotary_emb(positions, q, k, context)
        attn_output = self.attn(q, k, v, context)
        output: torch.Tensor = self.o_proj(attn_output)
        return output

    def norm_heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is done to queries and keys before the rotary embedding: here nothing."""
        return q, k


class Qwen3Attention(LlamaAttention):
    """Attention with a norm of each query and key head."""

    def __init__(self, layer_prefix: str, get_rope: GetRope, build: BuildContext) -> None:
        super().__init__(layer_prefix, get_rope, build)
        self.q_norm = RMSNorm(self.head_dim, build.config.model.rms_norm_eps, build)
        self.k_norm = RMSNorm(self.head_dim, build.config.model.rms_norm_eps, build)

    def norm_heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, each head normed by itself."""
        normed_q = self.q_norm(q.view(q.size(0), -1, self.head_dim)).view(q.shape)
        normed_k = self.k_norm(k.view(k.size(0), -1, self.head_dim)).view(k.shape)
        return normed_q, normed_k


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm that also adds the residual."""

    def __init__(self, self_attn: LlamaAttention, mlp: nn.Module, build: BuildContext) -> None:
        super().__init__()
        model = build.config.model
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, build)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, and the residual that is yet to be added to them (None before the first layer)."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm.add_and_norm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states, context=context)
        hidden_states, residual = self.post_attention_layernorm.add_and_norm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states, context)
        return hidden_states, residual


class DecoderModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, layers: Iterator[DecoderLayer], build: BuildContext) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(build)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(build.config.model.hidden_size, build.config.model.rms_norm_eps, build)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states after the final norm."""
        hidden_states = self.embed_tokens(input_ids)
        residual = None
        for layer in self.layers:
            # While a layer runs, this frame keeps what the previous one returned: two more tensors under every peak.
            hidden_states, residual = layer(positions, hidden_states, residual, context)
        assert residual is not None
        hidden_states, _ = self.norm.add_and_norm(hidden_states, residual)
        return hidden_states


class CausalLM(nn.Module):
    """A language model. Subclasses say what one layer consists of.

    Submodules and weights have upstream's names, by which the adapters to xlite find them. They are made in upstream's
    order, since what is dropped meanwhile leaves holes in the allocator's segments that later tensors may not fit into.

    Args:
        build: What the weights are made with.
        make_layer: Makes the layer of an index, given its dotted name.
    """

    def __init__(self, build: BuildContext, make_layer: Callable[[int, str], DecoderLayer]) -> None:
        super().__init__()
        self.build = build
        self.make_layer = make_layer
        model = build.config.model
        self.model = DecoderModel(
            (make_layer(index, f"model.layers.{index}") for index in range(model.num_hidden_layers)), build
        )
        self.lm_head = self.model.embed_tokens if model.tie_word_embeddings else ParallelLMHead(build)
        self.logits_processor = LogitsProcessor(build)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states of every token, before the output projection."""
        hidden_states: torch.Tensor = self.model(input_ids, positions, context)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits over the whole vocabulary, the same on every rank."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def kv_cache_specs(self) -> dict[str, FullAttentionSpec]:
        """What each attention layer needs of the KV cache on this rank, by layer name."""
        layers = (module for module in self.modules() if isinstance(module, Attention))
        return {layer.layer_name: layer.kv_cache_spec for layer in layers}
