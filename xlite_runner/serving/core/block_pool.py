"""The KV cache's blocks: which are free, who holds the others, and what the full ones contain.

Rules are vLLM's (``vllm/v1/core/block_pool.py``); a block is its number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Stands where no block is needed; never handed out, never freed."""


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``, each free or held by one or more requests.

    Free blocks keep their content until they are handed out again, so a free block may still be a prefix-cache hit.

    Args:
        num_blocks: All blocks, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: allowed is at least 1, the null block")
        self.num_blocks = num_blocks
        # A hash table on a doubly linked list: first in, first out, and removal from the middle in constant time.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # Blocks of equal content are not merged, since a request's block table only grows. Oldest first.
        self._cached: dict[bytes, dict[int, None]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, with or without cached content."""
        return len(self._free)

    @property
    def free_blocks(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return list(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are held, 0 to 1; the null block does not count."""
        num_usable = self.num_blocks - 1
        return 1.0 - len(self._free) / num_usable if num_usable else 0.0

    def ref_count(self, block: int) -> int:
        """How many requests hold a block."""
        return self._ref_counts[block]

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """How many of some blocks are free."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out the blocks that have been free for longest; what was cached in them is forgotten.

        Raises:
            ValueError: There are not that many free blocks; upstream's text.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
            self._forget_content(block)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Count one more holder of cached blocks, free or not."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self._free[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Count one holder less; blocks without any go to the end of the queue, in the order given."""
        for block in blocks:
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free[block] = None

    def cache(self, block: int, content_hash: bytes) -> None:
        """Remember what a full block contains."""
        self._hashes[block] = content_hash
        self._cached.setdefault(content_hash, {})[block] = None

    def get_cached_block(self, content_hash: bytes) -> int | None:
        """The oldest block with that content."""
        blocks = self._cached.get(content_hash)
        return next(iter(blocks)) if blocks else None

    def reset_prefix_cache(self) -> bool:
        """Forget all contents; return False and keep them if a block is in use."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._hashes = [None] * self.num_blocks
        self._cached.clear()
        return True

    def _forget_content(self, block: int) -> None:
        content_hash = self._hashes[block]
        if content_hash is None:
            return
        self._hashes[block] = None
        blocks = self._cached[content_hash]
        del blocks[block]
        if not blocks:
            del self._cached[content_hash]
