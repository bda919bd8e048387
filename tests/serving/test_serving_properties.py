"""What holds for every workload: blocks have owners, preemption and sharing change no token, every request ends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fake_worker import VOCABULARY, answer, make_engine, make_scheduler
from xlite_runner.serving.core.request import FinishReason, Request
from xlite_runner.serving.core.scheduler import Scheduler
from xlite_runner.serving.sampling_params import SamplingParams

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
WHOLE_SEQUENCE = MAX_MODEL_LEN // BLOCK_SIZE
"""Blocks; with so many and the null block every request can be served, alone if need be."""


@st.composite
def schedulers(draw) -> Scheduler:
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    return make_scheduler(
        1 + WHOLE_SEQUENCE + draw(st.integers(0, 20)),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)) if chunked else 80,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 3])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        num_drafts=draw(st.sampled_from([0, 1, 3])),
        asynchronous=draw(st.booleans()),
    )


@st.composite
def workloads(draw) -> list[tuple[int, Request]]:
    """Requests and the steps at which they come; some share a beginning."""
    common = draw(st.lists(st.integers(0, VOCABULARY), max_size=20))
    arrivals = []
    for number in range(draw(st.integers(1, 8))):
        own = draw(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=20))
        prompt = common + own if draw(st.booleans()) else own
        params = SamplingParams(max_tokens=draw(st.integers(1, 20)))
        request = Request(f"r{number}", prompt, params, priority=draw(st.integers(0, 2)), arrival_time=float(number))
        arrivals.append((draw(st.integers(0, 20)), request))
    return arrivals


def check_blocks(scheduler: Scheduler) -> None:
    """Every block is free or held by as many requests as it counts, never the null block, never twice by one."""
    pool = scheduler.kv_cache_manager.block_pool
    holders = Counter(block for request in scheduler.requests.values() for block in request.block_ids)
    for request in scheduler.requests.values():
        assert len(set(request.block_ids)) == len(request.block_ids)
    free = pool.free_blocks
    assert len(set(free)) == len(free) == pool.num_free_blocks
    assert 0 not in free
    assert 0 not in holders
    assert [pool.ref_count(block) for block in range(pool.num_blocks)] == [holders[b] for b in range(pool.num_blocks)]
    assert len(free) + len(holders) + 1 == pool.num_blocks


def check_limits(scheduler: Scheduler, num_scheduled_tokens: dict[str, int]) -> None:
    assert sum(num_scheduled_tokens.values()) <= scheduler.config.max_num_scheduled_tokens
    assert all(num_tokens > 0 for num_tokens in num_scheduled_tokens.values())
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    queued = [request.request_id for request in [*scheduler.running, *scheduler.waiting]]
    assert sorted(queued) == sorted(scheduler.requests)


@settings(max_examples=60, deadline=None)
@given(scheduler=schedulers(), workload=workloads())
def test_every_request_gets_its_answer(scheduler, workload):
    """The same tokens as alone, whatever was preempted, shared, split or drafted; the worker checks what it reads."""
    engine, _ = make_engine(scheduler)
    prompts = {request.request_id: request.prompt_token_ids for _, request in workload}
    tokens: dict[str, list[int]] = {req_id: [] for req_id in prompts}
    reasons: dict[str, FinishReason] = {}
    for number in range(2000):
        for arrival, request in workload:
            if arrival == number:
                engine.add_request(request)
        if number > 20 and not engine.has_work:
            break
        for replica in engine.step():
            check_blocks(scheduler)
            check_limits(scheduler, replica.scheduler_output.num_scheduled_tokens if replica.scheduler_output else {})
            for output in replica.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finished:
                    reasons[output.request_id] = output.finish_reason
    assert reasons == dict.fromkeys(prompts, FinishReason.LENGTH)
    assert tokens == {
        request.request_id: answer(prompts[request.request_id], request.sampling_params.max_tokens)
        for _, request in workload
    }
    assert scheduler.kv_cache_manager.block_pool.usage == 0
    assert scheduler.counters.generation_tokens == sum(map(len, tokens.values()))
    assert scheduler.counters.prompt_tokens == sum(map(len, prompts.values()))


@settings(max_examples=30, deadline=None)
@given(scheduler=schedulers(), workload=workloads(), data=st.data())
def test_aborts_at_any_time_leave_nothing_behind(scheduler, workload, data):
    engine, _ = make_engine(scheduler)
    for _, request in workload:
        engine.add_request(request)
    while engine.has_work:
        unfinished = sorted(scheduler.requests)
        if unfinished and data.draw(st.booleans()):
            engine.abort_requests([data.draw(st.sampled_from(unfinished))])
            check_blocks(scheduler)
        if engine.has_work:
            engine.step()
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.usage == 0
    assert scheduler.counters.request_success.total() == len(workload)


class Watched(dict):
    """Counts how often it is asked for anything."""

    num_accesses = 0

    def __getitem__(self, key):
        self.num_accesses += 1
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.num_accesses += 1
        return super().get(key, default)

    def __iter__(self):
        self.num_accesses += len(self)
        return super().__iter__()

    def values(self):
        self.num_accesses += len(self)
        return super().values()

    def items(self):
        self.num_accesses += len(self)
        return super().items()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_finished_requests_cost_nothing(asynchronous):
    """A step after 300 finished requests touches and keeps as much as the same step after none."""

    def cost_of_a_step(num_finished: int) -> tuple[int, int, int]:
        scheduler = make_scheduler(100, block_size=BLOCK_SIZE, asynchronous=asynchronous)
        engine, worker = make_engine(scheduler)
        for number in range(num_finished):
            engine.add_request(Request(f"done{number}", [number] * 5, SamplingParams(max_tokens=2)))
            while engine.has_work:
                engine.step()
        for number in range(4):
            engine.add_request(Request(f"r{number}", [number] * 5, SamplingParams(max_tokens=50)))
        engine.step()
        scheduler.requests = Watched(scheduler.requests)
        for _ in range(10):
            engine.step()
        return scheduler.requests.num_accesses, len(scheduler.requests), len(worker.rows)

    assert cost_of_a_step(300) == cost_of_a_step(0)
