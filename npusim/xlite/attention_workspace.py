"""The workspace in which attention scores live, common to all kinds of attention."""

from __future__ import annotations

from npusim.xlite.forward_pass import QUERY_TILE, ForwardPass, Take
from npusim.xlite.tensors import DType


def score_rows(run: ForwardPass) -> int:
    """Rows of scores in flight: two query tiles per AI core."""
    return 2 * QUERY_TILE * run.model.device.num_ai_cores


def attend(run: ForwardPass, take: Take, value_width: int) -> None:
    """Scores of all queries against the whole context: at once if it is one tile of keys, else tile by tile."""
    rows, tile = score_rows(run), run.step.kv_tile
    if run.step.context <= tile:
        run.put(take(rows, run.step.context))
        return
    vector_rows = 2 * QUERY_TILE * run.model.device.num_vector_cores
    scores = take(rows, tile)
    partial_out = take(rows, value_width)
    row_max = take(vector_rows, dtype=DType.FP32)
    row_sum = take(vector_rows, dtype=DType.FP32)
    last_max = take(run.step.num_tokens, run.model.q_heads, dtype=DType.FP32)
    last_sum = take(run.step.num_tokens, run.model.q_heads, dtype=DType.FP32)
    for tensor in (last_sum, last_max, row_sum, row_max, partial_out, scores):
        run.put(tensor)
