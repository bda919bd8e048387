"""The operators of vllm-ascend's compiled extension that the runner calls.

As all kernels on the stub they compute nothing: they allocate their results. Schemas and sizes: vllm-ascend v0.22.1rc1,
csrc/torch_binding.cpp and csrc/moe.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("_C_ascend", "DEF")
LIBRARY.define(
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6)"
    " -> (Tensor y, Tensor rstd, Tensor x)"
)
LIBRARY.define(
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type,"
    " bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None)"
    " -> (Tensor y, Tensor expert_idx, Tensor out)"
)
LIBRARY.define(
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,"
    " int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0,"
    " bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0)"
    " -> (Tensor expanded, Tensor row_idx, Tensor expert_tokens, Tensor scales)"
)


@torch.library.impl(LIBRARY, "npu_add_rms_norm_bias", "PrivateUse1")
def npu_add_rms_norm_bias(x1, x2, gamma, beta=None, epsilon=1e-6):
    rstd = x1.new_empty((*x1.shape[: x1.dim() - gamma.dim()], *[1] * gamma.dim()), dtype=torch.float32)
    return torch.empty_like(x1), rstd, torch.empty_like(x1)


@torch.library.impl(LIBRARY, "moe_gating_top_k", "PrivateUse1")
def moe_gating_top_k(x, k, *args, **options):
    rows = x.shape[0]
    return x.new_empty(rows, k), x.new_empty(rows, k, dtype=torch.int32), torch.empty_like(x, dtype=torch.float32)


@torch.library.impl(LIBRARY, "npu_moe_init_routing_custom", "PrivateUse1")
def npu_moe_init_routing_custom(x, expert_idx, *, active_num=-1, active_expert_range=(), expert_num=-1, **options):
    num_rows = min(expert_idx.numel(), active_num) if active_num > 0 else expert_idx.numel()
    first, last = active_expert_range or (0, expert_num)
    return (
        x.new_empty(num_rows, x.shape[1]),
        expert_idx.new_empty(expert_idx.numel()),
        x.new_empty(last - first, dtype=torch.int64),
        x.new_empty(num_rows, dtype=torch.float32),
    )
