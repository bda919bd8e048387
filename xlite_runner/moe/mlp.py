"""The experts themselves."""

from __future__ import annotations

import torch
import torch_npu

from xlite_runner.models.layers import silu_and_mul


def apply_mlp(
    hidden_states: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, group_list: torch.Tensor, group_list_type: int
) -> torch.Tensor:
    """The gated MLP of every local expert on its rows.

    Args:
        hidden_states: Rows sorted by expert.
        w13: Gate and up projections, [experts, hidden, 2 * intermediate].
        w2: Down projections, [experts, intermediate, hidden].
        group_list: int64, rows of each expert.
        group_list_type: 0: as running totals, 1: as counts.
    """
    gate_up = _grouped_matmul(hidden_states, w13, group_list, group_list_type)
    gate_up = silu_and_mul(gate_up)  # frees the input once the output exists
    return _grouped_matmul(gate_up, w2, group_list, group_list_type)


def _grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, group_list: torch.Tensor, group_list_type: int
) -> torch.Tensor:
    product: torch.Tensor = torch_npu.npu_grouped_matmul(
        x=[x],
        weight=[weight],
        bias=None,
        split_item=2,
        group_list_type=group_list_type,
        group_type=0,
        group_list=group_list,
    )[0]
    return product
