"""A benchmark's figures against those that vLLM computes of the same requests."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from xlite_runner.bench.metrics import BenchmarkMetrics, Goodput, RequestRecord, calculate_metrics

RECORDED = json.loads(
    (Path(__file__).parents[1] / "data" / "serving" / "bench_serve_metrics.json").read_text(encoding="utf-8")
)


def record(req_id: str, start_time: float, chunk_times: list[float], **settings: Any) -> RequestRecord:
    settings = {"prompt_len": 1, "output_len": len(chunk_times), "end_time": chunk_times[-1], **settings}
    return RequestRecord(req_id=req_id, start_time=start_time, chunk_times=array("d", chunk_times), **settings)


@pytest.fixture(scope="module")
def metrics() -> BenchmarkMetrics:
    records = [
        record(error=None if completed else "failed", **request)
        for request in RECORDED["requests"]
        for completed in [request.pop("completed")]
    ]
    return calculate_metrics(records, RECORDED["duration"], Goodput(**RECORDED["goodput"]), RECORDED["percentiles"])


def test_figures_are_those_of_vllm(metrics):
    expected = RECORDED["metrics"]
    names = {"total_input": "total_input_tokens", "total_output": "total_output_tokens"}
    ours = metrics.to_dict()
    for key, value in expected.items():
        if key.startswith("percentiles_"):
            for percentile, milliseconds in value:
                name = f"p{percentile:g}_{key.removeprefix('percentiles_')}"
                assert ours.pop(name) == pytest.approx(milliseconds), name
        elif key != "rtfx":  # of audio
            assert ours.pop(names.get(key, key)) == pytest.approx(value), key
    assert ours == {"duration": 9.5}


def test_requests_without_a_second_token_have_no_tpot():
    one = record("0", 0.0, [2.0])
    two = record("1", 0.0, [1.0, 1.5])
    metrics = calculate_metrics([one, two], 2.0, Goodput(tpot=100.0), [50.0])
    assert metrics.latencies["tpot"].mean == 500
    assert metrics.latencies["itl"].mean == 500
    assert metrics.request_goodput == 0.5  # a missing TPOT counts as 0


def test_nothing_completed():
    failed = RequestRecord(req_id="0", start_time=1.0, prompt_len=5, end_time=1.0, error="refused")
    metrics = calculate_metrics([failed], 0.0, Goodput(), [99.0])
    assert (metrics.completed, metrics.failed, metrics.request_throughput) == (0, 1, 0.0)
    assert metrics.request_goodput is None
    assert metrics.to_dict()["p99_ttft_ms"] == 0


def test_chunks_of_several_tokens_count_once_in_itl_and_fully_in_output():
    metrics = calculate_metrics([record("0", 0.0, [1.0, 1.25], output_len=4)], 1.25, Goodput(), [])
    assert metrics.total_output_tokens == 4
    assert metrics.latencies["itl"].mean == 250
    assert metrics.latencies["tpot"].mean == pytest.approx(250 / 3)
