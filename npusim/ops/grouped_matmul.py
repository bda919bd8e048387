"""Matrix products of groups of rows, each with its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from npusim.errors import UnmodelledCallError
from npusim.ops.operator import operator
from npusim.ops.refusal import INVALID_VALUE, refusal
from npusim.ops.shapes import scalar_type
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

SPLIT_K = 2
KEYS_AND_COUNTS, COUNTS = 2, 1
_INT4_IN_INT32 = 8


def _check_lists(split_item: int, num_x: int, num_weights: int, num_groups: int) -> None:
    if not num_x or not num_weights:
        raise refusal("Invalid inputs: neither x nor weight could be empty.")
    if split_item not in (0, 1, 2, 3):
        raise refusal(f"Invalid value of split_item [{split_item}], which should only be one of 0/1/2/3.")
    if split_item >= 2:
        return
    if num_groups and not (num_x == 1 and num_weights == num_groups):
        raise refusal(
            "Invalid inputs. When split_item = 0 or 1 and input group_list is not None, the following two conditions "
            "are supposed to be satisfied: (1) length of x equals 1; (2) length of weight equals that of group_list. "
            f"Actual lengths: x [{num_x}], weight [{num_weights}], group_list [{num_groups}]."
        )
    if not num_groups and num_x != num_weights:
        raise refusal(
            "When split_item = 0 or 1 and input group_list is None, the num of x tensors must equal the num of weight "
            f"tensors.Actual lengths: x [{num_x}], weight [{num_weights}]."
        )


def _group_rows(ends: Sequence[int]) -> list[int]:
    """Rows of each group from where the groups end."""
    if ends[0] < 0:
        raise refusal(f"group_list[0] should be larger than or equal to 0, but now is {ends[0]}.", INVALID_VALUE)
    rows = [ends[0]]
    for index in range(1, len(ends)):
        rows.append(ends[index] - ends[index - 1])
        if rows[-1] < 0:
            raise refusal(
                f"group_list[{index}] - group_list[{index - 1}] should be larger than or equal to 0, but now is "
                f"{rows[-1]}.",
                INVALID_VALUE,
            )
    return rows


def _results(
    x: Sequence[Tensor],
    widths: Sequence[int],
    packed_width: int,
    split_item: int,
    ends: Sequence[int] | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    first = x[0]
    if split_item >= 2:
        num_rows = sum(tensor.shape[0] for tensor in x)
        return [new_like(first, (num_rows, packed_width), dtype)]
    if ends:
        return [new_like(first, (rows, width), dtype) for rows, width in zip(_group_rows(ends), widths, strict=True)]
    return [new_like(first, (*one.shape[:-1], width), dtype) for one, width in zip(x, widths, strict=True)]


def _grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    split_item: int | None = 0,
    output_dtype: Any = None,
    **options: Any,
) -> list[Tensor]:
    known = {"tuning_config", "act_type"}
    if (
        group_type == SPLIT_K
        or any(value for name, value in options.items() if name not in known)
        or options.get("act_type")
    ):
        raise UnmodelledCallError(f"values of npu_grouped_matmul with {sorted(options)} are not modelled")
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    dtype = scalar_type(output_dtype) if isinstance(output_dtype, int) else output_dtype or x[0].dtype
    num_rows = [one.shape[0] for one in x]
    if len(x) == 1 and group_list is not None:
        counts = torch.as_tensor(group_list, dtype=torch.int64)
        if group_list_type == KEYS_AND_COUNTS:
            per_expert = torch.zeros(len(weights), dtype=torch.int64)
            per_expert[counts[:, 0]] = counts[:, 1]
            counts = per_expert
        elif group_list_type != COUNTS:
            counts = counts.diff(prepend=counts.new_zeros(1))
        num_rows = counts.tolist()
    parts = torch.cat(list(x)).split([*num_rows, sum(one.shape[0] for one in x) - sum(num_rows)])
    biases = None if bias is None else list(bias[0]) if len(bias) == 1 and bias[0].dim() == 2 else bias
    scales = None if not scale else list(scale[0]) if len(scale) == 1 and scale[0].dim() == 2 else scale
    tokens = None if not per_token_scale else torch.cat(list(per_token_scale)).split([len(part) for part in parts])
    results = []
    for index, matrix in enumerate(weights):
        product = parts[index].float() @ matrix.float()
        if scales:
            product = product * scales[index].float()
        if tokens is not None:
            product = product * tokens[index].unsqueeze(-1)
        if biases:
            product = product + biases[index].float()
        results.append(product.to(dtype))
    if (split_item or 0) < 2:
        return results
    return [torch.cat([*results, results[0].new_zeros(len(parts[-1]), results[0].shape[1])])]


@operator("npu::npu_grouped_matmul", computes=_grouped_matmul, is_product=True)
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    **_: Any,
) -> list[Tensor]:
    """One result, or (``split_item`` 0 and 1) one for each group; its rows are read from ``group_list`` on the host."""
    if group_type is None:
        raise refusal("Requires manual passing group_type, current is None.", INVALID_VALUE)
    if group_type not in (-1, 0, SPLIT_K):
        raise refusal(
            f"Use Tensor input with current cann version, The group type must be -1, 0 or 2, but now is [{group_type}]",
            INVALID_VALUE,
        )
    if x_dtype is not None or weight_dtype is not None:
        raise UnmodelledCallError("npu_grouped_matmul with x_dtype or weight_dtype is not modelled")
    split_item = split_item or 0
    single = len(weight) == 1 and weight[0].dim() == 3
    num_weights = weight[0].shape[0] if single else len(weight)
    num_groups = group_list.shape[0] if group_list is not None and group_list.dim() else 0
    _check_lists(split_item, len(x), num_weights, num_groups)
    dtype = x[0].dtype if output_dtype is None else scalar_type(output_dtype)
    width = weight[0].shape[-1]
    transposed = weight[0].stride(-2) == 1 and weight[0].stride(-1) == weight[0].shape[-2]
    is_packed = weight[0].dtype is torch.int32 and not transposed
    packed_width = width * _INT4_IN_INT32 if is_packed else width
    if group_type == SPLIT_K:
        if split_item < 2:
            sizes = [width] * num_weights if single else [one.shape[-1] for one in weight]
            return [new_like(x[0], (x[0].shape[0], size), dtype) for size in sizes]
        if len(x) == 1:
            if num_weights != 1:
                raise RuntimeError(
                    "When group_list is 2(K_SPLIT) and split_item is 2/3, the length of weight must equal x."
                )
            return [new_like(x[0], (num_groups, x[0].shape[0], packed_width), dtype)]
    widths = [width] * num_weights if single else [one.shape[-1] for one in weight]
    ends = None
    if num_groups and split_item < 2:
        assert group_list is not None
        ends = [int(end) for end in platform().values.read(group_list).flatten()[:num_groups].tolist()]
    return _results(x, widths, packed_width, split_item, ends, dtype)


@operator("npu::npu_grouped_matmul.List", computes=_grouped_matmul, is_product=True)
def npu_grouped_matmul_list(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Sequence[int] | None = None,
    split_item: int | None = 0,
    output_dtype: torch.dtype | None = None,
    **_: Any,
) -> list[Tensor]:
    """The same with the groups' ends as numbers."""
    split_item = split_item or 0
    _check_lists(split_item, len(x), len(weight), len(group_list or ()))
    dtype = output_dtype or x[0].dtype
    widths = [one.shape[1] for one in weight]
    return _results(x, widths, widths[0], split_item, group_list, dtype)


