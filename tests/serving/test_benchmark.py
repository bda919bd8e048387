"""The benchmark's loop on an engine that computes nothing: who is sent when, what is measured, how requests end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.serving.fake_worker import make_scheduler
from xlite_runner.bench.benchmark import Benchmark
from xlite_runner.bench.traces import SampleRequest, Segment
from xlite_runner.bench.workload import TimedRequest
from xlite_runner.serving.clock import HostOverhead
from xlite_runner.serving.engine_core import ReplicaStep, ServingEngine
from xlite_runner.serving.output import ModelRunnerOutput
from xlite_runner.serving.sampling_params import SamplingParams


class StepClock:
    """Virtual time that passes only when told."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, t: float) -> None:
        self.time = max(self.time, t)

    def charge(self, host_seconds: float) -> None:
        self.time += host_seconds


class Executor:
    """Every step takes a second and samples a token for each request whose tokens are all computed then."""

    def __init__(self, clock: StepClock, fails_at: Sequence[int] = ()) -> None:
        self.clock = clock
        self.fails_at = fails_at
        self.num_steps = 0
        self.num_computed: dict[str, int] = {}
        self.num_tokens: dict[str, int] = {}

    def execute_model(self, steps: Sequence[ReplicaStep]) -> list[ModelRunnerOutput | None]:
        self.clock.time += 1
        self.num_steps += 1
        if self.num_steps in self.fails_at:
            raise MemoryError("NPU out of memory.\nmore lines")
        return [self.execute(step) for step in steps]

    def execute(self, step: ReplicaStep) -> ModelRunnerOutput | None:
        output = step.scheduler_output
        if output is None:
            return None
        for new in output.scheduled_new_reqs:
            self.num_tokens[new.req_id] = len(new.prompt_token_ids)
            self.num_computed[new.req_id] = new.num_computed_tokens
        for req_id, num_computed in zip(
            output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True
        ):
            self.num_computed[req_id] = num_computed
        sampled = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            if self.num_computed[req_id] + num_tokens >= self.num_tokens[req_id]:
                sampled[req_id] = [7]
                self.num_tokens[req_id] += 1
        return ModelRunnerOutput(sampled_token_ids=sampled)


def request(req_id: str, arrival_time: float, prompt_len: int, output_len: int) -> TimedRequest:
    sample = SampleRequest(prompt=(Segment(key=(int(req_id),), num_tokens=prompt_len),), expected_output_len=output_len)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
    return TimedRequest(req_id=req_id, arrival_time=arrival_time, sample=sample, sampling_params=params, seed=0)


def serve(requests, *, num_blocks=100, fails_at=(), scheduler=None, **options):
    clock = StepClock()
    executor = Executor(clock, fails_at)
    engine = ServingEngine([make_scheduler(num_blocks, max_model_len=1024, **(scheduler or {}))], executor)
    options = {"is_engine_error": lambda error: isinstance(error, MemoryError), **options}
    run = Benchmark(engine, clock, vocab_size=50, max_model_len=1024, **options).run(requests)
    return run, executor


def times(run):
    return {record.req_id: (record.start_time, list(record.chunk_times)) for record in run.records}


def test_tokens_come_back_at_the_end_of_each_step():
    run, _ = serve([request("0", 0.0, 100, 3), request("1", 0.5, 100, 2)])
    # The second one arrives during the first step, whose end it waits for; its time counts from its arrival.
    assert times(run) == {"0": (0.0, [1.0, 2.0, 3.0]), "1": (0.5, [2.0, 3.0])}
    assert [record.ttft for record in run.records] == [1.0, 1.5]
    assert run.duration == 3.0
    assert (run.load.num_steps, run.load.num_scheduled_tokens) == (3, 100 + 1 + 100 + 1 + 1)
    assert run.load.max_num_running == 2
    assert all(record.is_completed for record in run.records)


