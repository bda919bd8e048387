"""Linear layers: what they take from the pool while they run."""

from __future__ import annotations

from npusim.xlite.config import QuantKind
from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.tensors import DType, Tensor


def linear(run: ForwardPass, x: Tensor, quant: QuantKind, *, bias_width: int = 0) -> None:
    """A linear layer on ``x``, with a bias of ``bias_width`` elements where it has one and is not quantised."""
    if quant is QuantKind.NONE:
        _cast_bias(run, bias_width)
        return
    take = run.taker("ForwardLinear")
    quantised = take(*x.shape, dtype=DType.INT8)
    if quant is QuantKind.DYNAMIC:
        run.put(take(x.shape[0], dtype=DType.FP32))
    run.put(quantised)


def gate_linear(run: ForwardPass, x: Tensor) -> None:
    """The MoE gate on ``x``; an fp32 gate casts bf16 activations first, and only those."""
    if run.model.weights.gate_dtype is DType.FP32 and x.dtype is DType.BF16:
        run.put(run.pool.get(x.shape, DType.FP32, "XliteOpMatmul"))


def _cast_bias(run: ForwardPass, bias_width: int) -> None:
    if bias_width and run.model.weights.dtype is DType.BF16:
        run.put(run.pool.get((bias_width,), DType.FP32, "XliteOpMatmul"))
