"""The pool against the real libraries: every size, every refusal, every get and put."""

from __future__ import annotations

import pytest

from npusim.xlite.pool import counting_pool, dummy_runs, tensor_pool_size
from npusim.xlite.versions import VERSIONS

KINDS = ("named", "indexer", "boundary", "edge", "random")
TRACED = (0, 12, 15, 16, 19, 26, 52, 64, 65, 69, 74, 87)


def answer(model):
    try:
        size = tensor_pool_size(model)
    except (RuntimeError, ValueError) as error:
        return {"bytes": None, "mb": None, "error": str(error), "overruns": 0}
    return {"bytes": size.num_bytes, "mb": size.megabytes, "error": None, "overruns": size.overruns}


def as_golden(event):
    tensor = event.tensor
    if event.kind == "put":
        return ["put", tensor.block.offset]
    dtype = {"BIT1": "bit"}.get(tensor.dtype.name, tensor.dtype.name.lower())
    return [
        "get",
        tensor.block.offset,
        tensor.block.num_bytes,
        dtype,
        list(tensor.shape),
        tensor.taker,
        event.peak_bytes,
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_answers_as_the_real_library(kind, version, golden_rows, rank_model):
    rows = [row for row in golden_rows.values() if row["kind"] == kind]
    assert rows
    differences = [
        (row["id"], row["name"], row["results"][version], got)
        for row in rows
        if (got := answer(rank_model(row, version))) != row["results"][version]
    ]
    assert differences == []


def test_golden_data_is_whole(golden_rows, golden_traces):
    assert len(golden_rows) == 668
    assert {row["kind"] for row in golden_rows.values()} == set(KINDS)
    assert set(golden_traces) == {(number, version) for number in TRACED for version in VERSIONS}


@pytest.mark.parametrize("number", TRACED)
@pytest.mark.parametrize("version", VERSIONS)
def test_takes_and_puts_as_the_real_library(number, version, golden_rows, golden_traces, rank_model):
    trace = golden_traces[number, version]
    layers = {"n_layers": trace["n_layers"], "n_dense_layers": trace["n_dense_layers"]}
    model = rank_model(golden_rows[number], version, **layers)
    events = []
    pool = counting_pool(model, events)
    dummy_runs(model, pool)
    assert [as_golden(event) for event in events] == trace["events"]
    assert pool.arena.peak_bytes == trace["bytes"]
    assert pool.arena.blocks == ()
