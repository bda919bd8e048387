"""The numbers of attention: one reference computation for all fused forms. In float32, rounded once. Grade: assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npusim.errors import UnmodelledCallError

NO_MASK, ALL_MASK, CAUSAL, CAUSAL_RIGHT, BAND = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Masking:
    """Which keys a query sees.

    Attributes:
        sparse_mode: 0 and 1: what ``mask`` leaves; 2: keys up to its own place counted from the start; 3: counted from
            the end; 4: a band of ``pre_tokens`` before and ``next_tokens`` behind, counted from the end.
        mask: True where a key is hidden; the last two dimensions are queries and keys.
        pre_tokens: Keys before the query's place that it sees.
        next_tokens: Keys behind it.
    """

    sparse_mode: int = NO_MASK
    mask: Tensor | None = None
    pre_tokens: int = 2147483647
    next_tokens: int = 2147483647

    def hidden(self, num_queries: int, num_keys: int, sequence: int) -> Tensor | None:
        """True where one sequence's keys are hidden from its queries."""
        if self.sparse_mode in (NO_MASK, ALL_MASK):
            if self.mask is None:
                return None
            mask = self.mask.bool()
            while mask.dim() > 2:
                mask = mask[min(sequence, mask.shape[0] - 1)]
            return mask[:num_queries, :num_keys]
        places = torch.arange(num_queries).unsqueeze(1)
        keys = torch.arange(num_keys)
        if self.sparse_mode == CAUSAL:
            return keys > places
        if self.sparse_mode not in (CAUSAL_RIGHT, BAND):
            raise UnmodelledCallError(f"values of attention with sparse_mode {self.sparse_mode} are not modelled")
        places = places + num_keys - num_queries
        if self.sparse_mode == CAUSAL_RIGHT:
            return keys > places
        return (keys > places + self.next_tokens) | (keys < places - self.pre_tokens)


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, masking: Masking, sequence: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, [tokens, heads, size] each; the output and the logarithm of each softmax's sum.

    Fewer key heads than query heads are shared by consecutive query heads. A query that sees nothing gives zeros.
    """
    share = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(share, 1)
    value = value.float().repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    hidden = masking.hidden(query.shape[0], key.shape[0], sequence)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    sums = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - sums.masked_fill(sums == float("-inf"), 0).unsqueeze(-1))
    output = torch.einsum("hqk,khd->qhd", weights, value)
    return output.to(query.dtype), sums.T.contiguous()


def from_pages(cache: Tensor, pages: Tensor, num_tokens: int, num_heads: int) -> Tensor:
    """One sequence's keys or values out of a paged cache, [tokens, heads, size].

    The cache is [pages, page size, heads, size] or [pages, page size, heads * size].
    """
    if cache.dim() not in (3, 4):
        raise UnmodelledCallError(
            f"values of attention over a paged cache of {cache.dim()} dimensions are not modelled"
        )
    page_size = cache.shape[1]
    num_pages = -(-num_tokens // page_size)
    rows = cache[pages[:num_pages].long()].flatten(0, 1)[:num_tokens]
    return rows.reshape(num_tokens, num_heads, -1)


def spans(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each sequence from where they end."""
    start = 0
    for end in ends:
        yield start, end
        start = end
