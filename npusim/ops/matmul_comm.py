"""Matrix products with a collective in the same kernel (MC2). They wait for the other ranks of their communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npusim.ops.distributed import group_of
from npusim.ops.moe_comm import meet
from npusim.ops.operator import IN_BODY, operator
from npusim.ops.parts import Part, update
from npusim.ops.refusal import INVALID_PARAMETER, INVALID_TYPE, INVALID_VALUE, refusal
from npusim.torch_backend.registration import platform
from npusim.torch_backend.tensors import new_like

_WORLD_SIZES = (2, 4, 8, 16, 32)


def _together(
    operation: str,
    hcom: str,
    operands: Sequence[Tensor | None],
    results: Sequence[Tensor],
    compute: Callable[[list[list[Tensor | None]], int], list[Tensor]] | None,
) -> None:
    """Meet, and compute every rank's results from the operands of all: ``compute(operands by rank, rank)``."""
    group = group_of(hcom) if platform().hccl_communicator(hcom).num_ranks > 1 else None
    rank, num_ranks = (group.rank(), group.size()) if group else (0, 1)
    given = [tensor is not None for tensor in operands]
    computes = compute is not None and platform().values.multiplies
    own = [tensor for tensor in operands if tensor is not None] if computes else []

    def finish(parts: list[Part], receivers: Sequence[int]) -> None:
        targets = [target for receiver in receivers for target in parts[receiver].outputs]
        if compute is None or not computes:
            platform().values.forget(targets)
            return

        def all_results(*hosts: Tensor) -> list[Tensor]:
            rest = iter(hosts)
            by_rank = [[next(rest) if has else None for has in given] for _ in range(num_ranks)]
            return [result for receiver in receivers for result in compute(by_rank, receiver)]

        update(targets, [tensor for part in parts for tensor in part.inputs], all_results)

    meet(hcom, rank, num_ranks, operation, finish, own, results)


def _summed(by_rank: list[list[Tensor | None]]) -> Tensor:
    products = []
    for x1, x2, bias, *_ in by_rank:
        assert x1 is not None
        assert x2 is not None
        product = x1.float() @ x2.float()
        products.append(product if bias is None else product + bias)
    return torch.stack(products).sum(0)


@operator("npu::npu_mm_all_reduce_base", computes=IN_BODY)
def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x3: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The sum of all ranks' products."""
    if x2.dim() != 2:
        raise refusal(f"x2 needs to be 2D, but got: {x2.dim()}D", INVALID_VALUE)
    if x1.shape[-1] != x2.shape[0]:
        raise refusal(
            f"K of x1 and x2 should be same, but they are x1_k: {x1.shape[-1]}, x2_k: {x2.shape[0]}", INVALID_VALUE
        )
    if not x1.is_floating_point() and dequant_scale is None:
        raise refusal("when neither dtype of x1 or dtype of x2 is valid. ", INVALID_TYPE)
    dtype = x1.dtype
    if dequant_scale is not None:
        dtype = torch.bfloat16 if dequant_scale.dtype is torch.bfloat16 else torch.float16
    result = new_like(x1, (*x1.shape[:-1], x2.shape[1]), dtype)

    def compute(by_rank: list[list[Tensor | None]], rank: int) -> list[Tensor]:
        total, added = _summed(by_rank), by_rank[rank][3]
        return [(total if added is None else total + added).to(dtype)]

    is_plain = dequant_scale is None and antiquant_scale is None and reduce_op == "sum"
    _together("mm_all_reduce", hcom, (x1, x2, bias, x3), (result,), compute if is_plain else None)
    return result


def _check(x1: Tensor, x2: Tensor, world_size: int, wrong_size: str) -> None:
    if world_size not in _WORLD_SIZES:
        raise refusal(
            f"world_size should be in {list(_WORLD_SIZES)}, but the actual value is {world_size}.", wrong_size
        )
    if x1.dim() != 2 or x2.dim() != 2:
        raise refusal(
            f"Both inputs of mm are required to be 2D, but the actual inputs are {x1.dim()}D and {x2.dim()}D."
        )
    if x1.shape[1] != x2.shape[0]:
        raise refusal(
            "The K-axis in the two inputs of Matmul must be equal, but in reality, the K-axis of x1 is "
            f"{x1.shape[1]} and the K-axis of x2 is {x2.shape[0]}."
        )


def _result_type(x1: Tensor, x2_scale: Tensor | None, output_dtype: torch.dtype | None) -> torch.dtype:
    if x2_scale is None:
        return x1.dtype
    return torch.float16 if x2_scale.dtype is torch.int64 else output_dtype or torch.bfloat16


@operator("npu::npu_mm_reduce_scatter_base", computes=IN_BODY)
def npu_mm_reduce_scatter_base(
    self: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    x2_scale: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """This rank's rows of the sum of all ranks' products."""
    _check(self, x2, world_size, INVALID_VALUE)
    if self.shape[0] % world_size:
        raise refusal("The M-axis in input of Matmul should be be divisible by world_size.")
    rows, dtype = self.shape[0] // world_size, _result_type(self, x2_scale, output_dtype)
    result = new_like(self, (rows, x2.shape[1]), dtype)

    def compute(by_rank: list[list[Tensor | None]], rank: int) -> list[Tensor]:
        return [_summed(by_rank)[rank * rows : (rank + 1) * rows].to(dtype)]

    is_plain = x2_scale is None and reduce_op == "sum"
    _together("mm_reduce_scatter", hcom, (self, x2, bias), (result,), compute if is_plain else None)
    return result


@operator("npu::npu_all_gather_base_mm", computes=IN_BODY)
def npu_all_gather_base_mm(
    self: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    x2_scale: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    output_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """All ranks' rows times this rank's matrix; and, if asked for, all ranks' rows."""
    _check(self, x2, world_size, INVALID_PARAMETER)
    gathered = self if gather_index == 0 else x2
    dtype = _result_type(self, x2_scale, output_dtype)
    rows = self.shape[0] * (world_size if gather_index == 0 else 1)
    result = new_like(self, (rows, x2.shape[1]), dtype)
    size = (gathered.shape[0] * world_size, gathered.shape[1]) if gather_output else (0,)
    everyones = new_like(self, size)

    def compute(by_rank: list[list[Tensor | None]], rank: int) -> list[Tensor]:
        x1 = torch.cat([tensors[0] for tensors in by_rank if tensors[0] is not None])
        _, own, added = by_rank[rank]
        assert own is not None
        product = x1.float() @ own.float()
        return [(product if added is None else product + added).to(dtype), x1 if gather_output else x1.new_empty(0)]

    is_plain = x2_scale is None and gather_index == 0
    _together("all_gather_mm", hcom, (self, x2, bias), (result, everyones), compute if is_plain else None)
    return result, everyones
