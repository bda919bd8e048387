"""Start-ups on the device under test: simulated, the real torch_npu on the stub CANN, or a card.

What a start-up measures is the same on each of them, since the runner is, and so is what is checked here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = EXAMPLES / "tiny.toml"
MOE = EXAMPLES / "qwen3-30b-a3b-tp2-ep2.toml"
A2 = {"device_profile": "a2-64g", "total_memory_bytes": 65452113920, "free_memory_bytes": 65068760000}
"""The simulated card; what the stub is, too. A card is what it is."""
MIB, GIB = 1 << 20, 1 << 30
POLICIES = ("runnable", "skip")

pytestmark = pytest.mark.needs("xlite", "vllm_ascend")


def sampler_bytes(rank) -> int:
    """Of the dummy sampler run: a row of hidden states and of logits for each request."""
    rows, model = rank.config.scheduler.max_num_seqs, rank.config.model
    tp_size = rank.config.parallel.tensor_parallel_size
    logits = 2 * rows * model.vocab_size
    return 2 * rows * model.hidden_size + logits + (logits + logits // tp_size if tp_size > 1 else 0)


def test_full_mode_sets_memory_aside_for_sampling_only(start_rank):
    """What PR #11380 is about: serving will not execute the model, so its activations are nobody's business."""
    rank = start_rank(TINY, "skip")
    assert 0 <= rank.memory.peak_activation_bytes - sampler_bytes(rank) < 32768, "the profile run executed the model"


def test_before_the_fix_the_model_was_executed(start_rank):
    rank = start_rank(TINY, "runnable")
    assert rank.memory.peak_activation_bytes > 10 * sampler_bytes(rank)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_pool_is_seen_as_memory_outside_torch(start_rank, policy):
    rank = start_rank(TINY, policy)
    pool_mb = rank.memory.xlite_pool_mb
    assert f"xlite runtime pool size: {pool_mb} MB" in rank.result.log_lines
    assert 0 < pool_mb * MIB <= rank.memory.non_torch_bytes < GIB


@pytest.mark.parametrize("policy", POLICIES)
def test_the_cache_is_planned_into_what_is_left(start_rank, policy):
    """And with it, no more is in use than was asked for, but for what whole segments have more."""
    import torch

    rank = start_rank(TINY, policy)
    memory = rank.memory
    non_kv = memory.weights_bytes + memory.peak_activation_bytes + memory.non_torch_bytes
    assert memory.available_kv_cache_bytes == pytest.approx(memory.requested_memory_bytes - non_kv, abs=1)
    page_bytes = {spec.page_size_bytes for spec in rank.worker.get_kv_cache_spec().values()}
    block_bytes = rank.config.model.num_hidden_layers * page_bytes.pop()
    assert rank.result.num_gpu_blocks == memory.available_kv_cache_bytes // block_bytes
    assert memory.kv_cache_bytes >= rank.result.num_gpu_blocks * block_bytes
    taken = memory.free_memory_at_start_bytes - torch.npu.mem_get_info()[0]
    assert taken <= memory.requested_memory_bytes + 64 * MIB


@pytest.mark.parametrize("policy", POLICIES)
def test_the_profile_run_can_be_repeated_within_what_was_set_aside(start_rank, policy):
    """Its tensors are gone, and the largest step finds the room again."""
    import torch

    rank = start_rank(TINY, policy)
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    with torch.inference_mode():
        rank.worker.model_runner.profile_run()
    assert torch.npu.max_memory_allocated() - before <= rank.memory.peak_activation_bytes
    assert torch.npu.memory_allocated() == before


@pytest.mark.needs("lone_rank", "no_workspaces")
@pytest.mark.parametrize(("policy", "peak_gib"), [("runnable", 0.7253), ("skip", 0.0455)])
def test_mixture_of_experts_on_two_cards(start_rank, policy, peak_gib):
    """Qwen3-30B-A3B, TP2 EP2, on cards that gather instead of exchanging: peaks of 3 layers are those of all."""
    rank = start_rank(MOE, policy, num_layers=3, **A2)
    assert rank.memory.peak_activation_bytes / GIB == pytest.approx(peak_gib, abs=0.0005)
    assert rank.result.num_gpu_blocks > 0


@pytest.mark.slow
@pytest.mark.needs("lone_rank", "no_workspaces")
def test_published_model_on_two_cards(start_rank):
    """All 48 layers: the published log's weights and pool, and what the fix saves."""
    results = [start_rank(MOE, policy, **A2).result for policy in POLICIES]
    for result in results:
        assert "Loading model weights took 28.4768 GB" in result.log_lines
        assert "xlite runtime pool size: 519 MB" in result.log_lines
    before, after = (result.ranks[0] for result in results)
    assert before.non_torch_bytes == after.non_torch_bytes
    saved = before.peak_activation_bytes - after.peak_activation_bytes
    assert saved / GIB == pytest.approx(0.7253 - 0.0455, abs=0.001)
    more = after.available_kv_cache_bytes - before.available_kv_cache_bytes
    assert more == pytest.approx(saved, abs=1)
