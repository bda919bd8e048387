"""The serving loop: what it refuses, replicas in step, workers, what stalls."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.serving.fake_worker import (
    FakeWorker,
    answer,
    make_engine,
    make_request,
    make_scheduler,
    run_in_turns,
)
from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.serving.core.async_scheduler import AsyncScheduler
from xlite_runner.serving.core.request import FinishReason, Request
from xlite_runner.serving.engine_core import STEPS_BETWEEN_AGREEMENTS, ServingEngine
from xlite_runner.serving.executor import WorkerExecutor
from xlite_runner.serving.output import LogprobsLists, ModelRunnerOutput
from xlite_runner.serving.sampling_params import SamplingParams

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
TINY_MOE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def make_replicas(num_replicas: int, tensor_parallel_size: int = 1, *, lockstep: bool = True):
    workers = [FakeWorker(128) for _ in range(num_replicas * tensor_parallel_size)]
    executor = WorkerExecutor(workers, num_replicas, run_in_turns)
    engine = ServingEngine([make_scheduler(20) for _ in range(num_replicas)], executor, lockstep=lockstep)
    return engine, workers


class TestRequests:
    @pytest.fixture
    def engine(self) -> ServingEngine:
        return make_engine(make_scheduler(20, max_model_len=256))[0]

    @pytest.mark.parametrize(
        ("length", "plus", "advice"),
        [
            (257, "", "text tokens."),
            (
                256,
                "plus the number of requested output tokens (at least 1) ",
                "text tokens (prompt + requested output tokens).",
            ),
        ],
    )
    def test_too_long(self, engine, length, plus, advice):
        text = (
            f"The decoder prompt (length {length}) {plus}is longer than the maximum model length of 256. "
            f"Make sure that `max_model_len` is no smaller than the number of {advice}"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            engine.add_request(make_request("a", length))
        assert not engine.has_unfinished_requests

    def test_empty(self):
        with pytest.raises(ValueError, match="The decoder prompt cannot be empty"):
            Request("a", [], SamplingParams())

    def test_more_min_tokens_than_there_is_room_for(self, engine):
        with pytest.raises(ValueError, match=r"min_tokens = 7 after a prompt of 250 tokens: allowed is at most 6"):
            engine.add_request(make_request("a", 250, params={"min_tokens": 7}))
        engine.add_request(make_request("a", 250, params={"min_tokens": 6}))

    def test_same_id_twice(self, engine):
        engine.add_request(make_request("a", 10, max_tokens=1))
        with pytest.raises(ValueError, match="duplicate request id 'a'"):
            engine.add_request(make_request("a", 10))
        engine.step()
        engine.add_request(make_request("a", 10))  # the first has ended

    def test_unknown_replica(self, engine):
        with pytest.raises(ValueError, match="data_parallel_rank = 1: allowed is 0 to 0"):
            engine.add_request(make_request("a", 10), data_parallel_rank=1)


class TestStops:
    """The model's answer to these prompts is known, so each rule can be hit at a token of choice."""

    PROMPT = tuple(range(20))

    def run(self, eos_token_id: int | None = None, **params) -> tuple[int, FinishReason, int | None]:
        engine, _ = make_engine(make_scheduler(20, max_model_len=40))
        engine.add_request(Request("a", self.PROMPT, SamplingParams(**params), eos_token_id=eos_token_id))
        tokens = []
        while engine.has_work:
            for output in engine.step()[0].outputs:
                tokens += output.new_token_ids
        assert tokens == answer(self.PROMPT, len(tokens))
        return len(tokens), output.finish_reason, output.stop_reason

    @pytest.fixture
    def third(self) -> int:
        tokens = answer(self.PROMPT, 10)
        assert tokens[:3].count(tokens[2]) == 1
        return tokens[2]

    def test_eos(self, third):
        assert self.run(third) == (3, FinishReason.STOP, None)

    def test_stop_token(self, third):
        assert self.run(stop_token_ids=(third,)) == (3, FinishReason.STOP, third)

    def test_eos_comes_before_stop_tokens(self, third):
        assert self.run(third, stop_token_ids=(third,)) == (3, FinishReason.STOP, None)

    def test_ignored_eos_may_be_a_stop_token(self, third):
        assert self.run(third, ignore_eos=True) == (16, FinishReason.LENGTH, None)
        assert self.run(third, ignore_eos=True, stop_token_ids=(third,)) == (3, FinishReason.STOP, third)

    def test_stop_comes_before_length(self, third):
        assert self.run(third, max_tokens=3) == (3, FinishReason.STOP, None)
        assert self.run(third, max_tokens=2) == (2, FinishReason.LENGTH, None)

    def test_nothing_stops_below_min_tokens(self, third):
        assert self.run(third, min_tokens=3) == (3, FinishReason.STOP, None)
        assert self.run(third, min_tokens=4) == (16, FinishReason.LENGTH, None)

    def test_longest_sequence(self):
        assert self.run(max_tokens=100) == (20, FinishReason.LENGTH, None)

    def test_tokens_after_the_stop_are_dropped(self, third):
        scheduler = make_scheduler(20, num_drafts=3)
        engine, _ = make_engine(scheduler, draft_is_right=lambda position: True)
        engine.add_request(Request("a", self.PROMPT, SamplingParams(), eos_token_id=third))
        first, second = engine.step()[0].outputs, engine.step()[0].outputs
        assert [len(output.new_token_ids) for output in [*first, *second]] == [1, 2]
        assert second[0].finish_reason is FinishReason.STOP


