"""Runs serving programs on vLLM's own scheduler, unmodified: reads programs, writes traces, as lines of JSON.

Run as a script inside an environment that has vllm::

    python -m tests.upstream.scheduler FIRST_SEED LAST_SEED
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.upstream.engine import model_directory
from tests.upstream.scheduler_programs import EOS, Program, RequestProgram, drive, random_program

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # the scheduler is vLLM's; the Ascend platform needs a device and does not touch it
}
MODEL = Path(__file__).parent / "models" / "Qwen3-0.6B.json"


class MtpConfig(SimpleNamespace):
    """What the scheduler asks of the speculative configuration of an MTP drafter."""

    def use_eagle(self) -> bool:
        return True

    def uses_draft_model(self) -> bool:
        return False

    def use_dflash(self) -> bool:
        return False


class UpstreamScheduler:
    """vLLM's scheduler in plain values."""

    def __init__(self, program: Program, base_config: Any) -> None:
        import torch
        from vllm.config import SchedulerConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(program.block_size, sha256)
        config = copy.copy(base_config)
        config.scheduler_config = SchedulerConfig(
            max_model_len=program.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=program.max_num_seqs,
            max_num_batched_tokens=program.max_num_batched_tokens,
            enable_chunked_prefill=program.enable_chunked_prefill,
            policy=program.policy,
            long_prefill_token_threshold=program.long_prefill_token_threshold,
            scheduler_reserve_full_isl=program.scheduler_reserve_full_isl,
            async_scheduling=program.asynchronous,
        )
        config.cache_config = copy.copy(base_config.cache_config)
        config.cache_config.num_gpu_blocks = program.num_blocks
        config.cache_config.block_size = program.block_size
        config.cache_config.enable_prefix_caching = program.enable_prefix_caching
        config.model_config = copy.copy(base_config.model_config)
        config.model_config.max_model_len = program.max_model_len
        config.speculative_config = MtpConfig(num_speculative_tokens=program.num_drafts) if program.num_drafts else None
        spec = FullAttentionSpec(block_size=program.block_size, num_kv_heads=1, head_size=8, dtype=torch.float16)
        self._drafts = program.num_drafts and not program.asynchronous
        self._steps: list[Any] = []
        self.scheduler = (AsyncScheduler if program.asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(program.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=program.block_size,
            log_stats=True,
        )
        self._queries = self._hits = 0

    def add(self, request: RequestProgram) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            temperature=0,
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            prompt_logprobs=request.prompt_logprobs,
        )
        params.update_from_generation_config({}, EOS)
        self.scheduler.add_request(
            Request(
                request_id=request.request_id,
                prompt_token_ids=request.prompt,
                sampling_params=params,
                pooling_params=None,
                arrival_time=request.arrival_time,
                cache_salt=request.cache_salt,
                priority=request.priority,
                block_hasher=self._hasher if self.scheduler.kv_cache_manager.enable_caching else None,
            )
        )

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, reset_running_requests: bool) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests))

    def schedule(self) -> dict[str, Any]:
        output = self.scheduler.schedule()
        self._steps.append(output)
        cached = output.scheduled_cached_reqs
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        return {
            "new": [
                [new.req_id, new.prompt_token_ids, new.block_ids[0], new.num_computed_tokens]
                for new in output.scheduled_new_reqs
            ],
            "cached": {
                "req_ids": list(cached.req_ids),
                "resumed_req_ids": sorted(cached.resumed_req_ids),
                "new_block_ids": [None if blocks is None else list(blocks[0]) for blocks in cached.new_block_ids],
                "all_token_ids": {req_id: list(tokens) for req_id, tokens in cached.all_token_ids.items()},
                "num_computed_tokens": list(cached.num_computed_tokens),
                "num_output_tokens": list(cached.num_output_tokens),
            },
            "num_scheduled_tokens": [list(item) for item in output.num_scheduled_tokens.items()],
            "spec_decode_tokens": [[k, list(v)] for k, v in output.scheduled_spec_decode_tokens.items()],
            "preempted_req_ids": sorted(output.preempted_req_ids),
            "finished_req_ids": sorted(output.finished_req_ids),
            "num_common_prefix_blocks": output.num_common_prefix_blocks[0],
        }

    def update(self, sampled: Mapping[str, list[int]], drafts: Mapping[str, list[int]]) -> list[Any]:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        req_ids = list(sampled)
        result = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[list(sampled[req_id]) for req_id in req_ids],
        )
        by_client = self.scheduler.update_from_output(self._steps.pop(0), result)
        if self._drafts and req_ids:
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), [list(ids) for ids in drafts.values()]))
        if (stats := by_client[0].scheduler_stats) is not None:
            self._queries += stats.prefix_cache_stats.queries
            self._hits += stats.prefix_cache_stats.hits
        return [
            [output.request_id, list(output.new_token_ids), str(output.finish_reason), output.stop_reason]
            for output in by_client[0].outputs
        ]

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "free_blocks": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "usage": scheduler.kv_cache_manager.usage,
            "computed": [request.num_computed_tokens for request in scheduler.running],
            "preemptions": sum(request.num_preemptions for request in scheduler.requests.values()),
            "prefix_cache": [self._queries, self._hits],
        }

    def has_requests(self) -> bool:
        return bool(self.scheduler.has_requests())


def upstream_config() -> Any:
    """A configuration of upstream's for a small model, on no device."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()  # this build of vllm is for no device at all
    from vllm.engine.arg_utils import EngineArgs

    with model_directory(MODEL) as model:
        return EngineArgs(model=str(model), load_format="dummy", skip_tokenizer_init=True).create_engine_config()


def main() -> None:
    """Drive the programs of a range of seeds."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # upstream logs to stdout
    config = upstream_config()
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        program = random_program(seed)
        trace: list[Any] = []
        try:
            drive(program, UpstreamScheduler(program, config), trace)
        except Exception:  # noqa: BLE001 - whoever reads the line reports it
            trace.append(["error", traceback.format_exc()])
        print(json.dumps(trace), file=results, flush=True)


if __name__ == "__main__":
    main()
