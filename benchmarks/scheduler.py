"""What the scheduler costs: CPU time of one decode step, ours and, in an environment that has vllm, vLLM's own.

python benchmarks/scheduler.py
PYTHONPATH=.:tests/upstream/path:FOLDER/0.23.0 FOLDER/venv/bin/python benchmarks/scheduler.py --vllm
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

PROMPT_LENGTH = 1000


def cost_per_step(step: Callable[[], None], num_steps: int = 64, num_runs: int = 30) -> float:
    """Microseconds of CPU time per step, on average of the best run; what else runs on the machine slows the others."""
    gc.collect()
    gc.freeze()
    best = float("inf")
    for _ in range(num_runs):
        begin = time.process_time_ns()
        for _ in range(num_steps):
            step()
        best = min(best, (time.process_time_ns() - begin) / num_steps / 1000)
    gc.unfreeze()
    return best


def our_step(num_requests: int) -> Callable[[], None]:
    from xlite_runner.config import CacheConfig, SchedulerConfig
    from xlite_runner.serving.core.request import Request
    from xlite_runner.serving.core.scheduler import Scheduler
    from xlite_runner.serving.output import ModelRunnerOutput
    from xlite_runner.serving.sampling_params import SamplingParams

    config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=2**20, max_model_len=40960)
    scheduler = Scheduler(config, CacheConfig(block_size=128, gpu_memory_utilization=0.9), 40 * num_requests)
    params = SamplingParams(max_tokens=2**20)
    for number in range(num_requests):
        prompt = list(range(number * PROMPT_LENGTH, (number + 1) * PROMPT_LENGTH))
        scheduler.add_request(Request(f"request-{number}", prompt, params))
    result = ModelRunnerOutput(sampled_token_ids={f"request-{n}": [17] for n in range(num_requests)})

    def step() -> None:
        scheduler.update_from_output(scheduler.schedule(), result)

    step()
    return step


def vllm_step(num_requests: int) -> Callable[[], None]:
    from tests.upstream.scheduler import UpstreamScheduler, upstream_config
    from tests.upstream.scheduler_programs import Program, RequestProgram

    base_config = upstream_config()
    from vllm.v1.outputs import ModelRunnerOutput

    program = Program(
        num_blocks=40 * num_requests,
        block_size=128,
        max_num_seqs=num_requests,
        max_num_batched_tokens=2**20,
        max_model_len=40960,
        policy="fcfs",
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        long_prefill_token_threshold=0,
        scheduler_reserve_full_isl=True,
        num_drafts=0,
        asynchronous=False,
    )
    adapter = UpstreamScheduler(program, base_config)
    for number in range(num_requests):
        prompt = list(range(number * PROMPT_LENGTH, (number + 1) * PROMPT_LENGTH))
        adapter.add(RequestProgram(f"request-{number}", prompt, max_tokens=2**20))
    scheduler = adapter.scheduler
    scheduler.log_stats = False

    def step() -> None:
        output = scheduler.schedule()
        req_ids = list(output.num_scheduled_tokens)
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
                sampled_token_ids=[[17] for _ in req_ids],
            ),
        )

    step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="vLLM's scheduler")
    options = parser.parse_args()
    make_step = vllm_step if options.vllm else our_step
    print("schedule() and update_from_output(), decode step")
    for num_requests in (1, 16, 64, 256):
        print(f"{num_requests:4} requests {cost_per_step(make_step(num_requests)):8.1f} us")


if __name__ == "__main__":
    main()