def test_an_idle_engine_waits_for_the_next_request():
    run, executor = serve([request("0", 0.0, 10, 1), request("1", 10.25, 10, 1)])
    assert times(run) == {"0": (0.0, [1.0]), "1": (10.25, [11.25])}
    assert run.load.num_steps == 2
    # Running is counted after a step, and nothing runs after the only step of a request.
    assert run.load.mean_num_running == 0
    assert executor.num_steps == 4  # after each request one step more tells the workers that it has ended


def test_who_exceeds_the_concurrency_is_sent_when_another_has_ended():
    requests = [request(str(index), 0.1 * index, 10, 2) for index in range(4)]
    run, _ = serve(requests, max_concurrency=2)
    assert times(run) == {
        "0": (0.0, [1.0, 2.0]),
        "1": (0.1, [2.0, 3.0]),
        "2": (2.0, [3.0, 4.0]),
        "3": (3.0, [4.0, 5.0]),
    }


def test_the_host_takes_its_time():
    run, _ = serve([request("0", 0.0, 10, 2)], host_overhead=HostOverhead(step_seconds=0.25, request_seconds=0.5))
    assert times(run) == {"0": (0.0, [1.25, 3.0])}  # nothing runs yet when the first step is composed


def test_requests_too_long_for_the_model_are_refused():
    run, _ = serve([request("0", 0.0, 1000, 25), request("1", 0.0, 1000, 24)])
    refused, served = run.records
    assert refused.error == "WorkloadError: prompt and output of 1025 tokens: allowed is at most max_model_len = 1024"
    assert (refused.end_time, refused.output_len) == (0.0, 0)
    assert served.is_completed
    assert served.output_len == 24


def test_a_request_that_never_fits_fails_instead_of_blocking_the_others():
    run, _ = serve([request("0", 0.0, 700, 1), request("1", 0.0, 10, 1)], num_blocks=6)
    blocked, behind = run.records
    assert blocked.error is not None
    assert blocked.error.startswith("NeverAdmittedError: 700 tokens do not fit into 5 blocks")
    assert behind.is_completed


@pytest.mark.parametrize("survives", [False, True])
def test_an_error_of_the_engine_ends_the_requests_that_it_has(survives):
    requests = [request("0", 0.0, 10, 9), request("1", 0.0, 10, 2), request("2", 20.0, 10, 2)]
    run, _ = serve(requests, fails_at=[3], survives_errors=survives)
    first, second, third = run.records
    assert first.error == "MemoryError: NPU out of memory."
    assert second.is_completed
    assert first.end_time == 3.0
    if survives:
        assert list(third.chunk_times) == [21.0, 22.0]
    else:
        assert third.error == "EngineDeadError: the engine died at 3.000000 s: NPU out of memory."
        assert third.end_time == 20.0


def test_other_errors_are_ours():
    with pytest.raises(MemoryError):
        serve([request("0", 0.0, 10, 2)], fails_at=[1], is_engine_error=lambda _: False)


def test_preempted_requests_end_with_all_their_tokens():
    requests = [request(str(index), 0.0, 512, 40) for index in range(2)]
    run, _ = serve(requests, num_blocks=10)
    assert run.num_preemptions > 0
    assert [record.output_len for record in run.records] == [40, 40]
    assert run.load.max_num_waiting == 1


def test_observers_are_told_of_every_step_and_wait():
    told = []

    class Observer:
        def on_step(self, begin, end, load):
            told.append((begin, end, load.num_running, load.num_tokens, load.num_finished))

    serve([request("0", 0.0, 10, 2), request("1", 5.5, 10, 1)], observers=[Observer()])
    assert told == [
        (0.0, 1.0, 1, 10, 0),
        (1.0, 2.0, 0, 1, 1),
        (2.0, 3.0, 0, 0, 1),  # tells the workers that the request has ended
        (3.0, 5.5, 0, 0, 1),
        (5.5, 6.5, 0, 10, 2),
        (6.5, 7.5, 0, 0, 2),
    ]
