"""Whole start-ups on the simulated device, against what was published and what the references derive from it.

The published pair is the log of vllm-ascend PR #11380: Qwen3-30B-A3B, TP2 EP2, two A3 dies, before and after the fix.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from npusim.device.profile import load_profile

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED = EXAMPLES / "qwen3-30b-a3b-tp2-ep2.toml"
DECODE_ONLY = EXAMPLES / "qwen3-30b-a3b-decode-only.toml"
MIB = 1 << 20
POOL_BYTES_519_MB = 519 * MIB

pytestmark = pytest.mark.sim_only("these are particular cards with particular memory")


@pytest.fixture(scope="module")
def short_model(tmp_path_factory):
    """The published model with 3 of its 48 layers: for figures that do not depend on their number."""
    path = tmp_path_factory.mktemp("models") / "short.json"
    model = json.loads((EXAMPLES / "models" / "Qwen3-30B-A3B.json").read_text())
    path.write_text(json.dumps(model | {"num_hidden_layers": 3}))
    return path


def owned(result, owner, label="", rank=0):
    return sum(row.num_bytes for row in result.ranks[rank].ledger if row.owner == owner and label in row.label)


PUBLISHED = {
    "runnable": (
        "xlite runtime pool size: 519 MB",
        "Available KV cache memory: 25.53 GiB",
        "GPU KV cache size: 557,696 tokens",
        "Maximum concurrency for 40,960 tokens per request: 13.62x",
        "Free memory on device (60.89/61.27 GiB) on startup.",
        "Desired GPU memory utilization is (0.95, 58.21 GiB).",
        "28.48 GiB for weights",
        "3.56 GiB for non-torch memory",
        "0.0 GiB for NPU graph memory",
        "`--kv-cache-memory=27260496384` (25.39 GiB) to fit into requested memory",
        "`--kv-cache-memory=30142716416` (28.07 GiB) to fully utilize NPU free memory",
        "Current KV cache memory: 25.53 GiB.",
    ),
    "skip": (
        "xlite runtime pool size: 519 MB",
        "Available KV cache memory: 28.67 GiB",
        "GPU KV cache size: 626,176 tokens",
        "Maximum concurrency for 40,960 tokens per request: 15.29x",
        "Free memory on device (60.89/61.27 GiB) on startup.",
        "Desired GPU memory utilization is (0.95, 58.21 GiB).",
        "28.48 GiB for weights",
        "0.05 GiB for peak activation",
        "1.02 GiB for non-torch memory",
        "0.0 GiB for NPU graph memory",
        "`--kv-cache-memory=30625051136` (28.52 GiB) to fit into requested memory",
        "`--kv-cache-memory=33509896704` (31.21 GiB) to fully utilize NPU free memory",
        "Current KV cache memory: 28.67 GiB.",
    ),
}


@pytest.mark.parametrize(("policy", "text"), [(policy, text) for policy, texts in PUBLISHED.items() for text in texts])
def test_published_log(start_scenario, policy, text):
    """Every figure that the two published logs print, in their wording; peak activation before the fix see below."""
    assert any(text in line for line in start_scenario(SEED, policy).log_lines)


def test_peak_activation_before_the_fix(start_scenario):
    """The log prints 0.64 GiB; how far expert routing is out of balance is the device's random stream's to say.

    Without imbalance the peak is 644.4 MiB, and each row that a rank gets more costs three rows of 4 KiB. The reference
    bounds the rest by 6 MiB.
    """
    result = start_scenario(SEED, "runnable")
    assert abs(result.limiting_rank.peak_activation_bytes - 0.635 * (1 << 30)) < 6 * MIB


def test_peak_activation_after_the_fix_is_the_dummy_sampler_run(start_scenario):
    """64 rows of hidden states, this rank's logits, the gathered logits and their copy: 46.6 MiB."""
    logits_bytes = 64 * 151936 * 2
    expected = 64 * 2048 * 2 + logits_bytes // 2 + 2 * logits_bytes
    for rank in start_scenario(SEED, "skip").ranks:
        assert 0 <= rank.peak_activation_bytes - expected < 4096


