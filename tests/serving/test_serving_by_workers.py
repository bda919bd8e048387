"""The serving loop on a worker that computes: what it schedules never changes what a request gets."""

from __future__ import annotations

import re

import pytest
import torch

from tests.serving.conftest import DENSE, FULL, OFF
from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.serving.core.request import FinishReason, Request
from xlite_runner.serving.engine_core import ServingEngine
from xlite_runner.serving.executor import WorkerExecutor
from xlite_runner.serving.sampling_params import SamplingParams

pytestmark = [pytest.mark.npu_settings(values="real"), pytest.mark.needs("values")]
PLENTY, SCARCE = 24, 6


def prompts():
    """Four prompts that fill their first block within a few tokens, two of them with a common beginning."""
    generator = torch.Generator().manual_seed(4)
    made = [torch.randint(512, (length,), generator=generator).tolist() for length in (125, 124, 123, 130)]
    made[3][:128] = (made[0] + made[1])[:128]
    return [*made, [*made[3][:128], 5, 6]]


def serve(worker, num_blocks, params):
    """All requests at once; their tokens, why they ended, and how often one was preempted."""
    engine = ServingEngine.from_config(
        worker.config,
        [num_blocks],
        WorkerExecutor([worker], 1, lambda functions: [function() for function in functions]),
    )
    for number, prompt in enumerate(prompts()):
        engine.add_request(Request(f"r{number}", prompt, params))
    tokens, reasons = {}, {}
    while engine.has_unfinished_requests:
        for outputs in engine.step():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                reasons[output.request_id] = output.finish_reason
    return tokens, reasons, engine.schedulers[0].counters.num_preemptions


GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
SEEDED = SamplingParams(seed=7, max_tokens=9, ignore_eos=True, top_k=20)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("params", "settings"),
    [
        pytest.param(GREEDY, {}, id="whole prompts"),
        pytest.param(
            GREEDY, {"async_scheduling": True, "num_speculative_tokens": 1}, id="asynchronously with drafts", marks=slow
        ),
        pytest.param(SEEDED, {"max_num_batched_tokens": 48}, id="seeded in chunks"),
        pytest.param(GREEDY, {"max_num_batched_tokens": 48}, id="in chunks", marks=slow),
        pytest.param(GREEDY, {"num_speculative_tokens": 1}, id="with drafts", marks=slow),
        pytest.param(GREEDY, {"async_scheduling": True}, id="asynchronously", marks=slow),
        pytest.param(SEEDED, {}, id="seeded", marks=slow),
    ],
)
def test_neither_preemption_nor_chunks_nor_drafts_change_the_tokens(make_worker, params, settings):
    undisturbed, reasons, num_preemptions = serve(make_worker(xlite=OFF, num_blocks=PLENTY), PLENTY, params)
    assert num_preemptions == 0
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert {len(output) for output in undisturbed.values()} == {9}
    worker = make_worker(DENSE, FULL, num_blocks=SCARCE, **{"max_num_seqs": 8} | settings)
    tokens, _, num_preemptions = serve(worker, SCARCE, params)
    assert num_preemptions > 0
    assert tokens == undisturbed


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([1, 512], {}, "Token id 512 is out of vocabulary"),
        ([1, -1], {}, "Token id -1 is out of vocabulary"),
        ([1], {"allowed_token_ids": ()}, "allowed_token_ids is not None and empty!"),
        ([1], {"allowed_token_ids": (3, 512)}, "allowed_token_ids contains out-of-vocab token id!"),
        ([1], {"logprobs": 600}, "Requested sample logprobs of 600, which is greater than max allowed: 512"),
    ],
)
def test_tokens_outside_of_the_vocabulary_are_refused(prompt, params, message):
    config = check_and_update_config(EngineArgs(max_num_batched_tokens=512), ModelConfig.from_hf(DENSE))
    engine = ServingEngine.from_config(config, [8], WorkerExecutor([None], 1, None))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        engine.add_request(Request("r", prompt, SamplingParams(**params)))
    assert not engine.has_unfinished_requests
