"""Our scheduler in plain values, for programs that vLLM's scheduler runs, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.upstream.scheduler_programs import EOS, Program, RequestProgram, drive
from xlite_runner.config import CacheConfig, SchedulerConfig, SchedulingPolicy, SpeculativeConfig
from xlite_runner.serving.core.async_scheduler import AsyncScheduler
from xlite_runner.serving.core.request import Request, RequestStatus
from xlite_runner.serving.core.scheduler import Scheduler
from xlite_runner.serving.output import ModelRunnerOutput, SchedulerOutput
from xlite_runner.serving.sampling_params import SamplingParams


class OurScheduler:
    """Our scheduler in plain values."""

    def __init__(self, program: Program) -> None:
        config = SchedulerConfig(
            max_num_seqs=program.max_num_seqs,
            max_num_batched_tokens=program.max_num_batched_tokens,
            max_model_len=program.max_model_len,
            enable_chunked_prefill=program.enable_chunked_prefill,
            policy=SchedulingPolicy(program.policy),
            long_prefill_token_threshold=program.long_prefill_token_threshold,
            scheduler_reserve_full_isl=program.scheduler_reserve_full_isl,
            async_scheduling=program.asynchronous,
        )
        cache = CacheConfig(
            block_size=program.block_size,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=program.enable_prefix_caching,
        )
        speculative = SpeculativeConfig(program.num_drafts) if program.num_drafts else None
        scheduler_class = AsyncScheduler if program.asynchronous else Scheduler
        self.scheduler = scheduler_class(config, cache, program.num_blocks, speculative)
        self._steps: list[SchedulerOutput] = []
        self._prefix_cache = [0, 0]

    def add(self, request: RequestProgram) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            prompt_logprobs=request.prompt_logprobs,
        )
        self.scheduler.add_request(
            Request(
                request.request_id,
                request.prompt,
                params,
                eos_token_id=EOS,
                arrival_time=request.arrival_time,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def reset(self, reset_running_requests: bool) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def schedule(self) -> dict[str, Any]:
        output = self.scheduler.schedule()
        self._steps.append(output)
        cached = output.scheduled_cached_reqs
        return {
            "new": [
                [new.req_id, list(new.prompt_token_ids), list(new.block_ids), new.num_computed_tokens]
                for new in output.scheduled_new_reqs
            ],
            "cached": {
                "req_ids": list(cached.req_ids),
                "resumed_req_ids": sorted(cached.resumed_req_ids),
                "new_block_ids": [None if blocks is None else list(blocks) for blocks in cached.new_block_ids],
                "all_token_ids": {req_id: list(tokens) for req_id, tokens in cached.all_token_ids.items()},
                "num_computed_tokens": list(cached.num_computed_tokens),
                "num_output_tokens": list(cached.num_output_tokens),
            },
            "num_scheduled_tokens": [list(item) for item in output.num_scheduled_tokens.items()],
            "spec_decode_tokens": [[k, list(v)] for k, v in output.scheduled_spec_decode_tokens.items()],
            "preempted_req_ids": sorted(output.preempted_req_ids),
            "finished_req_ids": sorted(output.finished_req_ids),
            "num_common_prefix_blocks": output.num_common_prefix_blocks,
        }

    def update(self, sampled: Mapping[str, list[int]], drafts: Mapping[str, list[int]]) -> list[Any]:
        result = ModelRunnerOutput(sampled_token_ids=sampled, draft_token_ids=drafts)
        outputs = self.scheduler.update_from_output(self._steps.pop(0), result)
        counters = self.scheduler.counters
        self._prefix_cache = [counters.prefix_cache_queries, counters.prefix_cache_hits]
        return [
            [
                output.request_id,
                list(output.new_token_ids),
                str(output.finish_reason and output.finish_reason.value),
                output.stop_reason,
            ]
            for output in outputs
        ]

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "free_blocks": pool.free_blocks,
            "usage": pool.usage,
            "computed": [request.num_computed_tokens for request in scheduler.running],
            "preemptions": sum(request.num_preemptions for request in scheduler.requests.values()),
            # Upstream hands these out with results.
            "prefix_cache": self._prefix_cache,
        }

    def has_requests(self) -> bool:
        return self.scheduler.has_requests()


def our_trace(program: Program) -> list[Any]:
    """What our scheduler makes of a program, as JSON has it."""
    trace: list[Any] = []
    drive(program, OurScheduler(program), trace)
    plain: list[Any] = json.loads(json.dumps(trace))
    return plain
