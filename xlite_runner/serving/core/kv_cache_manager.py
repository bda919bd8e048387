"""Which blocks of the KV cache each request holds. Rules are vLLM's (``vllm/v1/core/kv_cache_manager.py``).

For models whose layers all have full attention: one group of layers, one block table per request.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from xlite_runner.serving.core.block_pool import BlockPool
from xlite_runner.serving.core.request import Request

_NO_BLOCKS: Sequence[int] = ()


class KVCacheManager:
    """Gives blocks to requests and takes them back.

    Args:
        num_blocks: Blocks of the cache, the null block included.
        block_size: Tokens per block.
        max_model_len: Longest sequence, in tokens.
        enable_caching: Whether requests share full blocks of equal prefixes.
        num_lookahead_tokens: Slots to have ready beyond a step's tokens, for what a drafter writes.
        drop_last_hit: Compute the last block that hits again, since a drafter of kind MTP or EAGLE needs its hidden
            states.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        enable_caching: bool,
        num_lookahead_tokens: int = 0,
        drop_last_hit: bool = False,
    ) -> None:
        self.block_pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self._max_model_len = max_model_len
        self._num_lookahead_tokens = num_lookahead_tokens
        self._drop_last_hit = drop_last_hit
        self._num_holders = 0

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Cached blocks with the leading tokens of a request that holds none; at least one token is left to compute."""
        max_hits = (request.num_tokens - 1) // self.block_size
        self._hash_full_blocks(request, max_hits)
        hits: list[int] = []
        for content_hash in request.block_hashes[:max_hits]:
            block = self.block_pool.get_cached_block(content_hash)
            if block is None:
                break
            hits.append(block)
        if self._drop_last_hit and hits:
            hits.pop()
        return hits

    def allocate_first_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[int], *, full_sequence_must_fit: bool
    ) -> bool:
        """Give a request that holds no blocks what its next step needs, if there are enough free ones.

        Args:
            request: Who gets them.
            num_new_tokens: Tokens of the step.
            computed_blocks: What :meth:`get_computed_blocks` found.
            full_sequence_must_fit: Whether there must be room for all tokens that the request has by now.

        Returns:
            Whether it got them; if not, nothing has changed.
        """
        end = len(computed_blocks) * self.block_size + num_new_tokens
        num_blocks = self._num_blocks(end + self._num_lookahead_tokens)
        num_needed = max(num_blocks, self._num_blocks(request.num_tokens)) if full_sequence_must_fit else num_blocks
        pool = self.block_pool
        # Free blocks that hit leave the free queue, too.
        num_available = pool.num_free_blocks - pool.num_free_of(computed_blocks)
        if num_needed - len(computed_blocks) > num_available:
            return False
        pool.touch(computed_blocks)
        request.block_ids = [*computed_blocks, *pool.get_new_blocks(num_blocks - len(computed_blocks))]
        request.num_cached_blocks = len(computed_blocks)
        self._num_holders += 1
        self._after_allocation(request, end)
        return True

    def allocate_slots(self, request: Request, num_new_tokens: int) -> Sequence[int] | None:
        """Have slots ready for the next tokens, drafts included, of a request that holds blocks.

        Returns:
            The new blocks, often none; None, and nothing changed, if there are too few free ones.
        """
        end = request.num_computed_tokens + num_new_tokens
        if end <= request.num_ready_tokens:
            return _NO_BLOCKS
        # After rejected drafts a request may hold more than it needs.
        num_new_blocks = max(self._num_blocks(end + self._num_lookahead_tokens) - len(request.block_ids), 0)
        if num_new_blocks > self.block_pool.num_free_blocks:
            return None
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        request.block_ids += new_blocks
        self._after_allocation(request, end)
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let other requests find the full blocks among a request's first ``num_tokens`` tokens."""
        num_full_blocks = num_tokens // self.block_size
        if not self.enable_caching or num_full_blocks <= request.num_cached_blocks:
            return
        self._hash_full_blocks(request, num_full_blocks)
        for index in range(request.num_cached_blocks, num_full_blocks):
            self.block_pool.cache(request.block_ids[index], request.block_hashes[index])
        request.num_cached_blocks = num_full_blocks
        self._update_ready_tokens(request)

    def free(self, request: Request) -> None:
        """Take all blocks back, the last one first, so that the beginning of a prompt stays cached for longest."""
        if request.block_ids:
            self._num_holders -= 1
        self.block_pool.free(request.block_ids[::-1])
        request.block_ids = []
        request.num_cached_blocks = request.num_ready_tokens = 0

    def get_num_common_prefix_blocks(self, request: Request) -> int:
        """Leading blocks of a request that all requests with blocks share; without a prefix cache not even its own."""
        num_common = 0
        if not self.enable_caching:
            return num_common
        for block in request.block_ids:
            if self.block_pool.ref_count(block) != self._num_holders:
                break
            num_common += 1
        return num_common

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def _after_allocation(self, request: Request, end: int) -> None:
        # Blocks count as cached when they are scheduled to become full; drafts may be rejected, so they do not count.
        self.cache_blocks(request, min(end, request.num_tokens))
        self._update_ready_tokens(request)

    def _update_ready_tokens(self, request: Request) -> None:
        num_ready_tokens = len(request.block_ids) * self.block_size - self._num_lookahead_tokens
        if self.enable_caching:
            num_ready_tokens = min(num_ready_tokens, (request.num_cached_blocks + 1) * self.block_size - 1)
        request.num_ready_tokens = num_ready_tokens

    def _hash_full_blocks(self, request: Request, num_blocks: int) -> None:
        hashes, tokens, block_size = request.block_hashes, request.all_token_ids, self.block_size
        if num_blocks <= len(hashes):
            return
        block_hash = hashes[-1] if hashes else (request.cache_salt or "").encode()
        for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
            content = array("q", tokens[start : start + block_size]).tobytes()
            block_hash = hashlib.sha256(block_hash + content).digest()
            hashes.append(block_hash)
