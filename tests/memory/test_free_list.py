"""The ordered set of free blocks against a sorted list of the obvious keys."""

from __future__ import annotations

import random
from itertools import pairwise

from sortedcontainers import SortedKeyList

from npusim.memory.blocks import FREE, Block
from npusim.memory.free_list import FreeList
from npusim.memory.pools import BlockPool
from npusim.memory.statistics import Statistics


def test_same_as_a_sorted_list() -> None:
    free_list = FreeList(BlockPool(is_small=True, counters=Statistics(1).small), stream=0)
    oracle = SortedKeyList(key=lambda block: (block.size, block.address))
    choices = random.Random(7)
    for step in range(6000):
        if len(oracle) < 2500 and choices.random() < 0.7:
            block = Block.whole(512 * step, 512 * choices.randrange(1, 400), FREE, free_list)
            free_list.add(block)
            oracle.add(block)
        elif choices.random() < 0.5:
            block = choices.choice(oracle)
            oracle.remove(block)
            free_list.remove(block)
        else:
            block = choices.choice(oracle)
            oracle.remove(block)
            size, block.size = block.size, 512 * choices.randrange(1, 400)
            oracle.add(block)
            free_list.replace(size, block.address, block)
        wanted = 512 * choices.randrange(1, 420)
        index = oracle.bisect_key_left((wanted, 0))
        assert free_list.smallest_from(wanted) is (oracle[index] if index < len(oracle) else None)
        assert free_list.largest() is oracle[-1]
    assert list(free_list) == list(oracle)
    for block, after in pairwise(oracle):
        assert free_list.next_after(block) is after
    assert free_list.next_after(oracle[-1]) is None
    for block in oracle:
        free_list.remove(block)
    assert free_list.largest() is None
    assert list(free_list) == []
