"""What a step takes of the device, for the published configuration with 64 requests.

Expected values are those of upstream's own runner and sampler, measured tensor by tensor (vllm 0.23.0, vllm-ascend
0.23.0). One thing is added to them: a mask that ``exponential_`` makes for itself, one byte per logit, which the real
torch_npu does (tests/ops: golden records of its host code), and which tensors alone do not show.
"""

from __future__ import annotations

import pytest

from tests.serving.steps import Client, run_step
from xlite_runner.serving.sampling_params import SamplingParams

MIB = 1 << 20
NUM_REQS, VOCAB_SIZE = 64, 151936
LOGITS_BYTES = NUM_REQS * VOCAB_SIZE
MASK_OF_EXPONENTIAL = LOGITS_BYTES / MIB

pytestmark = pytest.mark.sim_only("this is a particular card with a particular model")

PEAKS = {
    "greedy": (SamplingParams(temperature=0.0), 55.89),
    "random": (SamplingParams(), 130.08 + MASK_OF_EXPONENTIAL),
    "top-p": (SamplingParams(top_p=0.9), 167.17 + MASK_OF_EXPONENTIAL),
    "top-p with logprobs": (SamplingParams(top_p=0.9, logprobs=5), 204.27 + MASK_OF_EXPONENTIAL),
}


def on_ranks(world, engine, step):
    """Execute a step on all ranks; each rank's output, and its peak above and remainder over what was allocated."""
    import torch

    def execute(worker):
        before = torch.npu.memory_allocated(worker.device)
        torch.npu.reset_peak_memory_stats(worker.device)
        output = worker.execute_model(step)
        peak = torch.npu.max_memory_allocated(worker.device) - before
        return output, peak, torch.npu.memory_allocated(worker.device) - before

    return world.run_ranks([lambda worker=worker: execute(worker) for worker in engine.workers])


@pytest.fixture
def measured_step(started_seed):
    """``execute(step)`` on all ranks; the figures of rank 0 are appended to ``execute.memory``."""
    world, engine = started_seed
    execute_on_ranks = on_ranks

    def execute(step):
        results = execute_on_ranks(world, engine, step)
        assert len({repr(output) for output, _, _ in results}) == 1, "tensor-parallel ranks sample the same tokens"
        execute.memory.append(results[0][1:])
        return results[0][0]

    execute.memory = []
    return execute


@pytest.mark.parametrize("case", list(PEAKS))
def test_step_peaks_over_idle(measured_step, case):
    params, expected_mib = PEAKS[case]
    clients = [Client(f"{case}{row}", range(100), params, blocks=[row + 1]) for row in range(NUM_REQS)]
    run_step(measured_step, clients[:1], {clients[0].req_id: 100})  # the first step makes the mask, which stays
    measured_step.memory.clear()
    run_step(measured_step, clients, {client.req_id: client.num_tokens - client.num_computed for client in clients})
    run_step(measured_step, clients, {client.req_id: 1 for client in clients})
    run_step(measured_step, [], {}, finished=[client.req_id for client in clients])
    (prefill, after_prefill), (decode, after_decode), (empty, _) = measured_step.memory
    assert prefill / MIB == pytest.approx(expected_mib, abs=0.01)
    assert decode / MIB == pytest.approx(expected_mib, abs=0.01)
    assert (after_prefill, after_decode, empty) == (0, 0, 0)
