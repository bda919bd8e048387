"""Continuous batching: which tokens of which requests the next step computes. Rules are vLLM's scheduler's, 0.23.0.

There is no prefill phase and no decode phase: each step every request gets as many of its uncomputed tokens as limits
and blocks allow, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xlite_runner.config import CacheConfig, SchedulerConfig, SchedulingPolicy, SpeculativeConfig
from xlite_runner.serving.core.kv_cache_manager import KVCacheManager
from xlite_runner.serving.core.request import Request, RequestStatus
from xlite_runner.serving.core.request_queue import create_request_queue
from xlite_runner.serving.core.stats import SchedulerStats, ServingCounters
from xlite_runner.serving.output import (
    CachedRequestData,
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)


@dataclass(slots=True)
class _Step:
    """One step in the making.

    Attributes:
        running: Requests that had blocks before.
        num_computed_tokens: Before the step, of ``running`` and then ``resumed``.
        new_block_ids: Of those among ``running`` that got any.
    """

    token_budget: int
    running: list[Request] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, Sequence[int]] = field(default_factory=dict)
    spec_token_ids: dict[str, Sequence[int]] = field(default_factory=dict)


class Scheduler:
    """Requests, their blocks, and the next step.

    Args:
        scheduler_config: Limits of one step, and the policy.
        cache_config: Block size, and whether prefixes are shared.
        num_gpu_blocks: Blocks of the KV cache, the null block included.
        speculative_config: Draft tokens per request and step, of an MTP drafter.

    Attributes:
        running: Requests with blocks, in the order in which they are scheduled.
        waiting: Requests without blocks.
        requests: All of them by id.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        num_gpu_blocks: int,
        speculative_config: SpeculativeConfig | None = None,
    ) -> None:
        self.config = scheduler_config
        self.num_spec_tokens = speculative_config.num_speculative_tokens if speculative_config else 0
        self.kv_cache_manager = KVCacheManager(
            num_gpu_blocks,
            cache_config.block_size,
            scheduler_config.max_model_len,
            enable_caching=cache_config.enable_prefix_caching,
            num_lookahead_tokens=self.num_spec_tokens,
            drop_last_hit=self.num_spec_tokens > 0,
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = create_request_queue(scheduler_config.policy)
        self.counters = ServingCounters()
        self._finished_req_ids: list[str] = []
        self._prev_step_req_ids: Mapping[str, int] = {}

    # --- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            ValueError: An unfinished request has the same id.
        """
        if request.request_id in self.requests:
            raise ValueError(f"duplicate request id {request.request_id!r}")
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside; their blocks are free at once, and steps in flight no longer concern them.

        Args:
            request_ids: Whom to end; those that are unknown or ended before are left out.
            status: Their final status.

        Returns:
            The requests that ended now.
        """
        ended = [self.requests[req_id] for req_id in dict.fromkeys(request_ids) if req_id in self.requests]
        for request in ended:
            if request.status is not RequestStatus.RUNNING:
                self.waiting.remove(request)
        self._remove_from_running({request for request in ended if request.status is RequestStatus.RUNNING})
        for request in ended:
            request.status = status
            self._free_request(request)
        return ended

    def has_unfinished_requests(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.running or self.waiting)

    def has_requests(self) -> bool:
        """Whether a step has something to say: to run requests, or that some have ended."""
        return bool(self.running or self.waiting or self._finished_req_ids)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, unless a request holds blocks.

        Args:
            reset_running_requests: Preempt all running requests first.

        Returns:
            Whether they are forgotten.
        """
        if reset_running_requests:
            while self.running:
                request = self.running.pop()
                self._preempt(request)
                # What is on its way for it was computed with the old weights or cache.
                request.async_tokens_to_discard = request.num_output_placeholders
                request.num_output_placeholders = 0
            self._prev_step_req_ids = {}
        return self.kv_cache_manager.block_pool.reset_prefix_cache()

    # --- one step

    def schedule(self) -> SchedulerOutput:
        """Compose the next step and count its tokens as computed."""
        step = _Step(self.config.max_num_scheduled_tokens)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        return self._make_output(step)

    def _schedule_running(self, step: _Step) -> None:
        running, scheduled, num_scheduled_tokens = self.running, step.running, step.num_scheduled_tokens
        add_num_computed_tokens = step.num_computed_tokens.append
        token_budget = step.token_budget
        threshold = self.config.long_prefill_token_threshold
        # With drafts, positions could go beyond the longest sequence.
        max_computed_tokens = self.config.max_model_len - 1
        index = 0
        while index < len(running) and token_budget > 0:
            request = running[index]
            index += 1
            num_computed_tokens = request.num_computed_tokens
            num_placeholders = request.num_output_placeholders
            # With its last token on the way, even if all drafts in flight are rejected, nothing is left to do.
            if num_placeholders and num_computed_tokens + 2 - num_placeholders >= request.max_num_tokens:
                continue
            num_tokens = len(request.all_token_ids) + num_placeholders
            num_new_tokens = num_tokens + len(request.spec_token_ids) - num_computed_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            if num_new_tokens > token_budget:
                num_new_tokens = token_budget
            if num_new_tokens > max_computed_tokens - num_computed_tokens:
                num_new_tokens = max_computed_tokens - num_computed_tokens
            if num_new_tokens <= 0:
                continue  # not the end of the pass: younger requests may go on
            end = num_computed_tokens + num_new_tokens
            if end > request.num_ready_tokens:
                num_scheduled = len(scheduled)
                if not self._allocate_slots(request, num_new_tokens, step):
                    break
                if len(scheduled) < num_scheduled:  # those taken back stood before it
                    index -= num_scheduled - len(scheduled)
                    token_budget = step.token_budget - sum(num_scheduled_tokens.values())
            scheduled.append(request)
            add_num_computed_tokens(num_computed_tokens)
            num_scheduled_tokens[request.request_id] = num_new_tokens
            token_budget -= num_new_tokens
            request.num_computed_tokens = end
            request.is_prefill_chunk = end < num_tokens
            if request.spec_token_ids:
                if end > num_tokens:
                    step.spec_token_ids[request.request_id] = request.spec_token_ids[: end - num_tokens]
                request.spec_token_ids = ()  # the step gives new ones
        step.token_budget = token_budget

    def _allocate_slots(self, request: Request, num_new_tokens: int, step: _Step) -> bool:
        """Get slots for a running request, at the expense of others; False if it was preempted itself."""
        while (new_block_ids := self.kv_cache_manager.allocate_slots(request, num_new_tokens)) is None:
            victim = self._preempt_one(step)
            if victim is request:
                return False
            if victim.request_id in step.num_scheduled_tokens:
                self._take_back(victim, step)
        if new_block_ids:
            step.new_block_ids[request.request_id] = new_block_ids
        return True

    def _schedule_waiting(self, step: _Step) -> None:
        config, kv_cache_manager = self.config, self.kv_cache_manager
        while self.waiting and step.token_budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.peek()
            computed_blocks = self._get_computed_blocks(request)
            num_computed_tokens = len(computed_blocks) * kv_cache_manager.block_size
            num_new_tokens = request.num_tokens - num_computed_tokens
            if 0 < config.long_prefill_token_threshold < num_new_tokens:
                num_new_tokens = config.long_prefill_token_threshold
            if num_new_tokens > step.token_budget:
                if not config.enable_chunked_prefill:
                    break
                num_new_tokens = step.token_budget
            if not kv_cache_manager.allocate_first_slots(
                request,
                num_new_tokens,
                computed_blocks,
                full_sequence_must_fit=config.scheduler_reserve_full_isl,
            ):
                break  # nobody overtakes the head of the queue
            self.waiting.pop()
            self.running.append(request)
            if request.status is RequestStatus.WAITING:
                step.new.append(request)
            else:
                step.resumed.append(request)
                step.num_computed_tokens.append(num_computed_tokens)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = num_computed_tokens + num_new_tokens
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )
            step.num_scheduled_tokens[request.request_id] = num_new_tokens
            step.token_budget -= num_new_tokens

    def _get_computed_blocks(self, request: Request) -> list[int]:
        # Prompt log probabilities need all tokens computed.
        if not self.kv_cache_manager.enable_caching or request.sampling_params.prompt_logprobs is not None:
            return []
        blocks = self.kv_cache_manager.get_computed_blocks(request)
        if not request.num_preemptions:
            self.counters.prefix_cache_queries += request.num_tokens
            self.counters.prefix_cache_hits += len(blocks) * self.kv_cache_manager.block_size
        return blocks

    def _preempt_one(self, step: _Step) -> Request:
        if self.config.policy is SchedulingPolicy.PRIORITY:
            victim = max(self.running, key=lambda request: (request.priority, request.arrival_time))
            self.running.remove(victim)
        else:
            victim = self.running.pop()
        self._preempt(victim)
        step.preempted.append(victim)
        return victim

    def _preempt(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = ()
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.add_preempted(request)

    def _take_back(self, request: Request, step: _Step) -> None:
        index = step.running.index(request)
        del step.running[index], step.num_computed_tokens[index]
        del step.num_scheduled_tokens[request.request_id]
        step.new_block_ids.pop(request.request_id, None)
        step.spec_token_ids.pop(request.request_id, None)

    def _make_output(self, step: _Step) -> SchedulerOutput:
        requests = step.running + step.resumed if step.resumed else step.running
        req_ids = [request.request_id for request in requests]
        new_block_ids: list[Sequence[int] | None] = list(map(step.new_block_ids.get, req_ids))
        for index, request in enumerate(step.resumed, len(step.running)):
            new_block_ids[index] = request.block_ids.copy()
        prev = self._prev_step_req_ids
        output = SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    block_ids=request.block_ids.copy(),
                    num_computed_tokens=request.num_computed_tokens - step.num_scheduled_tokens[request.request_id],
                )
                for request in step.new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=req_ids,
                resumed_req_ids=frozenset([request.request_id for request in step.resumed]),
                new_block_ids=new_block_ids,
                all_token_ids={
                    req_id: self.requests[req_id].all_token_ids.copy() for req_id in req_ids if req_id not in prev
                },
                num_computed_tokens=step.num_computed_tokens,
                num_output_tokens=[
                    len(request.all_token_ids) - request.num_prompt_tokens + request.num_output_placeholders
                    for request in requests
                ],
            ),
            num_scheduled_tokens=step.num_scheduled_tokens,
            scheduled_spec_decode_tokens=step.spec_token_ids,
            preempted_req_ids=frozenset([request.request_id for request in step.preempted]),
            finished_req_ids=frozenset(self._finished_req_ids),
            num_common_prefix_blocks=(
                self.kv_cache_manager.get_num_common_prefix_blocks(self.running[0]) if self.running else 0
            ),
        )
        self._finished_req_ids = []
        self._prev_step_req_ids = step.num_scheduled_tokens
        return output

    # --- what a step gave

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in what a step gave: new tokens, ended requests, drafts for the next step.

        Returns:
            An entry for each request that has something new.
        """
        outputs: list[EngineCoreOutput] = []
        stopped_running: set[Request] = set()
        requests, sampled_token_ids = self.requests, model_runner_output.sampled_token_ids
        spec_token_ids = scheduler_output.scheduled_spec_decode_tokens
        append_output_tokens = self._append_output_tokens
        for req_id in scheduler_output.num_scheduled_tokens:
            request = requests.get(req_id)
            if request is None:
                continue  # ended from outside while the step ran
            new_token_ids = sampled_token_ids.get(req_id)
            if not new_token_ids:
                continue  # in the middle of its tokens
            if req_id in spec_token_ids:
                self._reject_drafts(request, len(spec_token_ids[req_id]), len(new_token_ids) - 1)
            status = request.status
            if len(request.all_token_ids) == request.num_prompt_tokens:
                self.counters.prompt_tokens += request.num_prompt_tokens
            new_token_ids = append_output_tokens(request, new_token_ids)
            if request.status is not status:
                self._free_request(request)
                if status is RequestStatus.RUNNING:
                    stopped_running.add(request)
                else:
                    self.waiting.remove(request)  # preempted while the step ran
                outputs.append(
                    EngineCoreOutput(req_id, new_token_ids, request.status.finish_reason, request.stop_reason)
                )
            elif new_token_ids:
                outputs.append(EngineCoreOutput(req_id, new_token_ids))
        self._remove_from_running(stopped_running)
        self.counters.generation_tokens += sum([len(output.new_token_ids) for output in outputs])
        self._update_draft_token_ids(model_runner_output.draft_token_ids)
        self._add_logprobs(outputs, model_runner_output)
        return outputs

    def make_stats(self) -> SchedulerStats:
        """The state now."""
        return SchedulerStats(
            num_requests_running=len(self.running),
            num_requests_waiting=len(self.waiting),
            kv_cache_usage_perc=self.kv_cache_manager.block_pool.usage,
            counters=self.counters,
        )

    def _append_output_tokens(self, request: Request, new_token_ids: Sequence[int]) -> Sequence[int]:
        """Append them up to the one that ends the request; return those that were appended."""
        return request.append_output_tokens(new_token_ids, self.config.max_model_len)

    def _reject_drafts(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        num_rejected = num_drafts - num_accepted
        # Nothing is computed, and nothing on its way, if the request was preempted while the step ran.
        if request.num_computed_tokens:
            request.num_computed_tokens -= num_rejected
        if request.num_output_placeholders:
            request.num_output_placeholders -= num_rejected
        self.counters.spec_decode_num_drafts += 1
        self.counters.spec_decode_num_draft_tokens += num_drafts
        self.counters.spec_decode_num_accepted_tokens += num_accepted
        self.counters.spec_decode_num_accepted_tokens_per_pos.update(range(num_accepted))

    def _update_draft_token_ids(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        for req_id, token_ids in draft_token_ids.items():
            request = self.requests.get(req_id)
            if request is not None:
                request.spec_token_ids = () if request.is_prefill_chunk else token_ids

    def _add_logprobs(self, outputs: list[EngineCoreOutput], model_runner_output: ModelRunnerOutput) -> None:
        if not model_runner_output.logprobs and not model_runner_output.prompt_logprobs:
            return
        by_request = {output.request_id: output for output in outputs}
        for req_id, logprobs in model_runner_output.logprobs.items():
            if req_id in by_request:
                by_request[req_id].logprobs = logprobs.first(len(by_request[req_id].new_token_ids))
        for req_id, logprobs in model_runner_output.prompt_logprobs.items():
            if req_id in by_request:
                by_request[req_id].prompt_logprobs = logprobs
            elif req_id in self.requests:
                outputs.append(EngineCoreOutput(req_id, (), prompt_logprobs=logprobs))

    def _remove_from_running(self, requests: set[Request]) -> None:
        if requests:
            self.running = [request for request in self.running if request not in requests]

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)
        finish_reason = request.status.finish_reason
        assert finish_reason is not None
        self.counters.request_success[finish_reason] += 1