def test_same_model_on_a2_has_no_expert_exchange(start_scenario, short_model):
    """Scenario 2: all-gather instead of all-to-all, so the peak is 0.725 GiB and neither ep nor mc2 takes buffers."""
    a2 = {"total_memory_bytes": 65452113920, "free_memory_bytes": 65068760000, "device_profile": "a2-64g"}
    before, after = (start_scenario(SEED, policy, model=short_model, **a2) for policy in ("runnable", "skip"))
    assert before.ranks[0].peak_activation_bytes / (1 << 30) == pytest.approx(0.7253, abs=0.0005)
    for result in (before, after):
        assert {row.label.partition(":")[0] for row in result.ranks[0].ledger if "buffers" in row.label} == {"tp"}
    assert before.ranks[0].non_torch_bytes == after.ranks[0].non_torch_bytes


@pytest.mark.parametrize("megabytes", [200, pytest.param(512, marks=pytest.mark.slow)])
def test_hccl_buffsize_counts_only_where_mc2_runs(start_scenario, short_model, megabytes):
    """Scenario 3: non-torch memory before the fix follows HCCL_BUFFSIZE twice, after it not at all."""

    def non_torch_bytes(policy, **settings):
        return start_scenario(SEED, policy, model=short_model, **settings).ranks[0].non_torch_bytes

    smaller = {"environment": {"HCCL_BUFFSIZE": megabytes}}
    assert non_torch_bytes("runnable") - non_torch_bytes("runnable", **smaller) == 2 * (1024 - megabytes) * MIB
    assert non_torch_bytes("skip") == non_torch_bytes("skip", **smaller)


def test_decode_only_profiles_the_model_under_either_policy(start_scenario, short_model):
    """Scenario 4: the fix changes nothing, the pool is 99 MB, and the cache gets about as little as before the fix."""
    before, after = (start_scenario(DECODE_ONLY, policy, model=short_model) for policy in ("runnable", "skip"))
    full, fixed = (start_scenario(SEED, policy, model=short_model) for policy in ("runnable", "skip"))
    for result in (before, after):
        assert "xlite runtime pool size: 99 MB" in result.log_lines
        assert result.ranks[0].peak_activation_bytes == full.ranks[0].peak_activation_bytes
        assert owned(result, "xlite pool") == 100 * MIB  # whole pages of 2 MiB
    assert before.ranks[0].available_kv_cache_bytes == after.ranks[0].available_kv_cache_bytes
    assert full.ranks[0].available_kv_cache_bytes < before.ranks[0].available_kv_cache_bytes
    assert before.ranks[0].available_kv_cache_bytes < fixed.ranks[0].available_kv_cache_bytes


def test_poorest_rank_decides(start_scenario, short_model):
    """Scenario 9: a smaller card on one rank means as many blocks for both as it can hold."""
    total, free = 65787658240, 65383120896
    memory = {
        "total_memory_bytes": [total, total - 1024 * MIB],
        "free_memory_bytes": [free, free - 1024 * MIB],
    }
    result = start_scenario(SEED, "skip", model=short_model, **memory)
    rich, limiting = result.ranks
    assert result.limiting_rank is limiting
    assert rich.available_kv_cache_bytes - limiting.available_kv_cache_bytes == pytest.approx(0.95 * 1024 * MIB, abs=2)
    assert result.num_gpu_blocks == limiting.available_kv_cache_bytes // (3 * 2 * 128 * 2 * 128 * 2)


@pytest.mark.parametrize("is_moe", [False, True])
def test_the_poorest_rank_of_each_replica_decides_for_that_replica(start_scenario, short_model, is_moe):
    """As vLLM's engine cores, of which there is one for each replica; compared with them in ``tests/upstream``."""
    total = 65787658240
    settings = {"model": short_model, "enable_expert_parallel": True} if is_moe else {}
    memory = {"total_memory_bytes": [total - gib * 1024 * MIB for gib in (0, 1, 3, 2)]}
    memory |= {"gpu_memory_utilization": 0.5}
    tiny = EXAMPLES / "tiny.toml"
    result = start_scenario(tiny, "skip", tensor_parallel_size=2, data_parallel_size=2, **settings, **memory)
    first, second, third, fourth = result.ranks
    assert first.kv_cache_bytes == second.kv_cache_bytes > third.kv_cache_bytes == fourth.kv_cache_bytes
    assert second.available_kv_cache_bytes - third.available_kv_cache_bytes > 64 * MIB
    assert result.limiting_rank is third
    assert abs(third.available_kv_cache_bytes - third.kv_cache_bytes) < 3 * MIB
    lines = [line for line in result.log_lines if line.startswith("GPU KV cache size")]
    assert len(set(lines)) == 2


