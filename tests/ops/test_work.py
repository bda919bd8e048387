"""What operators move and multiply: each family against a count by hand, and names that exist."""

from __future__ import annotations

import pytest
import torch

from npusim.device.cost import Product, Unit
from npusim.ops.operator import DECLARED
from npusim.ops.work import WAITS, WORK, Call

pytestmark = pytest.mark.sim_only("reads the model")


def work(name, *args, results=None, **kwargs):
    declared = DECLARED[name]
    return WORK[name](Call(declared.positions, args, kwargs, results))


def bf16(*size):
    return torch.empty(size, dtype=torch.bfloat16, device="meta")


def test_every_name_is_that_of_an_operator(npu_world):
    assert sorted((WORK.keys() | WAITS) - DECLARED.keys()) == []


@pytest.mark.parametrize(
    ("name", "args", "result", "product"),
    [
        ("aten::linear", (bf16(2, 3, 64), bf16(80, 64)), bf16(2, 3, 80), Product(6, 64, 80)),
        ("aten::mm", (bf16(6, 64), bf16(64, 80)), bf16(6, 80), Product(6, 64, 80)),
        ("aten::addmm", (bf16(80), bf16(6, 64), bf16(64, 80)), bf16(6, 80), Product(6, 64, 80)),
        ("aten::bmm", (bf16(5, 6, 64), bf16(5, 64, 80)), bf16(5, 6, 80), Product(6, 64, 80, 5)),
        ("aten::matmul", (bf16(5, 6, 64), bf16(64, 80)), bf16(5, 6, 80), Product(30, 64, 80)),
        ("aten::mv", (bf16(6, 64), bf16(64)), bf16(6), Product(6, 64, 1)),
    ],
)
def test_products(npu_world, name, args, result, product):
    done = work(name, *args, results=result)
    assert done.products == (product,)
    assert done.num_bytes == sum(tensor.nbytes for tensor in (*args[-2:], result))


def test_experts_without_rows_are_not_read(npu_world):
    experts = bf16(16, 64, 80)
    few = work("npu::npu_grouped_matmul", [bf16(4, 64)], [experts], results=[bf16(4, 80)])
    many = work("npu::npu_grouped_matmul", [bf16(320, 64)], [experts], results=[bf16(320, 80)])
    assert few.products == (Product(1, 64, 80, 4),)
    assert many.products == (Product(20, 64, 80, 16),)
    assert few.num_bytes == (4 * 64 * 80 + 4 * (64 + 80)) * 2
    assert many.num_bytes == (16 * 64 * 80 + 320 * (64 + 80)) * 2


LAYOUTS = [
    ("BSH", (2, 1, 4 * 32), (2, 100, 2 * 32), None),
    ("BNSD", (2, 4, 1, 32), (2, 2, 100, 32), None),
    ("BSND", (2, 1, 4, 32), (2, 100, 2, 32), None),
    ("TND", (2, 4, 32), (200, 2, 32), [100, 200]),
    ("TND paged", (2, 4, 32), (9, 16, 64), [100, 100]),
]


@pytest.mark.parametrize(("layout", "query", "key", "lengths"), LAYOUTS, ids=[layout[0] for layout in LAYOUTS])
def test_attention_counts_the_same_in_every_layout(npu_world, layout, query, key, lengths):
    name, _, paged = layout.partition(" ")
    options = {"block_table": torch.empty(2, 8, device="meta"), "block_size": 16} if paged else {}
    done = work(
        "npu::npu_fused_infer_attention_score",
        bf16(*query),
        bf16(*key),
        bf16(*key),
        results=[bf16(*query)],
        input_layout=name,
        num_heads=4,
        num_key_value_heads=2,
        actual_seq_lengths=[1, 2] if name == "TND" else None,
        actual_seq_lengths_kv=lengths,
        **options,
    )
    assert done.unit is Unit.ATTENTION
    assert done.attention_flops == 2 * 2 * 100 * 4 * 64
    assert done.num_bytes == (2 * 2 * 4 * 32 + 200 * 2 * 2 * 32) * 2


def test_a_prompt_sees_the_keys_before_each_token(npu_world):
    done = work(
        "atb::_npu_flash_attention",
        bf16(100, 4 * 32),
        bf16(100, 2 * 32),
        bf16(100, 2 * 32),
        None,
        torch.tensor([60, 40]),
        1.0,
        4,
        2,
        bf16(100, 4 * 32),
    )
    pairs = 60 * 61 // 2 + 40 * 41 // 2
    assert done.attention_flops == 2 * pairs * 4 * 64


def test_caches_and_tables_are_touched_where_rows_are_written_or_taken(npu_world):
    cache, rows = bf16(1000, 16, 2, 32), bf16(4, 2, 32)
    slots = torch.empty(4, dtype=torch.int32, device="meta")
    assert work("atb::_npu_reshape_and_cache", rows, rows, cache, cache, slots).num_bytes == 4 * rows.nbytes
    taken = bf16(4, 64)
    assert work("aten::embedding", bf16(50000, 64), slots, results=taken).num_bytes == 2 * taken.nbytes
