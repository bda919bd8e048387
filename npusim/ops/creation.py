"""Tensors made from numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from npusim.ops.operator import operator
from npusim.ops.shapes import Number


def _arange(start: Number, end: Number, step: Number = 1, *, out: None) -> Tensor:  # noqa: ARG001 - the operator's argument
    return torch.arange(start, end, step)


def _num_steps(start: Number, end: Number, step: Number) -> int:
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    return math.ceil((end - start) / step)


@operator("aten::arange.start_out", computes=_arange, writes=["out"], overwrites=["out"])
def arange(start: Number, end: Number, step: Number = 1, *, out: Tensor) -> Tensor:
    """Numbers from ``start`` up to ``end``, in ``out``."""
    size = (_num_steps(start, end, step),)
    return out if out.shape == size else out.resize_(size)
