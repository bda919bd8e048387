"""Two hours of virtual time under faults: nothing leaks, every request ends, and it happens the same way every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
from xlite_runner.scenario import load_scenario

TINY = Path(__file__).parents[2] / "examples" / "tiny.toml"
GIB = 1 << 30

pytestmark = pytest.mark.sim_only("virtual time and planned faults")


def faults_over(seconds):
    return [
        {"at": 0.2 * seconds, "rank": 1, "other_process_bytes": GIB},
        {"at": 0.3 * seconds, "rank": 0, "collective_delay": 31.0},
        {"at": 0.4 * seconds, "rank": 1, "slowdown": 50.0},
        {"at": 0.5 * seconds, "rank": 1, "slowdown": 1.0},
        {"at": 0.6 * seconds, "rank": 1, "collective_delay": 29.0},
        {"at": 0.7 * seconds, "rank": 1, "other_process_bytes": -GIB},
    ]


def serve(num_requests, seconds, faults=()):
    """A tiny model on two ranks; requests come all the time, and in between something goes wrong."""
    from xlite_runner.bench import simulation

    overrides = {
        "tensor_parallel_size": 2,
        "environment": {"HCCL_EXEC_TIMEOUT": 30},
        "workload": {
            "num_prompts": num_requests,
            "request_rate": num_requests / seconds,
            "random_input_len": 100,
            "random_output_len": 8,
            "random_range_ratio": 0.5,
        },
        "bench": {"survives_errors": True},
        "faults": list(faults),
    }
    scenario = load_scenario(TINY, overrides)
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    return simulation.serve(scenario, config, ProfilePolicy.SKIP)


def check(served, num_requests, seconds):
    result = served.result
    records = result.run.records
    assert len(records) == num_requests
    assert result.metrics.duration == pytest.approx(seconds, rel=0.1)
    assert all(record.end_time is not None for record in records)
    failed = [record for record in records if not record.is_completed]
    assert failed, "the first collective that came too late ended the requests in the engine"
    assert {record.error for record in failed} == {
        "RuntimeError: NPU function error: AclrtSynchronizeStreamWithTimeout, error code is 507048"
    }
    assert result.metrics.completed + len(failed) == num_requests
    warmed_up = serve(3, 3.0).result.memory
    for memory, warm in zip(result.memory, warmed_up, strict=True):
        assert memory.at_end == warm.at_end, f"rank {memory.rank}: something was not given back"
    assert result.memory[1].peak_by_owner["other process"] == GIB
    assert "other process" not in result.memory[0].peak_by_owner


@pytest.mark.slow
def test_faults_of_a_minute():
    check(serve(20, 120.0, faults_over(120.0)), 20, 120.0)


@pytest.mark.slow
def test_ten_thousand_requests_in_two_hours():
    first = serve(10_000, 7200.0, faults_over(7200.0))
    check(first, 10_000, 7200.0)
    assert serve(10_000, 7200.0, faults_over(7200.0)).result.event_log_digest == first.result.event_log_digest