def test_neighbour_that_was_there_before_costs_nothing_more(start_scenario, short_model):
    """Scenario 8: only what is taken after the first snapshot counts."""
    alone = start_scenario(SEED, "skip", model=short_model)
    shared = start_scenario(
        SEED,
        "skip",
        model=short_model,
        free_memory_bytes=65383120896 - 2048 * MIB,
        other_processes=[{"name": "first instance", "memory_bytes": 2048 * MIB}],
    )
    assert owned(shared, "other process") == 2048 * MIB
    assert shared.ranks[0].free_memory_at_start_bytes == alone.ranks[0].free_memory_at_start_bytes - 2048 * MIB
    assert shared.ranks[0].available_kv_cache_bytes == alone.ranks[0].available_kv_cache_bytes


@pytest.mark.npu_settings(other_processes={"neighbour": 4096 * MIB})
def test_profiling_refuses_when_a_neighbour_leaves_meanwhile(npu_world):
    """Scenario 8: memory that others give back during profiling would count as the instance's own; upstream asserts."""
    import torch.distributed as dist

    from xlite_runner.config import ModelConfig, ProfilePolicy, check_and_update_config
    from xlite_runner.scenario import load_scenario
    from xlite_runner.worker import XliteWorker

    scenario = load_scenario(EXAMPLES / "tiny.toml")
    config = check_and_update_config(scenario, ModelConfig.from_hf(scenario.model))
    worker = XliteWorker(config, 0, 0, dist.HashStore(), ProfilePolicy.SKIP)
    worker.init_device()
    worker.load_model()
    npu_world.cards[0].other_processes["neighbour"].resize(0)
    with pytest.raises(AssertionError, match=r"^Error in memory profiling\. Initial free memory [\d.]+ GiB, curr"):
        worker.determine_available_memory()


def test_ledger_is_all_of_the_used_memory(start_scenario):
    for policy in ("runnable", "skip"):
        for rank in start_scenario(SEED, policy).ranks:
            held = sum(row.num_bytes for row in rank.ledger)
            assert rank.free_memory_at_start_bytes < rank.total_memory_bytes
            assert held <= rank.total_memory_bytes
            assert {row.grade for row in rank.ledger} <= {"exact", "calibrated", "assumed"}
            assert rank.kv_cache_bytes <= held


def predicted_tokens(start_scenario, short_model, policy, profile):
    """Tokens of the published configuration if its devices had this profile.

    What the profile calibrates is part of non-torch memory; by how much does not depend on the number of layers.
    """
    rank = start_scenario(SEED, policy).limiting_rank
    calibrated, blind = (
        start_scenario(SEED, policy, model=short_model, profile=each).ranks[rank.rank].non_torch_bytes
        for each in (None, profile)
    )
    return (rank.available_kv_cache_bytes + calibrated - blind) // (48 * 2 * 128 * 2 * 128 * 2) * 128


@pytest.mark.slow
def test_prediction_of_the_old_run_from_the_new_one(start_scenario, short_model):
    """Calibrated on the log after the fix alone, the tokens of the run before it come out within 1 %."""
    profile = load_profile("a3-64g")
    blind = replace(profile, communicator_control_bytes=profile.hccl_runtime_bytes)
    assert predicted_tokens(start_scenario, short_model, "skip", blind) == 626_176
    assert predicted_tokens(start_scenario, short_model, "runnable", blind) == pytest.approx(557_696, rel=0.01)


@pytest.mark.slow
def test_prediction_without_either_log(start_scenario, short_model):
    """With what communicators cost on another card (a public 910B log) instead, both come out within 1 %."""
    other = load_profile("a2-64g").hccl_runtime_bytes
    blind = replace(load_profile("a3-64g"), hccl_runtime_bytes=other, communicator_control_bytes=other)
    assert predicted_tokens(start_scenario, short_model, "skip", blind) == pytest.approx(626_176, rel=0.01)
    assert predicted_tokens(start_scenario, short_model, "runnable", blind) == pytest.approx(557_696, rel=0.01)
