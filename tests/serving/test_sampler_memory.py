"""What the samplers take, in units of one byte per logit of the batch, against upstream's, measured tensor by tensor.

``MASK`` is what the noise takes besides: ``exponential_`` makes a mask of one byte per logit for itself (golden records
of the real torch_npu). It counts where the noise is the peak.
"""

from __future__ import annotations

import numpy as np
import pytest

from xlite_runner.forward_context import AscendDeviceType
from xlite_runner.serving.sampling_params import SamplingParams

MIB = 1 << 20
NUM_REQS, VOCAB_SIZE = 64, 151936
MASK = 1
A2, A5 = AscendDeviceType.A2, AscendDeviceType.A5
GREEDY, RANDOM = {"temperature": 0.0}, {}
TOP_K, TOP_P = {"top_k": 50}, {"top_p": 0.9}
PENALTY = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
PROMPT, OUTPUT = 100, 10
PENALTY_IDS = 8 * NUM_REQS * (PROMPT + OUTPUT)

pytestmark = pytest.mark.needs("no_workspaces")

ROWS = [
    ("greedy", A2, GREEDY, 6, 0),
    ("greedy, allowed tokens", A2, GREEDY | {"allowed_token_ids": (1, 2)}, 6, 0),
    ("greedy, minimal length", A2, GREEDY | {"min_tokens": 16}, 6, 0),
    ("random", A2, RANDOM, 14, MASK),
    ("random, min-p", A2, {"min_p": 0.1}, 14, MASK),
    ("top-k", A2, TOP_K, 18, MASK),
    ("top-p", A2, TOP_P, 18, MASK),
    ("top-k and top-p, min-p", A2, TOP_K | TOP_P | {"min_p": 0.1}, 18, MASK),
    ("top-p, penalties", A2, TOP_P | PENALTY, 18, MASK),
    ("greedy with logprobs", A2, GREEDY | {"logprobs": 5}, 11, 0),
    ("greedy with all logprobs", A2, GREEDY | {"logprobs": -1}, 38, 0),
    ("top-p with logprobs", A2, TOP_P | {"logprobs": 5}, 22, MASK),
    ("greedy, penalties", A2, GREEDY | PENALTY, 16, 0),
    ("top-k by torch", A5, TOP_K, 23, 0),
    ("top-p by torch", A5, TOP_P, 28, 0),
    ("top-k and top-p by torch", A5, TOP_K | TOP_P, 29, 0),
]


@pytest.fixture
def batch(npu_device):
    """``batch(**params)``: 64 rows with these sampling parameters, and the buffers on the device."""
    from types import SimpleNamespace

    import torch

    from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
    from xlite_runner.input_buffers import InputBuffers
    from xlite_runner.serving.output import NewRequestData
    from xlite_runner.serving.worker.input_batch import InputBatch
    from xlite_runner.serving.worker.request_state import CachedRequestState

    from .conftest import EXAMPLES

    def make(num_reqs=NUM_REQS, **params):
        model = ModelConfig.from_hf(EXAMPLES / "models" / "Qwen3-30B-A3B.json")
        args = EngineArgs(max_num_seqs=num_reqs, max_num_batched_tokens=1024, max_model_len=1024, block_size=128)
        config = check_and_update_config(args, model)
        buffers = InputBuffers(config, npu_device)
        made = InputBatch(config, buffers, npu_device)
        for row in range(num_reqs):
            data = NewRequestData(
                req_id=str(row),
                prompt_token_ids=range(PROMPT),
                sampling_params=SamplingParams(**params),
                block_ids=[],
                num_computed_tokens=0,
            )
            request = CachedRequestState.of(data, npu_device)
            request.output_token_ids = list(range(OUTPUT))
            made.add_request(request)
        made.refresh_metadata()
        return SimpleNamespace(rows=made, buffers=buffers, torch=torch)

    return make


def peak_of(torch, make_logits, run):
    """Peak of bytes asked for, from before the logits exist to the end of ``run(logits)``, and what that returned."""
    before = torch.npu.memory_stats().get("requested_bytes.all.current", 0)
    logits = make_logits()
    torch.npu.reset_peak_memory_stats()
    result = run(logits)
    return torch.npu.memory_stats()["requested_bytes.all.peak"] - before, result


def assert_takes(peak, units, more_bytes=0):
    expected = units * NUM_REQS * VOCAB_SIZE + more_bytes
    assert peak / MIB == pytest.approx(expected / MIB, abs=0.01), f"{peak - expected} bytes more"


@pytest.mark.parametrize(("case", "device_type", "params", "units", "mask"), ROWS, ids=[row[0] for row in ROWS])
def test_peak_of_the_sampler(batch, case, device_type, params, units, mask):
    from xlite_runner.serving.sample.sampler import Sampler

    made = batch(**params)
    torch = made.torch
    sampler = Sampler(device_type, made.buffers.batch.neg_inf)
    peak, _ = peak_of(
        torch,
        lambda: torch.empty(NUM_REQS, VOCAB_SIZE, dtype=torch.bfloat16, device="npu"),
        lambda logits: sampler(logits, made.rows.sampling_metadata),
    )
    assert_takes(peak, units + mask)


SPECULATIVE_ROWS = [
    ("greedy", GREEDY, 22, 0),
    ("random", RANDOM, 26, MASK),
    ("top-p", TOP_P, 26, MASK),
    ("greedy with logprobs", GREEDY | {"logprobs": 5}, 44, 0),
    ("top-p with logprobs", TOP_P | {"logprobs": 5}, 44, 0),
]


@pytest.mark.parametrize(
    ("case", "params", "units", "mask"), SPECULATIVE_ROWS, ids=[row[0] for row in SPECULATIVE_ROWS]
)
def test_peak_of_the_rejection_sampler(batch, case, params, units, mask):
    """One draft for each request: two rows of logits each."""
    from xlite_runner.serving.sample.rejection_sampler import RejectionSampler
    from xlite_runner.serving.sample.sampler import Sampler
    from xlite_runner.serving.worker.step_inputs import SpecDecodeMetadata

    made = batch(**params)
    torch = made.torch
    rows = np.arange(NUM_REQS)
    spec = SpecDecodeMetadata(
        num_draft_tokens=np.ones(NUM_REQS, dtype=np.int32),
        draft_token_ids=torch.zeros(NUM_REQS, dtype=torch.int32, device="npu"),
        draft_rows=rows,
        target_logits_indices=torch.from_numpy(2 * rows).to("npu"),
        bonus_logits_indices=torch.from_numpy(2 * rows + 1).to("npu"),
        cu_num_draft_tokens=torch.from_numpy(rows + 1).to("npu", torch.int32),
        cu_num_sampled_tokens=torch.from_numpy(2 * rows + 2).to("npu", torch.int32),
    )
    sampler = RejectionSampler(Sampler(A2, made.buffers.batch.neg_inf))
    peak, output = peak_of(
        torch,
        lambda: torch.empty(2 * NUM_REQS, VOCAB_SIZE, dtype=torch.bfloat16, device="npu"),
        lambda logits: sampler(logits, made.rows.sampling_metadata, spec, [[0]] * NUM_REQS),
    )
    assert output.sampled_token_ids.shape == (NUM_REQS, 2)
    most_probable = 2 * NUM_REQS * params.get("logprobs", 0) * (4 + 8)  # log probabilities and ids, part of the result
    assert_takes(peak, units + mask, most_probable)
