"""Multi-head latent attention in its two forms, with or without DSA's choice of keys."""

from __future__ import annotations

from typing import Final

from npusim.xlite.attention_dsa import choose_keys, choose_keys_from_all_scores, chooses_keys
from npusim.xlite.attention_workspace import attend, score_rows
from npusim.xlite.collectives import reduce_hidden
from npusim.xlite.config import AttnType
from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.linear import linear
from npusim.xlite.tensors import Tensor

SHORT_QUERY_TOKENS: Final = 6
GATHER_CONTEXT: Final = 8192
GATHER_CONTEXT_PER_REQUEST: Final = 280
"""When 0.2.0rc4 copies chosen keys together: at most so many tokens per request, and a context above either limit.
Calibrated: found by bisection of the real library's answers, and in agreement with all of its golden configurations."""


def attention_mla(run: ForwardPass, hidden: Tensor) -> None:
    """Latent attention, from the hidden states back into them.

    Raises:
        ValueError: xlite's own text, when the heads do not split evenly over TP.
    """
    if run.config.n_heads % run.config.def_tp_size:
        raise ValueError("nHeads must be divisible by defTpSize and defTpSize > 0")
    if run.model.behaviour.absorbed_mla:
        _absorbed(run, hidden)
    else:
        _expanded(run, hidden)


def _expanded(run: ForwardPass, hidden: Tensor) -> None:
    """Keys and values are expanded from their latents while attention runs."""
    config, weights, n, heads = run.config, run.model.weights, run.step.num_tokens, run.model.q_heads
    take, take_common = run.taker("ForwardAttnMLA"), run.taker("ForwardAttnMLACommon")

    latents = take_common(n, config.q_lora_rank + config.kv_lora_rank + config.rope_head_dim)
    q_latent = take_common(n, config.q_lora_rank)
    query = take_common(n, heads * (config.nope_head_dim + config.rope_head_dim))
    kv_latent = take_common(n, config.kv_lora_rank)
    linear(run, hidden, weights.mla_qkv_a)
    linear(run, q_latent, weights.mla_q_b)
    run.put(latents)
    run.put(kv_latent)

    chosen = choose_keys_from_all_scores(run, q_latent) if config.attn_type == AttnType.AttnDSA else None
    run.put(q_latent)
    out = take(n, heads * config.v_head_dim)
    if chosen is not None:
        run.put(take(score_rows(run), config.index_topk))
        run.put(chosen)
    else:
        attend(run, take, value_width=config.v_head_dim)
    run.put(query)
    linear(run, out, weights.attn_out)
    reduce_hidden(run, hidden)
    run.put(out)


def _absorbed(run: ForwardPass, hidden: Tensor) -> None:
    """The up-projections are multiplied into query and output, so that attention reads the latent keys as they are."""
    config, weights, n, heads = run.config, run.model.weights, run.step.num_tokens, run.model.q_heads
    take, take_common = run.taker("ForwardAttnMLAV2"), run.taker("ForwardAttnMLACommonV2")

    latents = take_common(n, config.q_lora_rank + config.kv_lora_rank + config.rope_head_dim)
    q_latent = take_common(n, config.q_lora_rank)
    query = take_common(n, heads * (config.nope_head_dim + config.rope_head_dim))
    linear(run, hidden, weights.mla_qkv_a)
    run.put(latents)
    linear(run, q_latent, weights.mla_q_b)
    q_rope = take_common(n, heads * config.rope_head_dim)

    chosen = choose_keys(run, q_latent) if config.attn_type == AttnType.AttnDSA else None
    run.put(q_latent)
    q_absorbed = take(n, heads * config.kv_lora_rank)
    run.put(query)
    out_absorbed = take(n, heads * config.kv_lora_rank)
    if _gathers_chosen_keys(run):
        _attend_to_gathered_keys(run)
    else:
        attend(run, take, value_width=config.kv_lora_rank)
    if chosen is not None:
        run.put(chosen)
    run.put(q_rope)
    run.put(q_absorbed)
    out = take(n, heads * config.v_head_dim)
    run.put(out_absorbed)
    linear(run, out, weights.attn_out)
    reduce_hidden(run, hidden)
    run.put(out)


def _gathers_chosen_keys(run: ForwardPass) -> bool:
    step = run.step
    return (
        run.model.behaviour.gathers_sparse_keys
        and run.config.attn_type == AttnType.AttnDSA
        and chooses_keys(run)
        and step.num_tokens <= SHORT_QUERY_TOKENS * step.num_requests
        and (step.context > GATHER_CONTEXT or step.context > GATHER_CONTEXT_PER_REQUEST * step.num_requests)
    )


def _attend_to_gathered_keys(run: ForwardPass) -> None:
    config, take = run.config, run.taker("ForwardAttnMLAV2")
    latents = take(run.step.num_tokens, config.index_topk, config.kv_lora_rank)
    ropes = take(run.step.num_tokens, config.index_topk, config.rope_head_dim)
    scores = take(score_rows(run), config.index_topk)
    for tensor in (scores, ropes, latents):
        run.put(tensor)
