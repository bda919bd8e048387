"""The KV-cache plan: page size, minimum over workers, override, and the checks with upstream's texts."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlite_runner.config import EngineArgs, ModelConfig, RunnerConfig, check_and_update_config
from xlite_runner.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, get_kv_cache_configs

ORACLE = Path(__file__).parents[1] / "data" / "kv_planning" / "vllm_0.23.0.jsonl"
MODEL = ModelConfig.from_hf(Path(__file__).parents[2] / "examples" / "models" / "Qwen3-30B-A3B.json")
CONFIG = check_and_update_config(EngineArgs(max_model_len=40960), MODEL)
SPEC = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=128, dtype_size=2)
BLOCK_BYTES = 6_291_456  # of the published run: 48 layers, a page of 131072 bytes each
NO_MEMORY = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
    "(this flag also controls CPU memory reservation on the CPU backend, despite its name). "
    "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)


def layers(spec: KVCacheSpec = SPEC, count: int = 48) -> dict[str, KVCacheSpec]:
    return {f"model.layers.{index}.self_attn.attn": spec for index in range(count)}


def with_override(num_blocks: int | None) -> RunnerConfig:
    return replace(CONFIG, cache=replace(CONFIG.cache, num_gpu_blocks_override=num_blocks))


def test_page_size() -> None:
    assert SPEC.page_size_bytes == 131_072
    group = KVCacheGroupSpec(layer_names=tuple(layers()), kv_cache_spec=SPEC)
    assert group.bytes_per_block == BLOCK_BYTES
    assert group.blocks_per_request(40960) == 320
    assert SPEC.max_memory_usage_bytes(129) == 2 * 131_072


def test_every_worker_gets_what_the_poorest_can_hold(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xlite_runner")
    configs = get_kv_cache_configs([layers()] * 3, [30_782_337_536, 27_417_782_784, 30_000_000_000], CONFIG)
    assert [config.num_blocks for config in configs] == [4357] * 3
    assert {tensor.num_bytes for config in configs for tensor in config.tensors} == {4357 * 131_072}
    assert [tensor.layer_name for tensor in configs[0].tensors] == list(layers())
    assert configs[0].num_tokens(40960) == 557_696
    assert caplog.messages == [
        "GPU KV cache size: 557,696 tokens",
        "Maximum concurrency for 40,960 tokens per request: 13.62x",
    ]


def test_override_replaces_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "xlite_runner")
    configs = get_kv_cache_configs([layers()] * 2, [4 * BLOCK_BYTES + 1, -5], with_override(400))
    assert [config.num_blocks for config in configs] == [400, 400]
    assert caplog.messages[:2] == [
        "Overriding num_gpu_blocks=4 with num_gpu_blocks_override=400",
        "Overriding num_gpu_blocks=-1 with num_gpu_blocks_override=400",
    ]


def test_override_is_what_the_check_sees() -> None:
    with pytest.raises(ValueError, match=r"the estimated maximum model length is 1280\. "):
        get_kv_cache_configs([layers()], [10**12], with_override(10))


@pytest.mark.parametrize("available", [0, -2500])
def test_no_memory(available: int) -> None:
    with pytest.raises(ValueError, match="No available memory") as caught:
        get_kv_cache_configs([layers()] * 2, [10**12, available], CONFIG)
    assert str(caught.value) == NO_MEMORY


def test_too_little_for_one_request() -> None:
    with pytest.raises(ValueError, match="To serve") as caught:
        get_kv_cache_configs([layers()], [300 * BLOCK_BYTES + 1], CONFIG)
    assert str(caught.value) == (
        "To serve at least one request with the model's max seq len (40960), (1.88 GiB KV cache is needed, which is "
        "larger than the available KV cache memory (1.76 GiB). Based on the available memory, the estimated maximum "
        "model length is 38400. Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU "
        "backend) or decreasing `max_model_len` when initializing the engine. "
        "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
    )


def test_too_little_for_one_token_has_no_estimate() -> None:
    with pytest.raises(ValueError, match=r"memory \(0\.01 GiB\)\. Try increasing"):
        get_kv_cache_configs([layers()], [BLOCK_BYTES - 1], CONFIG)


def test_exactly_one_request_fits() -> None:
    config = get_kv_cache_configs([layers()], [320 * BLOCK_BYTES], CONFIG)[0]
    assert config.max_concurrency(40960) == 1.0


def test_layers_that_differ_are_refused() -> None:
    specs = layers() | {"other": replace(SPEC, num_kv_heads=1)}
    with pytest.raises(NotImplementedError, match="layers with different needs"):
        get_kv_cache_configs([specs], [10**12], CONFIG)


@dataclass(frozen=True, kw_only=True)
class WindowSpec(FullAttentionSpec):
    """Another kind of attention, which needs no more than ``window`` tokens."""

    window: int

    def max_memory_usage_bytes(self, max_model_len: int) -> int:
        return super().max_memory_usage_bytes(min(max_model_len, self.window))


def test_another_kind_of_attention_needs_only_its_spec() -> None:
    spec = WindowSpec(block_size=128, num_kv_heads=2, head_size=128, dtype_size=2, window=1024)
    config = get_kv_cache_configs([layers(spec)], [16 * BLOCK_BYTES], CONFIG)[0]
    assert config.max_concurrency(40960) == 2.0
    assert config.num_tokens(40960) == 2 * 40960


@settings(derandomize=True, max_examples=50, database=None)
@given(
    available=st.integers(min_value=1, max_value=10**11),
    upper_bound=st.integers(min_value=1, max_value=100_000),
    block_size=st.sampled_from([16, 64, 128]),
)
def test_estimate_is_the_longest_that_fits(available: int, upper_bound: int, block_size: int) -> None:
    group = KVCacheGroupSpec(layer_names=("a", "b"), kv_cache_spec=replace(SPEC, block_size=block_size))
    estimate = group.estimate_max_model_len(available, upper_bound)
    assert 0 <= estimate <= upper_bound
    assert group.max_memory_usage_bytes(estimate) <= available
    assert estimate == upper_bound or group.max_memory_usage_bytes(estimate + 1) > available


@settings(derandomize=True, max_examples=50, database=None)
@given(num_blocks=st.integers(min_value=320, max_value=20_000))
def test_tokens_from_the_concurrency_are_whole_blocks_for_the_published_run(num_blocks: int) -> None:
    group = KVCacheGroupSpec(layer_names=tuple(layers()), kv_cache_spec=SPEC)
    config = KVCacheConfig(num_blocks=num_blocks, group=group, tensors=())
    assert config.num_tokens(40960) == num_blocks * 128


@pytest.mark.parametrize("case", [json.loads(line) for line in ORACLE.read_text().splitlines()])
def test_same_plan_as_vllm(case: dict[str, Any]) -> None:
    spec = FullAttentionSpec(
        block_size=case["block_size"], num_kv_heads=case["num_kv_heads"], head_size=case["head_size"], dtype_size=2
    )
    max_model_len = case["max_model_len"]
    config = replace(
        with_override(case["num_gpu_blocks_override"]), scheduler=replace(CONFIG.scheduler, max_model_len=max_model_len)
    )
    available = case["available_memory"]
    specs = [layers(spec, case["num_layers"])] * len(available)
    if "error" in case:
        with pytest.raises(ValueError, match=r"KV cache|cache blocks") as caught:
            get_kv_cache_configs(specs, available, config)
        assert str(caught.value) == case["error"]
        return
    plans = get_kv_cache_configs(specs, available, config)
    assert {plan.num_blocks for plan in plans} == {case["num_blocks"]}
    assert {tensor.num_bytes for plan in plans for tensor in plan.tensors} == {case["tensor_bytes"]}
    assert plans[0].max_concurrency(max_model_len) == case["max_concurrency"]
    assert plans[0].num_tokens(max_model_len) == case["num_tokens"]
