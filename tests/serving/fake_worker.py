"""A model runner without a model: what it samples follows from what it reads through the block tables.

A slot of its KV cache holds the state after a prefix: a checksum over the tokens up to there. So a block that two
requests share wrongly, or that is handed out while it is in use, is found at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from xlite_runner.config import CacheConfig, SchedulerConfig, SchedulingPolicy, SpeculativeConfig
from xlite_runner.serving.core.async_scheduler import AsyncScheduler
from xlite_runner.serving.core.request import Request
from xlite_runner.serving.core.scheduler import Scheduler
from xlite_runner.serving.engine_core import ServingEngine
from xlite_runner.serving.executor import WorkerExecutor
from xlite_runner.serving.output import ModelRunnerOutput, SchedulerOutput
from xlite_runner.serving.sampling_params import SamplingParams

VOCABULARY = 1000


def next_state(state: int, token: int) -> int:
    return crc32(token.to_bytes(8, "little", signed=True), state)


def sample(state: int) -> int:
    return state % VOCABULARY


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake model says to a prompt."""
    state, tokens = 0, []
    for token in prompt:
        state = next_state(state, token)
    for _ in range(num_tokens):
        tokens.append(sample(state))
        state = next_state(state, tokens[-1])
    return tokens


@dataclass
class _Row:
    """A request as the worker knows it; ``num_computed`` counts accepted tokens only."""

    tokens: list[int]
    blocks: list[int]
    num_computed: int
    drafts: list[int] = field(default_factory=list)


class FakeWorker:
    """Executes steps on a KV cache of states.

    Args:
        block_size: Tokens per block.
        num_drafts: Draft tokens per step.
        draft_is_right: Whether the drafter's proposal at a position is what the model will say.
    """

    def __init__(self, block_size: int, num_drafts: int = 0, draft_is_right=lambda position: position % 3 != 0):
        self.block_size = block_size
        self.num_drafts = num_drafts
        self.draft_is_right = draft_is_right
        self.slots: dict[tuple[int, int], int] = {}
        self.rows: dict[str, _Row] = {}
        self.steps: list[dict[str, int]] = []
        self.num_dummy_batches = 0

    def execute_dummy_batch(self) -> None:
        self.num_dummy_batches += 1

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(dict(output.num_scheduled_tokens))
        for req_id in output.finished_req_ids:
            self.rows.pop(req_id, None)
        self._update_rows(output)
        sampled: dict[str, list[int]] = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            num_drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            sampled[req_id] = self._run(self.rows[req_id], num_tokens, num_drafts)
        drafts = {req_id: self._propose(self.rows[req_id]) for req_id in sampled} if self.num_drafts else {}
        return ModelRunnerOutput(sampled_token_ids={k: v for k, v in sampled.items() if v}, draft_token_ids=drafts)

    def _update_rows(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = _Row(list(new.prompt_token_ids), list(new.block_ids), new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            row, block_ids = self.rows[req_id], cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert list(cached.all_token_ids[req_id]) == row.tokens
                row.blocks = list(block_ids)
                row.num_computed = cached.num_computed_tokens[i]
            elif block_ids is not None:
                row.blocks += block_ids
            # Ahead of time a scheduler counts drafts in flight as accepted.
            assert row.num_computed <= cached.num_computed_tokens[i]

    def _slot(self, row: _Row, position: int) -> tuple[int, int]:
        block = row.blocks[position // self.block_size]
        assert block != 0
        return block, position % self.block_size

    def _run(self, row: _Row, num_tokens: int, num_drafts: int) -> list[int]:
        begin, end = row.num_computed, row.num_computed + num_tokens - num_drafts
        state = 0
        for position in range(begin):  # what the step reads
            state = next_state(state, row.tokens[position])
            assert self.slots[self._slot(row, position)] == state
        drafts = row.drafts[:num_drafts]
        states = []
        for position, token in enumerate([*row.tokens[begin:end], *drafts], begin):
            state = next_state(state, token)
            self.slots[self._slot(row, position)] = state
            states.append(state)
        row.num_computed = end
        if end < len(row.tokens):
            return []
        sampled = [sample(states[end - begin - 1])]
        for i, draft in enumerate(drafts):
            if draft != sampled[-1]:
                break
            sampled.append(sample(states[end - begin + i]))
            row.num_computed += 1
        row.tokens += sampled
        return sampled

    def _propose(self, row: _Row) -> list[int]:
        state = 0
        for token in row.tokens:
            state = next_state(state, token)
        row.drafts = []
        for position in range(len(row.tokens), len(row.tokens) + self.num_drafts):
            token = sample(state) if self.draft_is_right(position) else (sample(state) + 1) % VOCABULARY
            row.drafts.append(token)
            state = next_state(state, token)
        return row.drafts


def make_scheduler(
    num_blocks: int,
    *,
    block_size: int = 128,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 40960,
    enable_prefix_caching: bool = True,
    num_drafts: int = 0,
    policy: str = "fcfs",
    asynchronous: bool = False,
    **limits: int | bool,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=SchedulingPolicy(policy),
        async_scheduling=asynchronous,
        **limits,
    )
    cache = CacheConfig(block_size=block_size, gpu_memory_utilization=0.9, enable_prefix_caching=enable_prefix_caching)
    scheduler_class = AsyncScheduler if asynchronous else Scheduler
    return scheduler_class(config, cache, num_blocks, SpeculativeConfig(num_drafts) if num_drafts else None)


def run_in_turns(functions):
    return [function() for function in functions]


def make_engine(scheduler: Scheduler, **worker) -> tuple[ServingEngine, FakeWorker]:
    """An engine of one replica, and its worker."""
    fake = FakeWorker(scheduler.kv_cache_manager.block_size, scheduler.num_spec_tokens, **worker)
    return ServingEngine([scheduler], WorkerExecutor([fake], 1, run_in_turns)), fake


def make_request(request_id: str, prompt: int | Sequence[int], max_tokens: int = 16, **more) -> Request:
    """A request with the given prompt, or one of its own of the given length."""
    if isinstance(prompt, int):
        prompt = list(range(first := crc32(request_id.encode()), first + prompt))
    params = SamplingParams(max_tokens=max_tokens, temperature=0, **more.pop("params", {}))
    return Request(request_id, prompt, params, **more)
