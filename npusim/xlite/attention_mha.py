"""Multi-head and grouped-query attention."""

from __future__ import annotations

from npusim.errors import UnmodelledCallError
from npusim.xlite.attention_workspace import attend
from npusim.xlite.collectives import all_reduce, reduce_hidden
from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.linear import linear
from npusim.xlite.tensors import DType, Tensor

_FUNCTION = "ForwardAttnMHA"


def attention_mha(run: ForwardPass, hidden: Tensor) -> None:
    """Attention with full keys and values, from the hidden states back into them."""
    config, weights = run.config, run.model.weights
    if config.attn_output_gate:
        raise UnmodelledCallError("xlite ModelConfig.attn_output_gate is not modelled")
    take = run.taker(_FUNCTION)
    qkv_width = (run.model.q_heads + 2 * run.model.kv_heads) * config.head_dim

    qkv = take(run.step.num_tokens, qkv_width)
    linear(run, hidden, weights.mha_qkv, bias_width=qkv_width if config.qkv_bias else 0)
    if config.qk_norm_full:
        _norm_over_all_heads(run)
    out = take(run.step.num_tokens, run.model.q_heads * config.head_dim)
    attend(run, take, value_width=config.head_dim)
    linear(run, out, weights.attn_out)
    reduce_hidden(run, hidden)
    run.put(qkv)
    run.put(out)


def _norm_over_all_heads(run: ForwardPass) -> None:
    """Norm of q and k over the heads of all TP ranks: their variances are summed over the ranks."""
    take, n, tp = run.taker(_FUNCTION), run.step.num_tokens, run.model.tp
    if run.model.behaviour.packed_qk_variance:
        variances = take(2 * n, 1, dtype=DType.FP32)
        all_reduce(run, variances, tp)
        run.put(variances)
        return
    q_variance = take(n, 1, dtype=DType.FP32)
    k_variance = take(n, 1, dtype=DType.FP32)
    if tp.size > 1:
        packed = take(n, 2, dtype=DType.FP32)
        all_reduce(run, packed, tp)
        run.put(packed)
    run.put(q_variance)
    run.put(k_variance)
