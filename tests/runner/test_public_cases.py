"""KV-cache and budget arithmetic against figures of public start-ups; their sources are in tests/data/public_cases."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from xlite_runner.budget import (
    GIB,
    REDUNDANCY_BUFFER_BYTES,
    NonKVMemory,
    available_kv_cache_memory,
    available_kv_cache_message,
    free_memory_message,
    requested_memory,
    suggest_kv_cache_memory,
)
from xlite_runner.config import EngineArgs, ModelConfig, ParallelConfig, RunnerConfig, check_and_update_config
from xlite_runner.config.model_config import SUPPORTED_ARCHITECTURES
from xlite_runner.kv_cache import FullAttentionSpec, KVCacheConfig, get_kv_cache_configs

DATA = Path(__file__).parents[1] / "data" / "public_cases"
CASES = [json.loads(line) for path in sorted(DATA.glob("*.jsonl")) for line in path.read_text().splitlines()]
PLANS = [
    pytest.param(case, plan, id=f"{case['id']}-{index}")
    for case in CASES
    for index, plan in enumerate(case.get("plans", ()))
]
BUDGETS = [pytest.param(case["budget"], id=case["id"]) for case in CASES if "budget" in case]
ROUNDING_GIB = 0.005


def spec_of(case: dict[str, Any]) -> dict[str, FullAttentionSpec]:
    kv = case["kv"]
    num_kv_heads = max(1, kv["num_kv_heads"] // kv["tensor_parallel_size"])
    spec = FullAttentionSpec(
        block_size=kv["block_size"], num_kv_heads=num_kv_heads, head_size=kv["head_size"], dtype_size=kv["dtype_size"]
    )
    return {f"model.layers.{index}.self_attn.attn": spec for index in range(kv["num_layers"])}


def runner_config(max_model_len: int, num_gpu_blocks_override: int | None) -> RunnerConfig:
    model = ModelConfig(
        architecture="Qwen3ForCausalLM",
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=1 << 30,
    )
    args = EngineArgs(max_model_len=max_model_len, num_gpu_blocks_override=num_gpu_blocks_override)
    return check_and_update_config(args, model)


def plan_kv_cache(case: dict[str, Any], plan: dict[str, Any], available: list[int]) -> list[KVCacheConfig]:
    # Where no length was printed, one block's worth of tokens leaves the number of blocks alone.
    config = runner_config(plan.get("max_model_len", case["kv"]["block_size"]), plan.get("num_gpu_blocks"))
    return get_kv_cache_configs([spec_of(case)] * len(available), available, config)


def printed_bytes(gib: float) -> tuple[int, int]:
    """The smallest and largest number of bytes that print as ``gib``."""
    return int((gib - ROUNDING_GIB) * GIB), int((gib + ROUNDING_GIB) * GIB)


def test_every_case_is_of_a_supported_architecture_and_has_a_source() -> None:
    assert len(CASES) == 23
    assert {case["architecture"] for case in CASES} <= set(SUPPORTED_ARCHITECTURES)
    assert all(case["source"] for case in CASES)


@pytest.mark.parametrize(("case", "plan"), [p for p in PLANS if "available_bytes" in p.values[1]])
def test_exact_memory_gives_the_printed_capacity(
    case: dict[str, Any], plan: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "xlite_runner")
    available = plan["available_bytes"]
    config = plan_kv_cache(case, plan, available)[0]
    bytes_per_block = config.group.bytes_per_block
    if "limiting_worker" in plan:
        assert config.num_blocks == available[plan["limiting_worker"]] // bytes_per_block
    if "tokens" in plan:
        assert config.num_blocks * case["kv"]["block_size"] == plan["tokens"]
        if plan["max_model_len"] % case["kv"]["block_size"] == 0:  # later versions derive tokens from the concurrency
            assert f"GPU KV cache size: {plan['tokens']:,} tokens" in caplog.messages
    if "concurrency" in plan:
        length = plan["max_model_len"]
        assert f"Maximum concurrency for {length:,} tokens per request: {plan['concurrency']:.2f}x" in caplog.messages


@pytest.mark.parametrize(
    ("case", "plan"), [p for p in PLANS if "available_gib" in p.values[1] and "tokens" in p.values[1]]
)
def test_rounded_memory_brackets_the_printed_capacity(case: dict[str, Any], plan: dict[str, Any]) -> None:
    least, most = (plan_kv_cache(case, plan, [num_bytes])[0] for num_bytes in printed_bytes(plan["available_gib"]))
    block_size = case["kv"]["block_size"]
    assert least.num_blocks * block_size <= plan["tokens"] <= most.num_blocks * block_size
    if "concurrency" in plan:
        exact = KVCacheConfig(num_blocks=plan["tokens"] // block_size, group=least.group, tensors=())
        assert f"{exact.max_concurrency(plan['max_model_len']):.2f}" == f"{plan['concurrency']:.2f}"
        assert exact.num_tokens(plan["max_model_len"]) == plan["tokens"]


@pytest.mark.parametrize(("case", "plan"), [p for p in PLANS if "num_gpu_blocks" in p.values[1]])
def test_printed_blocks_give_the_printed_capacity(case: dict[str, Any], plan: dict[str, Any]) -> None:
    config = plan_kv_cache(case, plan, [1])[0]
    assert config.num_blocks == plan["num_gpu_blocks"]
    if "tokens" in plan:
        assert config.num_blocks * case["kv"]["block_size"] == plan["tokens"]
    if "concurrency" in plan:
        assert f"{config.max_concurrency(plan['max_model_len']):.2f}" == f"{plan['concurrency']:.2f}"
    if "page_size_bytes" in plan:
        assert config.group.kv_cache_spec.page_size_bytes == plan["page_size_bytes"]
    num_bytes = sum(tensor.num_bytes for tensor in config.tensors)
    if "available_at_most_gib" in plan:
        assert num_bytes <= printed_bytes(plan["available_at_most_gib"])[1]
    if "kv_cache_gib" in plan:
        assert round(num_bytes / GIB, 2) == plan["kv_cache_gib"]


@pytest.mark.parametrize(("case", "plan"), [p for p in PLANS if "estimated_max_model_len" in p.values[1]])
def test_too_small_a_cache_gives_the_printed_estimate(case: dict[str, Any], plan: dict[str, Any]) -> None:
    estimates = []
    for available in printed_bytes(plan["available_gib"]):
        with pytest.raises(ValueError, match="estimated maximum model length is") as caught:
            plan_kv_cache(case, plan, [available])
        found = re.search(r"length is (\d+)\.", str(caught.value))
        assert found
        estimates.append(int(found[1]))
    assert estimates[0] <= plan["estimated_max_model_len"] <= estimates[1]


def non_kv_of(budget: dict[str, Any]) -> NonKVMemory:
    # Some logs print a sum of components only; which of them it is counted as does not matter here.
    weights = budget.get("weights_gib", 0) + budget.get("weights_and_activation_gib", 0) + budget.get("non_kv_gib", 0)
    return NonKVMemory(
        weights=int(weights * GIB),
        peak_activation=int(budget.get("peak_activation_gib", 0) * GIB),
        non_torch=int(budget.get("non_torch_gib", 0) * GIB),
    )


def requested_of(budget: dict[str, Any]) -> float:
    if "total_gib" not in budget:
        return float(budget["requested_gib"] * GIB)
    return requested_memory(int(budget["total_gib"] * GIB), budget["gpu_memory_utilization"])


@pytest.mark.parametrize("budget", [p for p in BUDGETS if {"total_gib", "requested_gib"} <= p.values[0].keys()])
def test_requested_memory(budget: dict[str, Any]) -> None:
    assert requested_of(budget) / GIB == pytest.approx(budget["requested_gib"], abs=2 * ROUNDING_GIB)


@pytest.mark.parametrize("budget", [p for p in BUDGETS if "available_gib" in p.values[0]])
def test_available_memory_is_what_the_components_leave(budget: dict[str, Any]) -> None:
    available = available_kv_cache_memory(requested_of(budget), non_kv_of(budget))
    num_rounded = sum(key.endswith("_gib") for key in budget)
    assert available / GIB == pytest.approx(budget["available_gib"], abs=num_rounded * ROUNDING_GIB)


@pytest.mark.parametrize("budget", [p for p in BUDGETS if "suggested_fit_requested" in p.values[0]])
def test_suggestions(budget: dict[str, Any]) -> None:
    graph, free = int(budget["graph_gib"] * GIB), int(budget["free_gib"] * GIB)
    suggested = suggest_kv_cache_memory(requested_of(budget), free, non_kv_of(budget), graph)
    tolerance = 5 * ROUNDING_GIB * GIB
    assert suggested.fit_requested == pytest.approx(budget["suggested_fit_requested"], abs=tolerance)
    if "suggested_use_free" in budget:
        assert suggested.use_free == pytest.approx(budget["suggested_use_free"], abs=tolerance)
        difference = budget["suggested_use_free"] - budget["suggested_fit_requested"]
        printed = (budget["free_gib"] - budget["requested_gib"]) * GIB
        assert difference == pytest.approx(printed, abs=2 * ROUNDING_GIB * GIB)


TOTAL_BYTES = 62740 << 20  # 61.27 GiB; examples/qwen3-30b-a3b-tp2-ep2.toml says why this very number
SEEDS = [case for case in CASES if case["kind"] == "xlite"]


@pytest.mark.parametrize("case", SEEDS, ids=lambda case: case["id"])
def test_published_xlite_runs_to_the_byte(case: dict[str, Any]) -> None:
    """With weights and peak as the model has them, every printed figure follows from the suggestions."""
    budget = case["budget"]
    requested = requested_memory(TOTAL_BYTES, 0.95)
    free = int(requested) + budget["suggested_use_free"] - budget["suggested_fit_requested"]
    available = case["plans"][0]["available_bytes"][0]
    weights, activation = 29_159 << 20, {0.64: 655 << 20, 0.05: 47 << 20}[budget["peak_activation_gib"]]
    non_kv = NonKVMemory(
        weights=weights, peak_activation=activation, non_torch=int(requested) - available - weights - activation
    )
    assert available_kv_cache_memory(requested, non_kv) == available
    assert available_kv_cache_message(available) == f"Available KV cache memory: {budget['available_gib']:.2f} GiB"
    fit, use = budget["suggested_fit_requested"], budget["suggested_use_free"]
    assert free_memory_message(
        total=TOTAL_BYTES,
        free_at_start=free,
        gpu_memory_utilization=0.95,
        requested=requested,
        non_kv=non_kv,
        graph=0,
        available=available,
    ) == (
        "Free memory on device (60.89/61.27 GiB) on startup. Desired GPU memory utilization is (0.95, 58.21 GiB). "
        f"Actual usage: 28.48 GiB for weights, {budget['peak_activation_gib']} GiB for peak activation, "
        f"{budget['non_torch_gib']} GiB for non-torch memory, 0.0 GiB for NPU graph memory. Replace "
        f"gpu_memory_utilization with `--kv-cache-memory={fit}` ({round(fit / GIB, 2)} GiB) to fit into requested "
        f"memory, or `--kv-cache-memory={use}` ({round(use / GIB, 2)} GiB) to fully utilize NPU free memory. "
        f"Current KV cache memory: {budget['available_gib']} GiB."
    )


@pytest.mark.parametrize(
    ("requested", "free", "graph", "graph_estimate"), [(1e10, 2 * 10**10, 0, 0), (7.5e9, 8 * 10**9, 77, 5_000_001)]
)
def test_identities(requested: float, free: int, graph: int, graph_estimate: int) -> None:
    non_kv = NonKVMemory(weights=3_000_000_001, peak_activation=70_000, non_torch=400_000_000)
    suggested = suggest_kv_cache_memory(requested, free, non_kv, graph)
    available = available_kv_cache_memory(requested, non_kv, graph_estimate)
    assert suggested.use_free - suggested.fit_requested == free - int(requested)
    fraction = available - suggested.fit_requested - (REDUNDANCY_BUFFER_BYTES + graph - graph_estimate)
    assert 0 <= fraction < 1


def test_kv_heads_are_replicated_when_there_are_more_ranks_than_heads() -> None:
    assert runner_config(16, None).model.get_num_kv_heads(ParallelConfig(tensor_parallel_size=16)) == 1
