"""Matrix products. Each is one kernel that takes strided operands as they are and allocates only its result.

Operands of different types are multiplied in the first one's, which the result has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from npusim.ops.atb import check_outputs
from npusim.ops.operator import Hosts, operator
from npusim.ops.refusal import INVALID_TYPE, refusal, type_name
from npusim.ops.shapes import Number, broadcast
from npusim.torch_backend.tensors import new_like, runtime_of


def _in_first_type(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def compute(first: Tensor, *others: Any, **options: Any) -> Tensor:
        return function(first, *(o.to(first.dtype) if isinstance(o, Tensor) else o for o in others), **options)

    return compute


def _check_inner(rows: int, left: int, right: int, columns: int) -> None:
    if left != right:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({rows}x{left} and {right}x{columns})")


def _matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise RuntimeError(f"{name} must be a matrix")


@operator("aten::linear", computes=_in_first_type(functional.linear), is_product=True)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``, the bias fused, except on 310P, where product and sum are separate."""
    if weight.dim() == 1:
        return new_like(input, input.shape[:-1])
    if weight.dim() > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {weight.dim()}D")
    size = (*input.shape[:-1], weight.shape[0])
    _check_inner(input.shape[:-1].numel(), input.shape[-1], weight.shape[1], weight.shape[0])
    if bias is None:
        return new_like(input, size)
    result = new_like(input, size, bias.dtype)
    if runtime_of(input.device).card.profile.family == "310P":
        transposed_input, product = new_like(input), new_like(input, size)
        del product, transposed_input
    return result


@operator("npu::npu_linear", computes=_in_first_type(functional.linear), is_product=True)
def npu_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same for two dimensions."""
    return new_like(input, (input.shape[0], weight.shape[0]))


@operator("aten::mm", computes=_in_first_type(torch.mm), is_product=True)
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    """``self @ mat2``."""
    _matrix("self", self)
    _matrix("mat2", mat2)
    _check_inner(*self.shape, *mat2.shape)
    return new_like(self, (self.shape[0], mat2.shape[1]))


def _mm_out(self: Tensor, mat2: Tensor, *, out: None) -> Tensor:
    return torch.mm(self, mat2.to(self.dtype))


@operator("aten::mm.out", computes=_mm_out, writes=["out"], overwrites=["out"], is_product=True)
def mm_out(self: Tensor, mat2: Tensor, *, out: Tensor) -> Tensor:
    """``self @ mat2`` into ``out``, which grows if need be."""
    _matrix("self", self)
    _matrix("mat2", mat2)
    _check_inner(*self.shape, *mat2.shape)
    if out.dtype != self.dtype:
        raise refusal(f"expected dtype {type_name(self.dtype)} but got dtype {type_name(out.dtype)}", INVALID_TYPE)
    size = (self.shape[0], mat2.shape[1])
    return out if out.shape == size else out.resize_(size)


@operator("aten::addmm", computes=_in_first_type(torch.addmm), is_product=True)
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * self + alpha * (mat1 @ mat2)``."""
    if mat1.dim() == mat2.dim() == 2:
        broadcast(self.shape, (mat1.shape[0], mat2.shape[1]))
        _check_inner(*mat1.shape, *mat2.shape)
    return new_like(self, (mat1.size(0), mat2.size(1)))


@operator("aten::bmm", computes=_in_first_type(torch.bmm), is_product=True)
def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    """One product for each batch."""
    for name, tensor in (("self", self), ("mat2", mat2)):
        if tensor.dim() != 3:
            raise RuntimeError(f"{name} must be a 3D tensor")
    return new_like(self, (max(self.shape[0], mat2.shape[0]), self.shape[1], mat2.shape[2]))


