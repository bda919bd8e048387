"""Scheduler and model together: tokens of a tiny model, computed, do not depend on what the scheduler did."""

from __future__ import annotations

import pytest
import torch

from tests.serving.fake_worker import make_scheduler, run_in_turns
from xlite_runner.serving.core.request import Request
from xlite_runner.serving.engine_core import ServingEngine
from xlite_runner.serving.executor import WorkerExecutor
from xlite_runner.serving.sampling_params import SamplingParams

pytestmark = [pytest.mark.npu_settings(values="real"), pytest.mark.needs("values")]


def serve(worker, num_blocks: int, prompts: dict[str, list[int]], **settings):
    """Tokens by request, and the scheduler's counters."""
    scheduler = make_scheduler(num_blocks, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512, **settings)
    engine = ServingEngine([scheduler], WorkerExecutor([worker], 1, run_in_turns))
    tokens: dict[str, list[int]] = {req_id: [] for req_id in prompts}
    for req_id, prompt in prompts.items():
        engine.add_request(Request(req_id, prompt, SamplingParams(temperature=0, max_tokens=4)))
    while engine.has_work:
        for output in engine.step()[0].outputs:
            tokens[output.request_id] += output.new_token_ids
    return tokens, scheduler.counters


@pytest.mark.slow
def test_preemption_and_shared_blocks_change_no_token(make_worker):
    """Two of three requests share their first block; with five blocks for all, one loses its blocks on the way."""
    generator = torch.Generator().manual_seed(3)
    common, *own = (torch.randint(512, (length,), generator=generator).tolist() for length in (128, 127, 127, 126))
    prompts = {"a": common + own[0], "b": common + own[1], "c": own[2]}
    worker = make_worker(num_blocks=12)
    expected, _ = serve(worker, 12, prompts, enable_prefix_caching=False)
    tokens, counters = serve(worker, 6, prompts)
    assert tokens == expected
    assert counters.num_preemptions > 0
    assert counters.prefix_cache_hits >= 128
    assert len({token for output in tokens.values() for token in output}) > 6
