"""Tensors made from numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from npusim.ops.operator import operator

Real = int | float


def _arange(start: Real, end: Real, step: Real = 1, *, out: None) -> Tensor:
    return torch.arange(start, end, step)


def _num_steps(start: Real, end: Real, step: Real) -> int:
    if step == 0:
        raise RuntimeError("step must be nonzero")
    if (end - start) * step < 0:
        raise RuntimeError("upper bound and lower bound inconsistent with step sign")
    return math.ceil((end - start) / step)


@operator("aten::arange.start_out", computes=_arange, writes=["out"], overwrites=["out"])
def arange(start: Real, end: Real, step: Real = 1, *, out: Tensor) -> Tensor:
    """Reals from ``start`` up to ``end``, in ``out``."""
    size = (_num_steps(start, end, step),)
    return out if out.shape == size else out.resize_(size)
