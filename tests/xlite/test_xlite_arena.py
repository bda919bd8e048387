from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.xlite.arena import ALIGN_BYTES, MAX_LIVE_BLOCKS, Arena
from npusim.xlite.tensors import DType, TensorPool

KIB = 1024


def test_takes_the_first_gap_that_is_large_enough():
    arena = Arena()
    first, second, third = arena.get(2 * KIB), arena.get(5 * KIB), arena.get(KIB)
    arena.put(first)
    arena.put(second)
    assert arena.get(8 * KIB).offset == third.end
    assert arena.get(7 * KIB).offset == 0, "the two neighbouring gaps are one, and an exact fit takes it"
    assert arena.peak_bytes == 16 * KIB


def test_rounds_sizes_up_to_one_kib():
    arena = Arena()
    assert [arena.get(size).offset for size in (1, KIB, KIB + 1, 1)] == [0, KIB, 2 * KIB, 4 * KIB]


def test_blocks_of_no_bytes_take_no_room_and_are_told_apart():
    arena = Arena()
    full, empty = arena.get(KIB), arena.get(0)
    assert empty.offset == full.offset == 0
    arena.put(empty)
    assert arena.blocks == (full,)


def test_refuses_as_the_library_does():
    counting = Arena()
    for _ in range(MAX_LIVE_BLOCKS):
        counting.get(1)
    with pytest.raises(RuntimeError, match=r"^dynamic tensor too many, please put after use$"):
        counting.get(1)

    full = Arena(capacity_bytes=4 * KIB)
    first = full.get(KIB)
    full.get(2 * KIB)
    full.put(first)
    with pytest.raises(RuntimeError) as refusal:
        full.get(KIB + 1)
    assert str(refusal.value) == "no free tensor"
    assert "2048 bytes asked, 1024 left behind the last of 1 live tensors" in refusal.value.__notes__[0]
    assert full.get(KIB).offset == 0


def test_refuses_what_is_not_live():
    arena = Arena()
    block = arena.get(KIB)
    arena.put(block)
    with pytest.raises(ValueError, match="not live in this arena"):
        arena.put(block)

    pool = TensorPool(arena, bits_round_up=True)
    tensor = pool.get((4, 4), DType.BF16, "test")
    with pytest.raises(ValueError, match="not taken from this pool"):
        pool.put(tensor.view(16))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_lowest_free_place_under_any_sequence(steps):
    arena = Arena()
    occupied = [False] * 600
    live = []
    for takes, number in steps:
        if takes or not live:
            block = arena.get(number * ALIGN_BYTES)
            lowest = next(i for i in range(600) if not any(occupied[i : i + number]))
            assert block.offset == lowest * ALIGN_BYTES
            occupied[lowest : lowest + number] = [True] * number
            live.append((block, number))
        else:
            block, taken = live.pop(number % len(live))
            arena.put(block)
            start = block.offset // ALIGN_BYTES
            occupied[start : start + taken] = [False] * taken
    assert [block.offset for block in arena.blocks] == sorted(block.offset for block, _ in live)


@pytest.mark.parametrize(("bits_round_up", "num_bytes"), [(False, 13_312), (True, 13_313)])
def test_bits_that_fill_no_whole_byte(bits_round_up, num_bytes):
    pool = TensorPool(Arena(), bits_round_up=bits_round_up)
    assert pool.num_bytes((1775, 60), DType.BIT1) == num_bytes
