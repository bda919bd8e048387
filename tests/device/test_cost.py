"""Durations: their rooflines, and how far they are from published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published_tables import TPOT_4526, cells, operator_cells, serving_cells, standalone_cells
from npusim.device.cost import (
    COLLECTIVE_LATENCY_NS,
    COPY_LATENCY_NS,
    MATMUL_START_NS,
    VECTOR_START_NS,
    CostModel,
    Product,
    Unit,
    Work,
)
from npusim.device.profile import load_profile

A2, A3 = load_profile("a2-64g"), load_profile("a3-64g")
COSTS = CostModel(A2)


def test_a_kernel_takes_its_start_and_the_longer_of_bytes_and_products():
    assert COSTS.vector_ns(0) == VECTOR_START_NS
    assert COSTS.vector_ns(640_000_000) == VECTOR_START_NS + 1_000_000  # 640 GB/s
    assert COSTS.kernel_ns(Work(Unit.VECTOR, 640_000_000)) == COSTS.vector_ns(640_000_000)
    thin, thick = (
        Work(Unit.MATMUL, 1 << 30, (Product(1, 1024, 1024),)),
        Work(Unit.MATMUL, 1, (Product(8192, 8192, 8192),)),
    )
    assert COSTS.kernel_ns(thin) == MATMUL_START_NS + round(COSTS.memory_ns(thin))
    assert COSTS.kernel_ns(thick) == MATMUL_START_NS + round(COSTS.cube_ns(thick))


def test_products_come_in_whole_rounds_of_tiles():
    one_round = Work(Unit.MATMUL, 0, (Product(128, 4096, 256 * 20),))
    one_more = Work(Unit.MATMUL, 0, (Product(128, 4096, 256 * 20 + 1),))
    assert COSTS.cube_ns(one_more) == 2 * COSTS.cube_ns(one_round)


def test_operands_of_8_bits_are_twice_as_fast_and_of_32_four_times_as_slow():
    times = [COSTS.cube_ns(Work(Unit.MATMUL, 0, (Product(4096, 4096, 4096, 1, bits),))) for bits in (8, 16, 32)]
    assert times == [times[1] / 2, times[1], times[1] * 4]


def test_collectives_by_topology():
    num_bytes = 8 * 18_000_000
    assert COSTS.collective_ns("all_reduce", num_bytes, 1) == 0
    assert COSTS.collective_ns("all_gather", num_bytes, 8) == COLLECTIVE_LATENCY_NS + 1_000_000  # each link an eighth
    assert COSTS.collective_ns("all_reduce", num_bytes, 8) == COLLECTIVE_LATENCY_NS + 2_000_000
    assert COSTS.collective_ns("all_gather", num_bytes, 2) == COLLECTIVE_LATENCY_NS + 4_000_000  # one link of seven
    switched = CostModel(A3)
    pair, eight = (switched.collective_ns("all_gather", num_bytes, n) - COLLECTIVE_LATENCY_NS for n in (2, 8))
    assert eight / pair == pytest.approx(7 / 8 * 2, rel=1e-4)
    assert COSTS.collective_ns("all_gather", num_bytes, 16) > COSTS.collective_ns("all_gather", num_bytes, 8)


def test_copies_take_their_links():
    assert COSTS.host_to_device_ns(17_240_000) == COPY_LATENCY_NS + 1_000_000
    assert COSTS.device_to_host_ns(19_700_000) == COPY_LATENCY_NS + 1_000_000


def test_rates_are_the_profiles():
    fast = CostModel(replace(A2, hbm_bytes_per_s=replace(A2.hbm_bytes_per_s, value=2 * A2.hbm_bytes_per_s.value)))
    assert fast.vector_ns(640_000_000) == VECTOR_START_NS + 500_000


@pytest.mark.parametrize(
    ("made", "worst", "mean"),
    [
        (lambda: serving_cells("calibrated on it", "Qwen3-32B", 8, TPOT_4526), 0.05, 0.015),
        (lambda: serving_cells("check", "Qwen3-32B", 2, {1: (33.6, None, None)}), 0.02, 0.02),
        (standalone_cells, 0.24, 0.09),
        (operator_cells, 0.41, 0.08),
    ],
    ids=["Qwen3-32B TP8", "Qwen3-32B TP2", "xlite alone", "operators"],
)
def test_published_figures(made, worst, mean):
    errors = [abs(cell.error) for cell in made()]
    assert errors
    assert max(errors) < worst
    assert sum(errors) / len(errors) < mean


@pytest.mark.slow
def test_every_published_table_is_predicted_within_a_factor_of_three():
    assert all(-0.67 < cell.error < 2 for cell in cells())
