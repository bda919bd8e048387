"""``torch.ops._c10d_functional`` on device ``npu``: collectives that return new tensors, as compiled code calls them.

torch's own kernels ask its registry of groups by name, which has one entry for all ranks of a process; these ask the
calling rank's registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from torch import Tensor
from torch import distributed as dist

from npusim.ops.distributed import group_of
from npusim.torch_backend.registration import kernel
from npusim.torch_backend.tensors import new_like


def _options(reduce_op: str) -> SimpleNamespace:
    return SimpleNamespace(reduceOp=dist.ReduceOp(getattr(dist.ReduceOp, reduce_op.upper())))


@kernel("_c10d_functional", "all_reduce_")
def all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Sum (or other reduction) over ranks, in place."""
    group_of(group_name).allreduce([input], _options(reduce_op))
    return input


@kernel("_c10d_functional", "all_reduce")
def all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Sum (or other reduction) over ranks."""
    output = input.clone()
    all_reduce_(output, reduce_op, group_name)
    return output


@kernel("_c10d_functional", "all_gather_into_tensor")
def all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    """All ranks' inputs, one after another along dimension 0."""
    output = new_like(input, (input.shape[0] * group_size, *input.shape[1:]))
    group_of(group_name).all_gather_single(output, input)
    return output


@kernel("_c10d_functional", "reduce_scatter_tensor")
def reduce_scatter_tensor(input: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    """Each rank's share, along dimension 0, of the sum over ranks."""
    output = new_like(input, (input.shape[0] // group_size, *input.shape[1:]))
    group_of(group_name).reduce_scatter_single(output, input, _options(reduce_op))
    return output


@kernel("_c10d_functional", "all_to_all_single")
def all_to_all_single(
    input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: str
) -> Tensor:
    """Rows to every rank, rows from every rank."""
    output = new_like(input, (sum(output_split_sizes), *input.shape[1:]))
    group_of(group_name).alltoall_base(output, input, list(output_split_sizes), list(input_split_sizes))
    return output


@kernel("_c10d_functional", "broadcast_")
def broadcast_(input: Tensor, src: int, group_name: str) -> Tensor:
    """The root's tensor, in place."""
    group_of(group_name).broadcast([input], SimpleNamespace(rootRank=src))
    return input


@kernel("_c10d_functional", "broadcast")
def broadcast(input: Tensor, src: int, group_name: str) -> Tensor:
    """The root's tensor."""
    output = input.clone()
    broadcast_(output, src, group_name)
    return output