class TestReplicas:
    def test_least_busy_replica(self):
        engine, _ = make_replicas(3)
        assert [engine.add_request(make_request(str(n), 10)) for n in range(4)] == [0, 1, 2, 0]
        engine.step()
        assert engine.add_request(make_request("a", 10)) == 1  # all run: 2, 1 and 1 of them

    def test_idle_replicas_run_dummy_batches(self):
        engine, workers = make_replicas(2, tensor_parallel_size=2)
        engine.add_request(make_request("a", 10, max_tokens=3), data_parallel_rank=1)
        for _ in range(3):
            engine.step()
        assert not engine.has_unfinished_requests
        assert [worker.num_dummy_batches for worker in workers] == [3, 3, 0, 0]
        assert [worker.steps for worker in workers[2:]] == [[{"a": 10}, {"a": 1}, {"a": 1}]] * 2

    def test_they_agree_on_the_end_every_32_steps(self):
        engine, workers = make_replicas(2)
        engine.add_request(make_request("a", 10, max_tokens=1))
        num_steps = 0
        while engine.has_work:
            engine.step()
            num_steps += 1
        assert num_steps == STEPS_BETWEEN_AGREEMENTS
        assert [worker.num_dummy_batches for worker in workers] == [31, 32]
        assert engine.step() == []
        engine.add_request(make_request("b", 10, max_tokens=40))
        while engine.has_work:
            engine.step()
            num_steps += 1
        assert num_steps == 3 * STEPS_BETWEEN_AGREEMENTS

    def test_replicas_of_a_dense_model_are_on_their_own(self):
        engine, workers = make_replicas(2, lockstep=False)
        engine.add_request(make_request("a", 10, max_tokens=1))
        engine.step()
        engine.step()  # tells the workers that it ended
        assert not engine.has_work
        assert [(worker.num_dummy_batches, len(worker.steps)) for worker in workers] == [(0, 2), (0, 0)]

    @pytest.mark.parametrize(("hf", "lockstep"), [(TINY, False), (TINY_MOE, True)])
    def test_of_a_configuration(self, hf, lockstep):
        args = EngineArgs(data_parallel_size=2, async_scheduling=True, max_num_seqs=8)
        config = check_and_update_config(args, ModelConfig.from_hf(hf))
        workers = [FakeWorker(128) for _ in range(2)]
        engine = ServingEngine.from_config(config, [10, 10], WorkerExecutor(workers, 2, run_in_turns))
        assert [type(scheduler) for scheduler in engine.schedulers] == [AsyncScheduler] * 2
        assert engine.schedulers[0].kv_cache_manager.block_pool.num_blocks == 10
        engine.add_request(Request("a", range(10), SamplingParams(max_tokens=1)))
        engine.step()
        assert [worker.num_dummy_batches for worker in workers] == [0, 1 if lockstep else 0]

    def test_workers_must_make_whole_replicas(self):
        with pytest.raises(ValueError, match="3 workers: allowed is a multiple of the 2 replicas"):
            WorkerExecutor([FakeWorker(128)] * 3, 2, run_in_turns)


