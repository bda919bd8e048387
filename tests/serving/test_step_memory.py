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


@pytest.fixture
def measured_step(started_seed):
    """``execute(step)`` on all ranks; rank 0's peak and remainder are appended to ``execute.memory``."""

    def execute(step):
        output, *memory = started_seed.execute(step)
        execute.memory.append(memory)
        return output

    execute.memory = []
    return execute


def test_what_no_term_of_the_budget_counts(started_seed):
    """Allocated without being weights or cache: the runner's buffers, xlite's hidden states and rotary table.

    Upstream's sum is of sizes rounded to 512 bytes; torch_npu adds 32 before, so that 14 buffers take 512 more.
    """
    worker = started_seed.engine.workers[0]
    weights, cache = worker.model_runner.model_memory_usage, worker.kv_cache_bytes
    assert started_seed.allocated_bytes - weights - cache == 82_688_512 + 14 * 512


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


def serve_once(measured_step, name, **params):
    clients = [Client(f"{name}{row}", [row], SamplingParams(**params), blocks=[row + 1]) for row in range(NUM_REQS)]
    run_step(measured_step, clients, {client.req_id: 1 for client in clients})
    run_step(measured_step, [], {}, finished=[client.req_id for client in clients])


def test_noise_has_memory_of_its_own(measured_step):
    """It is drawn on a second stream, from whose memory no other stream gets any; it stays reserved there.

    4 bytes a logit for the noise and one for the mask, in steps of 20 MiB as expandable segments grow.
    """
    import torch

    torch.npu.empty_cache()
    main = torch.npu.current_stream().npu_stream
    reserved = []
    for step in range(2):
        serve_once(measured_step, f"random{step}")
        segments = [segment for segment in torch.npu.memory_snapshot() if segment["device"] == 0]
        reserved.append(sum(segment["total_size"] for segment in segments if segment["stream"] not in (0, main)))
    assert 5 * LOGITS_BYTES < reserved[0] == reserved[1] < 5 * LOGITS_BYTES + 20 * MIB


def test_mask_of_allowed_tokens_stays(measured_step, started_seed):
    """A row for every request that there can be, made when the first asks for it."""
    import torch

    serve_once(measured_step, "first", temperature=0.0)
    before = torch.npu.memory_allocated(0)
    for step in range(2):
        serve_once(measured_step, f"allowed{step}", temperature=0.0, allowed_token_ids=(1, 2))
        assert torch.npu.memory_allocated(0) - before == LOGITS_BYTES + 512  # torch_npu adds 32 bytes, and rounds


def test_log_probabilities_of_a_prompt(measured_step):
    """All of a chunk at once: 10 bytes for each logit of each of its tokens, far above any other step.

    The allocator does not split off what is less than 1 MiB of a free block, and counts it with the tensor.
    """
    num_logits = 1024
    client = Client("scored", range(num_logits + 1), SamplingParams(temperature=0.0, prompt_logprobs=1), range(1, 10))
    output = run_step(measured_step, [client], {"scored": num_logits + 1})
    run_step(measured_step, [], {}, finished=["scored"])
    assert len(output.prompt_logprobs["scored"].logprobs) == num_logits
    own_logits_mib = 2 * VOCAB_SIZE / MIB  # of the token that is sampled
    tensors_mib = 10 * num_logits * VOCAB_SIZE / MIB + own_logits_mib
    max_num_tensors = 5  # logits twice, their probabilities, which are greater, hidden states
    assert tensors_mib - 0.2 < measured_step.memory[0][0] / MIB < tensors_mib + 0.2 + max_num_tensors
