"""Allocations outside the pool, against the sizes that the sources and the observed wheels give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npusim.device.ledger import Grade
from npusim.xlite import Environment, When, outside_pool


def sizes(model, when):
    return {entry.label: (entry.block_bytes, entry.count) for entry in outside_pool(model) if entry.when is when}


def test_seed_case(seed_model):
    assert sizes(seed_model, When.MODEL_INIT) == {
        "identity index table": (4 * 40960, 1),
        "expert pointer tables": (8 * 128, 2 * 48),
        "sync words": (25, 1),
    }
    assert sizes(seed_model, When.INIT_TENSOR_POOL) == {
        "XCCL flag windows": (2_465_792, 1),
        "XCCL parameter blocks": (512, 1),
    }
    assert sizes(seed_model, When.FIRST_FORWARD) == {
        "positions": (8 * 8192, 1),
        "slot mapping": (4 * 8192, 1),
        "lens, cached lens, query starts": (4 * 64, 3),
        "block tables": (4 * 64 * 320, 1),
    }
    totals = {when: sum(entry.num_bytes for entry in outside_pool(seed_model) if entry.when is when) for when in When}
    assert [round(totals[when] / 1e6, 2) for when in When] == [2.47, 0.26, 0.18]


def test_later_version(seed_model):
    model = replace(seed_model, version="0.2.0rc4")
    assert sizes(model, When.MODEL_INIT)["identity index table"] == (409_600, 1)
    assert sizes(model, When.MODEL_INIT)["sync words"] == (200, 1)
    assert "positions" not in sizes(model, When.FIRST_FORWARD)
    assert {entry.grade for entry in outside_pool(model)} == {Grade.CALIBRATED}
    assert {entry.grade for entry in outside_pool(seed_model)} == {Grade.EXACT}


@pytest.mark.parametrize(
    ("environment", "windows"),
    [({}, 1), ({"XLITE_DISABLE_XCCL": "1"}, 0), ({"XLITE_DEVS_PER_NODE": "1"}, 0), ({"HCCL_DETERMINISTIC": "on"}, 0)],
)
def test_xccl_windows(seed_model, environment, windows):
    model = replace(seed_model, environment=Environment.from_mapping(environment))
    assert sizes(model, When.INIT_TENSOR_POOL).get("XCCL flag windows", (0, 0))[1] == windows


def test_quantised_experts_have_scale_tables(golden_rows, rank_model):
    assert sizes(rank_model(golden_rows[19], "0.1.0rc11"), When.MODEL_INIT)["expert pointer tables"] == (1024, 4 * 48)


def test_dense_model_has_neither_indices_nor_tables(golden_rows, rank_model):
    assert set(sizes(rank_model(golden_rows[52], "0.1.0rc11"), When.MODEL_INIT)) == {"sync words"}


def test_dp_without_xccl_keeps_graph_buffers(golden_rows, rank_model):
    model = replace(rank_model(golden_rows[16], "0.2.0rc0"), environment=Environment(disable_xccl=True))
    packed = 2 * 2048 + 2 * 128 + 128 // 8
    buffers = sizes(model, When.FIRST_FORWARD)
    assert buffers["DP graph send buffer"] == (64 * 2 * 2 * 2048, 1)
    assert buffers["DP graph receive buffer"] == (64 * 2 * packed, 1)
    for other in (replace(model, version="0.1.0rc11"), replace(model, environment=Environment())):
        assert "DP graph send buffer" not in sizes(other, When.FIRST_FORWARD)
