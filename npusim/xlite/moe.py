"""Mixture-of-experts layers: gate, dispatch over DP, routed experts, combine, shared experts."""

from __future__ import annotations

from dataclasses import dataclass

from npusim.xlite.collectives import all_gather, reduce_hidden, reduce_scatter
from npusim.xlite.ffn import shared_experts
from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.linear import gate_linear
from npusim.xlite.tensors import DType, Tensor


@dataclass(frozen=True, slots=True)
class _Routing:
    """What the gate decided per token: weights of the experts, and one bit per expert."""

    weights: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """Tokens of all DP ranks sorted by expert, and what is needed to bring the results back."""

    routing: _Routing
    unpermute_index: Tensor
    tokens: Tensor
    counts: Tensor


def moe_ffn(run: ForwardPass, hidden: Tensor) -> None:
    """The FFN of an MoE layer, from the hidden states back into them."""
    dispatched = _dispatch(run, _gate(run, hidden))
    results = _routed_experts(run, dispatched.tokens)
    if run.model.runs_shared_experts:
        routed = run.taker("ForwardMoE")(run.step.padded_tokens, run.config.hidden_size)
        _combine(run, dispatched, results, routed)
        shared_experts(run, hidden)
        run.put(routed)
    else:
        _combine(run, dispatched, results, hidden)
    reduce_hidden(run, hidden)


def _gate(run: ForwardPass, hidden: Tensor) -> _Routing:
    take = run.taker("ForwardMoEGate")
    shape, dtype = (run.step.padded_tokens, run.config.n_routed_experts), run.model.weights.gate_dtype
    weights = take(*shape, dtype=dtype)
    bits = take(*shape, dtype=DType.BIT1)
    scores = take(*shape, dtype=dtype)
    gate_linear(run, hidden)
    run.put(scores)
    return _Routing(weights, bits)


def _dispatch(run: ForwardPass, routing: _Routing) -> _Dispatched:
    take, config = run.taker("ForwardMoEDispatch"), run.config
    num_tokens = run.step.padded_tokens * config.def_dp_size
    gathered = None
    if config.def_dp_size > 1:
        gathered, routing = _gather_over_dp(run, routing)
    unpermute_index = take(config.n_routed_experts, num_tokens + 1, dtype=DType.INT32)
    counts = take(config.n_routed_experts, dtype=DType.INT32)
    tokens = take(run.model.expert_rows(num_tokens), config.hidden_size)
    if gathered is not None:
        run.put(gathered)
    return _Dispatched(routing, unpermute_index, tokens, counts)


def _gather_over_dp(run: ForwardPass, local: _Routing) -> tuple[Tensor, _Routing]:
    """Bring tokens and routing of all DP ranks here in one all-gather of packed bytes."""
    take, dp = run.taker("ForwardMoEDispatch"), run.model.dp
    n, hidden_size, experts = run.step.padded_tokens, run.config.hidden_size, run.config.n_routed_experts
    tokens = take(n * dp.size, hidden_size)
    weights = take(n * dp.size, experts, dtype=local.weights.dtype)
    bits = take(n * dp.size, experts, dtype=DType.BIT1)
    if run.dp_in_graph:
        run.put(local.bits)
        run.put(local.weights)
        return tokens, _Routing(weights, bits)

    packed_bytes = run.pool.num_bytes((n, hidden_size), tokens.dtype)
    packed_bytes += sum(run.pool.num_bytes(tensor.shape, tensor.dtype) for tensor in (local.weights, local.bits))
    wrap = 1 << run.model.behaviour.packed_gather_bits
    send = take(packed_bytes % wrap, dtype=DType.INT8)
    run.put(local.bits)
    run.put(local.weights)
    receive = take(packed_bytes * dp.size % wrap, dtype=DType.INT8)
    all_gather(run, send, receive, dp)
    run.put(send)
    run.put(receive)
    return tokens, _Routing(weights, bits)


def _routed_experts(run: ForwardPass, tokens: Tensor) -> Tensor:
    take = run.taker("ForwardMoE")
    rows, width = tokens.shape[0], run.config.moe_intermediate_size // run.config.moe_tp_size
    inputs = _matmul_inputs(run, tokens)
    gate_up = take(rows, 2 * width)
    for tensor in inputs:
        run.put(tensor)
    activated = take(rows, width)
    run.put(gate_up)
    inputs = _matmul_inputs(run, activated)
    results = take(rows, run.config.hidden_size)
    for tensor in inputs:
        run.put(tensor)
    return results


def _matmul_inputs(run: ForwardPass, rows: Tensor) -> tuple[Tensor, ...]:
    """What the experts' matmul reads: the rows, or in their place an int8 copy with a scale per row."""
    if not run.model.weights.experts_quantised:
        return (rows,)
    take = run.taker("ForwardMoE")
    quantised = take(*rows.shape, dtype=DType.INT8)
    scale = take(rows.shape[0], dtype=DType.FP32)
    run.put(rows)
    return quantised, scale


def _combine(run: ForwardPass, dispatched: _Dispatched, results: Tensor, target: Tensor) -> None:
    """Bring the experts' results back to their tokens, and over DP to the ranks that own them."""
    if run.config.def_dp_size > 1 and not run.dp_in_graph:
        rows = run.step.padded_tokens * run.config.def_dp_size
        unpermuted = run.taker("ForwardMOECombine")(rows, run.config.hidden_size)
        reduce_scatter(run, unpermuted, target, run.model.dp)
        run.put(unpermuted)
    routing = dispatched.routing
    for tensor in (dispatched.counts, results, dispatched.unpermute_index, routing.bits, routing.weights):
        run.put(tensor)
