"""Which experts a token goes to."""

from __future__ import annotations

import torch

from xlite_runner.config import MoeConfig


def select_experts(router_logits: torch.Tensor, moe: MoeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax and top-k as one vendor kernel.

    Returns:
        Weights in the dtype of the logits and int32 expert ids, both [tokens, top-k].
    """
    # The third result, [tokens, experts] in fp32, is allocated although it is not asked for.
    topk_weights, topk_ids, _ = torch.ops._C_ascend.moe_gating_top_k(
        router_logits,
        k=moe.num_experts_per_tok,
        k_group=1,
        group_count=1,
        group_select_mode=1,
        renorm=int(moe.norm_topk_prob),
        norm_type=0,
        out_flag=False,
        routed_scaling_factor=1.0,
        eps=1e-20,
        bias_opt=None,
    )
    return topk_weights, topk_ids