class TestStalls:
    def test_too_large_for_the_cache(self):
        engine, _ = make_engine(make_scheduler(10))
        engine.add_request(make_request("large", 1300))
        engine.add_request(make_request("behind", 10, max_tokens=1))
        engine.step()
        assert [request.request_id for request in engine.stalled_requests()] == ["large", "behind"]
        engine.abort_requests(["large"])
        engine.step()
        assert engine.stalled_requests() == []
        assert not engine.has_unfinished_requests

    def test_an_empty_step_after_a_preemption_is_none(self):
        engine, _ = make_engine(make_scheduler(13, policy="priority"))
        engine.add_request(make_request("a", 500, priority=9))
        engine.step()
        for req_id in "bc":
            engine.add_request(make_request(req_id, 500, arrival_time=1))
        while engine.step()[0].scheduler_output.num_scheduled_tokens:
            pass
        assert engine.stalled_requests() == []


def test_abort_while_the_step_runs():
    engine, worker = make_engine(make_scheduler(20))
    execute = worker.execute_model
    worker.execute_model = lambda output: (engine.abort_requests(["a"]), execute(output))[1]
    engine.add_request(make_request("a", 10))
    engine.add_request(make_request("b", 10))
    (step,) = engine.step()
    assert [output.request_id for output in step.outputs] == ["b"]
    assert step.scheduler_stats.num_requests_running == 1


def test_logprobs_end_with_the_tokens():
    scheduler = make_scheduler(20, num_drafts=1)
    request = make_request("a", 10, max_tokens=1)
    scheduler.add_request(request)
    scheduler.add_request(make_request("b", 300))
    output = scheduler.schedule()
    rows = partial(LogprobsLists, token_ids=[[1], [2]], logprobs=[[-0.1], [-0.2]], sampled_token_ranks=[1, 1])
    result = ModelRunnerOutput(
        sampled_token_ids={"a": [1, 2]}, logprobs={"a": rows(), "gone": rows()}, prompt_logprobs={"b": rows()}
    )
    a, b = scheduler.update_from_output(output, result)
    assert (a.logprobs.token_ids, a.finished) == ([[1]], True)
    assert (b.request_id, list(b.new_token_ids), b.prompt_logprobs) == ("b", [], rows())


def test_stats():
    engine, _ = make_engine(make_scheduler(10, num_drafts=1), draft_is_right=lambda position: position != 131)
    engine.add_request(make_request("a", 128, max_tokens=4))
    engine.add_request(make_request("b", 2000))
    (step,) = engine.step()
    stats = step.scheduler_stats
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    assert stats.kv_cache_usage_perc == pytest.approx(2 / 9)
    while engine.schedulers[0].running:
        engine.step()
    counters = stats.counters
    assert (counters.prompt_tokens, counters.generation_tokens) == (128, 4)
    assert counters.request_success == {FinishReason.LENGTH: 1}
    assert (counters.spec_decode_num_drafts, counters.spec_decode_num_accepted_tokens) == (2, 1)
    assert counters.spec_decode_num_accepted_tokens_per_pos == {0: 1}
