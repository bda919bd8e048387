"""Workloads: lengths, tokens and times of their requests."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from xlite_runner.bench.arrivals import arrival_times, ramp_up_times
from xlite_runner.bench.workload import Workload, build_requests
from xlite_runner.errors import WorkloadError

TRACES = Path(__file__).parents[1] / "data" / "serving" / "traces"


def test_defaults_are_those_of_vllm():
    requests = build_requests(Workload())
    assert len(requests) == 1000
    assert {(request.sample.prompt_len, request.sampling_params.max_tokens) for request in requests} == {(1024, 128)}
    assert {request.arrival_time for request in requests} == {0.0}
    assert all(request.sampling_params.is_greedy and request.sampling_params.ignore_eos for request in requests)


def test_random_lengths_fill_their_range_and_follow_the_seed():
    workload = Workload(num_prompts=400, random_input_len=10, random_output_len=4, random_range_ratio=0.5)
    requests = build_requests(workload)
    assert {request.sample.prompt_len for request in requests} == set(range(5, 16))
    assert {request.sample.expected_output_len for request in requests} == set(range(2, 7))
    assert build_requests(workload) == requests
    assert build_requests(workload.model_copy(update={"seed": 1})) != requests


def test_prompts_share_their_prefix_and_nothing_else():
    workload = Workload(num_prompts=2, random_input_len=50, random_prefix_len=30)
    first, second = (request.prompt_token_ids(1000) for request in build_requests(workload))
    assert len(first) == len(second) == 80
    assert first[:30] == second[:30]
    assert first[30:] != second[30:]
    assert all(0 <= token < 1000 for token in first)
    assert first == build_requests(workload)[0].prompt_token_ids(1000)


def test_poisson_arrivals_have_their_rate_and_end_on_time():
    times = arrival_times(2000, 4.0, 1.0, seed=3)
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(500)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness):
    gaps = np.diff(arrival_times(4000, 4.0, burstiness, seed=3))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_arrivals_without_chance():
    assert arrival_times(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]
    assert arrival_times(3, 2.0, math.inf, seed=0) == [0.5, 1.0, 1.5]
    assert ramp_up_times(3, "linear", 1.0, 4.0, math.inf, seed=0) == pytest.approx([1, 1.4, 1.65])
    assert ramp_up_times(3, "exponential", 1.0, 4.0, math.inf, seed=0) == pytest.approx([1, 1.5, 1.75])
    assert ramp_up_times(1, "linear", 2.0, 4.0, math.inf, seed=0) == [0.5]


def test_traces_bring_their_times_unless_a_rate_is_given():
    trace = {"dataset_name": "mooncake", "dataset_path": TRACES / "mooncake.jsonl"}
    requests = build_requests(Workload(**trace))
    assert [request.arrival_time for request in requests] == [0.0, 3.0, 3.0]
    first, _, third = (request.prompt_token_ids(100) for request in requests)
    assert first == third
    rated = build_requests(Workload(**trace, request_rate=2.0, burstiness=math.inf, num_prompts=2))
    assert [request.arrival_time for request in rated] == [0.5, 1.0]


def test_requests_come_in_the_order_of_their_times():
    workload = Workload(
        dataset_name="timed_trace",
        dataset_path=TRACES / "timed.jsonl",
        timed_trace_label_timestamp="at",
        timed_trace_label_input_length="in",
        timed_trace_label_output_length="out",
        timed_trace_label_hash_ids="ids",
    )
    requests = build_requests(workload)
    assert [(request.req_id, request.arrival_time) for request in requests] == [("1", 0.25), ("0", 0.5)]
    ramped = build_requests(
        Workload(num_prompts=50, ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=9.0)
    )
    assert all(one.arrival_time < other.arrival_time for one, other in pairwise(ramped))


def test_requests_after_decades_are_refused():
    for settings in ({"request_rate": 1e-12}, {"request_rate": 1.0, "burstiness": 1e-300}):
        with pytest.raises(WorkloadError, match="allowed are times from 0 to 1e"):
            build_requests(Workload(num_prompts=2, **settings))


def test_a_trace_without_requests_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(WorkloadError, match="has no request that can be served"):
        build_requests(Workload(dataset_name="custom", dataset_path=tmp_path / "empty.jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_rate": 0.0}, "greater than 0"),
        ({"request_rate": math.nan}, "greater than 0|allowed are numbers above 0"),
        ({"burstiness": -1.0}, "greater than 0"),
        ({"num_prompts": 10**9}, "less than or equal to 10000000"),
        ({"random_input_len": 2**31}, "less than or equal to 2147483647"),
        ({"sampling": {"seed": 2**63}}, "less than 9223372036854775808"),
        ({"sampling": {"temperature": math.inf}}, "less than or equal to 34"),
        ({"random_range_ratio": 1.0}, "less than 1"),
        ({"dataset_path": Path("x")}, 'allowed with another dataset_name than "random"'),
        ({"dataset_name": "azure"}, 'missing key "dataset_path": dataset_name = "azure" is read from a file'),
        ({"ramp_up_start_rps": 1.0}, "allowed with ramp_up_strategy"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0}, "needs ramp_up_start_rps and ramp_up_end_rps"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 1.0},
            "and no request_rate",
        ),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValidationError, match=message):
        Workload(**settings)
