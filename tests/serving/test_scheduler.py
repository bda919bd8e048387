"""What a step is made of. Expected values were measured on vLLM 0.23.0's own scheduler; blocks of 128 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.serving.fake_worker import make_engine, make_request, make_scheduler
from xlite_runner.serving.core.request import FinishReason, RequestStatus
from xlite_runner.serving.output import ModelRunnerOutput, SchedulerOutput


class Serving:
    """An engine whose requests are called 0, 1, 2, ...; ``step`` gives the scheduled tokens and the free blocks."""

    def __init__(self, num_blocks: int, **settings) -> None:
        worker = {key: settings.pop(key) for key in ("draft_is_right",) if key in settings}
        self.scheduler = make_scheduler(num_blocks, **settings)
        self.engine, self.worker = make_engine(self.scheduler, **worker)
        self.finished: dict[int, FinishReason] = {}
        self.tokens: dict[int, list[int]] = {}
        self._num_requests = 0
        self._free_when_scheduled = self.free
        execute_model = self.worker.execute_model

        def note_free_blocks(output: SchedulerOutput):
            self._free_when_scheduled = self.free
            return execute_model(output)

        self.worker.execute_model = note_free_blocks

    def add(self, *prompts, max_tokens: int = 2000, **more) -> None:
        for prompt in prompts:
            self.engine.add_request(make_request(str(self._num_requests), prompt, max_tokens, **more))
            self._num_requests += 1

    def step(self) -> Step:
        outputs = self.engine.step()
        scheduled = outputs[0].scheduler_output if outputs else None
        for output in outputs[0].outputs if outputs else ():
            self.tokens.setdefault(int(output.request_id), []).extend(output.new_token_ids)
            if output.finished:
                self.finished[int(output.request_id)] = output.finish_reason
        return Step(scheduled or SchedulerOutput(), self._free_when_scheduled)

    def steps(self, count: int) -> list[dict[int, int]]:
        return [self.step().tokens for _ in range(count)]

    @property
    def free(self) -> int:
        return self.pool.num_free_blocks

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def waiting(self) -> list[int]:
        return [int(request.request_id) for request in self.scheduler.waiting]

    def blocks(self, request: int) -> list[int]:
        return self.scheduler.requests[str(request)].block_ids


@dataclass
class Step:
    output: SchedulerOutput
    free_after: int
    """Free blocks once the step was scheduled."""

    @property
    def tokens(self) -> dict[int, int]:
        return {int(req_id): n for req_id, n in self.output.num_scheduled_tokens.items()}


class TestBlocks:
    @pytest.mark.parametrize(("prompt", "num_blocks"), [(127, 1), (128, 1), (129, 2)])
    def test_of_a_prompt(self, prompt, num_blocks):
        serving = Serving(10)
        serving.add(prompt)
        serving.step()
        assert len(serving.blocks(0)) == num_blocks

    def test_decode_after_a_full_block_takes_the_next(self):
        serving = Serving(10)
        serving.add(128)
        serving.steps(2)
        assert len(serving.blocks(0)) == 2

    @pytest.mark.parametrize(("prompt", "num_blocks"), [(127, 1), (128, 2), (254, 2)])
    def test_lookahead_of_a_drafter(self, prompt, num_blocks):
        serving = Serving(10, num_drafts=1)
        serving.add(prompt)
        serving.step()
        assert len(serving.blocks(0)) == num_blocks

    def test_lookahead_of_a_decode(self):
        """254 computed tokens, two scheduled, one ahead."""
        serving = Serving(10, num_drafts=1)
        serving.add(254)
        assert serving.steps(2) == [{0: 254}, {0: 2}]
        assert len(serving.blocks(0)) == 3

    def test_order_of_reuse(self):
        serving = Serving(10)
        serving.add(300)
        serving.step()
        assert serving.blocks(0) == [1, 2, 3]
        serving.engine.abort_requests(["0"])
        assert serving.pool.free_blocks == [4, 5, 6, 7, 8, 9, 3, 2, 1]
        serving.add(130)
        serving.step()
        assert serving.blocks(1) == [4, 5]
        serving.engine.abort_requests(["1"])
        assert serving.pool.free_blocks == [6, 7, 8, 9, 3, 2, 1, 5, 4]

    def test_eviction_begins_with_the_ends_of_prompts(self):
        serving = Serving(8)
        a = [1] * 384
        for prompt in (a, [2] * 384):
            serving.add(prompt, max_tokens=1)
            serving.steps(2)
        assert serving.pool.free_blocks == [7, 3, 2, 1, 6, 5, 4]
        serving.add([3] * 256, max_tokens=1)
        serving.step()
        serving.add(a, max_tokens=1)
        (new,) = serving.step().output.scheduled_new_reqs
        assert (new.num_computed_tokens, list(new.block_ids)) == (256, [1, 2, 6])

    def test_null_block_and_usage(self):
        serving = Serving(4892)
        assert (serving.free, serving.pool.usage) == (4891, 0.0)
        serving.add(40_000)
        assert serving.steps(5) == [{0: 8192}] * 4 + [{0: 7232}]
        assert (len(serving.blocks(0)), serving.free) == (313, 4578)
        assert serving.pool.usage == pytest.approx(0.063995, abs=5e-7)


class TestPrompts:
    def test_chunks(self):
        serving = Serving(4892)
        serving.add(5000, 5000, 5000)
        expected = [({0: 5000, 1: 3192}, 4826), ({0: 1, 1: 1808, 2: 5000}, 4771), ({0: 1, 1: 1, 2: 1}, 4771)]
        assert [(step.tokens, step.free_after) for step in (serving.step() for _ in range(3))] == expected

    def test_threshold(self):
        serving = Serving(4892, long_prefill_token_threshold=2048)
        serving.add(5000, 5000, 5000)
        steps = [serving.step() for _ in range(4)]
        assert [list(step.tokens.values()) for step in steps] == [[2048] * 3, [2048] * 3, [904] * 3, [1] * 3]
        assert [step.free_after for step in steps[:3]] == [4843, 4795, 4771]

    def test_threshold_below_the_budget(self):
        serving = Serving(4892, long_prefill_token_threshold=1000, max_num_batched_tokens=2048)
        serving.add(3000, 3000, 3000, 3000)
        assert serving.steps(3) == [{0: 1000, 1: 1000, 2: 48}] * 3
        assert serving.waiting == [3]

    def test_decodes_come_first(self):
        serving = Serving(4892, max_num_batched_tokens=2048)
        serving.add(*[10] * 60)
        serving.step()
        serving.add(9000, 30)
        steps = [serving.step() for _ in range(6)]
        decodes = dict.fromkeys(range(60), 1)
        assert [step.tokens for step in steps] == [decodes | {60: 1988}] * 4 + [
            decodes | {60: 1048, 61: 30},
            decodes | {60: 1, 61: 1},
        ]
        assert [step.free_after for step in steps[:5]] == [4815, 4799, 4784, 4768, 4759]

    def test_without_chunks(self):
        serving = Serving(4892, enable_chunked_prefill=False, max_model_len=8192)
        serving.add(5000, 5000, 5000)
        assert serving.steps(3) == [{0: 5000}, {0: 1, 1: 5000}, {0: 1, 1: 1, 2: 5000}]

    def test_max_num_seqs(self):
        serving = Serving(4892, max_num_seqs=2)
        serving.add(100, 100, 100, max_tokens=2)
        assert serving.steps(4) == [{0: 100, 1: 100}, {0: 1, 1: 1}, {2: 100}, {2: 1}]


class TestPreemption:
    def test_the_youngest_first_and_maybe_the_requester(self):
        serving = Serving(10)
        serving.add(512, 512)
        assert (serving.step().tokens, serving.free) == ({0: 512, 1: 512}, 1)
        step = serving.step()
        assert (step.tokens, step.free_after, step.output.preempted_req_ids) == ({0: 1}, 4, frozenset("1"))
        assert serving.waiting == [1]
        assert serving.step().tokens == {0: 1}  # 1 needs five blocks, four are free

    @pytest.mark.parametrize(
        ("caching", "max_tokens", "resumed_at", "hits", "computed"),
        [(False, 140, 140, 0, 513), (True, 130, 130, 384, 129)],
    )
    def test_resumption(self, caching, max_tokens, resumed_at, hits, computed):
        serving = Serving(10, enable_prefix_caching=caching)
        serving.add(512, 512, max_tokens=max_tokens)
        for number in range(max_tokens):
            step = serving.step()
            assert not step.output.scheduled_cached_reqs.resumed_req_ids, number
        step = serving.step()
        assert resumed_at == max_tokens
        assert step.tokens == {1: computed}
        cached = step.output.scheduled_cached_reqs
        assert cached.resumed_req_ids == {"1"}
        assert cached.num_computed_tokens == [hits]
        assert cached.new_block_ids == [serving.blocks(1)]
        assert list(cached.all_token_ids) == ["1"]

    def test_many_at_once(self):
        serving = Serving(139)
        serving.add(*[250] * 64)
        step = serving.step()
        assert step.tokens == dict.fromkeys(range(32), 250) | {32: 192}
        assert step.free_after == 72
        step = serving.step()
        assert (len(step.tokens), sum(step.tokens.values()), step.free_after) == (64, 7840, 10)
        assert serving.steps(5) == [dict.fromkeys(range(64), 1)] * 5
        step = serving.step()
        assert (step.tokens, step.free_after) == (dict.fromkeys(range(53), 1), 0)
        assert serving.waiting == list(range(53, 64))
        step = serving.step()
        assert (len(step.tokens), len(step.output.preempted_req_ids)) == (46, 7)
        assert not serving.step().output.preempted_req_ids


class TestPriority:
    def test_order(self):
        serving = Serving(100, policy="priority", max_num_seqs=1)
        for priority, arrival_time in ((1, 5), (0, 9), (1, 2)):
            serving.add(10, max_tokens=1, priority=priority, arrival_time=arrival_time)
        assert serving.steps(3) == [{1: 10}, {2: 10}, {0: 10}]

    def test_the_requester_as_victim_leaves_an_empty_step(self):
        serving = Serving(13, policy="priority")
        serving.add(500, priority=9, arrival_time=0)
        serving.step()
        serving.add(500, 500, priority=0, arrival_time=1)
        while (step := serving.step()).tokens:
            pass
        assert (step.output.preempted_req_ids, step.free_after) == ({"0"}, 4)
        assert serving.step().tokens == {1: 1, 2: 1}

    def test_victim(self):
        serving = Serving(15, policy="priority")
        for arrival_time, priority in enumerate((5, 0, 9)):
            serving.add(512, priority=priority, arrival_time=arrival_time)
        assert list(serving.step().tokens) == [1, 0, 2]
        step = serving.step()
        assert (step.tokens, step.output.preempted_req_ids, step.free_after) == ({1: 1, 0: 1}, {"2"}, 4)

    def test_a_victim_scheduled_in_the_same_step_is_taken_back(self):
        serving = Serving(9, policy="priority")
        serving.add(250, priority=9)
        serving.steps(6)
        serving.add(*[250] * 3, priority=0)
        for _ in range(20):
            step = serving.step()
            if step.output.preempted_req_ids:
                break
        assert step.output.preempted_req_ids == {"0"}
        assert 0 not in step.tokens
        assert "0" not in step.output.scheduled_cached_reqs.req_ids


class TestAdmission:
    def test_whole_prompt_must_fit(self):
        serving = Serving(20, max_num_batched_tokens=1024)
        serving.add(1500, 1100)
        serving.step()
        step = serving.step()
        assert (step.tokens, step.free_after, serving.waiting) == ({0: 476}, 7, [1])

    def test_without_that_rule(self):
        serving = Serving(20, max_num_batched_tokens=1024, scheduler_reserve_full_isl=False)
        serving.add(1500, 1100)
        serving.step()
        step = serving.step()
        assert (step.tokens, step.free_after) == ({0: 476, 1: 548}, 2)
        assert serving.step().output.preempted_req_ids == {"1"}

    def test_the_rule_forgets_requests_in_the_middle_of_their_prompts(self):
        serving = Serving(21, max_num_batched_tokens=512)
        serving.add(1280, 1280)
        assert serving.steps(4)[2] == {0: 256, 1: 256}
        assert serving.step().output.preempted_req_ids == {"1"}

    def test_too_large_for_the_cache_waits_forever_and_so_do_those_behind(self):
        serving = Serving(10)
        serving.add(1300, 10)
        assert serving.steps(3) == [{}] * 3
        assert serving.waiting == [0, 1]

    def test_grown_too_large(self):
        serving = Serving(6)
        serving.add(600, max_tokens=200)
        while serving.step().tokens:
            pass
        assert serving.scheduler.requests["0"].num_tokens == 641
        assert serving.steps(3) == [{}] * 3

    def test_the_null_block_is_missing_from_a_cache_of_just_one_sequence(self):
        serving = Serving(2, max_model_len=256)
        serving.add(200)
        assert serving.steps(2) == [{}] * 2


class TestPrefixCache:
    def test_equal_prompts(self):
        serving = Serving(20)
        prompt = list(range(512))
        serving.add(prompt, max_tokens=1)
        serving.step()
        serving.add(prompt)
        (new,) = serving.step().output.scheduled_new_reqs
        assert (new.num_computed_tokens, list(new.block_ids)) == (384, [1, 2, 3, 5])
        counters = serving.scheduler.counters
        assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (1024, 384)

    @pytest.mark.parametrize(("num_drafts", "hits"), [(0, 512), (1, 384)])
    def test_a_drafter_computes_the_last_hit_again(self, num_drafts, hits):
        serving = Serving(20, num_drafts=num_drafts)
        serving.add(list(range(513)), max_tokens=1)
        serving.step()
        serving.add(list(range(513)))
        step = serving.step()
        assert step.output.scheduled_new_reqs[0].num_computed_tokens == hits
        assert step.tokens == {1: 513 - hits}

    def test_within_a_step(self):
        serving = Serving(20)
        common = list(range(256))
        serving.add(common + [1] * 10, common + [2] * 10)
        assert serving.step().tokens == {0: 266, 1: 10}
        assert [serving.pool.ref_count(block) for block in (1, 2, 3)] == [2, 2, 1]

    def test_salt(self):
        serving = Serving(20)
        serving.add(list(range(256)), cache_salt="a")
        serving.add(list(range(256)), cache_salt="b")
        assert serving.step().tokens == {0: 256, 1: 256}

    def test_prompt_logprobs_need_all_tokens(self):
        serving = Serving(20)
        serving.add(list(range(256)))
        serving.add(list(range(256)), params={"prompt_logprobs": 0})
        assert serving.step().tokens == {0: 256, 1: 256}

    def test_common_prefix(self):
        serving = Serving(20)
        common = list(range(256))
        serving.add(*[common + [number] * 50 for number in range(3)])
        assert serving.step().output.num_common_prefix_blocks == 2
        serving.add(10)
        assert serving.step().output.num_common_prefix_blocks == 0

    def test_reset(self):
        serving = Serving(20)
        serving.add(list(range(512)))
        serving.step()
        assert not serving.scheduler.reset_prefix_cache()
        assert serving.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert serving.step().tokens == {0: 513}


class TestAsynchronous:
    def test_no_step_beyond_the_length_limit(self):
        serving = Serving(10, asynchronous=True)
        serving.add(127, max_tokens=4)
        serving.add(50, max_tokens=2)
        steps = [serving.step() for _ in range(5)]
        assert [step.tokens for step in steps] == [{0: 127, 1: 50}, {0: 1, 1: 1}, {0: 1}, {0: 1}, {}]
        assert [step.free_after for step in steps] == [7, 7, 6, 7, 7]
        assert serving.free == 9
        assert serving.finished == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH}
        assert {k: len(v) for k, v in serving.tokens.items()} == {0: 4, 1: 2}

    def test_one_wasted_step_after_eos(self):
        serving = Serving(10, asynchronous=True)
        eos = answer_of(50, 2)[-1]
        serving.add(50, eos_token_id=eos)
        assert serving.steps(4)[:3] == [{0: 50}, {0: 1}, {0: 1}]
        assert serving.finished == {0: FinishReason.STOP}

    def test_accepted_drafts(self):
        serving = self.drafting(right=True)
        steps = [serving.step() for _ in range(6)]
        assert [step.tokens for step in steps] == [{0: 126}, {0: 2}, {0: 2}, {0: 2}, {0: 2}, {}]
        assert [self.computed(step) for step in steps[1:5]] == [126, 128, 130, 132]
        assert len(serving.tokens[0]) == 8

    def test_rejected_drafts(self):
        """Positions are counted two ahead and corrected by the results of the step before the last."""
        serving = self.drafting(right=False)
        steps = []
        while serving.engine.has_work:
            steps.append(serving.step())
        decodes = [step for step in steps[1:] if step.tokens]
        assert [step.tokens for step in decodes] == [{0: 2}] * 7
        assert [self.computed(step) for step in decodes] == [126, *range(128, 134)]
        assert len(serving.tokens[0]) == 8

    def drafting(self, *, right: bool) -> Serving:
        serving = Serving(10, asynchronous=True, num_drafts=1, draft_is_right=lambda position: right)
        serving.add(126, max_tokens=8)
        return serving

    def computed(self, step: Step) -> int:
        (num_computed_tokens,) = step.output.scheduled_cached_reqs.num_computed_tokens
        return num_computed_tokens


def answer_of(prompt: int, num_tokens: int) -> list[int]:
    serving = Serving(10)
    serving.add(prompt, max_tokens=num_tokens)
    serving.steps(num_tokens + 1)
    return serving.tokens[0]


class TestDrafts:
    def test_two_tokens_per_decode(self):
        serving = Serving(4892, num_drafts=1)
        serving.add(*[100] * 64)
        step = serving.step()
        assert (sum(step.tokens.values()), 4891 - step.free_after) == (6400, 64)
        step = serving.step()
        assert step.tokens == dict.fromkeys(range(64), 2)
        assert all(len(drafts) == 1 for drafts in step.output.scheduled_spec_decode_tokens.values())

    def test_none_while_in_a_prompt(self):
        serving = Serving(100, num_drafts=1, max_num_batched_tokens=200)
        serving.add(300)
        assert [serving.step().output.scheduled_spec_decode_tokens.keys() for _ in range(3)] == [set(), set(), {"0"}]

    def test_none_beyond_the_longest_sequence(self):
        serving = Serving(100, num_drafts=1, max_model_len=130, draft_is_right=lambda position: True)
        serving.add(125)
        assert serving.steps(4) == [{0: 125}, {0: 2}, {0: 2}, {}]
        assert len(serving.tokens[0]) == 5
        assert serving.finished == {0: FinishReason.LENGTH}


class TestEnds:
    def test_longest_sequence(self):
        serving = Serving(10, max_model_len=256)
        serving.add(250, max_tokens=100)
        serving.steps(7)
        assert (len(serving.tokens[0]), serving.finished[0]) == (6, FinishReason.LENGTH)

    def test_seed_capacity(self):
        """Sixteen requests of maximum length: 15 run at once, nobody is preempted."""
        scheduler = make_scheduler(4892)
        for number in range(16):
            scheduler.add_request(make_request(str(number), 40_000, max_tokens=960))
        num_running = set()
        while not scheduler.counters.request_success:
            output = scheduler.schedule()
            assert not output.preempted_req_ids
            num_running.add(len(scheduler.running))
            sampled = {k: [7] for k in output.num_scheduled_tokens if not scheduler.requests[k].is_prefill_chunk}
            scheduler.update_from_output(output, ModelRunnerOutput(sampled_token_ids=sampled))
        assert max(num_running) == 15

    def test_abort_frees_at_once(self):
        serving = Serving(10)
        serving.add(256, 256)
        serving.step()
        assert serving.free == 5
        (output,) = serving.engine.abort_requests(["0", "unknown"])
        assert (output.finish_reason, serving.free) == (FinishReason.ABORT, 7)
        assert serving.step().output.finished_req_ids == {"0"}

    def test_abort_of_a_waiting_request(self):
        serving = Serving(10)
        serving.add(1300)
        serving.step()
        serving.engine.abort_requests(["0"])
        assert not serving.engine.has_unfinished_requests
        assert serving.step().output.finished_req_ids == {"0"}
        assert not serving.engine.has_work

    def test_late_result_of_an_aborted_request_is_ignored(self):
        serving = Serving(10)
        serving.add(256)
        output = serving.scheduler.schedule()
        serving.scheduler.finish_requests(["0"], RequestStatus.FINISHED_ABORTED)
        assert serving.scheduler.update_from_output(output, serving.worker.execute_model(output)) == []
