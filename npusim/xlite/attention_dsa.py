"""DSA's indexer: it chooses the keys that sparse attention looks at."""

from __future__ import annotations

from typing import Final

from npusim.xlite.attention_workspace import score_rows
from npusim.xlite.forward_pass import ForwardPass
from npusim.xlite.linear import linear
from npusim.xlite.tensors import DType, Tensor

INDEXER_KV_TILE: Final = 4096
"""Keys that the fused indexer scores at once. Exact: GVirt xlite/csrc/op.h, tag 0.2.0rc0."""

_FUNCTION = "ForwardAttnIndexer"


def chooses_keys(run: ForwardPass) -> bool:
    """Whether the context is longer than what would be chosen from it."""
    return run.step.context > run.config.index_topk


def choose_keys_from_all_scores(run: ForwardPass, q_latent: Tensor) -> Tensor | None:
    """The indexer of 0.1.0: scores against the whole context at once.

    Returns:
        The indices, to be put back after attention; None where the context is too short to choose from.
    """
    config, n, take = run.config, run.step.num_tokens, run.taker(_FUNCTION)
    keys_and_weights = take(n, config.index_head_dim + config.index_n_heads)
    if not chooses_keys(run):
        run.put(keys_and_weights)
        return None
    query = take(n, config.index_n_heads, config.index_head_dim)
    linear(run, q_latent, run.model.weights.index_q_b)
    scores = take(n, run.step.context)
    run.put(keys_and_weights)
    run.put(query)
    chosen = take(n, config.index_topk, dtype=DType.INT32)
    run.put(scores)
    return chosen


def choose_keys(run: ForwardPass, q_latent: Tensor) -> Tensor | None:
    """The fused indexer of 0.2.0: scores tile by tile, with the best keys so far beside them.

    Returns:
        The indices, to be put back after attention; None where there are none in the pool.
    """
    config, n, take = run.config, run.step.num_tokens, run.taker(_FUNCTION)
    keys_and_weights = take(n, config.index_head_dim + config.index_n_heads)
    if not chooses_keys(run):
        run.put(keys_and_weights)
        return None
    query = take(n, config.index_n_heads * config.index_head_dim)
    linear(run, q_latent, run.model.weights.index_q_b)
    scores = take(score_rows(run), INDEXER_KV_TILE)
    best_so_far = take(n, 2 * config.index_topk, dtype=DType.INT32)
    chosen = None if run.model.behaviour.gathers_sparse_keys else take(n, config.index_topk, dtype=DType.INT32)
    for tensor in (keys_and_weights, query, best_so_far, scores):
        run.put(tensor)
    return chosen
