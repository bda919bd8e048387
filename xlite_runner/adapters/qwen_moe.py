"""Adapter for Qwen3 with routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch_npu

from xlite_runner.adapters.llama import LlamaXliteModel
from xlite_runner.models.layers import ACL_FORMAT_FRACTAL_NZ
from xlite_runner.models.qwen3_moe import Qwen3MoeSparseMoeBlock


class QwenMoeXliteModel(LlamaXliteModel):
    """Qwen3 MoE; xlite refuses models that also have dense layers."""

    supported_architectures: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)

    @property
    def blocks(self) -> list[Qwen3MoeSparseMoeBlock]:
        """Routers and experts, layer by layer."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Qwen3MoeSparseMoeBlock)]

    def build_config(self) -> Mapping[str, Any]:
        """The dense dimensions and those of the experts."""
        moe = self.config.model.moe
        assert moe is not None
        is_nz = torch_npu.get_npu_format(self.blocks[0].experts.w13_weight) == ACL_FORMAT_FRACTAL_NZ
        return {
            **super().build_config(),
            "n_dense_layers": 0,
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": 0,
            "n_act_experts": moe.num_experts_per_tok,
            "moe_intermediate_size": moe.moe_intermediate_size,
            "norm_topk_prob": moe.norm_topk_prob,
            "experts_weight_nz": is_nz,
        }

    def build_weights(self) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
        """The dense weights, the routers, and every expert as a view of its layer's tensor."""
        experts = [block.experts for block in self.blocks]
        return {
            **super().build_weights(),
            "gate": [block.gate.weight for block in self.blocks],
            "re_up_gate": [weight for layer in experts for weight in layer.w13_weight.unbind(0)],
            "re_down": [weight for layer in experts for weight in layer.w2_weight.unbind(0)],
        }