@operator("aten::baddbmm", computes=_in_first_type(torch.baddbmm), is_product=True)
def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * self + alpha * (batch1 @ batch2)``."""
    if batch2.dim() < 3:
        raise refusal(f"tensor mat2's dimension must be greater than 2, but got Tensor of dimension {batch2.dim()}")
    return new_like(self, (batch1.size(0), batch1.size(1), batch2.size(2)))


def _matmul_size(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    left, right = tuple(a), tuple(b)
    if len(right) == 1:
        return left[:-1]
    if len(left) == 1:
        return (*right[:-2], right[-1])
    return (*broadcast(left[:-2], right[:-2]), left[-2], right[-1])


@operator("aten::matmul", computes=_in_first_type(torch.matmul), is_product=True)
def matmul(self: Tensor, other: Tensor) -> Tensor:
    """Torch's product for any dimensions, one kernel."""
    if other.dim() > 1:
        _check_inner(self.shape[:-1].numel(), self.shape[-1], other.shape[-2], other.shape[-1])
    return new_like(self, _matmul_size(self.shape, other.shape))


@operator("aten::mv", computes=_in_first_type(torch.mv), is_product=True)
def mv(self: Tensor, vec: Tensor) -> Tensor:
    """``self @ vec``, in the vector's type."""
    return new_like(vec, (self.shape[0],))


@operator("aten::dot", computes=_in_first_type(torch.dot), is_product=True)
def dot(self: Tensor, tensor: Tensor) -> Tensor:
    """The product of two vectors."""
    return new_like(self, ())


def _matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> Tensor:  # noqa: N803 - the vendor's name
    return C + x.float().T @ weight.float()


@operator("atb::_npu_matmul_add_fp32", computes=_matmul_add_fp32, writes=["C"], hosts=Hosts.TAKEN, is_product=True)
def npu_matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:  # noqa: N803 - the vendor's name
    """Adds ``x.T @ weight`` to a float32 matrix."""
    check_outputs(C)


def _transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    left = input.permute(*perm_x1) if perm_x1 else input
    right = weight.permute(*perm_x2) if perm_x2 else weight
    product = torch.bmm(left, right.to(left.dtype)).permute(1, 0, 2)
    if batch_split_factor and batch_split_factor > 1:
        rows = product.shape[0]
        return product.reshape(rows, batch_split_factor, -1).transpose(0, 1).contiguous()
    return product.contiguous()


@operator("npu::npu_transpose_batchmatmul", computes=_transpose_batchmatmul, is_product=True)
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
    **_: Any,
) -> Tensor:
    """One product for each batch, the batch moved behind the rows; optionally cut into parts, or quantised."""
    batch_dim = 1 if perm_x1 is not None and list(perm_x1) == [1, 0, 2] else 0
    rows, batches, columns = input.size(1 - batch_dim), input.size(batch_dim), weight.size(2)
    if scale is not None:
        return new_like(input, (rows, 1, batches * columns))
    if batch_split_factor and batch_split_factor > 1:
        return new_like(input, (batch_split_factor, rows, batches * columns // batch_split_factor))
    return new_like(input, (rows, batches, columns))


@operator("npu::npu_bmmV2", computes=lambda input, mat2, output_sizes: torch.matmul(input, mat2), is_product=True)
def npu_bmm_v2(input: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    """An operator of the older kind, which copies strided operands unless they are plain transposes."""
    result = new_like(input, output_sizes or _matmul_size(input.shape, mat2.shape))
    copies = [new_like(tensor) for tensor in (input, mat2) if not _is_plain(tensor)]
    del copies[::-1]
    return result


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() > 1 and tensor.transpose(-1, -2).is_contiguous())


@operator("npu::npu_prefetch")
def npu_prefetch(input: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """Moves a weight towards the next product; takes no memory."""
    if max_size <= 0:
        raise refusal(f"max_size should be greater than zero, but got {max_size}")
    size = input.numel() * input.itemsize
    if not 0 <= offset < size:
        raise refusal(f"offset out of range of tensor size, tensor size: {size}, offset: {offset}")
