"""Adapter for dense models, and what all adapters share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from xlite._C import AttnMHA, ScoringFuncSoftmax

from xlite_runner.adapters.base import XliteModel
from xlite_runner.models.attention_metadata import AscendMetadata
from xlite_runner.models.decoder import DecoderLayer, Qwen3Attention
from xlite_runner.models.dense import Qwen2MLP
from xlite_runner.models.layers import weight_nz_mode


class LlamaXliteModel(XliteModel):
    """Llama, Qwen2, Qwen3."""

    supported_architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    attn_metadata_type: ClassVar[type[AscendMetadata]] = AscendMetadata

    @property
    def layers(self) -> list[DecoderLayer]:
        """The model's layers, in order."""
        return [layer for layer in self.runnable.model.layers if isinstance(layer, DecoderLayer)]

    def build_config(self) -> Mapping[str, Any]:
        """Dimensions of the model, and the largest step that xlite will see."""
        config, model = self.config, self.config.model
        scheduler, parallel = config.scheduler, config.parallel
        full_mode = config.ascend.xlite_graph_config.full_mode
        is_moe = model.moe is not None
        return {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "n_layers": model.num_hidden_layers,
            "n_heads": model.num_attention_heads,
            "n_kv_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            "rope_head_dim": model.head_dim,
            "norm_eps": model.rms_norm_eps,
            "rope_theta": model.rope_theta,
            "softmax_scale": model.head_dim**-0.5,
            "n_dense_layers": model.num_hidden_layers,
            "intermediate_size": model.intermediate_size,
            "def_tp_size": parallel.tensor_parallel_size,
            "def_dp_size": parallel.data_parallel_size,
            "moe_ep_size": parallel.moe_ep_size if is_moe else 1,
            "moe_tp_size": parallel.moe_tp_size if is_moe else 1,
            "experts_weight_transpose": True,
            "attn_type": AttnMHA,
            "scoring_func": ScoringFuncSoftmax,
            "weight_nz": weight_nz_mode(config) == 2,
            "max_m": scheduler.max_num_batched_tokens if full_mode else scheduler.max_num_seqs,
            "max_batch_size": scheduler.max_num_seqs,
            "max_seq_len": scheduler.max_model_len,
            "block_size": config.cache.block_size,
            "qkv_bias": model.attention_bias,
            "qk_norm": all(isinstance(layer.self_attn, Qwen3Attention) for layer in self.layers),
        }

    def build_weights(self) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
        """Every weight under xlite's name for it."""
        layers = self.layers
        attention = [layer.self_attn for layer in layers]
        biases = (attn.qkv_proj.bias for attn in attention)
        normed = [attn for attn in attention if isinstance(attn, Qwen3Attention)]
        dense = [layer.mlp for layer in layers if isinstance(layer.mlp, Qwen2MLP)]
        return {
            "embed": self.runnable.model.embed_tokens.weight,
            "norm": self.runnable.model.norm.weight,
            "head": self.runnable.lm_head.weight,
            "attn_norm": [layer.input_layernorm.weight for layer in layers],
            "mha_qkv": [attn.qkv_proj.weight for attn in attention],
            "attn_out": [attn.o_proj.weight for attn in attention],
            "mha_qkv_bias": [bias for bias in biases if bias is not None],
            "mha_q_norm": [attn.q_norm.weight for attn in normed],
            "mha_k_norm": [attn.k_norm.weight for attn in normed],
            "mlp_norm": [layer.post_attention_layernorm.weight for layer in layers],
            "mlp_up_gate": [mlp.gate_up_proj.weight for mlp in dense],
            "mlp_down": [mlp.down_proj.weight for mlp in dense],
        }

    def precompute_freqs_cis(self) -> torch.Tensor:
        """Cosines, then sines; made on the host and copied once. Scaling of frequencies is not applied, as upstream."""
        model, max_model_len = self.config.model, self.config.scheduler.max_model_len
        exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device="cpu") / model.head_dim
        positions = torch.arange(max_model_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, 1.0 / (model.rope_theta**exponents))
        embed = self.runnable.model.embed_tokens.weight
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(embed.dtype).to(embed.device)