def _swiglu_quant(
    x: Tensor,
    weight: Tensor | list[Tensor],
    group_list: Tensor,
    weight_scale: Any,
    x_scale: Tensor,
    group_list_type: int = 0,
) -> tuple[Tensor, Tensor]:
    weights = weight if isinstance(weight, list) else [weight]
    scales = weight_scale if isinstance(weight_scale, list) else [weight_scale]
    (product,) = _grouped_matmul(
        [x],
        weights,
        scale=scales,
        per_token_scale=[x_scale],
        group_list=group_list,
        group_list_type=group_list_type,
        split_item=2,
        output_dtype=torch.float32,
    )
    gate, up = product.chunk(2, -1)
    activated = functional.silu(gate) * up
    row_scale = activated.abs().amax(-1) / 127
    return (activated / row_scale.clamp(min=1e-30).unsqueeze(-1)).round().to(torch.int8), row_scale


def _swiglu_quant_v1(
    x: Tensor, weight: Tensor, group_list: Tensor, weight_scale: Tensor, x_scale: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *_swiglu_quant(x, weight, group_list, weight_scale, x_scale), torch.zeros(())


@operator("npu::npu_grouped_matmul_swiglu_quant", computes=_swiglu_quant_v1, is_product=True)
def npu_grouped_matmul_swiglu_quant(
    x: Tensor, weight: Tensor, group_list: Tensor, weight_scale: Tensor, x_scale: Tensor, **_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantised product, gated activation, quantised per row; and a number that means nothing."""
    width = weight_scale.shape[-1] // 2
    y = new_like(x, (x.shape[0], width), torch.int8)
    return y, new_like(x, (x.shape[0],), torch.float32), new_like(x, (), torch.float32)


def _swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    group_list_type: int | None = 0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    return _swiglu_quant(x, weight, group_list, weight_scale, x_scale, group_list_type or 0)


@operator("npu::npu_grouped_matmul_swiglu_quant_v2", computes=_swiglu_quant_v2, is_product=True)
def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: Sequence[Tensor],
    weight_scale: Sequence[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    dequant_mode: int | None = 0,
    quant_mode: int | None = 0,
    x_dtype: int | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The same for lists of weights, without the number."""
    if dequant_mode or quant_mode or x_dtype is not None:
        raise UnmodelledCallError("npu_grouped_matmul_swiglu_quant_v2 is modelled for int8 with a scale per row only")
    y = new_like(x, (x.shape[0], weight_scale[0].shape[-1] // 2), torch.int8)
    return y, new_like(x, (x.shape[0],), torch.float32)


@operator("npu::npu_grouped_matmul_finalize_routing", is_product=True)
def npu_grouped_matmul_finalize_routing(
    x: Tensor, w: Tensor, group_list: Tensor, *, dtype: torch.dtype | None = None, output_bs: int | None = 0, **_: Any
) -> Tensor:
    """The second product and the weighted sum of each token's rows."""
    num_tokens = output_bs or x.shape[0]
    return new_like(x, (num_tokens, w.shape[-1]), dtype or torch.float32)


@operator("npu::npu_quant_grouped_matmul_dequant", is_product=True)
def npu_quant_grouped_matmul_dequant(
    x: Tensor, quantized_weight: Tensor, weight_scale: Tensor, group_list: Tensor, **_: Any
) -> Tensor:
    """Quantises rows, multiplies, and gives the input's type back."""
    return new_like(x, (x.shape[0], quantized_weight.shape[1]))


def _grouped_matmul_add(
    input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, *, group_list_type: int | None = 0, **_: Any
) -> Tensor:
    ends = group_list.cumsum(0) if group_list_type == COUNTS else group_list
    total = input.clone()
    start = 0
    for group, end in enumerate(ends.tolist()):
        total[group] += x[start:end].float().T @ weight[start:end].float()
        start = end
    return total


@operator("npu::npu_grouped_matmul_add_", computes=_grouped_matmul_add, writes=["input"], is_product=True)
def npu_grouped_matmul_add_(input: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, **_: Any) -> Tensor:
    """Adds a product of each group's rows."""
    return input
