"""A drafter: what it takes, and what decode steps of two tokens meet."""

from __future__ import annotations

import pytest
import torch

from npusim.told import ToldTokens
from tests.serving.conftest import DECODE_ONLY, DENSE, FULL
from tests.serving.steps import Client, run_step
from xlite_runner.config import EngineArgs, ModelConfig, check_and_update_config
from xlite_runner.errors import ScenarioError

MIB = 1 << 20
NUM_REQS, HIDDEN_SIZE = 64, 2048

told = pytest.mark.npu_settings(told_values=ToldTokens(DENSE["vocab_size"]))


def test_buffers_of_the_published_size(npu_device):
    from xlite_runner.serving.worker.mtp_proposer import MtpProposer

    model = ModelConfig.from_hf(DENSE | {"hidden_size": HIDDEN_SIZE})
    args = EngineArgs(max_num_seqs=NUM_REQS, max_num_batched_tokens=8192, num_speculative_tokens=1)
    made = MtpProposer(check_and_update_config(args, model), npu_device)
    assert torch.npu.memory_stats()["requested_bytes.all.current"] / MIB == pytest.approx(64.3, abs=0.03)
    del made


def test_more_than_one_draft_is_refused(npu_device):
    from xlite_runner.serving.worker.mtp_proposer import MtpProposer

    args = EngineArgs(max_num_batched_tokens=512, num_speculative_tokens=2)
    config = check_and_update_config(args, ModelConfig.from_hf(DENSE))
    with pytest.raises(ScenarioError, match=r"^num_speculative_tokens = 2 is not supported; allowed: 1$"):
        MtpProposer(config, npu_device)


def test_the_drafter_has_a_layer_of_the_cache(make_worker):
    specs = make_worker(num_speculative_tokens=1).get_kv_cache_spec()
    assert list(specs) == [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]


def decode_twice(execute, num_reqs):
    """Prefill without drafts, then a step with the drafts that it gave."""
    clients = [Client(f"r{row}", [row], blocks=[row + 1]) for row in range(num_reqs)]
    drafts = run_step(execute, clients, {client.req_id: 1 for client in clients}).draft_token_ids
    assert set(drafts) == {client.req_id for client in clients}
    return run_step(execute, clients, {client.req_id: 2 for client in clients}, drafts)


@told
@pytest.mark.needs("atb")
def test_decode_only_xlite_has_room_for_half_the_requests(make_worker):
    """Its largest step is as many tokens as there can be requests, and each brings two: 32 fit, 33 do not."""
    settings = {"max_num_seqs": 64, "num_blocks": 66, "num_speculative_tokens": 1}
    output = decode_twice(make_worker(xlite=DECODE_ONLY, **settings).execute_model, 32)
    assert len(output.sampled_token_ids) == 32
    with pytest.raises(RuntimeError, match=r"invalid attnMeta batched tokens\(\d+\) > maxBatchedTokens\(64\)"):
        decode_twice(make_worker(xlite=DECODE_ONLY, **settings).execute_model, 33)


@told
@pytest.mark.needs("atb")
def test_full_mode_has_room_for_all(make_worker):
    execute = make_worker(xlite=FULL, max_num_seqs=64, num_blocks=66, num_speculative_tokens=1).execute_model
    assert len(decode_twice(execute, 64).sampled_token_ids) == 64
